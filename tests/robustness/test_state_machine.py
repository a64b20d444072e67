"""A serving engine at random: admit, prefill, speculate, commit, decode, release, permute.

Two sets of pools live side by side. One is driven as an engine drives it: ragged batches with
padding rows and rows without tokens, verified and committed later. The other sees only the plain
ops, one row a call, on the tokens that were kept. After every step the two are equal to the bit,
and each call is held to the specification in float64, started from the bits before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from common import TOLERANCE, assert_untouched
from harness import (
    DTYPES,
    PADDING,
    Array,
    Pool,
    assert_same_bits,
    assert_same_pool,
    normal,
    offsets_of,
    relative_error,
    u32,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from max.dtype import DType

from gdn_graph import GatedDeltaGeometry, reference

SLOTS, RING_ROWS = 6, 7
ROUNDING = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}


@st.composite
def geometries(draw: st.DrawFn) -> GatedDeltaGeometry:
    nk, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dims = st.sampled_from([1, 2, 7, 8, 16, 17, 24, 33])
    return GatedDeltaGeometry(
        nk, nk * group, draw(dims), draw(dims), draw(st.integers(2, 8)), draw(st.integers(2, 9))
    )


@dataclass
class Tokens:
    """Tokens of one row: inputs of the conv, and of the recurrence."""

    x: Array
    qkv: Array
    decay: Array
    beta: Array

    def __len__(self) -> int:
        return len(self.x)

    @property
    def gates(self) -> tuple[Array, Array, Array]:
        return self.qkv, self.decay, self.beta

    def first(self, n: int) -> Tokens:
        return Tokens(*(a[:n] for a in (self.x, *self.gates)))


@dataclass
class Pending:
    """A verified window that waits for its commit."""

    ring_row: int
    tokens: Tokens


class Machine(RuleBasedStateMachine):
    ops_of: Any = None
    steps = 0

    @initialize(
        geometry=geometries(),
        dtype=st.sampled_from(sorted(DTYPES)),
        seed=st.integers(0, 2**32 - 1),
        stride_padding=st.integers(0, 5),
    )
    def start(self, geometry, dtype, seed, stride_padding):
        g = self.g = geometry
        self.name, self.dtype = dtype, DTYPES[dtype]
        self.ops = type(self).ops_of(dtype)
        self.rng = np.random.default_rng(seed)
        self.state = Pool.poison(self.dtype, g.recurrent_state_shape(SLOTS))
        self.conv_state = Pool.poison(self.dtype, g.conv_state_shape(SLOTS))
        self.ring = Pool.poison(
            DType.float32,
            (RING_ROWS, g.num_key_heads, g.ring_len, g.record_elements + stride_padding),
        )
        self.weight = normal(self.rng, g.conv_dim, g.conv_width)
        self.plain_state, self.plain_conv = self.state.copy(), self.conv_state.copy()
        # The same windows once more, committed by a fold of recorded inputs.
        self.ring_conv = self.conv_state.copy()
        self.conv_ring = Pool.poison(self.dtype, (RING_ROWS, g.ring_len, g.conv_dim))
        self.requests: dict[int, Pending | None] = {}

    # What the rules choose from.

    @property
    def idle(self) -> list[int]:
        return [slot for slot, pending in self.requests.items() if pending is None]

    @property
    def pending(self) -> list[int]:
        return [slot for slot, pending in self.requests.items() if pending is not None]

    @property
    def pools(self) -> list[Pool]:
        return [self.state, self.plain_state, self.conv_state, self.plain_conv, self.ring_conv]

    def some(self, data: st.DataObject, of: list[int], label: str) -> list[int]:
        return data.draw(st.lists(st.sampled_from(of), min_size=1, unique=True), label=label)

    def new_tokens(self, n: int) -> Tokens:
        g, rng = self.g, self.rng
        shape = (n, g.num_value_heads)
        return Tokens(
            normal(rng, n, g.conv_dim),
            normal(rng, n, g.conv_dim),
            rng.choice([1.0, 0.0, rng.uniform(0.5, 1)], p=[0.1, 0.05, 0.85], size=shape).astype(
                "f4"
            ),
            rng.uniform(0, 1, shape).astype(np.float32),
        )

    def batch(self, rows: dict[int, Tokens]) -> tuple[list[int], list[Tokens]]:
        """The rows in random order, with padding rows and rows without tokens among them."""
        slots, tokens = list(rows), list(rows.values())
        for _ in range(int(self.rng.integers(0, 3))):
            at = int(self.rng.integers(0, len(slots) + 1))
            padding = bool(self.rng.integers(0, 2))
            # A row without tokens may name any slot, or none that exists.
            slots.insert(at, PADDING if padding else int(self.rng.integers(0, SLOTS + 9)))
            tokens.insert(at, self.new_tokens(int(self.rng.integers(1, 4)) if padding else 0))
        return slots, tokens

    def joined(self, tokens: list[Tokens]) -> Tokens:
        """One behind the other, and now and then tokens of no row behind them."""
        tail = self.new_tokens(int(self.rng.integers(0, 3)))
        parts = [*tokens, tail]
        return Tokens(
            *(np.concatenate([getattr(t, f) for t in parts]) for f in ("x", "qkv", "decay", "beta"))
        )

    # Each row alone through the plain ops, on the plain pools or on copies of them.

    def plain_row(self, state: Pool, conv_state: Pool, slot: int, tokens: Tokens) -> list[Array]:
        offsets = [0, len(tokens)]
        return [
            self.ops.plain(*tokens.gates, state, [slot], offsets),
            self.ops.conv(tokens.x, self.weight, conv_state, [slot], offsets),
        ]

    def check_rows(
        self, out: Array, conv: Array, slots: list[int], rows: list[Tokens], keep: set[int]
    ) -> None:
        """Outputs of a batch against each row alone; the plain pools keep the rows in keep."""
        own = np.zeros(len(out), bool)
        start = 0
        for slot, tokens in zip(slots, rows, strict=True):
            at = slice(start, start + len(tokens))
            start += len(tokens)
            if slot == PADDING or not len(tokens):
                continue
            own[at] = True
            pools = (self.plain_state, self.plain_conv)
            if slot not in keep:
                pools = tuple(pool.copy() for pool in pools)
            want, want_conv = self.plain_row(*pools, slot, tokens)
            assert_same_bits(out[at], want, f"outputs of slot {slot}")
            assert_same_bits(conv[at], want_conv, f"conv of slot {slot}")
        assert not out[~own].any() and not conv[~own].any(), "outputs of no row"

    def verify_conv(self, batch: Tokens, slots: Any, rings: Any, offsets: Any, k: int) -> Array:
        return self.ops.conv_verify_ring(
            batch.x, self.weight, self.ring_conv, self.conv_ring, slots, rings, offsets, k
        )

    def check_spec(self, out: Array, want: Array, what: str) -> None:
        # A batch may have one output, which cancels to little more than its rounding.
        assert relative_error(out, want, least=0.1) < 4 * TOLERANCE, what

    # The rules.

    @precondition(lambda self: len(self.requests) < SLOTS)
    @rule(data=st.data(), zeroed=st.booleans())
    def admit(self, data, zeroed):
        free = [slot for slot in range(SLOTS) if slot not in self.requests]
        for slot in self.some(data, free, "admitted"):
            for pool, plain in ((self.state, self.plain_state), (self.conv_state, self.plain_conv)):
                shape = pool.bits.shape[1:]
                pool.put(slot, np.zeros(shape) if zeroed else 0.5 * normal(self.rng, *shape))
                plain.bits[slot] = pool.bits[slot]
            self.ring_conv.bits[slot] = self.conv_state.bits[slot]
            self.requests[slot] = None

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.requests)), label="released")
        del self.requests[slot]
        for pool in self.pools:
            pool.bits[slot] = Pool.poison(pool.dtype, [1]).bits

    @precondition(lambda self: self.requests)
    @rule(seed=st.integers(0, 1000))
    def permute(self, seed):
        """Every request moves to another slot, as a scheduler that compacts its batch does."""
        order = np.random.default_rng(seed).permutation(SLOTS)
        for pool in self.pools:
            pool.bits[:] = pool.bits[order]
        self.requests = {
            to: self.requests[int(slot)] for to, slot in enumerate(order) if slot in self.requests
        }

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def prefill(self, data):
        chosen = self.some(data, self.idle, "prefilled")
        rows = {s: self.new_tokens(data.draw(st.integers(1, 20), label="length")) for s in chosen}
        slots, tokens = self.batch(rows)
        batch, offsets = self.joined(tokens), offsets_of([len(t) for t in tokens])
        before, conv_before = self.state.exact, self.conv_state.exact
        untouched = self.state.copy()
        out = self.ops.plain(*batch.gates, self.state, slots, offsets)
        conv = self.ops.conv(batch.x, self.weight, self.conv_state, slots, offsets)
        self.ops.conv(batch.x, self.weight, self.ring_conv, slots, offsets)
        self.check_rows(out, conv, slots, tokens, keep=set(chosen))
        assert_untouched_rows(self.state, untouched, chosen)
        want = reference.gated_delta_recurrence_fwd(*batch.gates, before, u32(slots), offsets)
        self.check_spec(out, want, "prefill against float64")
        self.check_spec(
            conv,
            reference.gated_delta_conv1d_fwd(
                batch.x, self.weight, conv_before, u32(slots), offsets
            ),
            "conv of a prefill against float64",
        )
        got = self.state.values[chosen]
        bound = 4 * TOLERANCE + ROUNDING[self.name]
        assert relative_error(got, before[chosen]) < bound, "state against float64"

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def decode(self, data):
        """One token a row, through the verify ops at K = 0."""
        chosen = self.some(data, self.idle, "decoded")
        slots, tokens = self.batch({slot: self.new_tokens(1) for slot in chosen})
        batch, offsets = self.joined(tokens), offsets_of([len(t) for t in tokens])
        ring = self.ring.copy()
        wild = np.full(len(slots), PADDING - 1, np.uint32)
        out = self.ops.verify(*batch.gates, self.state, self.ring, slots, wild, offsets, 0)
        conv, _ = self.ops.conv_verify(
            batch.x, self.weight, self.conv_state, slots, offsets, batch.x, offsets, 0
        )
        again = self.verify_conv(batch, slots, wild, offsets, 0)
        assert_same_bits(again, conv, "conv that would record")
        self.check_rows(out, conv, slots, tokens, keep=set(chosen))
        assert_same_pool(self.ring, ring, "ring of a decode")

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def speculate(self, data):
        """Windows of any length; one longer than the ring is a prefill row and commits itself."""
        g = self.g
        chosen = self.some(data, self.idle, "speculated")
        lengths = st.integers(1, g.ring_len) | st.integers(g.ring_len + 1, g.ring_len + 4)
        rows = {slot: self.new_tokens(data.draw(lengths, label="window")) for slot in chosen}
        short = {s for s in chosen if len(rows[s]) <= g.ring_len}
        k = max([len(rows[s]) - 1 for s in short] + [1])
        k = data.draw(st.integers(k, g.ring_len - 1), label="K")
        taken = {p.ring_row for p in self.requests.values() if p is not None}
        free = [int(r) for r in self.rng.permutation(RING_ROWS) if r not in taken]
        ring_rows = dict(zip(chosen, free, strict=False))

        slots, tokens = self.batch(rows)
        rings = [ring_rows.get(s, PADDING) for s in slots]
        batch, offsets = self.joined(tokens), offsets_of([len(t) for t in tokens])
        before, ring, spec_ring = self.state.copy(), self.ring.copy(), self.ring.exact
        spec_state = self.state.exact
        out = self.ops.verify(*batch.gates, self.state, self.ring, slots, rings, offsets, k)
        # The window of a long row moves over all of it, at once.
        kept = [
            t.first(len(t) if s in chosen and s not in short else 0)
            for s, t in zip(slots, tokens, strict=True)
        ]
        kept_x = np.concatenate([t.x for t in kept])
        conv, _ = self.ops.conv_verify(
            batch.x,
            self.weight,
            self.conv_state,
            slots,
            offsets,
            kept_x,
            offsets_of([len(t) for t in kept]),
            k,
        )
        again = self.verify_conv(batch, slots, rings, offsets, k)
        assert_same_bits(again, conv, "conv that records")
        self.check_rows(out, conv, slots, tokens, keep=set(chosen) - short)
        assert_untouched_rows(self.state, before, set(chosen) - short)
        assert_untouched(self.ring, ring, [ring_rows[s] for s in short], "ring")
        want = reference.gated_delta_recurrence_verify_ring_fwd(
            *batch.gates, spec_state, spec_ring, u32(slots), u32(rings), offsets, k
        )
        self.check_spec(out, want, "verify against float64")
        for slot in short:
            got = self.ring.values[ring_rows[slot], :, : len(rows[slot]), : g.record_elements]
            record = spec_ring[ring_rows[slot], :, : len(rows[slot]), : g.record_elements]
            self.check_spec(got, record, "records against float64")
            self.requests[slot] = Pending(ring_rows[slot], rows[slot])

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), layers=st.integers(1, 3))
    def commit(self, data, layers):
        """Folds and rolls back: rows of a column of the tables share their count, as layers do."""
        chosen = self.some(data, self.pending, "committed")
        columns = [chosen[i : i + layers] for i in range(0, len(chosen), layers)]
        rows = np.full((layers, len(columns)), PADDING, np.int64)
        rings, counts, kept = rows.copy(), [], {}
        for b, column in enumerate(columns):
            windows = [self.requests[slot].tokens for slot in column]
            most = min(len(t) for t in windows)
            counts.append(data.draw(st.integers(0, most), label="kept"))
            for layer, (slot, tokens) in enumerate(zip(column, windows, strict=True)):
                rows[layer, b], rings[layer, b] = slot, self.requests[slot].ring_row
                kept[slot] = tokens.first(counts[-1])
        k = max(1, max(len(self.requests[slot].tokens) for slot in chosen) - 1)
        before, ring = self.state.copy(), self.ring.copy()
        spec_state = self.state.exact
        self.ops.fold(self.state, self.ring, rows, rings, counts, k)
        x = np.concatenate([t.x for t in kept.values()])
        offsets = offsets_of([len(t) for t in kept.values()])
        nothing = np.zeros(len(kept) + 1, np.uint32)
        self.ops.conv_verify(x, self.weight, self.conv_state, list(kept), nothing, x, offsets, k)
        self.ops.conv_fold(self.ring_conv, self.conv_ring, rows, rings, counts, k)
        assert_same_pool(self.ring, ring, "ring of a fold")
        assert_untouched_rows(self.state, before, [s for s, t in kept.items() if len(t)])
        reference.gated_delta_state_fold(
            spec_state, self.ring.exact, u32(rows), u32(rings), u32(counts), k
        )
        assert (
            relative_error(self.state.values[chosen], spec_state[chosen])
            < 4 * TOLERANCE + ROUNDING[self.name]
        ), "state against float64"
        for slot, tokens in kept.items():
            if len(tokens):
                self.plain_row(self.plain_state, self.plain_conv, slot, tokens)
            self.requests[slot] = None

    @invariant()
    def the_pools_are_those_of_the_plain_ops(self):
        if hasattr(self, "state"):
            assert_same_pool(self.state, self.plain_state, "pool")
            assert_same_pool(self.conv_state, self.plain_conv, "windows")
            assert_same_pool(self.ring_conv, self.plain_conv, "windows committed from a ring")
            type(self).steps += 1


def assert_untouched_rows(got: Pool, before: Pool, changed: Any) -> None:
    kept = [slot for slot in range(SLOTS) if slot not in changed]
    assert_same_bits(got.bits[kept], before.bits[kept], "rows that this step may not change")


def fuzz(ops_of: Any, examples: int, steps: int, *, same_each_time: bool) -> int:
    Machine.ops_of, Machine.steps = staticmethod(ops_of), 0
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=same_each_time,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Machine.steps


def test_an_engine_at_random(ops_of):
    steps = fuzz(ops_of, examples=90, steps=50, same_each_time=True)
    print(f"{steps:,} steps")
    assert steps >= 2000


@pytest.mark.slow
def test_an_engine_at_random_for_long(ops_of):
    steps = fuzz(ops_of, examples=400, steps=80, same_each_time=False)
    print(f"{steps:,} steps")
    assert steps >= 10_000


def test_a_lost_record_shows(ops_of):
    """The control: a fold that leaves out the last record fails, and within a few steps."""

    class Faulty(Machine):
        pass

    real = ops_of("f32")

    class Ops:
        def __getattr__(self, name):
            return getattr(real, name)

        def fold(self, state, ring, rows, rings, counts, k):
            real.fold(state, ring, rows, rings, np.maximum(np.array(counts, int) - 1, 0), k)

    Faulty.ops_of = staticmethod(lambda dtype: Ops() if dtype == "f32" else ops_of(dtype))
    with pytest.raises(AssertionError, match="pool|state"):
        run_state_machine_as_test(
            Faulty,
            settings=settings(
                max_examples=60,
                stateful_step_count=30,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
                phases=[p for p in settings().phases if p.name == "generate"],
            ),
        )
