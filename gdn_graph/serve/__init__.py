"""Serves Qwen3.5 models with MAX on this package's Gated DeltaNet ops.

    max serve --custom-architectures gdn_graph.serve --model FOLDER

MAX imports this package by name and reads ARCHITECTURES; see docs/serving.md. It is made when it
is read, so that the rest of the package can be used without importing MAX's pipelines.
"""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gdn_graph.serve.architectures import ARCHITECTURES as ARCHITECTURES

# What `max serve` and `max generate` take after --custom-architectures.
SPEC: Final = __name__


def __getattr__(name: str) -> Any:
    if name == "ARCHITECTURES":
        from gdn_graph.serve.architectures import ARCHITECTURES

        return ARCHITECTURES
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
