"""What MAX gets when it imports --custom-architectures gdn_graph.serve; no graph is built."""

import subprocess
import sys

# In processes of their own: importing the architectures changes every later graph of a process.
REGISTERED = """
import max.pipelines
from max.graph.graph import default_custom_extensions
from max.pipelines.lib.arch_lookup import ARCH_LOOKUP
from gdn_graph.library import kernel_library
from gdn_graph.serve import SPEC

assert kernel_library() not in default_custom_extensions()
ARCH_LOOKUP.import_custom_architectures([SPEC])
assert kernel_library() in default_custom_extensions()
for name in (
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "UnifiedMTPQwen3_5ForConditionalGeneration",
):
    found = ARCH_LOOKUP.find(name)
    assert found.pipeline_model.__module__ == "gdn_graph.serve.architectures", found
"""

COLLECTIVES = """
from max.graph import DeviceRef, ops
from max.nn.comm import Allreduce, Signals
from gdn_graph.serve.architectures import _identity_collectives

changed = (Allreduce, "__init__"), (Allreduce, "__call__"), (Signals, "__init__"), \
          (ops, "distributed_broadcast"), (ops, "allgather")
before = [getattr(*it) for it in changed]
with _identity_collectives():
    assert Allreduce(1)(["x"], []) == ["x"]
    assert Signals([DeviceRef.CPU()]).input_types() == []
    assert ops.distributed_broadcast("x", []) == ["x"]
    assert ops.allgather(["x"], [], axis=-1) == ["x"]
assert [getattr(*it) for it in changed] == before
"""


def _run(script: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_max_finds_our_models_and_builds_on_our_ops() -> None:
    _run(REGISTERED)


def test_collectives_are_identities_only_inside() -> None:
    _run(COLLECTIVES)


def test_the_package_is_imported_without_maxs_pipelines() -> None:
    modules = _run("import gdn_graph.serve.check, sys; print(*sys.modules)").split()
    assert "gdn_graph.serve.check" in modules
    assert "max.pipelines" not in modules
