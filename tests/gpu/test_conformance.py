"""The kernels have the signatures that MAX documents: names, order, types, defaults.

The lists below are those of the documentation. They are compared with what `mojo doc` says of the
sources, and a program made from them instantiates every kernel by position and by keyword.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mojo.run import subprocess_run_mojo

from gdn_graph.library import source_dir

Members = list[tuple[str, str, str | None]]


def members(text: str, defaults: dict[str, str] | None = None) -> Members:
    """(name, type, default) from lines of `name, name: type`."""
    found: Members = []
    for line in text.strip().splitlines():
        names, kind = line.rsplit(":", 1)
        for name in names.split(","):
            found.append((name.strip(), kind.strip(), (defaults or {}).get(name.strip())))
    return found


def tiles(**dtypes: str) -> dict[str, str]:
    """The types of tile arguments by name."""
    return {
        name: f"TileTensor[{dtype}, {name}_LT, MutUntrackedOrigin, Engine=Engine]"
        for name, dtype in dtypes.items()
    }


def arguments(text: str, types: dict[str, str]) -> Members:
    """Arguments in order: `name: type`, or the name of a tile alone."""
    found: Members = []
    for line in text.strip().splitlines():
        if ":" in line:
            found += members(line)
        else:
            found += [(n.strip(), types[n.strip()], None) for n in line.split(",") if n.strip()]
    return found


STRIDES = """
qkv_conv_output_seqlen_stride, qkv_conv_output_channel_stride: UInt32
per_token_seqlen_stride, per_token_head_stride: UInt32
recurrence_output_seqlen_stride, recurrence_output_valuedim_stride: UInt32
"""
RECURRENCE_TILES = tiles(
    recurrence_output="work_dtype",
    recurrent_state="state_dtype",
    slot_idx=".uint32",
    qkv_conv_output="work_dtype",
    decay_per_token="work_dtype",
    beta_per_token="work_dtype",
    input_row_offsets=".uint32",
    ring="ring_dtype",
    ring_slot_idx=".uint32",
)
DOCUMENTED: dict[str, tuple[str, Members, Members]] = {
    "gated_delta_state_fold_gpu": (
        "state_fold",
        members(
            """
            state_dtype, ring_dtype: DType
            KEY_HEAD_DIM, VALUE_HEAD_DIM, RING_LEN: Int
            recurrent_state_LT, row_ids_LT, ring_LT, ring_row_ids_LT, num_accepted_LT: TensorLayout
            Engine: TensorEngine
            KEY_DIM_TILE: Int
            """,
            {"KEY_DIM_TILE": "Int(8)"},
        ),
        arguments(
            """
            batch_size, num_layers, num_value_heads, num_key_heads: Int32
            recurrent_state, row_ids, ring, ring_row_ids
            ring_record_stride: Int32
            num_accepted
            """,
            tiles(
                recurrent_state="state_dtype",
                row_ids=".uint32",
                ring="ring_dtype",
                ring_row_ids=".uint32",
                num_accepted=".uint32",
            ),
        ),
    ),
    "gated_delta_recurrence_verify_ring_gpu": (
        "recurrence",
        members(
            """
            work_dtype, state_dtype, ring_dtype: DType
            KEY_HEAD_DIM, VALUE_HEAD_DIM, RING_LEN: Int
            recurrence_output_LT, qkv_conv_output_LT, decay_per_token_LT: TensorLayout
            beta_per_token_LT, recurrent_state_LT, slot_idx_LT, input_row_offsets_LT: TensorLayout
            ring_LT, ring_slot_idx_LT: TensorLayout
            Engine: TensorEngine
            """
        ),
        arguments(
            """
            batch_size, num_value_heads, num_key_heads, key_dim: Int32
            recurrence_output, recurrent_state, slot_idx, qkv_conv_output
            decay_per_token, beta_per_token, input_row_offsets, ring, ring_slot_idx
            ring_record_stride: Int32
            """
            + STRIDES,
            RECURRENCE_TILES,
        ),
    ),
    "gated_delta_recurrence_fwd_gpu": (
        "recurrence",
        members(
            """
            work_dtype, state_dtype: DType
            KEY_HEAD_DIM, VALUE_HEAD_DIM: Int
            recurrence_output_LT, qkv_conv_output_LT, decay_per_token_LT: TensorLayout
            beta_per_token_LT, recurrent_state_LT, slot_idx_LT, input_row_offsets_LT: TensorLayout
            Engine: TensorEngine
            """
        ),
        arguments(
            """
            batch_size, num_value_heads, num_key_heads, key_dim: Int32
            recurrence_output, recurrent_state, slot_idx, qkv_conv_output
            decay_per_token, beta_per_token, input_row_offsets
            """
            + STRIDES,
            RECURRENCE_TILES,
        ),
    ),
    "gated_delta_conv1d_fwd_gpu": (
        "conv1d",
        members(
            """
            work_dtype, state_dtype: DType
            KERNEL_SIZE, CONV1D_BLOCK_DIM: Int
            WRITE_STATE: Bool
            qkv_input_ragged_LT, conv_weight_LT, conv_state_LT, slot_idx_LT: TensorLayout
            input_row_offsets_LT, conv_output_ragged_LT: TensorLayout
            Engine: TensorEngine
            """
        ),
        arguments(
            """
            batch_size, total_seq_len, conv_dim: Int32
            qkv_input_ragged, conv_weight, conv_state, slot_idx
            input_row_offsets, conv_output_ragged
            qkv_input_seqlen_stride, qkv_input_channel_stride: UInt32
            conv_weight_channel_stride, conv_weight_offset_stride: UInt32
            conv_output_seqlen_stride, conv_output_channel_stride: UInt32
            """,
            tiles(
                qkv_input_ragged="work_dtype",
                conv_weight="work_dtype",
                conv_state="state_dtype",
                slot_idx=".uint32",
                input_row_offsets=".uint32",
                conv_output_ragged="work_dtype",
            ),
        ),
    ),
}
# What each kernel is instantiated with.
VALUES = {
    "work_dtype": "DType.float32",
    "state_dtype": "DType.bfloat16",
    "ring_dtype": "DType.float32",
    "KEY_HEAD_DIM": "16",
    "VALUE_HEAD_DIM": "24",
    "RING_LEN": "4",
    "KERNEL_SIZE": "4",
    "CONV1D_BLOCK_DIM": "128",
    "WRITE_STATE": "True",
    "Engine": "TileEngine",
    "KEY_DIM_TILE": "4",
    "recurrent_state_LT": "Rank4",
    "ring_LT": "Rank4",
    "conv_state_LT": "Rank3",
    "slot_idx_LT": "Rank1",
    "ring_slot_idx_LT": "Rank1",
    "input_row_offsets_LT": "Rank1",
    "num_accepted_LT": "Rank1",
}
PROGRAM = """
from std.compile import compile_info
from std.memory import alloc
from layout import TileTensor, row_major
from max.gpu.host import get_gpu_target
from gated_delta.ring import gated_delta_ring_record_elements
comptime Rank1 = type_of(row_major(1))
comptime Rank2 = type_of(row_major(1, 1))
comptime Rank3 = type_of(row_major(1, 1, 1))
comptime Rank4 = type_of(row_major(1, 1, 1, 1))
comptime TileEngine = type_of(TileTensor(alloc[Float32](1), row_major(1))).Engine
"""


def documentation(module: str, folder: Path) -> dict[str, Any]:
    """What `mojo doc` says of the functions of a module, by name."""
    out = folder / f"{module}.json"
    source = source_dir() / "gpu" / f"{module}.mojo"
    done = subprocess_run_mojo(["doc", str(source), "-o", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    functions = json.loads(out.read_text())["decl"]["functions"]
    return {function["name"]: function for function in functions}


@pytest.mark.parametrize("kernel", DOCUMENTED)
def test_signature_is_the_documented_one(kernel, tmp_path):
    module, parameters, args = DOCUMENTED[kernel]
    [overload] = documentation(module, tmp_path)[kernel]["overloads"]

    def read(kind: str) -> Members:
        return [(m["name"], m["type"], m.get("default")) for m in overload[kind]]

    assert read("parameters") == parameters
    assert read("args") == args
    for member in [*overload["parameters"], *overload["args"]]:
        assert member["passingKind"] == "pos_or_kw", member["name"]


def instantiation(kernel: str, by_keyword: bool) -> str:
    """A function that calls the kernel with everything by position, or by keyword."""
    _, parameters, args = DOCUMENTED[kernel]
    values = {name: VALUES.get(name, "Rank2") for name, _, _ in parameters}
    name = f"{kernel}_by_{'keyword' if by_keyword else 'position'}"
    declared, passed = [], []
    for arg, kind, _ in args:
        for parameter, value in values.items():
            kind = kind.replace(f"[{parameter},", f"[{value},").replace(
                f" {parameter},", f" {value},"
            )
        kind = kind.replace("=Engine]", "=TileEngine]").replace("[.uint32", "[DType.uint32")
        declared.append(f"{arg}: {kind}")
        passed.append(f"{arg}={arg}" if by_keyword else arg)
    given = [f"{p}={v}" if by_keyword else v for p, v in values.items()]
    return (
        f"def {name}({', '.join(declared)}):\n"
        f"    {kernel}[{', '.join(given)}]({', '.join(passed)})\n"
    )


def test_every_kernel_instantiates_by_position_and_by_keyword(tmp_path):
    program = PROGRAM
    body = "    print(gated_delta_ring_record_elements[128, 64](3))\n"
    body += "    print(gated_delta_ring_record_elements[KD=128, VD=64](group=3))\n"
    for kernel, (module, _, _) in DOCUMENTED.items():
        program += f"from gated_delta.gpu.{module} import {kernel}\n"
    for kernel in DOCUMENTED:
        for by_keyword in (False, True):
            function = instantiation(kernel, by_keyword)
            program += function
            name = function.split("(")[0].removeprefix("def ")
            body += (
                f'    print(compile_info[{name}, emission_kind="asm", '
                'target=get_gpu_target["sm_90"]()]().asm.find(".entry") >= 0)\n'
            )
    source = tmp_path / "conformance.mojo"
    source.write_text(f"{program}def main() raises:\n{body}")
    command = ["run", "--disable-warnings", "-I", str(source_dir().parent), str(source)]
    done = subprocess_run_mojo(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    record = str(128 + 3 * 65)
    assert done.stdout.split() == [record, record, *["True"] * 8]
