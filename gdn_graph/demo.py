"""The demo: speculative rounds through one MAX graph, held against the plain ops.

A round takes a ragged batch of windows through conv, SiLU and the verify ring of every layer,
greedy acceptance, the conv commit and one fold over all layers. The same accepted tokens then go
through the plain ops over pools of their own. Outputs, states and conv windows must be equal to the
bit; the error against the float64 specification is shown beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Dim, Graph, Module, TensorType, TensorValue
from max.graph import ops as mops
from numpy.typing import NDArray

from . import ops, reference
from .geometry import PADDING, GatedDeltaGeometry
from .library import kernel_library
from .timers import around_execute

Array = NDArray[Any]

VOCABULARY = 3  # of the demo's drafts: small, so that drafts are accepted often and not always
_SPECIFICATION_HEAD_TOKENS = 3000  # what NumPy does in a second or so


@dataclass(frozen=True)
class DemoOptions:
    """What the demo runs: the layers, the batch of requests and the drafts of each round."""

    geometry: GatedDeltaGeometry
    layers: int
    batch: int
    drafts: int
    rounds: int
    dtype: DType
    seed: int

    def __post_init__(self) -> None:
        for name in ("layers", "batch", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"demo: {name} is {getattr(self, name)}; need at least 1")
        if not 0 <= self.drafts < self.geometry.ring_len:
            raise ValueError(
                f"demo: drafts is {self.drafts}; need 0 to {self.geometry.ring_len - 1}, so that a "
                f"window of drafts + 1 fits the ring of length {self.geometry.ring_len}"
            )


@dataclass(frozen=True)
class Round:
    """What one round showed. Times are seconds, bytes those of all layers."""

    number: int
    window: list[int]
    accepted: list[int]
    equal: bool
    unequal: list[str]
    error: float
    verify_s: float
    fold_s: float
    bytes_moved: int
    snapshot_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def step_graph(options: DemoOptions, module: Module) -> None:
    """One whole round: conv, SiLU, verify ring, acceptance, conv commit, fold.

    B rows, N tokens and K drafts are symbolic. Commit row ids are inputs of their own, so that a
    commit can be left out by padding ids.
    """
    g, layers = options.geometry, options.layers
    types = [
        *_layer_inputs(g, layers),
        _tensor(DType.float32, g.value_dim, VOCABULARY),
        _tensor(DType.int64, "B", "K"),
        *_pools(g, options.dtype),
        _buffer(DType.float32, "ring_rows", *g.ring_shape(1)[1:]),
        _tensor(DType.uint32, layers, "B"),
        _tensor(DType.uint32, layers, "B"),
        _tensor(DType.uint32, layers, "B"),
        _tensor(DType.uint32, "B1"),
    ]
    with Graph("speculative_step", input_types=types, module=module) as graph:
        x, decay, beta, weight, head, drafts = (v.tensor for v in graph.inputs[:6])
        state, conv_state, ring = (v.buffer for v in graph.inputs[6:9])
        rows, ring_rows, commit_rows, offsets = (v.tensor for v in graph.inputs[9:])
        width = ops.verify_width_operand(Dim("K"))
        outputs = []
        for layer in range(layers):
            conv = ops.gated_delta_conv1d_verify_fwd(
                x[layer], weight[layer], conv_state, rows[layer], offsets, width, rollback=False
            )
            outputs.append(
                ops.gated_delta_recurrence_verify_ring_fwd(
                    mops.silu(conv),
                    decay[layer],
                    beta[layer],
                    state,
                    ring,
                    rows[layer],
                    ring_rows[layer],
                    offsets,
                    width,
                )
            )
        accepted, kept = _accept(outputs[-1] @ head, drafts, offsets, g.ring_len)
        source, kept_offsets = _pack(kept, offsets, Dim("N"))
        for layer in range(layers):
            ops.gated_delta_conv1d_verify_fwd(
                mops.gather(x[layer], source, axis=0),
                weight[layer],
                conv_state,
                commit_rows[layer],
                kept_offsets,
                width,
                rollback=True,
            )
        ops.gated_delta_state_fold(state, ring, commit_rows, ring_rows, accepted, width)
        graph.output(*outputs, accepted)


def plain_graph(options: DemoOptions, module: Module) -> None:
    """Conv, SiLU and the plain recurrence of every layer."""
    g, layers = options.geometry, options.layers
    types = [
        *_layer_inputs(g, layers),
        *_pools(g, options.dtype),
        _tensor(DType.uint32, layers, "B"),
        _tensor(DType.uint32, "B1"),
    ]
    with Graph("plain", input_types=types, module=module) as graph:
        x, decay, beta, weight = (v.tensor for v in graph.inputs[:4])
        state, conv_state = (v.buffer for v in graph.inputs[4:6])
        rows, offsets = (v.tensor for v in graph.inputs[6:])
        outputs = []
        for layer in range(layers):
            conv = ops.gated_delta_conv1d_fwd(
                x[layer], weight[layer], conv_state, rows[layer], offsets
            )
            outputs.append(
                ops.gated_delta_recurrence_fwd(
                    mops.silu(conv), decay[layer], beta[layer], state, rows[layer], offsets
                )
            )
        graph.output(*outputs)


def fold_graph(options: DemoOptions, module: Module) -> None:
    """The fold alone, to be timed."""
    g, layers = options.geometry, options.layers
    types = [
        _buffer(options.dtype, "rows", *g.recurrent_state_shape(1)[1:]),
        _buffer(DType.float32, "ring_rows", *g.ring_shape(1)[1:]),
        _tensor(DType.uint32, layers, "B"),
        _tensor(DType.uint32, layers, "B"),
        _tensor(DType.uint32, "B"),
        _tensor(DType.int64, "K"),
    ]
    with Graph("fold", input_types=types, module=module) as graph:
        state, ring = (v.buffer for v in graph.inputs[:2])
        rows, ring_rows, accepted, width = (v.tensor for v in graph.inputs[2:])
        ops.gated_delta_state_fold(state, ring, rows, ring_rows, accepted, width)
        graph.output()


class Demo:
    """Compiles the graphs, then runs the rounds."""

    def __init__(self, options: DemoOptions, on_step: Callable[[str], None]) -> None:
        self.options = options
        on_step("building the kernels")
        kernel_library()
        on_step("compiling the graphs, which takes a minute the first time")
        # One module: compiling three graphs one by one would pay MAX's fixed cost three times.
        module = Module()
        for build in (step_graph, plain_graph, fold_graph):
            build(options, module)
        models = InferenceSession(devices=[CPU()]).load_all(
            module, custom_extensions=[kernel_library()]
        )
        self.step, self.plain, self.fold = (
            models[name] for name in ("speculative_step", "plain", "fold")
        )
        on_step("filling the pools")
        self._fill()

    def _fill(self) -> None:
        o, g = self.options, self.options.geometry
        self.rng = np.random.default_rng(o.seed)
        pool_rows = o.layers * o.batch
        start = 0.1 * self._normal(*g.recurrent_state_shape(pool_rows))
        self.state, self.plain_state = (_StatePool(o.dtype, start) for _ in range(2))
        windows = self._normal(*g.conv_state_shape(pool_rows))
        self.conv_state, self.plain_conv_state = (_StatePool(o.dtype, windows) for _ in range(2))
        ring = np.full(g.ring_shape(pool_rows), np.nan, np.float32)
        self.ring = _StatePool(DType.float32, ring)
        self.weight = self._normal(o.layers, g.conv_dim, g.conv_width)
        self.head = self._normal(g.value_dim, VOCABULARY)
        # Row p * layers + layer is request p in that layer, as MAX's cache lays blocks out.
        self.rows = np.arange(pool_rows, dtype=np.uint32).reshape(o.batch, o.layers).T.copy()
        self.ring_rows = self.rows[::-1].copy()
        tokens = o.batch * (o.drafts + 1) * g.num_value_heads
        self.checked_layers = min(o.layers, max(1, _SPECIFICATION_HEAD_TOKENS // tokens))
        self.true_state = self.state.values().astype(np.float64)
        self.true_conv_state = self.conv_state.values().astype(np.float64)

    def _normal(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def run(self) -> Iterator[Round]:
        for number in range(1, self.options.rounds + 1):
            yield self._round(number)

    def _windows(self, number: int) -> list[int]:
        """Ragged windows of 1 to drafts + 1 tokens; one request has a long row, as in a prefill."""
        o = self.options
        lengths = [int(n) for n in self.rng.integers(1, o.drafts + 2, o.batch)]
        if o.batch > 1:
            lengths[number % o.batch] = o.geometry.ring_len + 2
        return lengths

    def _round(self, number: int) -> Round:
        o, g = self.options, self.options.geometry
        window = self._windows(number)
        offsets = np.cumsum([0, *window]).astype(np.uint32)
        n = int(offsets[-1])
        x = self._normal(o.layers, n, g.conv_dim)
        decay = self.rng.uniform(0.7, 1, (o.layers, n, g.num_value_heads)).astype(np.float32)
        beta = self.rng.uniform(0, 1, (o.layers, n, g.num_value_heads)).astype(np.float32)
        drafts = self.rng.integers(0, VOCABULARY, (o.batch, o.drafts))
        gates = (x, decay, beta, self.weight)

        def step(pools: Sequence[_StatePool], commit_rows: Array) -> list[Array]:
            return _run(
                self.step,
                *gates,
                self.head,
                drafts,
                *pools,
                self.rows,
                self.ring_rows,
                commit_rows,
                offsets,
            )

        def verify_only() -> float:
            pools = [p.copy() for p in (self.state, self.conv_state, self.ring)]
            nobody = np.full_like(self.rows, PADDING)
            return _seconds(lambda: step(pools, nobody))

        verify_s = min(verify_only() for _ in range(2))
        before = self.state.copy()
        *outputs, accepted = step((self.state, self.conv_state, self.ring), self.rows)
        fold_operands = (
            self.ring,
            self.rows,
            self.ring_rows,
            accepted,
            np.zeros(o.drafts, np.int64),
        )
        fold_s = min(
            _seconds(lambda pool: _run(self.fold, pool, *fold_operands), before.copy())
            for _ in range(2)
        )
        kept = [int(a) for a in accepted]
        index = np.concatenate(
            [np.arange(begin, begin + count) for begin, count in zip(offsets, kept, strict=False)]
        )
        kept_offsets = np.cumsum([0, *kept]).astype(np.uint32)
        kept_gates = (*(v[:, index] for v in gates[:3]), self.weight)
        plain_outputs = _run(
            self.plain,
            *kept_gates,
            self.plain_state,
            self.plain_conv_state,
            self.rows,
            kept_offsets,
        )
        unequal = [
            what
            for what, same in (
                (
                    "outputs",
                    all(
                        np.array_equal(_bits(out[index]), _bits(plain))
                        for out, plain in zip(outputs, plain_outputs, strict=True)
                    ),
                ),
                ("recurrent state", self.state.equals(self.plain_state)),
                ("conv window", self.conv_state.equals(self.plain_conv_state)),
            )
            if not same
        ]
        error = self._error(kept_gates, kept_offsets, [out[index] for out in outputs])
        moved, snapshot = self._bytes(window, kept)
        return Round(
            number,
            window,
            kept,
            not unequal,
            unequal,
            error,
            verify_s,
            fold_s,
            moved,
            snapshot,
        )

    def _error(self, gates: tuple[Array, ...], offsets: Array, outputs: Sequence[Array]) -> float:
        """Largest |difference| over largest |reference| of outputs and states, from float64."""
        x, decay, beta, weight = gates
        worst = 0.0
        for layer in range(self.checked_layers):
            rows = self.rows[layer]
            conv = reference.gated_delta_conv1d_fwd(
                x[layer], weight[layer], self.true_conv_state, rows, offsets
            )
            with np.errstate(over="ignore"):
                activated = conv / (1 + np.exp(-conv))
            true = reference.gated_delta_recurrence_fwd(
                activated, decay[layer], beta[layer], self.true_state, rows, offsets
            )
            worst = max(
                worst,
                _relative(outputs[layer], true),
                _relative(self.state.values(rows), self.true_state[rows]),
            )
        return worst

    def _bytes(self, window: Sequence[int], kept: Sequence[int]) -> tuple[int, int]:
        """Bytes of state and records a round moves, and with a state snapshot per window token.

        Rows longer than the ring read and write their state once either way. For the snapshots only
        reading the state and writing the snapshots is counted; the accepted one could be kept in
        place.
        """
        o, g = self.options, self.options.geometry
        state = g.recurrent_state_bytes(dtype=o.dtype)
        record = g.record_elements * g.num_key_heads * DType.float32.size_in_bytes
        moved = snapshot = 0
        for tokens, count in zip(window, kept, strict=True):
            if tokens > g.ring_len or o.drafts == 0:
                moved += 2 * state
                snapshot += 2 * state
            else:
                moved += 3 * state + (tokens + count) * record
                snapshot += (1 + tokens) * state
        return o.layers * moved, o.layers * snapshot


class _StatePool:
    """A pool of any state dtype over memory of its own, as MAX and NumPy see it."""

    def __init__(self, dtype: DType, values: Array) -> None:
        self.dtype = dtype
        if dtype == DType.bfloat16:
            raw = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
            self.data = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)
        else:
            self.data = np.array(values, dtype.to_numpy())

    def copy(self) -> _StatePool:
        copied = object.__new__(_StatePool)
        copied.dtype, copied.data = self.dtype, self.data.copy()
        return copied

    def values(self, rows: Any = slice(None)) -> Array:
        data: Array = self.data[rows]
        if self.dtype == DType.bfloat16:
            data = (data.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(data, np.float32)

    def buffer(self) -> Buffer:
        return Buffer.from_numpy(self.data).view(self.dtype, self.data.shape)

    def equals(self, other: _StatePool) -> bool:
        return bool(np.array_equal(_bits(self.data), _bits(other.data)))


def _layer_inputs(g: GatedDeltaGeometry, layers: int) -> list[TensorType]:
    return [
        _tensor(DType.float32, layers, "N", g.conv_dim),
        _tensor(DType.float32, layers, "N", g.num_value_heads),
        _tensor(DType.float32, layers, "N", g.num_value_heads),
        _tensor(DType.float32, layers, g.conv_dim, g.conv_width),
    ]


def _pools(g: GatedDeltaGeometry, dtype: DType) -> list[BufferType]:
    return [
        _buffer(dtype, "rows", *g.recurrent_state_shape(1)[1:]),
        _buffer(dtype, "rows", *g.conv_state_shape(1)[1:]),
    ]


def _accept(
    logits: TensorValue, drafts: TensorValue, offsets: TensorValue, ring_len: int
) -> tuple[TensorValue, TensorValue]:
    """Greedy acceptance in the graph: window rows kept, 1 + the longest prefix of right drafts.

    Token j of a row is the model's word on draft j. Returns num_accepted uint32 [B] for the fold,
    and the same as int64. A row longer than the ring keeps all of its tokens.
    """
    cpu = DeviceRef.CPU()
    bounds = mops.cast(offsets, DType.int64)
    begin, end = bounds[:-1].rebind(["B"]), bounds[1:].rebind(["B"])
    length = end - begin
    target = mops.squeeze(mops.argmax(logits, axis=-1), -1)
    place = mops.range(0, Dim("K"), 1, out_dim="K", dtype=DType.int64, device=cpu)
    token = mops.unsqueeze(begin, 1) + mops.unsqueeze(place, 0)
    last = mops.unsqueeze(mops.max(end - 1, mops.constant(0, DType.int64, device=cpu)), 1)
    said = mops.gather(target, mops.min(token, last), axis=0)
    is_draft = mops.unsqueeze(place, 0) < mops.unsqueeze(length - 1, 1)
    right = mops.logical_and(mops.equal(said, drafts), is_draft)
    wrong_before = mops.cumsum(mops.cast(mops.logical_not(right), DType.float32), axis=1)
    prefix = mops.cast(mops.equal(wrong_before, 0.0), DType.float32)
    run = mops.cast(mops.squeeze(mops.sum(prefix, axis=1), 1), DType.int64)
    kept = mops.where(length > ring_len, length, mops.min(length, run + 1))
    return mops.cast(kept, DType.uint32), kept


def _pack(kept: TensorValue, offsets: TensorValue, tokens: Dim) -> tuple[TensorValue, TensorValue]:
    """Token indices [N] that bring the kept tokens of each row together, and their offsets [B + 1].

    The tail past the last kept token belongs to no row.
    """
    cpu = DeviceRef.CPU()
    zero = mops.constant(np.zeros(1, np.int64), device=cpu)
    ends = mops.cumsum(kept, axis=0)
    kept_offsets = mops.concat([zero, ends])
    at = mops.range(0, tokens, 1, out_dim=tokens, dtype=DType.int64, device=cpu)
    ended = mops.unsqueeze(ends, 0) <= mops.unsqueeze(at, 1)
    row = mops.cast(mops.squeeze(mops.sum(mops.cast(ended, DType.float32), axis=1), 1), DType.int64)
    # Past the last row the gather may read any token: no row takes it.
    shift = mops.cast(offsets, DType.int64) - kept_offsets.rebind(offsets.shape)
    source = at + mops.gather(shift, row, axis=0)
    limit = mops.shape_to_tensor([tokens])[0] - 1
    return mops.max(mops.min(source, limit), 0), mops.cast(kept_offsets, DType.uint32)


def _run(model: Model, *operands: Any) -> list[Array]:
    inputs = [
        x.buffer() if isinstance(x, _StatePool) else np.ascontiguousarray(x) for x in operands
    ]
    with around_execute():
        outputs = model.execute(*inputs)
    return [np.array(out.to_numpy()) for out in outputs]


def _seconds(call: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def _bits(values: Array) -> Array:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def _relative(got: Array, true: Array) -> float:
    return float(np.abs(got - true).max() / np.abs(true).max())


def _tensor(dtype: DType, *shape: int | str) -> TensorType:
    return TensorType(dtype, shape, DeviceRef.CPU())


def _buffer(dtype: DType, *shape: int | str) -> BufferType:
    return BufferType(dtype, shape, DeviceRef.CPU())
