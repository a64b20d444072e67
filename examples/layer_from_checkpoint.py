"""Run one Gated DeltaNet layer with the weights of a checkpoint.

    python examples/layer_from_checkpoint.py [FOLDER [LAYER]]

FOLDER holds the config.json and *.safetensors of a Qwen3-Next or Qwen3.5 text model, and LAYER is
one of its linear attention layers. Without them a tiny checkpoint is written first.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import TensorType
from safetensors.numpy import save_file

from gdn_graph import GatedDeltaGeometry
from gdn_graph.layer import (
    GatedDeltaNet,
    checkpoint_names,
    checkpoint_weights,
    projections_of,
)
from gdn_graph.speculative import SpeculativeStates, StateSpec


def write_tiny_checkpoint(folder: Path) -> None:
    config = {
        "hidden_size": 48,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shapes = {
        "in_proj_qkvz.weight": (192, 48),
        "in_proj_ba.weight": (8, 48),
        "conv1d.weight": (128, 1, 4),
        "A_log": (4,),
        "dt_bias": (4,),
        "norm.weight": (16,),
        "out_proj.weight": (48, 64),
    }
    weights = {
        f"model.layers.0.linear_attn.{name}": rng.standard_normal(shape, np.float32) * 0.2
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")


def layer_of(folder: Path, index: int) -> tuple[GatedDeltaNet, str]:
    """The layer, with its weights, and where in the checkpoint they were."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    names = checkpoint_names(folder)
    ending = f"layers.{index}.linear_attn."
    prefix = next(
        (name[: name.index(ending) + len(ending)] for name in names if ending in name), None
    )
    if prefix is None:
        raise SystemExit(f"layer {index} of {folder} is no linear attention layer")
    layer = GatedDeltaNet(
        config["hidden_size"],
        GatedDeltaGeometry(
            config["linear_num_key_heads"],
            config["linear_num_value_heads"],
            config["linear_key_head_dim"],
            config["linear_value_head_dim"],
            config["linear_conv_kernel_dim"],
            ring_len=4,
        ),
        projections=projections_of(names),
        rms_norm_eps=config["rms_norm_eps"],
    )
    layer.load_state_dict(checkpoint_weights(folder, layer, prefix))
    return layer, prefix


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        if len(sys.argv) == 1:
            write_tiny_checkpoint(folder)
        layer, prefix = layer_of(folder, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
        states = SpeculativeStates(
            StateSpec(layer.geometry, layers=1, slots=2),
            InferenceSession(devices=[CPU()]),
            lambda inputs, windows: [layer(inputs[0].tensor, windows[0].layer(0))],
            [TensorType(DType.float32, ["tokens", layer.hidden_size], layer.device)],
            weights=layer.state_dict(),
        )

    rng = np.random.default_rng(0)
    request = states.admit()
    prompt = rng.standard_normal((9, layer.hidden_size), np.float32)
    states.verify(prompt, slots=[request], lengths=[9])

    # A fork decodes the same tokens plainly, to compare.
    plain = states.fork(request)
    window = rng.standard_normal((3, layer.hidden_size), np.float32)
    (verified,) = states.verify(window, slots=[request], lengths=[3], drafts=[2])
    states.commit([2])  # the settled token and one draft
    decoded = [
        states.verify(window[t : t + 1], slots=[plain], lengths=[1])[0].to_numpy() for t in range(2)
    ]
    equal = np.array_equal(verified.to_numpy()[:2], np.concatenate(decoded))
    state = states.pools[0]["recurrent_state"].to_numpy()
    print(f"{prefix}*: {layer.geometry}")
    print("verified tokens equal decoded ones: ", equal)
    print("committed state equals the decoded: ", np.array_equal(state[request], state[plain]))
    assert np.array_equal(state[request], state[plain])


if __name__ == "__main__":
    main()
