"""MAX's speculative Qwen3.5 graph on our ops, compiled for a GPU that is not there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving import load_example

from gdn_graph.serve import SPEC

# 9 minutes of one core, of which most go into MAX's matrix products for the GPU.
COMPILE_SECONDS = 3600.0


@pytest.mark.slow
def test_the_mtp_graph_compiles_for_hopper(tmp_path: Path) -> None:
    """With heads of 64, which MAX's own ops do not take: it compiles on our ops or not at all.

    MAX 26.7 compiles the graph and then asks for its outputs, for which it wants the GPU. So the
    command fails either way; it must be there, after the compilation, that it does.
    """
    example = load_example("tiny_qwen35")
    sizes = example.Sizes(
        # Equal widths wherever they can be: each other shape is another product to compile.
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        full_attention_interval=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    example.write_checkpoint(tmp_path / "model", sizes, mtp=True, dtype="bfloat16")
    result = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("max")), "warm-cache", "--target", "cuda:sm_90a"),
            *("--custom-architectures", SPEC, "--model", str(tmp_path / "model")),
            *("--devices", "gpu:0", "--quantization-encoding", "bfloat16", "--max-length", "256"),
            *("--speculative-method", "mtp", "--num-speculative-tokens", "1"),
            *("--enable-structured-output", "--max-batch-size", "4"),
        ],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMPILE_SECONDS,
    )
    assert re.search(r"Compiling model took [\d.]+ seconds", result.stdout), result.stdout[-5000:]
    assert re.search(
        r"CompileOnlyExecutionError: output_metadata .*'qwen3_5_with_mtp_graph' was compiled for",
        result.stdout,
    ), result.stdout[-5000:]
