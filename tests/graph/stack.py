"""A stack of Gated DeltaNet layers with residuals: the least model that has a speculative step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import TensorType, TensorValue
from max.nn import LayerList, Module

from gdn_graph.geometry import GatedDeltaGeometry
from gdn_graph.layer import GatedDeltaNet
from gdn_graph.speculative import SpeculativeStates, StateSpec, Window


def random_weights(module: Module, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Weights of the size that trained layers have: decays from 0.5 to 0.99, betas around 0.5."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, weight in sorted(module.raw_state_dict().items()):
        shape = [int(dim) for dim in weight.shape]
        values = rng.standard_normal(shape)
        if name.endswith("A_log"):
            values = np.log(rng.uniform(0.1, 2, shape))
        elif name.endswith("norm.weight"):
            values = rng.uniform(0.5, 1.5, shape)
        elif not name.endswith("dt_bias"):
            values /= np.sqrt(shape[-1])
        weights[name] = values.astype(np.float32)
    return weights


class Stack(Module):
    def __init__(self, hidden: int, geometry: GatedDeltaGeometry, layers: int) -> None:
        super().__init__()
        self.layers = LayerList([GatedDeltaNet(hidden, geometry) for _ in range(layers)])

    def __call__(self, x: TensorValue, window: Window, *, plain: bool = False) -> TensorValue:
        for i, layer in enumerate(self.layers):
            state = window.layer(i)
            x = x + layer(x, replace(state, ring=None) if plain else state)
        return x


def states_of_stack(
    session: InferenceSession, spec: StateSpec, hidden: int, *, plain: bool = False
) -> SpeculativeStates:
    """Verify and commit of a stack, or with plain a model on MAX's plain ops alone."""
    stack = Stack(hidden, spec.geometry, spec.layers)
    stack.load_state_dict(random_weights(stack, seed=0))

    def forward(inputs: Sequence[Any], windows: list[Window]) -> list[TensorValue]:
        return [stack(inputs[0].tensor, windows[0], plain=plain)]

    return SpeculativeStates(
        spec,
        session,
        forward,
        [TensorType(DType.float32, ["tokens", hidden], spec.devices[0])],
        weights=stack.state_dict(),
        name=f"{'plain' if plain else 'verify'}_{spec.layers}_{spec.state_dtype.name}",
    )
