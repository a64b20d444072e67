"""Serves Qwen3.5 models with MAX on this package's Gated DeltaNet ops.

    max serve --custom-architectures gdn_graph.serve --model FOLDER

MAX imports this package by name and reads ARCHITECTURES; see docs/serving.md. It is read lazily,
so that gdn_graph.serve.check does not import MAX's pipelines.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdn_graph.serve.architectures import ARCHITECTURES as ARCHITECTURES


def __getattr__(name: str) -> Any:
    if name == "ARCHITECTURES":
        from gdn_graph.serve.architectures import ARCHITECTURES

        return ARCHITECTURES
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
