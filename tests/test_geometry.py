"""Geometry: shapes, bytes, and the record layout that Python and Mojo share."""

from __future__ import annotations

from pathlib import Path

import pytest
from max.dtype import DType
from mojo.run import subprocess_run_mojo

from gdn_graph import GatedDeltaGeometry
from gdn_graph.geometry import MODELS
from gdn_graph.library import source_dir

_LAYOUT_PROGRAM = """
from gated_delta.ring import RecordLayout, gated_delta_ring_record_elements

def main():
    comptime for shape in [(1, 16, 16), (3, 32, 24), (2, 64, 65), (3, 8, 40)]:
        var group = shape[0]
        comptime KD = shape[1]
        comptime VD = shape[2]
        var layout = RecordLayout(KD, VD, group)
        print(group, KD, VD, gated_delta_ring_record_elements[KD, VD](group), end="")
        for g in range(group):
            print("", layout.delta_factor(g), layout.decay(g), end="")
        print()
"""


def test_the_record_layout_is_that_of_the_kernels(tmp_path: Path):
    program = tmp_path / "layout.mojo"
    program.write_text(_LAYOUT_PROGRAM)
    result = subprocess_run_mojo(
        ["run", "--disable-warnings", "-I", str(source_dir().parent), str(program)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.split("\n")[:4]
    for line in lines:
        group, KD, VD, elements, *offsets = (int(word) for word in line.split())
        g = GatedDeltaGeometry(2, 2 * group, KD, VD)
        assert elements == g.record_elements
        want = [(g.record_factors(h).start, g.record_decay(h)) for h in range(group)]
        assert list(zip(offsets[::2], offsets[1::2], strict=True)) == want
        assert g.record_factors(group - 1).stop == g.record_decay(0)


def test_qwen35_27b_bytes():
    model = MODELS["qwen3.5-27b"]
    g = model.geometry
    assert (g.conv_dim, g.record_elements, g.record_stride) == (10240, 515, 640)
    assert g.recurrent_state_bytes(model.layers, DType.bfloat16) == 75_497_472
    assert g.conv_state_bytes(model.layers, DType.bfloat16) == 2_949_120
    assert g.ring_bytes(model.layers) == 7_864_320


def test_the_record_is_padded_to_32_elements_unless_told():
    assert GatedDeltaGeometry(16, 48, 128, 128).record_stride == 544
    assert GatedDeltaGeometry(1, 1, 31, 32).record_stride == 64
    assert GatedDeltaGeometry(1, 1, 31, 32, stride=65).record_stride == 65


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_value_heads": 5}, "num_value_heads is 5; need a multiple of num_key_heads, 2"),
        ({"key_head_dim": 0}, "key_head_dim is 0; need at least 1"),
        ({"ring_len": 0}, "ring_len is 0"),
        ({"conv_width": 9}, "conv_width is 9; need 2 to 8"),
        ({"stride": 16}, "stride is 16; need at least the 26 elements of a record"),
        ({"conv_width": 1}, "conv_width is 1; need 2 to 8"),
    ],
)
def test_what_is_refused(change, message):
    sizes = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8}
    with pytest.raises(ValueError, match=message):
        GatedDeltaGeometry(**{**sizes, **change})
