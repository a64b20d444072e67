"""Compiles a speculative step of a model whose heads are split over two virtual sm_90a GPUs.

A device API is chosen once per process, so test_two_gpus.py runs this file in one of its own. That
proves compilation, nothing more.
"""

from __future__ import annotations

from max.driver import (
    set_virtual_device_api,
    set_virtual_device_count,
    set_virtual_device_target_arch,
)

set_virtual_device_api("cuda")
set_virtual_device_target_arch("sm_90a")
set_virtual_device_count(2)

from max.driver import CPU, Accelerator  # noqa: E402  (the devices are made of what was set)
from max.dtype import DType  # noqa: E402
from max.engine import InferenceSession  # noqa: E402
from max.graph import (  # noqa: E402
    BufferValue,
    DeviceRef,
    Graph,
    ShardingStrategy,
    TensorType,
    TensorValue,
    ops,
)
from max.nn import LayerList, Module, Signals  # noqa: E402

from gdn_graph import GatedDeltaGeometry  # noqa: E402
from gdn_graph.layer import GatedDeltaNet  # noqa: E402
from gdn_graph.speculative import StateSpec, Window  # noqa: E402

HIDDEN = 256
GPUS = (DeviceRef.GPU(0), DeviceRef.GPU(1))
SPEC = StateSpec(
    GatedDeltaGeometry(2, 6, 128, 128),
    layers=2,
    slots=4,
    state_dtype=DType.bfloat16,
    devices=GPUS,
)


class Model(Module):
    """Two layers with residuals, one of each projection layout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = LayerList(
            [
                GatedDeltaNet(
                    HIDDEN, SPEC.geometry, dtype=DType.bfloat16, device=GPUS[0], projections=layout
                )
                for layout in ("separate", "fused")
            ]
        )

    def __call__(
        self, xs: list[TensorValue], windows: list[Window], signals: list[BufferValue]
    ) -> list[TensorValue]:
        for i, layer in enumerate(self.layers):
            layer.sharding_strategy = ShardingStrategy.tensor_parallel(len(GPUS))
            parts = [
                shard(x, window.layer(i))
                for shard, x, window in zip(layer.shard(GPUS), xs, windows, strict=True)
            ]
            sums = ops.allreduce.sum(parts, signals)
            xs = [x + part for x, part in zip(xs, sums, strict=True)]
        return xs


def main() -> None:
    model = Model()
    model.state_dict()  # names the weights
    signals = Signals(GPUS).input_types()
    types = [TensorType(DType.bfloat16, ["tokens", HIDDEN], gpu) for gpu in GPUS]
    counts = [TensorType(DType.uint32, ["batch"], gpu) for gpu in GPUS]
    with Graph("two_gpus", input_types=[*types, *counts, *signals, *SPEC.input_types()]) as graph:
        xs = [value.tensor for value in graph.inputs[:2]]
        num_accepted = [value.tensor for value in graph.inputs[2:4]]
        buffers = [value.buffer for value in graph.inputs[4:6]]
        windows = SPEC.bind(graph.inputs[6:])
        out = model(xs, windows, buffers)
        for window, accepted in zip(windows, num_accepted, strict=True):
            window.commit(accepted)
        graph.output(*out)
    devices = [Accelerator(0), Accelerator(1), CPU()]
    InferenceSession(devices=devices).compile(graph)
    print("compiled", flush=True)


if __name__ == "__main__":
    main()
