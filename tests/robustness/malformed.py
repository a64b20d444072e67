"""The malformed calls, as a table: `python tests/robustness/malformed.py` counts and lists them.

A Build is refused by gdn_graph.ops when the graph is built, a Run by the op when it runs, a Make
by what makes an operand or a geometry. Each spoils some operands of a good call, and says what the
error has to name: the op, the argument, what came and what is needed ("|" parts what may stand
there).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from max.dtype import DType
from max.graph import BufferType, DeviceRef, TensorType

from gdn_graph import GatedDeltaGeometry, ops

GEOMETRY = GatedDeltaGeometry(2, 6, 4, 3, ring_len=4)
N, B, K, SLOTS, RING_ROWS, LAYERS = 5, 2, 3, 4, 3, 2
C = GEOMETRY.conv_dim
RECORD = GEOMETRY.record_elements
VALUE_HEADS = 6

CONV = "gated_delta_conv1d_fwd"
CONV_VERIFY = "gated_delta_conv1d_verify_fwd"
PLAIN = "gated_delta_recurrence_fwd"
VERIFY = "gated_delta_recurrence_verify_ring_fwd"
FOLD = "gated_delta_state_fold"
CONV_RING = "gated_delta_conv1d_verify_ring_fwd"
CONV_FOLD = "gated_delta_conv1d_fold"
GATES = "gated_delta_gates"
OPS = (CONV, CONV_VERIFY, PLAIN, VERIFY, FOLD, CONV_RING, CONV_FOLD, GATES)

f32, f16, bf16, f64 = DType.float32, DType.float16, DType.bfloat16, DType.float64
u32, i32, i64, u8, boolean = DType.uint32, DType.int32, DType.int64, DType.uint8, DType.bool

_ROWS = {"slot_idx": (u32, [B]), "input_row_offsets": (u32, [B + 1])}
_GATES = {
    "qkv_conv_output": (f32, [N, C]),
    "decay_per_token": (f32, [N, VALUE_HEADS]),
    "beta_per_token": (f32, [N, VALUE_HEADS]),
    "recurrent_state": (f32, GEOMETRY.recurrent_state_shape(SLOTS)),
}
_CONV = {
    "qkv_input_ragged": (f32, [N, C]),
    "conv_weight": (f32, [C, 4]),
    "conv_state": (f32, GEOMETRY.conv_state_shape(SLOTS)),
    **_ROWS,
}
_RING = {"ring": (f32, [RING_ROWS, 2, 4, RECORD])}
_RING_ROWS = {
    "slot_idx": (u32, [B]),
    "ring_slot_idx": (u32, [B]),
    "input_row_offsets": (u32, [B + 1]),
}
_CONV_RING = {"conv_ring": (f32, [RING_ROWS, 4, C])}
_TABLES = {
    "row_ids": (u32, [LAYERS, B]),
    "ring_row_ids": (u32, [LAYERS, B]),
    "num_accepted": (u32, [B]),
}
_WIDTH = {"verify_width": (i64, [K])}
# Operand -> (dtype, shape) of a good call, in the order of the signature.
GOOD: dict[str, dict[str, tuple[DType, Any]]] = {
    CONV: _CONV,
    CONV_VERIFY: {**_CONV, **_WIDTH},
    PLAIN: {**_GATES, **_ROWS},
    VERIFY: {**_GATES, **_RING, **_RING_ROWS, **_WIDTH},
    FOLD: {
        "recurrent_state": (f32, GEOMETRY.recurrent_state_shape(SLOTS)),
        **_RING,
        **_TABLES,
        **_WIDTH,
    },
    CONV_RING: {
        **{name: _CONV[name] for name in ("qkv_input_ragged", "conv_weight", "conv_state")},
        **_CONV_RING,
        **_RING_ROWS,
        **_WIDTH,
    },
    CONV_FOLD: {"conv_state": _CONV["conv_state"], **_CONV_RING, **_TABLES, **_WIDTH},
    GATES: {
        "a": (f32, [N, VALUE_HEADS]),
        "b": (f32, [N, VALUE_HEADS]),
        "A_log": (f32, [VALUE_HEADS]),
        "dt_bias": (f32, [VALUE_HEADS]),
    },
}
POOLS = ("conv_state", "recurrent_state", "ring", "conv_ring")
# The ops over ragged rows, those with a ring, and those over tables of all layers.
ROW_OPS = (CONV, CONV_VERIFY, PLAIN, VERIFY, CONV_RING)
RING_OPS = {VERIFY: "ring", FOLD: "ring", CONV_RING: "conv_ring", CONV_FOLD: "conv_ring"}
TABLE_OPS = {FOLD: "recurrent_state", CONV_FOLD: "conv_state"}
IDS = ("slot_idx", "ring_slot_idx", "input_row_offsets", "row_ids", "ring_row_ids", "num_accepted")


def good_type(op: str, operand: str, **changes: Any) -> TensorType | BufferType:
    dtype, shape = GOOD[op][operand]
    kind = BufferType if operand in POOLS else TensorType
    device = changes.get("device", DeviceRef.CPU())
    return kind(changes.get("dtype", dtype), changes.get("shape", shape), device)


@dataclass(frozen=True)
class Build:
    """A call refused when the graph is built: types, or values in their place, of some operands."""

    op: str
    what: str
    change: dict[str, Any]
    argument: str
    got: str
    need: str
    error: type[Exception] = ValueError
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A call refused when the op runs: some operands of a good call replaced, as arrays."""

    op: str
    what: str
    change: dict[str, Callable[[Any], Any]]
    argument: str
    got: str
    need: str
    error: type[Exception] = ValueError


@dataclass(frozen=True)
class Make:
    """A helper that refuses its arguments."""

    op: str
    what: str
    call: Callable[[], Any]
    argument: str
    got: str
    need: str
    error: type[Exception] = ValueError


def builds() -> list[Build]:
    calls: list[Build] = []
    for op, operands in GOOD.items():
        for name in operands:
            calls += _of_any_operand(op, name)
            if name in IDS:
                calls += _of_ids(op, name)
            elif name in POOLS:
                calls += _of_a_pool(op, name)
            elif name == "verify_width":
                calls += _of_the_width(op)
            else:
                calls += _of_a_tensor(op, name)
    return calls + _shapes_that_disagree() + _on_a_gpu()


def _of_any_operand(op: str, name: str) -> list[Build]:
    _, shape = GOOD[op][name]
    rank = len(shape)
    more, fewer = [*shape, 1], list(shape)[:-1]
    calls = [
        Build(
            op,
            f"{name} of rank {len(s)}",
            {name: good_type(op, name, shape=s)},
            name,
            f"has shape {list(s)}",
            f"rank {rank}",
        )
        for s in (more, fewer)
    ]
    others = [n for n in GOOD[op] if n in POOLS] or list(GOOD[op])
    # The first pool (or operand) says where the op runs: moved, the others are misplaced.
    if name != others[0]:
        calls.append(
            Build(
                op,
                f"{name} on a GPU",
                {name: good_type(op, name, device=DeviceRef.GPU())},
                name,
                "is on gpu:0",
                "cpu:0",
            )
        )
    calls.append(
        Build(op, f"{name} is None", {name: None}, name, "is ", "a buffer|a tensor", TypeError)
    )
    return calls


def _of_ids(op: str, name: str) -> list[Build]:
    calls = [
        Build(
            op,
            f"{name} of {dtype.name}",
            {name: good_type(op, name, dtype=dtype)},
            name,
            f"has dtype {dtype.name}",
            "uint32 or another integer",
            TypeError,
        )
        for dtype in (f32, f64, boolean)
    ]
    calls.append(
        Build(op, f"{name} is a list", {name: [0, 1]}, name, "is [0, 1]", "a tensor", TypeError)
    )
    return calls


def _of_a_tensor(op: str, name: str) -> list[Build]:
    calls = [
        Build(
            op,
            f"{name} of {dtype.name}",
            {name: good_type(op, name, dtype=dtype)},
            name,
            f"has dtype {dtype.name}",
            "float32, bfloat16 or float16",
            TypeError,
        )
        for dtype in (f64, i32)
    ]
    as_buffer = BufferType(*GOOD[op][name], DeviceRef.CPU())
    calls.append(
        Build(
            op, f"{name} is a buffer", {name: as_buffer}, name, "is a buffer", "a tensor", TypeError
        )
    )
    return calls


def _of_a_pool(op: str, name: str) -> list[Build]:
    calls = [
        Build(
            op,
            f"{name} of {dtype.name}",
            {name: good_type(op, name, dtype=dtype)},
            name,
            f"has dtype {dtype.name}",
            "float32, bfloat16 or float16",
            TypeError,
        )
        for dtype in (f64, u8)
    ]
    as_tensor = TensorType(*GOOD[op][name], DeviceRef.CPU())
    calls.append(
        Build(
            op,
            f"{name} is a tensor",
            {name: as_tensor},
            name,
            "is a TensorValue",
            "a buffer",
            TypeError,
        )
    )
    return calls


def _of_the_width(op: str) -> list[Build]:
    name = "verify_width"
    return [
        *(
            Build(
                op,
                f"{name} of {dtype.name}",
                {name: good_type(op, name, dtype=dtype)},
                name,
                f"has dtype {dtype.name}",
                "int64, see verify_width_operand",
                TypeError,
            )
            for dtype in (i32, u32, f32)
        ),
        Build(op, f"{name} is a number", {name: 3}, name, "is 3", "a tensor", TypeError),
    ]


def _shapes_that_disagree() -> list[Build]:
    calls: list[Build] = []

    def add(op: str, operand: str, shape: Any, got: str, need: str, argument: str = "") -> None:
        calls.append(
            Build(
                op,
                f"{operand} of shape {list(shape)}",
                {operand: good_type(op, operand, shape=shape)},
                argument or operand,
                got,
                need,
            )
        )

    for op in (CONV, CONV_VERIFY, CONV_RING):
        add(op, "conv_weight", [C - 1, 4], f"has shape [{C - 1}, 4]", f"{C}, the channels")
        add(op, "conv_weight", [4, C], f"has shape [4, {C}]", f"{C}, the channels")
        add(op, "conv_weight", [C, 1], "has width 1", "a conv width of 2 to 8")
        add(op, "conv_weight", [C, 9], "has width 9", "a conv width of 2 to 8")
        add(op, "conv_weight", [C, 0], "has width 0", "a conv width of 2 to 8")
        add(
            op,
            "conv_weight",
            [C, 3],
            f"has shape [{SLOTS}, {C}, 3]",
            "2, the conv width - 1",
            "conv_state",
        )
        add(
            op,
            "conv_state",
            [SLOTS, C + 1, 3],
            f"has shape [{SLOTS}, {C + 1}, 3]",
            f"{C}, the channels",
        )
        add(op, "conv_state", [SLOTS, 3, C], f"has shape [{SLOTS}, 3, {C}]", f"{C}, the channels")
        add(
            op, "conv_state", [SLOTS, C, 4], f"has shape [{SLOTS}, {C}, 4]", "3, the conv width - 1"
        )
        add(
            op,
            "qkv_input_ragged",
            [N, C - 1],
            f"has shape [{C}, 4]",
            f"{C - 1}, the channels",
            "conv_weight",
        )
    heads = VALUE_HEADS
    add(GATES, "b", [N + 1, heads], f"has shape [{N + 1}, {heads}]", f"{N}, the tokens of a")
    add(GATES, "b", [N, 1], f"has shape [{N}, 1]", f"{heads}, the value heads of a")
    for name in ("A_log", "dt_bias"):
        add(GATES, name, [heads - 1], f"has shape [{heads - 1}]", f"{heads}, the value heads")
        add(GATES, name, [1], "has shape [1]", f"{heads}, the value heads of a")
    calls.extend(
        Build(
            op,
            f"activation is {value!r}",
            {},
            "activation",
            f"is {value!r}",
            '"silu" or None',
            options={"activation": value},
        )
        for op in (CONV, CONV_VERIFY, CONV_RING)
        for value in ("relu", "SiLU", True)
    )
    for op, flag in ((CONV, "write_state"), (CONV_VERIFY, "rollback")):
        calls.extend(
            Build(
                op,
                f"{flag} is {value!r}",
                {},
                flag,
                f"is {value!r}",
                "True or False",
                TypeError,
                {flag: value},
            )
            for value in (1, "yes", None)
        )
    for op in ROW_OPS:
        for length in (0, B, B + 2):
            add(
                op,
                "input_row_offsets",
                [length],
                f"has shape [{length}]",
                f"{B + 1}, one more than the rows of slot_idx",
            )
        add(
            op,
            "slot_idx",
            [B + 1],
            f"has shape [{B + 1}]",
            f"{B + 2}, one more",
            "input_row_offsets",
        )
    nv, KD, VD = VALUE_HEADS, 4, 3
    for op in (PLAIN, VERIFY):
        calls += [
            Build(
                op,
                f"algorithm {value!r}",
                {},
                "algorithm",
                f"is {quoted}",
                "exact",
                options={"algorithm": value},
            )
            for value, quoted in (("fast", "'fast'"), ("block", '"block" on cpu:0'), (None, "None"))
        ]
        for gate in ("decay_per_token", "beta_per_token"):
            add(op, gate, [N + 1, nv], f"has shape [{N + 1}, {nv}]", f"{N}, the tokens")
            add(op, gate, [N, nv - 1], f"has shape [{N}, {nv - 1}]", f"{nv}, the value heads")
            add(op, gate, [N, 1], f"has shape [{N}, 1]", f"{nv}, the value heads")
            add(op, gate, [nv, N], f"has shape [{nv}, {N}]", f"{N}, the tokens")
        for channels in (C + 1, C - 2 * KD + 1, nv * VD, 0):
            add(
                op,
                "qkv_conv_output",
                [N, channels],
                f"has {channels} channels",
                "a whole number of key heads",
            )
        add(
            op,
            "qkv_conv_output",
            [N, C + 2 * 2 * KD],
            "has 6 value heads for the 4 key heads",
            "a multiple of the key heads",
            "recurrent_state",
        )
        add(
            op,
            "recurrent_state",
            [SLOTS, nv, VD, KD],
            f"has {C} channels",
            "a whole number of key heads",
            "qkv_conv_output",
        )
        for axis, name in ((1, "value heads"), (2, "key head dim"), (3, "value head dim")):
            shape = [SLOTS, nv, KD, VD]
            shape[axis] = 0
            change = {"recurrent_state": good_type(op, "recurrent_state", shape=shape)}
            if axis == 1:
                change |= {
                    g: good_type(op, g, shape=[N, 0]) for g in ("decay_per_token", "beta_per_token")
                }
            calls.append(
                Build(
                    op,
                    f"no {name}",
                    change,
                    "recurrent_state",
                    f"has shape {shape}",
                    "every head dim at least 1",
                )
            )
    for op in (VERIFY, FOLD):
        add(op, "ring", [RING_ROWS, 2, K, RECORD], f"has length {K}", "at least verify_width")
        add(op, "ring", [RING_ROWS, 2, 0, RECORD], "has length 0", "at least verify_width")
        add(
            op,
            "ring",
            [RING_ROWS, 2, 4, RECORD - 1],
            f"has record stride {RECORD - 1}",
            f"at least {RECORD} = key head dim",
        )
        add(
            op,
            "ring",
            [RING_ROWS, 2, RECORD, 4],
            "has record stride 4",
            f"at least {RECORD} = key head dim",
        )
    add(
        VERIFY,
        "ring",
        [RING_ROWS, 3, 4, RECORD],
        f"has shape [{RING_ROWS}, 3, 4, {RECORD}]",
        "2, the key heads",
    )
    for op, ring in RING_OPS.items():
        add(op, "verify_width", [4], "has length 4", "= 5", ring)
    for op in (CONV_RING, CONV_FOLD):
        for shape in ([RING_ROWS, 4, C - 1], [RING_ROWS, C, 4]):
            add(op, "conv_ring", shape, f"has shape {shape}", f"{C}, the channels of the conv")
        add(op, "conv_ring", [RING_ROWS, K, C], f"has length {K}", "at least verify_width")
    for history in (0, 8):
        shape = [SLOTS, C, history]
        add(CONV_FOLD, "conv_state", shape, f"has shape {shape}", "a conv width of 2 to 8")
    for op in (VERIFY, CONV_RING):
        add(op, "ring_slot_idx", [B + 1], f"has shape [{B + 1}]", f"{B}, the rows of slot_idx")
        add(op, "ring_slot_idx", [0], "has shape [0]", f"{B}, the rows of slot_idx")
    for nk in (0, 4, 12):
        add(
            FOLD,
            "ring",
            [RING_ROWS, nk, 4, RECORD],
            f"has {nk} key heads for the 6 value heads",
            "a number of key heads that divides the value heads",
        )
    for axis in (1, 2, 3):
        shape = [SLOTS, nv, KD, VD]
        shape[axis] = 0
        add(FOLD, "recurrent_state", shape, f"has shape {shape}", "every head dim at least 1")
    for op in TABLE_OPS:
        add(
            op,
            "row_ids",
            [LAYERS, B + 1],
            f"has shape [{LAYERS}, {B + 1}]",
            f"{B}, the rows of num_accepted",
        )
        add(
            op,
            "row_ids",
            [LAYERS + 1, B],
            f"has shape [{LAYERS}, {B}]",
            f"{LAYERS + 1}, the layers of row_ids",
            "ring_row_ids",
        )
        add(
            op,
            "ring_row_ids",
            [LAYERS, B - 1],
            f"has shape [{LAYERS}, {B - 1}]",
            f"{B}, the rows of num_accepted",
        )
        add(op, "ring_row_ids", [1, B], f"has shape [1, {B}]", f"{LAYERS}, the layers")
        add(
            op,
            "num_accepted",
            [B + 1],
            f"has shape [{LAYERS}, {B}]",
            f"{B + 1}, the rows of num_accepted",
            "row_ids",
        )
        add(op, "num_accepted", [0], f"has shape [{LAYERS}, {B}]", "0, the rows", "row_ids")
    return calls


def _on_a_gpu() -> list[Build]:
    """GPU kernels are compiled for some dims, which have to be static and in their range."""
    gpu = DeviceRef.GPU()
    calls: list[Build] = []

    def add(op: str, operand: str, shape: Any, need: str) -> None:
        change: dict[str, Any] = {
            name: good_type(op, name, device=gpu) for name in GOOD[op] if name != "verify_width"
        }
        got = f"[{', '.join(map(str, shape))}]"
        change[operand] = good_type(op, operand, shape=shape, device=gpu)
        what = f"{operand} of shape {got} on a GPU"
        calls.append(Build(op, what, change, operand, f"has shape {got} on gpu:0", need))

    heads = "a multiple of 8 from 16 to 256, static"
    for op in (PLAIN, VERIFY, FOLD):
        for KD, VD in ((12, 16), (8, 16), (264, 16), ("KD", 16), (16, 20), (16, "VD")):
            add(op, "recurrent_state", [SLOTS, "nv", KD, VD], heads)
    for op in (CONV, CONV_VERIFY):
        add(op, "conv_weight", [C, "width"], "from 2 to 8, static")
    return calls


def _value(*values: int) -> Callable[[Any], Any]:
    return lambda _: np.array(values, np.uint32)


def _shaped(*shape: int) -> Callable[[Any], Any]:
    """The array cut, or filled up with its first element, to another shape."""

    def change(array: Any) -> Any:
        out = np.full(shape, array.flat[0] if array.size else 0, array.dtype)
        common = tuple(slice(0, min(a, b)) for a, b in zip(shape, array.shape, strict=True))
        out[common] = array[common]
        return out

    return change


def _with(index: Any, value: int) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array = array.copy()
        array[index] = value
        return array

    return change


def runs() -> list[Run]:
    """What only the op can see: ids and offsets, and dims that are symbolic in its graph."""
    calls: list[Run] = []

    def add(op: str, what: str, change: dict[str, Any], argument: str, got: str, need: str) -> None:
        calls.append(Run(op, what, change, argument, got, need))

    for op in ROW_OPS:
        name, decrease = "input_row_offsets", "offsets that never decrease"
        for what, offsets, got in (
            ("offsets that decrease at row 0", (3, 2, 5), "goes from 3 to 2 at row 0"),
            ("offsets that decrease at row 1", (0, 4, 3), "goes from 4 to 3 at row 1"),
            ("offsets that come back to 0", (0, 5, 0), "goes from 5 to 0 at row 1"),
            ("offsets of a wrapped length", (0, 2**32 - 1, 5), f"goes from {2**32 - 1} to 5"),
        ):
            add(op, what, {name: _value(*offsets)}, name, got, decrease)
        for what, offsets in (
            ("offsets one past the tokens", (0, 3, N + 1)),
            ("offsets that end at 2**31", (0, 3, 2**31)),
            ("offsets that end at -1", (0, 3, 2**32 - 1)),
            ("offsets that all lie past the tokens", (N + 2, N + 2, N + 2)),
        ):
            add(
                op,
                what,
                {name: _value(*offsets)},
                name,
                f"ends at {offsets[-1]}",
                f"at most the {N} tokens",
            )
        for what, change in (
            ("one offset too few", _value(0, N)),
            ("one offset too many", _value(0, 3, N, N)),
            ("no offsets", _value()),
        ):
            length = len(change(None))
            add(op, what, {name: change}, name, f"has length {length}", f"one more than the {B}")
        no_rows = {x: _value() for x in GOOD[op] if x in ("slot_idx", "ring_slot_idx")}
        add(
            op,
            "no rows and no offsets",
            {**no_rows, name: _value()},
            name,
            "has length 0",
            "one more than the 0",
        )
        add(
            op,
            "no rows, an offset past the tokens",
            {**no_rows, name: _value(N + 1)},
            name,
            f"ends at {N + 1}",
            f"at most the {N} tokens",
        )
        for row, id in ((0, SLOTS), (1, SLOTS), (0, 2**31), (1, 2**32 - 2)):
            add(
                op,
                f"slot {id} at row {row}",
                {"slot_idx": _with(row, id)},
                "slot_idx",
                f"names row {id} at row {row} of the batch",
                f"an id below {SLOTS}",
            )
        pool = "conv_state" if "conv_state" in GOOD[op] else "recurrent_state"
        shape = list(GOOD[op][pool][1])
        add(
            op,
            "a pool without slots",
            {pool: _shaped(0, *shape[1:])},
            "slot_idx",
            "names row",
            "an id below 0",
        )
    for op in (CONV, CONV_VERIFY, CONV_RING):
        for what, operand, shape, argument, got, need in (
            (
                "weights of a channel fewer",
                "conv_weight",
                [C - 1, 4],
                "conv_weight",
                f"has shape ({C - 1}, 4)",
                f"({C}, 4)",
            ),
            ("weights of width 1", "conv_weight", [C, 1], "conv_weight", "has width 1", "2 to 8"),
            ("weights of width 9", "conv_weight", [C, 9], "conv_weight", "has width 9", "2 to 8"),
            ("weights without taps", "conv_weight", [C, 0], "conv_weight", "has width 0", "2 to 8"),
            (
                "weights of width 3",
                "conv_weight",
                [C, 3],
                "conv_state",
                f"has shape ({SLOTS}, {C}, 3)",
                f"({SLOTS}, {C}, 2)",
            ),
            (
                "a window of a trailing column",
                "conv_state",
                [SLOTS, C, 4],
                "conv_state",
                f"has shape ({SLOTS}, {C}, 4)",
                f"({SLOTS}, {C}, 3)",
            ),
            (
                "a window of a channel more",
                "conv_state",
                [SLOTS, C + 1, 3],
                "conv_state",
                f"has shape ({SLOTS}, {C + 1}, 3)",
                f"({SLOTS}, {C}, 3)",
            ),
            (
                "a turned window",
                "conv_state",
                [SLOTS, 3, C],
                "conv_state",
                f"has shape ({SLOTS}, 3, {C})",
                f"({SLOTS}, {C}, 3)",
            ),
        ):
            add(op, what, {operand: _shaped(*shape)}, argument, got, need)
        # The op with a ring holds its input to that first.
        argument, shape = ("conv_ring", "(3, 4, ") if op == CONV_RING else ("conv_weight", "(")
        add(
            op,
            "an input of a channel fewer",
            {"qkv_input_ragged": _shaped(N, C - 1)},
            argument,
            f"has shape {shape}{C}",
            f"{shape}{C - 1}",
        )
    for name, shape in (
        ("b", [N - 1, VALUE_HEADS]),
        ("b", [N, VALUE_HEADS + 1]),
        ("b", [VALUE_HEADS, N]),
        *((name, [heads]) for name in ("A_log", "dt_bias") for heads in (0, 1, VALUE_HEADS + 1)),
    ):
        need = [N, VALUE_HEADS] if name == "b" else [VALUE_HEADS]
        add(
            GATES,
            f"{name} of shape {shape}",
            {name: _shaped(*shape)},
            name,
            f"has shape ({', '.join(map(str, shape))}",
            f"({', '.join(map(str, need))}",
        )
    nv, KD, VD = VALUE_HEADS, 4, 3
    for op in (PLAIN, VERIFY):
        for gate in ("decay_per_token", "beta_per_token"):
            for shape in ([N - 1, nv], [N, nv + 1], [N, 1], [nv, N], [0, nv]):
                add(
                    op,
                    f"{gate} of shape {shape}",
                    {gate: _shaped(*shape)},
                    gate,
                    f"has shape ({shape[0]}, {shape[1]})",
                    f"({N}, {nv})",
                )
        for channels in (C + 1, nv * VD, nv * VD - 1, 0):
            add(
                op,
                f"{channels} channels",
                {"qkv_conv_output": _shaped(N, channels)},
                "qkv_conv_output",
                f"has {channels} channels",
                "a whole number of key heads",
            )
        add(
            op,
            "value heads no multiple of the key heads",
            {"qkv_conv_output": _shaped(N, C + 4 * KD)},
            "recurrent_state",
            "has 6 value heads for the 4 key heads",
            "a multiple of the key heads",
        )
        add(
            op,
            "a turned state",
            {"recurrent_state": _shaped(SLOTS, nv, VD, KD)},
            "qkv_conv_output",
            f"has {C} channels",
            "a whole number of key heads",
        )
        for axis in (1, 2, 3):
            shape = [SLOTS, nv, KD, VD]
            shape[axis] = 0
            add(
                op,
                f"a state of shape {shape}",
                {"recurrent_state": _shaped(*shape)},
                "recurrent_state",
                f"has shape ({', '.join(map(str, shape))})",
                "every head dim at least 1",
            )
    too_wide = {"verify_width": lambda _: np.zeros(4, np.int64)}
    far_too_wide = {"verify_width": lambda _: np.zeros(1000, np.int64)}
    for op, ring in RING_OPS.items():
        add(
            op,
            "as many drafts as the ring is long",
            too_wide,
            ring,
            "has length 4",
            "at least verify_width + 1 = 5",
        )
        add(op, "a thousand drafts", far_too_wide, ring, "has length 4", "= 1001")
    for op in (VERIFY, FOLD):
        for what, shape, got, need in (
            ("a ring one record short", [RING_ROWS, 2, K, RECORD], "has length 3", "= 4"),
            ("a ring without records", [RING_ROWS, 2, 0, RECORD], "has length 0", "= 4"),
            (
                "records one element short",
                [RING_ROWS, 2, 4, RECORD - 1],
                f"has record stride {RECORD - 1}",
                f"at least {RECORD}",
            ),
            (
                "records of no elements",
                [RING_ROWS, 2, 4, 0],
                "has record stride 0",
                f"at least {RECORD}",
            ),
        ):
            add(op, what, {"ring": _shaped(*shape)}, "ring", got, need)
    for nk in (1, 3):
        add(
            VERIFY,
            f"a ring of {nk} key heads",
            {"ring": _shaped(RING_ROWS, nk, 4, RECORD)},
            "ring",
            f"has shape ({RING_ROWS}, {nk}, 4, {RECORD})",
            f"({RING_ROWS}, 2, 4, {RECORD})",
        )
    for op in (VERIFY, CONV_RING):
        for length in (0, 1, 3):
            add(
                op,
                f"{length} ring slots",
                {"ring_slot_idx": _value(*[0] * length)},
                "ring_slot_idx",
                f"has shape ({length}",
                "(2",
            )
        for row, id in ((0, RING_ROWS), (1, RING_ROWS), (0, 2**31), (1, 2**32 - 2)):
            add(
                op,
                f"ring slot {id} at row {row}",
                {"ring_slot_idx": _with(row, id)},
                "ring_slot_idx",
                f"names row {id} at row {row} of the batch",
                f"an id below {RING_ROWS}",
            )
        add(
            op,
            "a ring without rows",
            {RING_OPS[op]: _shaped(0, *GOOD[op][RING_OPS[op]][1][1:])},
            "ring_slot_idx",
            "names row",
            "an id below 0",
        )
    for op in (CONV_RING, CONV_FOLD):
        for shape, got, need in (
            (
                [RING_ROWS, 4, C - 1],
                f"has shape ({RING_ROWS}, 4, {C - 1})",
                f"({RING_ROWS}, 4, {C})",
            ),
            ([RING_ROWS, C, 4], f"has shape ({RING_ROWS}, {C}, 4)", f"({RING_ROWS}, {C}, {C})"),
            ([RING_ROWS, K, C], "has length 3", "at least verify_width + 1 = 4"),
            ([RING_ROWS, 0, C], "has length 0", "at least verify_width + 1 = 4"),
        ):
            add(
                op,
                f"a ring of shape {shape}",
                {"conv_ring": _shaped(*shape)},
                "conv_ring",
                got,
                need,
            )
    for history in (0, 8):
        add(
            CONV_FOLD,
            f"a window of {history} inputs",
            {"conv_state": _shaped(SLOTS, C, history)},
            "conv_state",
            f"has shape ({SLOTS}, {C}, {history})",
            "a conv width of 2 to 8",
        )
    for nk in (0, 4, 12):
        add(
            FOLD,
            f"a ring of {nk} key heads",
            {"ring": _shaped(RING_ROWS, nk, 4, RECORD)},
            "ring",
            f"has {nk} key heads for the 6",
            "a number of key heads that divides",
        )
    for axis in (1, 2, 3):
        shape = [SLOTS, nv, KD, VD]
        shape[axis] = 0
        add(
            FOLD,
            f"a state of shape {shape}",
            {"recurrent_state": _shaped(*shape)},
            "recurrent_state",
            f"has shape ({', '.join(map(str, shape))})",
            "every head dim at least 1",
        )
    for op, pool in TABLE_OPS.items():
        ring = RING_OPS[op]
        for operand, pool_rows in (("row_ids", SLOTS), ("ring_row_ids", RING_ROWS)):
            for at, id in (
                ((0, 0), pool_rows),
                ((0, 1), 2**31),
                ((1, 0), 2**32 - 2),
                ((1, 1), pool_rows),
            ):
                add(
                    op,
                    f"{operand} {id} at layer {at[0]}, row {at[1]}",
                    {operand: _with(at, id)},
                    operand,
                    f"names row {id} at row {at[1]} of the batch",
                    f"an id below {pool_rows}",
                )
        for what, operand, shape, argument in (
            ("row ids of a row fewer", "row_ids", [LAYERS, B - 1], "row_ids"),
            ("row ids of a row more", "row_ids", [LAYERS, B + 1], "row_ids"),
            ("row ids of a layer more", "row_ids", [LAYERS + 1, B], "ring_row_ids"),
            ("ring row ids of a row fewer", "ring_row_ids", [LAYERS, B - 1], "ring_row_ids"),
            ("ring row ids of a layer fewer", "ring_row_ids", [LAYERS - 1, B], "ring_row_ids"),
            ("ring row ids of no layer", "ring_row_ids", [0, B], "ring_row_ids"),
        ):
            got = shape if operand == argument else [LAYERS, B]
            add(
                op,
                what,
                {operand: _shaped(*shape)},
                argument,
                f"has shape ({got[0]}, {got[1]})",
                "",
            )
        for length in (0, 1, 3):
            add(
                op,
                f"{length} accepted counts",
                {"num_accepted": _value(*[1] * length)},
                "row_ids",
                f"has shape ({LAYERS}, {B})",
                f"({LAYERS}, {length})",
            )
        add(
            op,
            "a state pool without rows",
            {pool: _shaped(0, *GOOD[op][pool][1][1:])},
            "row_ids",
            "names row",
            "an id below 0",
        )
        add(
            op,
            "a ring without rows",
            {ring: _shaped(0, *GOOD[op][ring][1][1:])},
            "ring_row_ids",
            "names row",
            "an id below 0",
        )
    return calls


def makes() -> list[Make]:
    width, geometry = "verify_width_operand", "GatedDeltaGeometry"
    good = {"num_key_heads": 2, "num_value_heads": 6, "key_head_dim": 4, "value_head_dim": 3}

    def of(**change: Any) -> Callable[[], Any]:
        return lambda: GatedDeltaGeometry(**{**good, **change})

    calls = [
        Make(
            width,
            f"{value!r} drafts",
            lambda value=value: ops.verify_width_operand(value),
            "num_draft_tokens",
            f"is {value}",
            "whole number|0 or more",
            TypeError,
        )
        for value in (1.5, None, [3])
    ]
    calls.append(
        Make(
            width,
            "-1 drafts",
            lambda: ops.verify_width_operand(-1),
            "num_draft_tokens",
            "is -1",
            "0 or more",
        )
    )
    for name in (*good, "ring_len"):
        for value in (0, -1):
            calls.append(
                Make(
                    geometry,
                    f"{name} of {value}",
                    of(**{name: value}),
                    name,
                    f"is {value}",
                    "at least 1",
                )
            )
        calls.append(
            Make(
                geometry,
                f"{name} of 1.5",
                of(**{name: 1.5}),
                name,
                "is 1.5",
                "a whole number",
                TypeError,
            )
        )
    calls.append(
        Make(
            geometry,
            "nv no multiple of nk",
            of(num_value_heads=5),
            "num_value_heads",
            "is 5",
            "a multiple of num_key_heads, 2",
        )
    )
    calls += [
        Make(
            geometry,
            f"conv_width of {value}",
            of(conv_width=value),
            "conv_width",
            f"is {value}",
            "2 to 8",
        )
        for value in (1, 9)
    ]
    calls.append(
        Make(
            geometry,
            "records closer than they are long",
            of(stride=15),
            "stride",
            "is 15",
            "at least the 16 elements",
        )
    )
    calls.append(
        Make(
            geometry,
            "conv_width of '4'",
            of(conv_width="4"),
            "conv_width",
            "is '4'",
            "a whole number",
            TypeError,
        )
    )
    return calls


def main() -> None:
    kinds = {"when the graph is built": builds(), "when the op runs": runs(), "helpers": makes()}
    for when, calls in kinds.items():
        print(f"{when}: {len(calls)}")
        for call in calls:
            print(f"  {call.op}: {call.what} -> {call.error.__name__} on {call.argument}")
    calls = {(type(c).__name__, c.op, c.what) for group in kinds.values() for c in group}
    print(f"{len(calls)} different malformed calls")


if __name__ == "__main__":
    main()
