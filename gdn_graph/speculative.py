"""Verify and commit of all Gated DeltaNet layers: pools, row tables and the order of a step.

    verify   runs a window of every row. With drafts it leaves the states alone and records every
             token in the rings; without drafts, and in rows longer than the ring, it lands them.
    commit   lands the accepted tokens: one launch for the recurrent states of all layers, one for
             their conv windows.

StateSpec is the part for graphs: it needs no device, so graphs can be compiled for one that is not
there. SpeculativeStates owns the pools on top of it and keeps the order. A commit may also stand in
the graph of the verify, after an acceptance (see sampling): one execution is then a whole step, and
num_accepted never visits the host.

num_accepted[b] counts the tokens of row b to keep: the tokens before its drafts, and the accepted
drafts; for a row without drafts it is its length. A row that is padding has the slot PADDING.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import numpy as np
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import (
    BufferType,
    BufferValue,
    DeviceRef,
    Dim,
    Graph,
    TensorType,
    TensorValue,
    Value,
    ops,
)
from max.graph import Module as GraphModule

from . import ops as gdn_ops
from .geometry import PADDING, STATE_DTYPES, GatedDeltaGeometry
from .layer import ConvCapture, LayerRing, LayerState
from .library import kernel_library
from .slots import Slots
from .timers import around_execute

ConvCommit = Literal["fold", "replay"]
Forward = Callable[[Sequence[Value[Any]], "list[Window]"], Sequence[TensorValue]]

_COMMIT = "commit"

_POOLS = ("recurrent_state", "conv_state", "ring", "conv_ring")
"""Order of a device's pools among the inputs of a graph; a replay has no conv ring."""


@dataclass(frozen=True)
class StateSpec:
    """The states of a model's layers: their geometry, how many, of what dtype and where.

    Args:
        geometry: Of the whole model; each device has geometry.shard(len(devices)).
        layers: Gated DeltaNet layers.
        slots: Requests that have a state at one time.
        state_dtype: Of the recurrent states, conv windows and conv ring. The ring is float32.
        devices: One for all heads, or the devices that the heads are split over.
        conv_commit: "fold" commits the conv windows of all layers in one launch; "replay" does as
            MAX does, a gather and a conv launch in each layer, and needs the commit in the graph
            of the verify.

    Raises:
        ValueError: If a value is out of range or the heads cannot be split.
    """

    geometry: GatedDeltaGeometry
    layers: int
    slots: int
    state_dtype: DType = DType.float32
    devices: tuple[DeviceRef, ...] = field(default_factory=lambda: (DeviceRef.CPU(),))
    conv_commit: ConvCommit = "fold"

    def __post_init__(self) -> None:
        for name, value in (("layers", self.layers), ("slots", self.slots)):
            if value < 1:
                raise ValueError(f"StateSpec: {name} is {value}; need at least 1")
        if self.state_dtype not in STATE_DTYPES:
            raise ValueError(
                f"StateSpec: state_dtype is {self.state_dtype.name}; need float32, bfloat16 or "
                "float16"
            )
        if self.conv_commit not in ("fold", "replay"):
            raise ValueError(
                f"StateSpec: conv_commit is {self.conv_commit!r}; need 'fold' or 'replay'"
            )
        self.geometry.shard(len(self.devices))

    @property
    def rows(self) -> int:
        """Rows of every pool."""
        return self.slots * self.layers

    def pools(self) -> dict[str, tuple[DType, tuple[int, ...]]]:
        """Dtype and shape of each pool of one device."""
        local = self.geometry.shard(len(self.devices))
        pools = {
            "recurrent_state": (self.state_dtype, local.recurrent_state_shape(self.rows)),
            "conv_state": (self.state_dtype, local.conv_state_shape(self.rows)),
            "ring": (DType.float32, local.ring_shape(self.rows)),
            "conv_ring": (self.state_dtype, local.conv_ring_shape(self.rows)),
        }
        if self.conv_commit == "replay":
            del pools["conv_ring"]
        return pools

    @property
    def bytes(self) -> int:
        """Bytes of all pools on all devices."""
        g, layers, dtype = self.geometry, self.layers, self.state_dtype
        request = (
            g.recurrent_state_bytes(layers, dtype)
            + g.conv_state_bytes(layers, dtype)
            + g.ring_bytes(layers)
        )
        if self.conv_commit == "fold":
            request += g.conv_ring_bytes(layers, dtype)
        return self.slots * request

    def input_types(self) -> list[BufferType | TensorType]:
        """What a graph with a verify takes, in the order that bind wants it.

        Per device: the pools, the row table uint32 [layers, batch] and input_row_offsets uint32
        [batch + 1]; then, once, verify_width int64 [drafts] on the CPU.
        """
        types: list[BufferType | TensorType] = []
        for device in self.devices:
            types += self._pool_types(device)
            types.append(TensorType(DType.uint32, [self.layers, "batch"], device))
            types.append(TensorType(DType.uint32, ["batch_plus_1"], device))
        return [*types, TensorType(DType.int64, ["drafts"], DeviceRef.CPU())]

    def bind(self, values: Sequence[Value[Any]]) -> list[Window]:
        """The windows of the graph being built, one per device, from its inputs of input_types."""
        width = values[-1].tensor
        count = len(self.pools())
        windows = []
        for i in range(len(self.devices)):
            of_device = values[i * (count + 2) : (i + 1) * (count + 2)]
            pools = {name: of_device[j].buffer for j, name in enumerate(self.pools())}
            rows, offsets = of_device[count].tensor, of_device[count + 1].tensor
            windows.append(Window(self, pools, rows, offsets, width))
        return windows

    def commit_graph(self, name: str = _COMMIT, module: GraphModule | None = None) -> Graph:
        """The graph of a commit that stands alone: per device two launches, whatever the layers.

        Its inputs are, per device, the pools, row_ids and ring_row_ids uint32 [layers, batch] and
        num_accepted uint32 [batch]; then verify_width.

        Args:
            name: Of the graph.
            module: Where it is added, to be compiled with other graphs.

        Raises:
            ValueError: If conv_commit is "replay": that needs what the verify computed.
        """
        if self.conv_commit == "replay":
            raise ValueError(
                "commit: conv_commit is 'replay', which needs the inputs of the verify; call "
                "commit in the graph of the verify, or use conv_commit='fold'"
            )
        types: list[BufferType | TensorType] = []
        for device in self.devices:
            table = TensorType(DType.uint32, [self.layers, "batch"], device)
            types += [*self._pool_types(device), table, table]
            types.append(TensorType(DType.uint32, ["batch"], device))
        types.append(TensorType(DType.int64, ["drafts"], DeviceRef.CPU()))
        with Graph(name, input_types=types, module=module) as graph:
            width = graph.inputs[-1].tensor
            count = len(_POOLS) + 3
            for i in range(len(self.devices)):
                values = graph.inputs[i * count : (i + 1) * count]
                pools = {pool: values[j].buffer for j, pool in enumerate(_POOLS)}
                rows, ring_rows, accepted = (value.tensor for value in values[len(_POOLS) :])
                _fold(pools, rows, ring_rows, accepted, width)
            graph.output()
        return graph

    def _pool_types(self, device: DeviceRef) -> list[BufferType]:
        # The number of rows is left open: one compiled graph serves any number of slots.
        return [
            BufferType(dtype, ["rows", *shape[1:]], device)
            for dtype, shape in self.pools().values()
        ]


class Window:
    """The states of all layers on one device, inside a graph, for one verify.

    Attributes:
        input_row_offsets: uint32 [batch + 1]; row b is tokens [offsets[b], offsets[b + 1]).
        verify_width: int64 [drafts] on the CPU; its length is the most drafts of a row.
        committed: Whether the graph lands what it verifies.
    """

    def __init__(
        self,
        spec: StateSpec,
        pools: Mapping[str, BufferValue],
        rows: TensorValue,
        input_row_offsets: TensorValue,
        verify_width: TensorValue,
    ) -> None:
        self.input_row_offsets = input_row_offsets
        self.verify_width = verify_width
        self.committed = False
        self._spec = spec
        self._pools = pools
        self._rows = rows
        self._captures: dict[int, list[ConvCapture]] = {}

    def layer(self, index: int) -> LayerState:
        """What GatedDeltaNet needs of its layer; index counts the Gated DeltaNet layers only."""
        if not 0 <= index < self._spec.layers:
            raise ValueError(f"Window: layer {index} of {self._spec.layers}; need one of those")
        rows = self._rows[index]
        return LayerState(
            self._pools["recurrent_state"],
            self._pools["conv_state"],
            rows,
            self.input_row_offsets,
            LayerRing(
                self._pools["ring"],
                self._pools.get("conv_ring"),
                rows,
                self.verify_width,
                self._captures.setdefault(index, []),
            ),
        )

    def commit(self, num_accepted: TensorValue) -> None:
        """Lands the accepted tokens of every row in every layer, in the graph of the verify.

        Args:
            num_accepted: uint32 [batch] on the window's device; see the module.

        Raises:
            RuntimeError: If the graph has committed this window already, or conv_commit is
                "replay" and a layer has not been verified.
        """
        if self.committed:
            raise RuntimeError("commit: this graph has committed its window; commit it once")
        rows = self._rows
        if self._spec.conv_commit == "fold":
            _fold(self._pools, rows, rows, num_accepted, self.verify_width)
        else:
            gdn_ops.gated_delta_state_fold(
                self._pools["recurrent_state"],
                self._pools["ring"],
                rows,
                rows,
                num_accepted,
                self.verify_width,
            )
            self._replay(num_accepted)
        self.committed = True

    def _replay(self, num_accepted: TensorValue) -> None:
        """Convolves the accepted tokens of every layer once more, now writing the windows."""
        missing = [i for i in range(self._spec.layers) if len(self._captures.get(i, ())) != 1]
        if missing:
            raise RuntimeError(
                f"commit: conv_commit is 'replay' and layers {missing} were not run exactly once "
                "before the commit; run every layer first"
            )
        tokens = self._captures[0][0].qkv.shape[0]
        indices, offsets = accepted_tokens(self.input_row_offsets, num_accepted, tokens)
        for index in range(self._spec.layers):
            capture = self._captures[index][0]
            gdn_ops.gated_delta_conv1d_verify_fwd(
                ops.gather(capture.qkv, indices, axis=0),
                capture.conv_weight,
                self._pools["conv_state"],
                self._rows[index],
                offsets,
                self.verify_width,
                rollback=True,
            )


def accepted_tokens(
    input_row_offsets: TensorValue, num_accepted: TensorValue, tokens: Dim
) -> tuple[TensorValue, TensorValue]:
    """Where the first num_accepted[b] tokens of every row lie, one row after the other.

    Args:
        input_row_offsets: [batch + 1].
        num_accepted: [batch], at least one row.
        tokens: N, of the verify.

    Returns:
        int64 [N], of which the places past the last accepted token are of no use, and uint32
        [batch + 1], the offsets of the accepted rows in it.
    """
    device = num_accepted.device
    accepted = ops.cast(num_accepted, DType.int64)
    starts = ops.rebind(ops.cast(input_row_offsets, DType.int64)[:-1], accepted.shape)
    ends = ops.cumsum(accepted, axis=0)
    place = ops.range(0, tokens, 1, out_dim=tokens, dtype=DType.int64, device=device)
    past = ops.cast(ops.unsqueeze(place, 1) >= ops.unsqueeze(ends, 0), DType.int64)
    last_row = ops.shape_to_tensor(accepted.shape)[0].to(device) - 1
    row = ops.min(ops.squeeze(ops.sum(past, axis=1), 1), last_row)
    source = ops.gather(starts, row, axis=0) + place - ops.gather(ends - accepted, row, axis=0)
    last_token = ops.shape_to_tensor([tokens])[0].to(device) - 1
    zero = ops.constant([0], DType.int64, device=device)
    offsets = ops.concat([zero, ends], axis=0)
    return ops.min(source, last_token), ops.cast(offsets, DType.uint32)


def _fold(
    pools: Mapping[str, BufferValue],
    rows: TensorValue,
    ring_rows: TensorValue,
    num_accepted: TensorValue,
    width: TensorValue,
) -> None:
    """The two launches of a commit on one device."""
    gdn_ops.gated_delta_state_fold(
        pools["recurrent_state"], pools["ring"], rows, ring_rows, num_accepted, width
    )
    gdn_ops.gated_delta_conv1d_fold(
        pools["conv_state"], pools["conv_ring"], rows, ring_rows, num_accepted, width
    )


class _Stage(Enum):
    """Where a slot is between its verify and its commit."""

    FRESH = "admitted, and not verified yet"
    RECORDED = "verified: its tokens are in the rings"
    LANDED = "verified without drafts or in a row longer than the ring: its tokens are landed"
    COMMITTED = "committed"


class SpeculativeStates:
    """Pools of all layers, their slots, and verify and commit in their order.

    Args:
        spec: What the pools are.
        session: Compiles the graphs.
        forward: Builds the verify: forward(inputs, windows) -> outputs, where windows has one
            Window per device. It may call Window.commit, and an execution is then a whole step.
        input_types: Of the inputs that forward gets.
        weights: For the graph, as Module.state_dict() gives them.
        name: Of the graph of the verify.

    Raises:
        RuntimeError: If forward commits the windows of some devices only.
        ValueError: If spec.conv_commit is "replay" and forward does not commit.

    Seen here and refused: a slot that is not admitted, one that is named twice, a verify of a slot
    whose last verify was not committed, a commit of a slot that was committed already or of no
    verified slot at all, drafts in a row longer than the ring. Not seen, because num_accepted is on
    the device: a count above what the verify recorded, which lands whatever the ring holds.
    """

    def __init__(
        self,
        spec: StateSpec,
        session: InferenceSession,
        forward: Forward,
        input_types: Sequence[TensorType | BufferType] = (),
        *,
        weights: Mapping[str, Any] | None = None,
        name: str = "verify",
    ) -> None:
        # Verify and commit are compiled together: MAX's cost of a compile is mostly a fixed one.
        module = GraphModule()
        with Graph(name, input_types=[*input_types, *spec.input_types()], module=module) as graph:
            inputs = graph.inputs[: len(input_types)]
            windows = spec.bind(graph.inputs[len(input_types) :])
            graph.output(*forward(inputs, windows))
        committed = {window.committed for window in windows}
        if len(committed) != 1:
            raise RuntimeError(
                "SpeculativeStates: forward commits the window of some devices only; commit all "
                "of them or none"
            )
        self.spec = spec
        self._commits_itself = committed.pop()
        if not self._commits_itself:
            spec.commit_graph(_COMMIT, module)
        models = session.load_all(
            module, custom_extensions=[kernel_library()], weights_registry=weights
        )
        self._verify: Model = models[name]
        self._commit: Model | None = models.get(_COMMIT)
        devices = [device.to_device() for device in spec.devices]
        self.pools: list[dict[str, Buffer]] = [
            {
                name: Buffer.zeros(shape, dtype, device)
                for name, (dtype, shape) in spec.pools().items()
            }
            for device in devices
        ]
        self._slots = Slots(
            spec.slots,
            spec.layers,
            [pools[name] for pools in self.pools for name in _POOLS[:2]],
            [pools[name] for pools in self.pools for name in _POOLS[2:] if name in pools],
        )
        self._stage: dict[int, _Stage] = {}
        self._batch: list[int] = []

    @property
    def free_slots(self) -> int:
        """Slots that no request owns."""
        return self._slots.free

    def admit(self) -> int:
        """A zeroed slot for a new request.

        Raises:
            RuntimeError: If no slot is free.
        """
        slot = self._slots.admit()
        self._stage[slot] = _Stage.FRESH
        return slot

    def release(self, slot: int) -> None:
        """Gives a slot back; what it has verified and not committed is dropped.

        Raises:
            ValueError: If slot is not admitted.
        """
        self._slots.release(slot)
        del self._stage[slot]

    def fork(self, slot: int) -> int:
        """A slot that starts where another one is, as for requests with a common prefix.

        Raises:
            ValueError: If slot is not admitted.
            RuntimeError: If it has an uncommitted verify, or no slot is free.
        """
        self._slots.require(slot, "fork")
        self._require_landed("fork", slot)
        child = self._slots.fork(slot)
        self._stage[child] = _Stage.FRESH
        return child

    def verify(
        self,
        *inputs: Any,
        slots: Sequence[int],
        lengths: Sequence[int],
        drafts: Sequence[int] | None = None,
    ) -> list[Buffer]:
        """Runs a window of every row.

        Args:
            inputs: What forward was promised, whose N tokens are the rows one after the other.
            slots: Of each row; PADDING for a row that takes no part.
            lengths: Tokens of each row, its drafts included. Without drafts any length is legal.
            drafts: How many of a row's last tokens are drafts; none if left out.

        Returns:
            The outputs of forward.

        Raises:
            ValueError: If a slot is not admitted or named twice, or a row has more drafts than
                tokens before them allow.
            RuntimeError: If a slot has an uncommitted verify.
        """
        slots, lengths = list(slots), list(lengths)
        drafts = [0] * len(slots) if drafts is None else list(drafts)
        self._check_batch("verify", slots)
        self._check_lengths(slots, lengths, drafts)
        for slot in slots:
            self._require_landed("verify", slot)
        width = max(drafts, default=0)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.uint32)
        rows = self._slots.rows(slots)
        with around_execute():
            outputs = self._verify.execute(
                *inputs, *self._device_inputs([rows, offsets]), _width(width)
            )
        for slot, length in zip(slots, lengths, strict=True):
            if slot == PADDING or length == 0:
                continue
            if self._commits_itself:
                self._stage[slot] = _Stage.COMMITTED
            elif width > 0 and length <= self.spec.geometry.ring_len:
                self._stage[slot] = _Stage.RECORDED
            else:
                self._stage[slot] = _Stage.LANDED
        self._batch = slots
        return list(outputs)

    def commit(self, num_accepted: Any, slots: Sequence[int] | None = None) -> None:
        """Lands the accepted tokens of verified rows in every layer: two launches per device.

        Rows are named by their slots, so a batch may be permuted, grown or shrunk since the verify:
        a slot that was admitted since, and one that landed in the verify, are left alone whatever
        their count.

        Args:
            num_accepted: uint32 [batch]: a Buffer on the device (one per device if there are
                several), which is not read here, or an array.
            slots: Of each entry; those of the last verify if left out.

        Raises:
            ValueError: If a slot is not admitted or named twice, or an array has another length
                than slots.
            RuntimeError: If a slot was committed already, no slot has been verified, or the graph
                of the verify commits.
        """
        slots = list(self._batch if slots is None else slots)
        if self._commits_itself:
            raise RuntimeError("commit: the graph of the verify commits; do not commit again")
        self._check_batch("commit", slots)
        stages = [self._stage.get(slot, _Stage.FRESH) for slot in slots]
        for slot, stage in zip(slots, stages, strict=True):
            if stage is _Stage.COMMITTED:
                raise RuntimeError(
                    f"commit: slot {slot} was committed already; verify it first, commit it once"
                )
        if all(stage is _Stage.FRESH for stage in stages):
            raise RuntimeError("commit: no slot of the batch has been verified; call verify first")
        accepted = self._accepted(num_accepted, len(slots))
        recorded = np.array([stage is _Stage.RECORDED for stage in stages])
        if recorded.any():
            assert self._commit is not None
            rows = self._slots.rows(slots)
            ring_rows = np.where(recorded, rows, PADDING).astype(np.uint32)
            self._commit.execute(*self._device_inputs([rows, ring_rows], accepted), _width(1))
        for slot, stage in zip(slots, stages, strict=True):
            if stage is not _Stage.FRESH:
                self._stage[slot] = _Stage.COMMITTED

    def _accepted(self, num_accepted: Any, batch: int) -> list[Buffer]:
        given = num_accepted if isinstance(num_accepted, list | tuple) else [num_accepted]
        if given and not isinstance(given[0], Buffer):
            array = np.asarray(num_accepted)
            if array.dtype.kind not in "iu" or (array < 0).any():
                raise ValueError(
                    f"commit: num_accepted is {num_accepted!r}; need counts, of 0 or more"
                )
            host = Buffer.from_numpy(np.ascontiguousarray(array, np.uint32))
            given = [host.to(device.to_device()) for device in self.spec.devices]
        for buffer in given:
            if tuple(buffer.shape) != (batch,) or buffer.dtype != DType.uint32:
                raise ValueError(
                    f"commit: num_accepted is {buffer.dtype.name} {tuple(buffer.shape)}; need "
                    f"uint32 ({batch},), one count for each slot"
                )
        if len(given) != len(self.spec.devices):
            raise ValueError(
                f"commit: num_accepted has {len(given)} buffers; need one for each of the "
                f"{len(self.spec.devices)} devices"
            )
        return list(given)

    def _device_inputs(
        self, tables: Sequence[np.ndarray[Any, Any]], own: Sequence[Buffer] | None = None
    ) -> list[Buffer]:
        """Per device: its pools, copies of the tables and, if given, its own buffer."""
        inputs: list[Buffer] = []
        for i, (device, pools) in enumerate(zip(self.spec.devices, self.pools, strict=True)):
            inputs += pools.values()
            inputs += [Buffer.from_numpy(table).to(device.to_device()) for table in tables]
            inputs += [] if own is None else [own[i]]
        return inputs

    def _check_batch(self, what: str, slots: Sequence[int]) -> None:
        real = [slot for slot in slots if slot != PADDING]
        for slot in real:
            self._slots.require(slot, what)
        if len(set(real)) != len(real):
            raise ValueError(f"{what}: slots are {slots}; need each slot once")

    def _check_lengths(
        self, slots: Sequence[int], lengths: Sequence[int], drafts: Sequence[int]
    ) -> None:
        if not len(slots) == len(lengths) == len(drafts):
            raise ValueError(
                f"verify: {len(slots)} slots, {len(lengths)} lengths, {len(drafts)} drafts; need "
                "one of each per row"
            )
        ring_len = self.spec.geometry.ring_len
        for row, (length, count) in enumerate(zip(lengths, drafts, strict=True)):
            if length < 0 or not 0 <= count < max(length, 1):
                raise ValueError(
                    f"verify: row {row} has {count} drafts among {length} tokens; need at least "
                    "one token before the drafts"
                )
            if count and length > ring_len:
                raise ValueError(
                    f"verify: row {row} has drafts and {length} tokens; need at most the ring "
                    f"length, {ring_len}: a longer row lands all its tokens, so leave its drafts "
                    "out or make the ring longer"
                )

    def _require_landed(self, what: str, slot: int) -> None:
        if self._stage.get(slot) is _Stage.RECORDED:
            raise RuntimeError(
                f"{what}: slot {slot} has a verify that was not committed; commit it, or release "
                "the slot"
            )


def _width(drafts: int) -> Buffer:
    """The verify_width operand: only its length is read."""
    return Buffer.from_numpy(np.zeros(drafts, np.int64))
