"""GatedDeltaNet: the whole layer as a MAX Module, from hidden states to hidden states.

    qkv, z, b, a = projections of x
    decay = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)        in float32
    y = recurrence(silu(conv(qkv)), decay, beta)                                in float32
    out = out_proj(rms_norm(y) * silu(z))

Weights carry the names of the public checkpoints, in either of their two projection layouts:

    separate (Qwen3.5)      in_proj_qkv, in_proj_z, in_proj_b, in_proj_a
    fused (Qwen3-Next)      in_proj_qkvz, in_proj_ba: key head by key head, its q, k, the v and z
                            (b and a) of its value heads

and in both conv1d.weight, A_log, dt_bias, norm.weight, out_proj.weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from max.driver import Buffer
from max.dtype import DType
from max.graph import BufferValue, DeviceRef, ShardingStrategy, TensorValue, Weight, ops
from max.graph.weight import Segment
from max.graph.weights import Weights, load_weights
from max.nn import Linear, Module, RMSNorm
from max.nn.stacked_linear import StackedLinear

from . import ops as gdn_ops
from .geometry import GatedDeltaGeometry

Projections = Literal["separate", "fused"]

_OUTPUT_GATES: Final = {"silu": ops.silu, "swish": ops.silu, "sigmoid": ops.sigmoid}


@dataclass(frozen=True)
class ConvCapture:
    """What a conv rollback by replay needs of one layer's verify."""

    qkv: TensorValue
    """float32 [N, conv_dim], the raw inputs of the conv."""
    conv_weight: TensorValue
    """float32 [conv_dim, width]."""


@dataclass(frozen=True)
class LayerRing:
    """Where one layer of one device records a verify."""

    ring: BufferValue
    conv_ring: BufferValue | None
    """None if the conv is committed by replay: the layer then adds to captures."""
    ring_slot_idx: TensorValue
    """uint32 [B], rows of both rings."""
    verify_width: TensorValue
    """int64 [K] on the CPU."""
    captures: list[ConvCapture] = field(default_factory=list)


@dataclass(frozen=True)
class LayerState:
    """The state of one layer on one device, and the rows of a batch in it."""

    recurrent_state: BufferValue
    conv_state: BufferValue
    slot_idx: TensorValue
    """uint32 [B], rows of both pools."""
    input_row_offsets: TensorValue
    """uint32 [B + 1]."""
    ring: LayerRing | None = None
    """None to land every token; with a ring, drafts are verified."""


class GatedDeltaNet(Module):
    """A Gated DeltaNet layer: prefill, decode and verify through one call.

    Args:
        hidden_size: Width of the hidden states.
        geometry: Heads, head dims and conv width of the layer.
        dtype: Of the hidden states and the projections. Gates, conv, recurrence and norm are
            float32 in any case; A_log, dt_bias and norm.weight are float32 weights.
        device: Where the layer runs.
        projections: Layout of the input projections, see the module.
        rms_norm_eps: Epsilon of the output norm.
        output_gate: What is done to z: "silu" (or "swish", the same) or "sigmoid".

    Raises:
        ValueError: If projections or output_gate is not one of those named.
    """

    def __init__(
        self,
        hidden_size: int,
        geometry: GatedDeltaGeometry,
        *,
        dtype: DType = DType.float32,
        device: DeviceRef | None = None,
        projections: Projections = "separate",
        rms_norm_eps: float = 1e-6,
        output_gate: str = "silu",
    ) -> None:
        super().__init__()
        if output_gate not in _OUTPUT_GATES:
            raise ValueError(
                f"GatedDeltaNet: output_gate is {output_gate!r}; need one of "
                f"{sorted(_OUTPUT_GATES)}"
            )
        device = device or DeviceRef.CPU()
        self.hidden_size = hidden_size
        self.geometry = geometry
        self.dtype = dtype
        self.device = device
        self.projections = projections
        self.rms_norm_eps = rms_norm_eps
        self.output_gate = output_gate
        nv, conv_dim, value_dim = geometry.num_value_heads, geometry.conv_dim, geometry.value_dim
        if projections == "separate":
            outputs = {
                "in_proj_qkv": conv_dim,
                "in_proj_z": value_dim,
                "in_proj_b": nv,
                "in_proj_a": nv,
            }
        elif projections == "fused":
            outputs = {"in_proj_qkvz": conv_dim + value_dim, "in_proj_ba": 2 * nv}
        else:
            raise ValueError(
                f"GatedDeltaNet: projections is {projections!r}; need 'separate' or 'fused'"
            )
        # Unstacked: the weights keep the names of the checkpoint, and meet in one matmul.
        self.in_proj = StackedLinear(
            in_dim=hidden_size,
            out_dims=list(outputs.values()),
            names=list(outputs),
            dtype=dtype,
            device=device,
            stacked=False,
        )
        host = DeviceRef.CPU()
        self.conv1d = Weight(
            "conv1d.weight", dtype, [conv_dim, 1, geometry.conv_width], device=host
        )
        self.A_log = Weight("A_log", DType.float32, [nv], device=host)
        self.dt_bias = Weight("dt_bias", DType.float32, [nv], device=host)
        self.norm = RMSNorm(geometry.value_head_dim, DType.float32, eps=rms_norm_eps)
        self.out_proj = Linear(value_dim, hidden_size, dtype, device)
        self._sharding_strategy: ShardingStrategy | None = None

    def __call__(self, x: TensorValue, state: LayerState) -> TensorValue:
        """Runs the tokens of every row from its state.

        Args:
            x: [N, hidden_size], rows one after the other as state.input_row_offsets has them.
            state: The pools and the rows in them; changed as the ops of gdn_graph.ops say.

        Returns:
            [N, hidden_size]; zero rows for tokens of no row or of a padding row. Of a shard, a
            partial sum: add those of all devices.
        """
        heads = self.geometry.num_value_heads, self.geometry.value_head_dim
        qkv, z, b, a = self._split(self.in_proj(x))
        decay, beta = gdn_ops.gated_delta_gates(
            a, b, self.A_log.to(x.device), self.dt_bias.to(x.device)
        )
        activated = self._conv(qkv, state)
        y = self._recurrence(activated, decay, beta, state)
        gate = _OUTPUT_GATES[self.output_gate](ops.cast(z, DType.float32))
        normed = self.norm(ops.reshape(y, [-1, *heads])) * ops.reshape(gate, [-1, *heads])
        normed = ops.rebind(
            ops.reshape(normed, [-1, self.geometry.value_dim]),
            [x.shape[0], self.geometry.value_dim],
        )
        return self.out_proj(ops.cast(normed, self.dtype))

    def _split(
        self, projected: TensorValue
    ) -> tuple[TensorValue, TensorValue, TensorValue, TensorValue]:
        """qkv [N, conv_dim], z [N, value_dim], b [N, nv], a [N, nv]"""
        g = self.geometry
        nv = g.num_value_heads
        if self.projections == "separate":
            qkv, z, b, a = ops.split(projected, [g.conv_dim, g.value_dim, nv, nv], axis=-1)
            return qkv, z, b, a
        tokens = projected.shape[0]
        group_dim = g.group * g.value_head_dim

        def by_key_head(tensor: TensorValue, sizes: list[int]) -> list[TensorValue]:
            heads = ops.reshape(tensor, [tokens, g.num_key_heads, sum(sizes)])
            return [
                ops.reshape(part, [tokens, g.num_key_heads * size])
                for part, size in zip(ops.split(heads, sizes, axis=-1), sizes, strict=True)
            ]

        qkvz, ba = ops.split(projected, [g.conv_dim + g.value_dim, 2 * nv], axis=-1)
        q, k, v, z = by_key_head(qkvz, [g.key_head_dim, g.key_head_dim, group_dim, group_dim])
        b, a = by_key_head(ba, [g.group, g.group])
        return ops.concat([q, k, v], axis=-1), z, b, a

    def _conv(self, qkv: TensorValue, state: LayerState) -> TensorValue:
        """The conv and its SiLU."""
        width = self.geometry.conv_width
        weight = ops.cast(self.conv1d.to(qkv.device), DType.float32)
        weight = ops.reshape(weight, [self.geometry.conv_dim, width])
        qkv = ops.cast(qkv, DType.float32)
        pool, slots, offsets = state.conv_state, state.slot_idx, state.input_row_offsets
        ring = state.ring
        if ring is None:
            return gdn_ops.gated_delta_conv1d_fwd(
                qkv, weight, pool, slots, offsets, activation="silu"
            )
        if ring.conv_ring is not None:
            return gdn_ops.gated_delta_conv1d_verify_ring_fwd(
                qkv,
                weight,
                pool,
                ring.conv_ring,
                slots,
                ring.ring_slot_idx,
                offsets,
                ring.verify_width,
                activation="silu",
            )
        ring.captures.append(ConvCapture(qkv, weight))
        return gdn_ops.gated_delta_conv1d_verify_fwd(
            qkv, weight, pool, slots, offsets, ring.verify_width, rollback=False, activation="silu"
        )

    def _recurrence(
        self, qkv: TensorValue, decay: TensorValue, beta: TensorValue, state: LayerState
    ) -> TensorValue:
        pool, slots, offsets = state.recurrent_state, state.slot_idx, state.input_row_offsets
        ring = state.ring
        if ring is None:
            return gdn_ops.gated_delta_recurrence_fwd(qkv, decay, beta, pool, slots, offsets)
        return gdn_ops.gated_delta_recurrence_verify_ring_fwd(
            qkv,
            decay,
            beta,
            pool,
            ring.ring,
            slots,
            ring.ring_slot_idx,
            offsets,
            ring.verify_width,
        )

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How the heads are split over devices; None until set."""
        return self._sharding_strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy) -> None:
        """Splits the layer by key head, each with its value heads.

        Raises:
            ValueError: If the strategy is not tensor parallel, or its devices do not divide the
                key heads.
        """
        if not strategy.is_tensor_parallel:
            raise ValueError(
                f"GatedDeltaNet: sharding_strategy is {strategy}; need "
                "ShardingStrategy.tensor_parallel(devices)"
            )
        devices = strategy.num_devices
        g = self.geometry
        g.shard(devices)
        by_rows = ShardingStrategy.rowwise(devices)
        keys = Segment.head_aware(g.num_key_heads, g.key_head_dim)
        values = Segment.head_aware(g.num_value_heads, g.value_head_dim)
        # Queries, keys and values of a device's heads lie in three places along the channels.
        by_channels = ShardingStrategy.segmented(devices, axis=0, segments=(keys, keys, values))
        for name, child in self.in_proj.sublayers.items():
            child.sharding_strategy = by_channels if name == "in_proj_qkv" else by_rows
        self.conv1d.sharding_strategy = by_channels
        self.A_log.sharding_strategy = by_rows
        self.dt_bias.sharding_strategy = by_rows
        self.norm.sharding_strategy = ShardingStrategy.replicate(devices)
        self.out_proj.sharding_strategy = ShardingStrategy.head_aware_columnwise(
            devices, g.num_value_heads, g.value_head_dim
        )
        self._sharding_strategy = strategy

    def shard(self, devices: Iterable[DeviceRef]) -> Sequence[GatedDeltaNet]:
        """One layer per device, each with its share of the heads.

        Raises:
            ValueError: If sharding_strategy is not set.
        """
        if self._sharding_strategy is None:
            raise ValueError("GatedDeltaNet: shard needs a sharding_strategy; set it first")
        devices = list(devices)
        in_proj = self.in_proj.shard(devices)
        conv1d = self.conv1d.shard(devices)
        A_log = self.A_log.shard(devices)
        dt_bias = self.dt_bias.shard(devices)
        norm = self.norm.shard(devices)
        out_proj = self.out_proj.shard(devices)
        shards = []
        for i, device in enumerate(devices):
            shard = GatedDeltaNet(
                self.hidden_size,
                self.geometry.shard(len(devices)),
                dtype=self.dtype,
                device=device,
                projections=self.projections,
                rms_norm_eps=self.rms_norm_eps,
                output_gate=self.output_gate,
            )
            shard.in_proj = in_proj[i]
            shard.conv1d = conv1d[i]
            shard.A_log = A_log[i]
            shard.dt_bias = dt_bias[i]
            shard.norm = norm[i]
            shard.out_proj = out_proj[i]
            shards.append(shard)
        return shards


def checkpoint_weights(folder: Path, module: Module, prefix: str = "") -> dict[str, Buffer]:
    """The weights of a module from a folder of safetensors, for Module.load_state_dict.

    Each weight is cast to the dtype that the module declares and given its shape (checkpoints keep
    conv1d.weight as [conv_dim, 1, width] or [conv_dim, width]).

    Args:
        folder: Holds one or more *.safetensors files.
        module: Names the weights, such as a GatedDeltaNet.
        prefix: What stands before those names in the checkpoint, such as
            "model.layers.0.linear_attn.".

    Raises:
        FileNotFoundError: If the folder holds no safetensors file.
        ValueError: If a weight is missing or its shape holds another number of elements.
    """
    stored = _checkpoint(folder)
    weights = {}
    for name, declared in module.raw_state_dict().items():
        if prefix + name not in stored:
            near = [key for key in stored if key.endswith(name)]
            raise ValueError(
                f"checkpoint_weights: {prefix + name} is not in {folder}; "
                + (f"there is {near[0]}: check the prefix" if near else "check the projections")
            )
        data = stored[prefix + name].data()
        if data.dtype != declared.dtype:
            data = data.astype(declared.dtype)
        shape = [int(dim) for dim in declared.shape]
        buffer = data.to_buffer()
        if buffer.num_elements != _elements(shape):
            raise ValueError(
                f"checkpoint_weights: {prefix + name} has shape {tuple(buffer.shape)}; need "
                f"{tuple(shape)}"
            )
        weights[name] = buffer.view(declared.dtype, shape)
    return weights


def checkpoint_names(folder: Path) -> list[str]:
    """The names of all weights in a folder of safetensors.

    Raises:
        FileNotFoundError: If the folder holds no safetensors file.
    """
    return list(_checkpoint(folder))


def projections_of(names: Iterable[str]) -> Projections:
    """The projection layout of a checkpoint with weights of these names."""
    return "fused" if any("in_proj_qkvz" in name for name in names) else "separate"


def _checkpoint(folder: Path) -> dict[str, Weights]:
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"checkpoint: no *.safetensors file in {folder}")
    return dict(load_weights(files).items())


def _elements(shape: list[int]) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count
