"""The conv that records its window's inputs, and the fold that shifts them in, in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from harness import PADDING, Pool, u32
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType

from gdn_graph import kernel_library, ops, reference

CPU_REF = DeviceRef.CPU()

# State dtype and ring dtype. A ring of the dtype of the windows is exact too.
DTYPES = {
    "float32": (DType.float32, DType.float32),
    "bfloat16": (DType.bfloat16, DType.bfloat16),
}


def drafts(count: int) -> np.ndarray:
    return np.zeros(count, np.int64)


def conv_ring_graph(name: str, state: DType, ring: DType, module: Module) -> None:
    """Every dim symbolic: the plain conv on its own windows, the verify, the fold."""
    f32, u32, i64 = DType.float32, DType.uint32, DType.int64
    with Graph(
        name,
        input_types=[
            TensorType(f32, ["n", "c"], CPU_REF),
            TensorType(f32, ["c", "w"], CPU_REF),
            BufferType(state, ["slots", "c", "h"], CPU_REF),
            BufferType(state, ["slots", "c", "h"], CPU_REF),
            BufferType(ring, ["rows", "r", "rc"], CPU_REF),
            TensorType(u32, ["b"], CPU_REF),
            TensorType(u32, ["b"], CPU_REF),
            TensorType(u32, ["b1"], CPU_REF),
            TensorType(i64, ["k"], CPU_REF),
            TensorType(u32, ["l", "fb"], CPU_REF),
            TensorType(u32, ["rl", "rb"], CPU_REF),
            TensorType(u32, ["ab"], CPU_REF),
            TensorType(i64, ["fk"], CPU_REF),
        ],
        module=module,
    ) as graph:
        qkv, weight = (value.tensor for value in graph.inputs[:2])
        plain_state, conv_state, conv_ring = (value.buffer for value in graph.inputs[2:5])
        slots, ring_slots, offsets, width = (value.tensor for value in graph.inputs[5:9])
        rows, ring_rows, accepted, fold_width = (value.tensor for value in graph.inputs[9:])
        plain = ops.gated_delta_conv1d_fwd(qkv, weight, plain_state, slots, offsets)
        verified = ops.gated_delta_conv1d_verify_ring_fwd(
            qkv, weight, conv_state, conv_ring, slots, ring_slots, offsets, width
        )
        ops.gated_delta_conv1d_fold(conv_state, conv_ring, rows, ring_rows, accepted, fold_width)
        graph.output(plain, verified)


@dataclass
class ConvRing:
    """The compiled graph on NumPy arrays."""

    model: Model
    state: DType
    ring: DType

    def __call__(
        self,
        qkv: np.ndarray,
        weight: np.ndarray,
        plain_state: Pool,
        conv_state: Pool,
        conv_ring: Pool,
        slots: Any,
        ring_slots: Any,
        offsets: Any,
        width: int,
        rows: Any = ((),),
        ring_rows: Any = ((),),
        accepted: Any = (),
        fold_width: int = 0,
    ) -> tuple[np.ndarray, np.ndarray]:
        plain, verified = self.model.execute(
            qkv,
            weight,
            plain_state.buffer,
            conv_state.buffer,
            conv_ring.buffer,
            u32(slots),
            u32(ring_slots),
            u32(offsets),
            drafts(width),
            u32(rows),
            u32(ring_rows),
            u32(accepted),
            drafts(fold_width),
        )
        return np.array(plain.to_numpy()), np.array(verified.to_numpy())


@pytest.fixture(scope="module")
def of_dtype(session: InferenceSession) -> dict[str, ConvRing]:
    module = Module()
    for name, dtypes in DTYPES.items():
        conv_ring_graph(name, *dtypes, module)
    models = session.load_all(module, custom_extensions=[kernel_library()])
    return {name: ConvRing(models[name], *dtypes) for name, dtypes in DTYPES.items()}


@pytest.fixture(params=DTYPES)
def conv_ring(request: pytest.FixtureRequest, of_dtype: dict[str, ConvRing]) -> ConvRing:
    return of_dtype[request.param]


@pytest.fixture
def float32_ring(of_dtype: dict[str, ConvRing]) -> ConvRing:
    return of_dtype["float32"]


class Case:
    """Random windows, inputs and a poisoned ring; 600 channels are two blocks, one partial."""

    def __init__(self, op: ConvRing, width: int, ring_len: int, lengths: list[int], slots: int = 7):
        rng = np.random.default_rng(width * 100 + ring_len)
        self.channels = 600
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.qkv = rng.standard_normal((self.offsets[-1] + 2, self.channels), np.float32)
        self.weight = rng.standard_normal((self.channels, width), np.float32)
        windows = rng.standard_normal((slots, self.channels, width - 1), np.float32)
        self.conv_state = Pool.of(op.state, windows)
        self.plain_state = Pool.of(op.state, windows)
        self.ring = Pool.poison(op.ring, (slots, ring_len, self.channels))


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("ring_len", [2, 4, 9])
def test_fold_equals_the_plain_conv_over_the_accepted_tokens(
    conv_ring: ConvRing, width: int, ring_len: int
) -> None:
    lengths = [ring_len, 0, 1, ring_len + 3, 2]
    slots, ring_slots = [5, 1, 0, 3, 6], [2, 0, 4, 1, 5]
    case = Case(conv_ring, width, ring_len, lengths)
    before = case.conv_state.bits.copy()
    plain, verified = conv_ring(
        case.qkv, case.weight, case.plain_state, case.conv_state, case.ring,
        slots, ring_slots, case.offsets, ring_len - 1,
    )  # fmt: skip
    assert (plain == verified).all()
    # Only the row longer than the ring has written its window, as the plain conv did.
    touched = case.conv_state.bits
    assert (touched[3] == case.plain_state.bits[3]).all()
    assert (np.delete(touched, 3, 0) == np.delete(before, 3, 0)).all()
    # It recorded nothing, nor did a row write past its tokens.
    recorded = case.ring.values
    assert np.isnan(recorded[[0, 1, 3, 6]]).all() and np.isnan(recorded[4, 1:]).all()

    for accepted in ([ring_len, 0, 1, ring_len + 3, 2], [1, 0, 0, ring_len + 3, 1]):
        fresh = Case(conv_ring, width, ring_len, lengths)
        conv_ring(
            case.qkv, case.weight, Case(conv_ring, width, ring_len, lengths).plain_state,
            fresh.conv_state, fresh.ring, slots, ring_slots, case.offsets, ring_len - 1,
            [slots], [ring_slots], accepted, ring_len - 1,
        )  # fmt: skip
        kept = np.concatenate(
            [np.arange(a) + case.offsets[b] for b, a in enumerate(accepted)]
        ).astype(int)
        again = Case(conv_ring, width, ring_len, lengths)
        conv_ring(
            np.ascontiguousarray(case.qkv[kept]), case.weight, again.plain_state,
            again.conv_state, again.ring, slots, ring_slots,
            np.concatenate([[0], np.cumsum(accepted)]), 0,
        )  # fmt: skip
        assert (fresh.conv_state.bits == again.plain_state.bits).all()
        # The K = 0 verify is the plain conv.
        assert (again.conv_state.bits == again.plain_state.bits).all()


def test_matches_the_specification(float32_ring: ConvRing) -> None:
    lengths, slots, ring_slots = [3, 6, 2, 1], [4, 0, PADDING, 2], [0, 5, 1, PADDING]
    case = Case(float32_ring, 4, 4, lengths)
    state, ring = case.conv_state.values.copy(), case.ring.values.copy()
    want = reference.gated_delta_conv1d_verify_ring_fwd(
        case.qkv, case.weight, state, ring, u32(slots), u32(ring_slots), case.offsets, 3
    )
    _, got = float32_ring(
        case.qkv, case.weight, case.plain_state, case.conv_state, case.ring,
        slots, ring_slots, case.offsets, 3,
    )  # fmt: skip
    assert np.abs(got - want).max() < 1e-5
    # Padding rows, the row with nowhere to record and the tail of no row are zero.
    assert not got[9:].any()
    np.testing.assert_array_equal(case.conv_state.values, state)
    np.testing.assert_array_equal(case.ring.values, ring)

    rows, ring_rows = [[4, 6], [1, PADDING]], [[0, 0], [0, 0]]
    reference.gated_delta_conv1d_fold(state, ring, u32(rows), u32(ring_rows), u32([3, 2]), 3)
    float32_ring(
        case.qkv[:0], case.weight, case.plain_state, case.conv_state, case.ring,
        [], [], [0], 0, rows, ring_rows, [3, 2], 3,
    )  # fmt: skip
    np.testing.assert_array_equal(case.conv_state.values, state)


@pytest.mark.parametrize("mistake", ["ring length", "channels", "ring id", "fold id", "tables"])
def test_a_refused_call_changes_nothing(float32_ring: ConvRing, mistake: str) -> None:
    case = Case(float32_ring, 4, 4, [2, 2])
    ring, ring_slots, rows, ring_rows, fold_width = case.ring, [0, 1], [[0, 1]], [[0, 1]], 3
    verify_width, message = 3, ""
    if mistake == "ring length":
        verify_width, message = 4, "conv_ring has length 4; need at least verify_width"
    elif mistake == "channels":
        ring = Pool.poison(float32_ring.ring, (7, 4, 599))
        message = "conv_ring has shape .*7, 4, 599.*; need .*7, 4, 600"
    elif mistake == "ring id":
        ring_slots, message = [0, 7], "ring_slot_idx names row 7 at row 1"
    elif mistake == "fold id":
        rows, verify_width, message = [[0, 9]], 0, "row_ids names row 9 at row 1"
    else:
        ring_rows, verify_width, message = [[0, 1], [0, 1]], 0, "ring_row_ids has shape"
    before = [buffer.bits.copy() for buffer in (case.conv_state, ring)]
    with pytest.raises(ValueError, match=message):
        float32_ring(
            case.qkv[:0] if verify_width == 0 else case.qkv, case.weight, case.plain_state,
            case.conv_state, ring, [0, 1], ring_slots,
            [0, 0, 0] if verify_width == 0 else case.offsets, verify_width,
            rows, ring_rows, [1, 1], fold_width,
        )  # fmt: skip
    for buffer, kept in zip((case.conv_state, ring), before, strict=True):
        assert (buffer.bits == kept).all()


def test_mistakes_seen_when_the_graph_is_built() -> None:
    f32, u32, i64 = DType.float32, DType.uint32, DType.int64

    def build(ring_shape: list[int], ring_dtype: DType = f32, k: int = 3) -> None:
        with Graph(
            "refused",
            input_types=[
                TensorType(f32, ["n", 8], CPU_REF),
                TensorType(f32, [8, 4], CPU_REF),
                BufferType(f32, [2, 8, 3], CPU_REF),
                BufferType(ring_dtype, ring_shape, CPU_REF),
                TensorType(u32, ["b"], CPU_REF),
                TensorType(u32, ["b1"], CPU_REF),
                TensorType(i64, [k], CPU_REF),
            ],
        ) as graph:
            qkv, weight, state, ring, slots, offsets, width = graph.inputs
            ops.gated_delta_conv1d_verify_ring_fwd(
                qkv, weight, state.buffer, ring.buffer, slots, slots, offsets, width.tensor
            )

    with pytest.raises(ValueError, match=r"conv_ring has length 3; need at least .* = 4"):
        build([2, 3, 8])
    with pytest.raises(ValueError, match=r"conv_ring has shape .*9.*; need 8"):
        build([2, 4, 9])
    with pytest.raises(TypeError, match="conv_ring has dtype int32"):
        build([2, 4, 8], DType.int32)
    build([2, 3, 8], k=0)
