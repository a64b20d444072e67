"""Whole graphs for a GPU, built on a machine without one.

A virtual device compiles a graph for an architecture, one process each (the device API is chosen
once per process). That proves compilation, nothing more; test_kernels.py runs the kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType

from gdn_graph import GatedDeltaGeometry, ops

GPU = DeviceRef.GPU()
GEOMETRY = GatedDeltaGeometry(2, 6, 128, 128)
ROOT = Path(__file__).resolve().parents[2]


def types(geometry: GatedDeltaGeometry) -> dict[str, TensorType | BufferType]:
    """The operands of a verify cycle, with the static dims that the kernels are compiled for."""
    g = geometry
    u32 = DType.uint32
    return {
        "x": TensorType(DType.float32, ["N", g.conv_dim], GPU),
        "weight": TensorType(DType.float32, [g.conv_dim, g.conv_width], GPU),
        "conv_state": BufferType(DType.bfloat16, ["slots", g.conv_dim, g.conv_width - 1], GPU),
        "a": TensorType(DType.bfloat16, ["N", g.num_value_heads], GPU),
        "b": TensorType(DType.float32, ["N", g.num_value_heads], GPU),
        "A_log": TensorType(DType.float32, [g.num_value_heads], GPU),
        "dt_bias": TensorType(DType.float32, [g.num_value_heads], GPU),
        "state": BufferType(DType.bfloat16, ["slots", *g.recurrent_state_shape(1)[1:]], GPU),
        "ring": BufferType(DType.float32, ["rows", *g.ring_shape(1)[1:]], GPU),
        "slots": TensorType(u32, ["B"], GPU),
        "ring_slots": TensorType(u32, ["B"], GPU),
        "offsets": TensorType(u32, ["B1"], GPU),
        "row_ids": TensorType(u32, ["L", "B"], GPU),
        "ring_row_ids": TensorType(u32, ["L", "B"], GPU),
        "accepted": TensorType(u32, ["B"], GPU),
        "width": TensorType(DType.int64, ["K"], DeviceRef.CPU()),
    }


def verify_cycle(operands: dict[str, TensorType | BufferType], algorithm: str = "exact") -> Graph:
    """Gates, conv with SiLU, verify, conv rollback and fold in one graph."""

    def forward(*values):
        v = {
            name: value.buffer if isinstance(kind, BufferType) else value.tensor
            for (name, kind), value in zip(operands.items(), values, strict=True)
        }
        conv = v["x"], v["weight"], v["conv_state"], v["slots"], v["offsets"], v["width"]
        qkv = ops.gated_delta_conv1d_verify_fwd(*conv, rollback=False, activation="silu")
        decay, beta = ops.gated_delta_gates(v["a"], v["b"], v["A_log"], v["dt_bias"])
        out = ops.gated_delta_recurrence_verify_ring_fwd(
            qkv,
            decay,
            beta,
            v["state"],
            v["ring"],
            v["slots"],
            v["ring_slots"],
            v["offsets"],
            v["width"],
            algorithm=algorithm,
        )
        ops.gated_delta_state_fold(
            v["state"],
            v["ring"],
            v["row_ids"],
            v["ring_row_ids"],
            v["accepted"],
            v["width"],
            algorithm=algorithm,
        )
        return out, ops.gated_delta_conv1d_verify_fwd(*conv, rollback=True)

    return Graph("verify_cycle", forward, input_types=list(operands.values()))


COMPILE = """
import sys
from max.driver import (
    set_virtual_device_api, set_virtual_device_count, set_virtual_device_target_arch,
)
set_virtual_device_api(sys.argv[1])
set_virtual_device_target_arch(sys.argv[2])
set_virtual_device_count(1)
from max.driver import CPU, Accelerator
from max.engine import InferenceSession
from test_graphs import GEOMETRY, types, verify_cycle
graph = verify_cycle(types(GEOMETRY), sys.argv[3])
InferenceSession(devices=[Accelerator(), CPU()]).compile(graph)
print("compiled")
"""


def compile_for(api: str, arch: str, algorithm: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), str(ROOT / "tests" / "gpu"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", COMPILE, api, arch, algorithm],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


@pytest.mark.parametrize(
    ("api", "arch", "algorithm"),
    [
        ("cuda", "sm_90a", "exact"),
        *(
            pytest.param(api, arch, algorithm, marks=pytest.mark.slow)
            for api, arch, algorithm in [
                ("cuda", "sm_80", "exact"),
                ("cuda", "sm_100a", "exact"),
                ("hip", "gfx942", "exact"),
                ("cuda", "sm_90a", "block"),
                ("hip", "gfx942", "block"),
            ]
        ),
    ],
)
def test_a_verify_cycle_compiles(api, arch, algorithm):
    done = compile_for(api, arch, algorithm)
    assert done.stdout.strip().endswith("compiled"), done.stderr[-4000:]


def test_an_algorithm_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="""algorithm is 'blocks'; need "exact" or "block\""""):
        verify_cycle(types(GEOMETRY), "blocks")


@pytest.mark.parametrize(
    ("operand", "axis", "dim", "message"),
    [
        ("weight", 1, "width", "conv_weight .* from 2 to 8, static, as dim 1"),
        ("state", 2, "KD", "recurrent_state .* a multiple of 8 from 16 to 256, static, as dim 2"),
        ("state", 3, 12, "recurrent_state .* a multiple of 8 from 16 to 256, static, as dim 3"),
        ("ring", 2, "R", "ring .* from 1 to 32, static, as dim 2"),
        ("ring", 2, 33, "ring .* from 1 to 32, static, as dim 2"),
    ],
)
def test_a_dim_that_no_kernel_can_be_compiled_for_is_refused(operand, axis, dim, message):
    operands = types(GEOMETRY)
    kind = operands[operand]
    shape = list(kind.shape)
    shape[axis] = dim
    operands[operand] = type(kind)(kind.dtype, shape, GPU)
    if operand == "state" and axis == 3:  # so that the channels agree with the head dim
        g = GatedDeltaGeometry(2, 6, 128, 12)
        operands["x"] = TensorType(DType.float32, ["N", g.conv_dim], GPU)
        operands["weight"] = TensorType(DType.float32, [g.conv_dim, 4], GPU)
        operands["conv_state"] = BufferType(DType.float32, ["slots", g.conv_dim, 3], GPU)
    with pytest.raises(ValueError, match=message):
        verify_cycle(operands)
