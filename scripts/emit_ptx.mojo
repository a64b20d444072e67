"""Writes the PTX of the GPU kernels of one geometry to a folder: <kernel>_<dtype>.ptx.

    mojo run -I kernels -D arch=sm_90 -D KD=128 -D VD=128 -D ring_len=4 -D width=4
        -D fwd -D verify -D fold -D conv -D conv_ring -D gates -D block -D f32 -D bf16 -D f16
        [-D ring_bf16] scripts/emit_ptx.mojo FOLDER

Only the kernels and pool dtypes named are compiled (scripts/emit_ptx.py chooses them). Every
dimension that a layout could fix is left to run time: the dearest case.
"""

from std.compile import compile_info
from std.memory import alloc
from std.sys import argv, get_defined_int, get_defined_string, is_defined

from layout import TensorEngine, TileTensor, row_major
from max.gpu.host import get_gpu_target

from gated_delta.gpu.conv1d import gated_delta_conv1d_fwd_gpu
from gated_delta.gpu.conv1d_ring import (
    gated_delta_conv1d_fold_gpu,
    gated_delta_conv1d_verify_ring_gpu,
)
from gated_delta.gpu.gates import gated_delta_gates_gpu
from gated_delta.gpu.head import Head
from gated_delta.gpu.recurrence import (
    gated_delta_recurrence_fwd_block_gpu,
    gated_delta_recurrence_fwd_gpu,
    gated_delta_recurrence_verify_ring_block_gpu,
    gated_delta_recurrence_verify_ring_gpu,
)
from gated_delta.gpu.state_fold import Fold, gated_delta_state_fold_gpu

comptime Target = get_gpu_target[get_defined_string["arch"]()]()
comptime KD = get_defined_int["KD"]()
comptime VD = get_defined_int["VD"]()
comptime RING_LEN = get_defined_int["ring_len"]()
comptime WIDTH = get_defined_int["width"]()
comptime WORK = DType.float32
comptime RING = DType.bfloat16 if is_defined["ring_bf16"]() else DType.float32
comptime Vector = type_of(row_major(1))
comptime Matrix = type_of(row_major(1, 1))
comptime Cube = type_of(row_major(1, 1, 1))
comptime Pool = type_of(row_major(1, 1, 1, 1))
comptime Engine = type_of(TileTensor(alloc[Float32](1), row_major(1))).Engine


def write(name: String, text: String) raises:
    with open(String(argv()[1]) + "/" + name, "w") as f:
        f.write(text)


def launch_geometry[state_dtype: DType](suffix: String) -> String:
    """The kernels' grids and blocks, as members of a JSON object."""
    comptime H = Head[KD, VD]
    comptime F = Fold[state_dtype, KD, VD]
    var members = String()
    members += String('"narrow_threads": ', 32 * H.NARROW, ', "narrow_splits": ', H.NARROW_SPLITS)
    members += String(', "wide_threads": ', 32 * H.WIDE, ', "wide_splits": ', H.WIDE_SPLITS)
    members += String(', "rows_first": ', Int(H.ROWS_FIRST))
    members += String(', "fold_threads": ', F.THREADS, ', "fold_parts": ', F.PARTS)
    return String('"', suffix, '": {', members, "}")


def emit[state_dtype: DType](suffix: String) raises:
    comptime if is_defined["conv"]():
        comptime conv[write: Bool] = gated_delta_conv1d_fwd_gpu[
            WORK,
            state_dtype,
            WIDTH,
            128,
            write,
            Matrix,
            Matrix,
            Cube,
            Vector,
            Vector,
            Matrix,
            Engine,
        ]
        write(
            "conv_" + suffix + ".ptx",
            compile_info[conv[True], emission_kind="asm", target=Target]().asm,
        )
        write(
            "conv_read_" + suffix + ".ptx",
            compile_info[conv[False], emission_kind="asm", target=Target]().asm,
        )
    comptime if is_defined["conv_ring"]():
        comptime conv_ring = gated_delta_conv1d_verify_ring_gpu[
            WORK,
            state_dtype,
            state_dtype,
            WIDTH,
            128,
            Matrix,
            Matrix,
            Cube,
            Vector,
            Vector,
            Matrix,
            Cube,
            Vector,
            Engine,
        ]
        write(
            "conv_ring_" + suffix + ".ptx",
            compile_info[conv_ring, emission_kind="asm", target=Target]().asm,
        )
        comptime conv_fold = gated_delta_conv1d_fold_gpu[
            state_dtype, state_dtype, 128, Cube, Matrix, Cube, Matrix, Vector, Engine
        ]
        write(
            "conv_fold_" + suffix + ".ptx",
            compile_info[conv_fold, emission_kind="asm", target=Target]().asm,
        )
    comptime if is_defined["gates"]():
        comptime gates = gated_delta_gates_gpu[
            state_dtype, WORK, Matrix, Matrix, Matrix, Matrix, Vector, Vector, Engine
        ]
        write(
            "gates_" + suffix + ".ptx",
            compile_info[gates, emission_kind="asm", target=Target]().asm,
        )
    comptime if is_defined["fwd"]():
        comptime fwd = gated_delta_recurrence_fwd_gpu[
            WORK, state_dtype, KD, VD, Matrix, Matrix, Matrix, Matrix, Pool, Vector, Vector, Engine
        ]
        write("fwd_" + suffix + ".ptx", compile_info[fwd, emission_kind="asm", target=Target]().asm)
    comptime if is_defined["verify"]():
        comptime verify = gated_delta_recurrence_verify_ring_gpu[
            WORK,
            state_dtype,
            RING,
            KD,
            VD,
            RING_LEN,
            Matrix,
            Matrix,
            Matrix,
            Matrix,
            Pool,
            Vector,
            Vector,
            Pool,
            Vector,
            Engine,
        ]
        write(
            "verify_" + suffix + ".ptx",
            compile_info[verify, emission_kind="asm", target=Target]().asm,
        )
    comptime if is_defined["block"]():
        comptime fwd = gated_delta_recurrence_fwd_block_gpu[
            WORK, state_dtype, KD, VD, Matrix, Matrix, Matrix, Matrix, Pool, Vector, Vector, Engine
        ]
        comptime verify = gated_delta_recurrence_verify_ring_block_gpu[
            WORK,
            state_dtype,
            RING,
            KD,
            VD,
            RING_LEN,
            Matrix,
            Matrix,
            Matrix,
            Matrix,
            Pool,
            Vector,
            Vector,
            Pool,
            Vector,
            Engine,
        ]
        write(
            "fwd_block_" + suffix + ".ptx",
            compile_info[fwd, emission_kind="asm", target=Target]().asm,
        )
        write(
            "verify_block_" + suffix + ".ptx",
            compile_info[verify, emission_kind="asm", target=Target]().asm,
        )
    comptime if is_defined["fold"]():
        comptime fold = gated_delta_state_fold_gpu[
            state_dtype, RING, KD, VD, RING_LEN, Pool, Matrix, Pool, Matrix, Vector, Engine
        ]
        write(
            "fold_" + suffix + ".ptx", compile_info[fold, emission_kind="asm", target=Target]().asm
        )


def main() raises:
    var launches = List[String]()
    comptime if is_defined["f32"]():
        emit[DType.float32]("f32")
        launches.append(launch_geometry[DType.float32]("f32"))
    comptime if is_defined["bf16"]():
        emit[DType.bfloat16]("bf16")
        launches.append(launch_geometry[DType.bfloat16]("bf16"))
    comptime if is_defined["f16"]():
        emit[DType.float16]("f16")
        launches.append(launch_geometry[DType.float16]("f16"))
    write("launch.json", String("{", String(", ").join(launches), "}"))
