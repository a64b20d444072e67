"""The compiled ops on NumPy arrays, and the cases they are run on.

One graph an op and pool dtype serves every geometry: every dim is symbolic, and each of its own, so
that it is the op and not MAX that sees operands disagree. A pool of bfloat16 is held as its bits
(uint16), since NumPy has no such dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType

from gdn_graph import GatedDeltaGeometry, kernel_library, ops
from gdn_graph.geometry import PADDING

Array = np.ndarray[Any, Any]

# (nk, group, KD, VD): symmetric sizes hide swapped axes, sizes off the vector width hide tails.
GEOMETRIES = {
    "1x1x16x16": GatedDeltaGeometry(1, 1, 16, 16, ring_len=16),
    "2x3x32x24": GatedDeltaGeometry(2, 6, 32, 24, ring_len=16),
    "1x2x128x128": GatedDeltaGeometry(1, 2, 128, 128, ring_len=16),
    "3x1x8x40": GatedDeltaGeometry(3, 3, 8, 40, ring_len=16),
    "2x2x64x65": GatedDeltaGeometry(2, 4, 64, 65, ring_len=16),
    "16x3x128x128": GatedDeltaGeometry(16, 48, 128, 128, ring_len=16),
}
DTYPES = {"f32": DType.float32, "bf16": DType.bfloat16, "f16": DType.float16}


class Pool:
    """A pool or ring of any state dtype, as raw bits that can be compared and poisoned."""

    def __init__(self, dtype: DType, bits: Array) -> None:
        self.dtype = dtype
        self.bits = bits

    @classmethod
    def of(cls, dtype: DType, values: Array) -> Pool:
        """Rounds float32 values to the dtype, ties to even."""
        values = np.ascontiguousarray(values, np.float32)
        if dtype == DType.bfloat16:
            raw = values.view(np.uint32).astype(np.uint64)
            bits = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)
            bits[np.isnan(values)] = 0x7FC0
            return cls(dtype, bits)
        if dtype == DType.float16:
            return cls(dtype, values.astype(np.float16).view(np.uint16))
        return cls(dtype, values.view(np.uint32).copy())

    @classmethod
    def poison(cls, dtype: DType, shape: Sequence[int]) -> Pool:
        """Signalling NaN patterns: read, they spoil a result; written, they are gone."""
        if dtype == DType.float32:
            return cls(dtype, np.full(shape, 0x7FA5A5A5, np.uint32))
        return cls(dtype, np.full(shape, 0x7FA5 if dtype == DType.bfloat16 else 0x7D5A, np.uint16))

    @property
    def values(self) -> Array:
        """The content as float32."""
        if self.dtype == DType.bfloat16:
            return (self.bits.astype(np.uint32) << 16).view(np.float32)
        if self.dtype == DType.float16:
            return self.bits.view(np.float16).astype(np.float32)
        return self.bits.view(np.float32)

    @property
    def exact(self) -> Array:
        """The content as float64. That a poisoned row's NaN are signalling is no news here."""
        with np.errstate(invalid="ignore"):
            return self.values.astype(np.float64)

    @property
    def buffer(self) -> Buffer:
        """A MAX buffer over the same memory."""
        return Buffer.from_numpy(self.bits).view(self.dtype, self.bits.shape)

    def copy(self) -> Pool:
        return Pool(self.dtype, self.bits.copy())

    def put(self, rows: Any, values: Array) -> None:
        self.bits[rows] = Pool.of(self.dtype, values).bits

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pool) and bool(np.array_equal(self.bits, other.bits))


class Ops:
    """The ops of one pool dtype (and ring dtype) on the CPU, compiled together when first used.

    One module, since MAX's fixed cost of a compile is many times that of one more op.
    """

    def __init__(
        self, session: InferenceSession, dtype: DType, ring_dtype: DType = DType.float32
    ) -> None:
        self.session = session
        self.dtype = dtype
        self.ring_dtype = ring_dtype

    @cached_property
    def models(self) -> dict[str, Model]:
        module = Module()
        conv = [
            tensor("N", "C"),
            tensor("C_weight", "width"),
            buffer(self.dtype, "slots", "C_state", "history"),
            ids("B"),
            ids("B1"),
        ]
        recurrence = [
            tensor("N", "C"),
            tensor("N_decay", "nv_decay"),
            tensor("N_beta", "nv_beta"),
            buffer(self.dtype, "slots", "nv", "KD", "VD"),
        ]
        ring = buffer(self.ring_dtype, "ring_rows", "nk", "R", "stride")
        table = [ids("L", "B_rows"), ids("L_ring", "B_ring"), ids("B"), drafts()]
        add_graph(module, "conv", ops.gated_delta_conv1d_fwd, conv)
        add_graph(
            module, "conv_read_only", partial(ops.gated_delta_conv1d_fwd, write_state=False), conv
        )
        rollback = [tensor("M", "C_back"), ids("B1_back"), drafts()]
        add_graph(module, "conv_verify", conv_verify, [*conv, *rollback])
        for algorithm in ("exact", "block"):
            add_graph(
                module,
                named("plain", algorithm),
                partial(ops.gated_delta_recurrence_fwd, algorithm=algorithm),
                [*recurrence, ids("B"), ids("B1")],
            )
            add_graph(
                module,
                named("verify", algorithm),
                partial(ops.gated_delta_recurrence_verify_ring_fwd, algorithm=algorithm),
                [*recurrence, ring, ids("B"), ids("B_ring"), ids("B1"), drafts()],
            )
            add_graph(
                module,
                named("fold", algorithm),
                partial(ops.gated_delta_state_fold, algorithm=algorithm),
                [recurrence[3], ring, *table],
            )
        conv_ring = buffer(self.dtype, "ring_rows", "R", "C_ring")
        add_graph(
            module,
            "conv_verify_ring",
            ops.gated_delta_conv1d_verify_ring_fwd,
            [*conv[:3], conv_ring, ids("B"), ids("B_ring"), ids("B1"), drafts()],
        )
        add_graph(module, "conv_fold", ops.gated_delta_conv1d_fold, [conv[2], conv_ring, *table])
        silu = partial(ops.gated_delta_conv1d_fwd, activation="silu")
        add_graph(module, "conv_silu", silu, conv)
        add_graph(
            module,
            "conv_verify_silu",
            conv_verify_silu,
            [*conv[:3], conv_ring, ids("B"), ids("B_ring"), ids("B1"), drafts()],
        )
        logits = (TensorType(self.dtype, [f"N_{x}", f"nv_{x}"], DeviceRef.CPU()) for x in "ab")
        add_graph(
            module, "gates", ops.gated_delta_gates, [*logits, tensor("nv_A"), tensor("nv_bias")]
        )
        return self.session.load_all(module, custom_extensions=[kernel_library()])

    def conv(
        self,
        x: Array,
        weight: Array,
        state: Pool,
        slots: Any,
        offsets: Any,
        write_state: bool = True,
    ) -> Array:
        model = self.models["conv" if write_state else "conv_read_only"]
        return run(model, x, weight, state, u32(slots), u32(offsets))[0]

    def conv_verify(
        self,
        x: Array,
        weight: Array,
        state: Pool,
        slots: Any,
        offsets: Any,
        accepted_x: Array,
        accepted_offsets: Any,
        k: int,
    ) -> tuple[Array, Array]:
        """The forward launch over the window, then the rollback launch over the accepted rows."""
        forward, rollback = run(
            self.models["conv_verify"],
            x,
            weight,
            state,
            u32(slots),
            u32(offsets),
            accepted_x,
            u32(accepted_offsets),
            np.zeros(k, np.int64),
        )
        return forward, rollback

    def conv_verify_ring(
        self,
        x: Array,
        weight: Array,
        state: Pool,
        ring: Pool,
        slots: Any,
        ring_slots: Any,
        offsets: Any,
        k: int,
    ) -> Array:
        model = self.models["conv_verify_ring"]
        rows = (u32(slots), u32(ring_slots), u32(offsets), np.zeros(k, np.int64))
        return run(model, x, weight, state, ring, *rows)[0]

    def conv_silu(self, x: Array, weight: Array, state: Pool, slots: Any, offsets: Any) -> Array:
        return run(self.models["conv_silu"], x, weight, state, u32(slots), u32(offsets))[0]

    def conv_verify_silu(
        self,
        x: Array,
        weight: Array,
        state: Pool,
        ring: Pool,
        slots: Any,
        ring_slots: Any,
        offsets: Any,
        k: int,
    ) -> tuple[Array, Array]:
        """The verify that is committed by a rollback, then the one that records in the ring."""
        rows = (u32(slots), u32(ring_slots), u32(offsets), np.zeros(k, np.int64))
        launch, ring_launch = run(self.models["conv_verify_silu"], x, weight, state, ring, *rows)
        return launch, ring_launch

    def gates(self, a: Pool, b: Pool, A_log: Array, dt_bias: Array) -> tuple[Array, Array]:
        decay, beta = run(self.models["gates"], a, b, A_log, dt_bias)
        return decay, beta

    def conv_fold(
        self, state: Pool, ring: Pool, row_ids: Any, ring_row_ids: Any, accepted: Any, k: int
    ) -> None:
        table = (u32(row_ids), u32(ring_row_ids), u32(accepted), np.zeros(k, np.int64))
        run(self.models["conv_fold"], state, ring, *table)

    def plain(
        self,
        qkv: Array,
        decay: Array,
        beta: Array,
        state: Pool,
        slots: Any,
        offsets: Any,
        algorithm: str = "exact",
    ) -> Array:
        model = self.models[named("plain", algorithm)]
        return run(model, qkv, decay, beta, state, u32(slots), u32(offsets))[0]

    def verify(
        self,
        qkv: Array,
        decay: Array,
        beta: Array,
        state: Pool,
        ring: Pool,
        slots: Any,
        ring_slots: Any,
        offsets: Any,
        k: int,
        algorithm: str = "exact",
    ) -> Array:
        return run(
            self.models[named("verify", algorithm)],
            qkv,
            decay,
            beta,
            state,
            ring,
            u32(slots),
            u32(ring_slots),
            u32(offsets),
            np.zeros(k, np.int64),
        )[0]

    def fold(
        self,
        state: Pool,
        ring: Pool,
        row_ids: Any,
        ring_row_ids: Any,
        accepted: Any,
        k: int,
        algorithm: str = "exact",
    ) -> None:
        run(
            self.models[named("fold", algorithm)],
            state,
            ring,
            u32(row_ids),
            u32(ring_row_ids),
            u32(accepted),
            np.zeros(k, np.int64),
        )


def named(op: str, algorithm: str) -> str:
    return op if algorithm == "exact" else f"{op}_{algorithm}"


def add_graph(module: Module, name: str, build: Callable[..., Any], types: Sequence[Any]) -> None:
    """Adds a graph that feeds its inputs, pools as buffers, to build."""
    with Graph(name, input_types=types, module=module) as graph:
        operands = [
            value.buffer if isinstance(t, BufferType) else value.tensor
            for value, t in zip(graph.inputs, types, strict=True)
        ]
        outputs = build(*operands)
        graph.output(*(outputs if isinstance(outputs, tuple) else [outputs] if outputs else []))


def conv_verify(
    x: Any,
    w: Any,
    state: Any,
    slots: Any,
    offsets: Any,
    kept_x: Any,
    kept_offsets: Any,
    width: Any,
) -> tuple[Any, Any]:
    """The forward launch over a window and the rollback launch over its accepted rows."""
    launch = ops.gated_delta_conv1d_verify_fwd
    return (
        launch(x, w, state, slots, offsets, width, rollback=False),
        launch(kept_x, w, state, slots, kept_offsets, width, rollback=True),
    )


def conv_verify_silu(
    x: Any,
    w: Any,
    state: Any,
    ring: Any,
    slots: Any,
    ring_slots: Any,
    offsets: Any,
    width: Any,
) -> tuple[Any, Any]:
    """Both convs of a verify, activated."""
    return (
        ops.gated_delta_conv1d_verify_fwd(
            x, w, state, slots, offsets, width, rollback=False, activation="silu"
        ),
        ops.gated_delta_conv1d_verify_ring_fwd(
            x, w, state, ring, slots, ring_slots, offsets, width, activation="silu"
        ),
    )


def tensor(*shape: int | str) -> TensorType:
    return TensorType(DType.float32, shape, DeviceRef.CPU())


def buffer(dtype: DType, *shape: int | str) -> BufferType:
    return BufferType(dtype, shape, DeviceRef.CPU())


def ids(*shape: int | str) -> TensorType:
    return TensorType(DType.uint32, shape, DeviceRef.CPU())


def drafts() -> TensorType:
    return TensorType(DType.int64, ["K"], DeviceRef.CPU())


def u32(values: Any) -> Array:
    return np.ascontiguousarray(np.asarray(values).astype(np.uint32))


def run(model: Model, *operands: Any) -> list[Array]:
    inputs = [x.buffer if isinstance(x, Pool) else np.ascontiguousarray(x) for x in operands]
    # A copy: the result must not share memory that a later call may get.
    return [np.array(out.to_numpy()) for out in model.execute(*inputs)]


def offsets_of(lengths: Sequence[int]) -> Array:
    return u32(np.concatenate([[0], np.cumsum(lengths)]))


@dataclass
class Case:
    """A ragged batch over pools with rows that no one owns, which stay poisoned."""

    geometry: GatedDeltaGeometry
    lengths: Sequence[int]
    dtype: DType = DType.float32
    seed: int = 0
    slots: Any = None
    ring_slots: Any = None
    tail: int = 0
    k: int | None = None
    stride_padding: int = 3
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        g = self.geometry
        rng = self.rng = np.random.default_rng([self.seed, *self.lengths])
        rows = len(self.lengths)
        n = sum(self.lengths) + self.tail
        self.offsets = offsets_of(self.lengths)
        if self.slots is None:
            self.slots = rng.permutation(rows + 2)[:rows]
        if self.ring_slots is None:
            self.ring_slots = rng.permutation(rows + 1)[:rows]
        if self.k is None:
            short = [t for t in self.lengths if t <= g.ring_len]
            self.k = max([*short, 2]) - 1
        self.slots, self.ring_slots = u32(self.slots), u32(self.ring_slots)
        self.x = normal(rng, n, g.conv_dim)
        self.qkv = normal(rng, n, g.conv_dim)
        self.decay = rng.uniform(0.6, 1, (n, g.num_value_heads)).astype(np.float32)
        self.beta = rng.uniform(0, 1, (n, g.num_value_heads)).astype(np.float32)
        self.weight = normal(rng, g.conv_dim, g.conv_width)
        owned = self.owned
        pool_rows = max([*owned, 0]) + 3
        self.state = Pool.poison(self.dtype, g.recurrent_state_shape(pool_rows))
        self.state.put(owned, 0.3 * normal(rng, *g.recurrent_state_shape(len(owned))))
        self.conv_state = Pool.poison(self.dtype, g.conv_state_shape(pool_rows))
        self.conv_state.put(owned, normal(rng, *g.conv_state_shape(len(owned))))
        ring_rows = max([int(s) for s in self.ring_slots if s != PADDING] + [0]) + 2
        stride = g.record_elements + self.stride_padding
        self.ring_shape = (ring_rows, g.num_key_heads, g.ring_len, stride)

    @property
    def owned(self) -> list[int]:
        """Pool rows that some row of the batch names."""
        return sorted({int(s) for s in self.slots if s != PADDING})

    def new_ring(self, dtype: DType = DType.float32) -> Pool:
        return Pool.poison(dtype, self.ring_shape)

    @property
    def gates(self) -> tuple[Array, Array, Array]:
        return self.qkv, self.decay, self.beta

    def take(self, counts: Sequence[int]) -> tuple[tuple[Array, Array, Array], Array]:
        """(qkv, decay, beta) and offsets of the first counts[b] tokens of each row."""
        index = self.index(counts)
        return (self.qkv[index], self.decay[index], self.beta[index]), offsets_of(counts)

    def index(self, counts: Sequence[int]) -> Array:
        starts = self.offsets[:-1].astype(np.int64)
        parts = [np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]
        return np.concatenate([*parts, np.zeros(0, np.int64)]).astype(np.int64)


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def relative_error(got: Array, true: Array, least: float = 0.0) -> float:
    """max |difference| over max |reference| of a tensor, taken for least if it is less."""
    scale = max(float(np.abs(true).max(initial=0)), least) or 1.0
    return float(np.abs(got.astype(np.float64) - true).max(initial=0)) / scale


def assert_same_bits(got: Array, want: Array, what: str) -> None:
    """Equality to the bit, with where and by how much it fails."""
    a, b = (np.ascontiguousarray(x) for x in (got, want))
    assert a.shape == b.shape, f"{what}: shape {a.shape}, not {b.shape}"
    if a.dtype == np.float32:
        a, b = a.view(np.uint32), b.view(np.uint32)
    wrong = np.argwhere(a != b)
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        ulps = int(np.abs(a.astype(np.int64) - b.astype(np.int64)).max())
        raise AssertionError(
            f"{what}: {len(wrong)} of {a.size} differ, by up to {ulps} ulps, first at {at}: "
            f"{got[at]!r}, not {want[at]!r}"
        )


def assert_same_pool(got: Pool, want: Pool, what: str) -> None:
    assert_same_bits(got.bits, want.bits, what)
