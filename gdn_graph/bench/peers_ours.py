"""These ops, through graphs whose every dim is symbolic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from . import memory
from .peer import Array, Peer, Settings, Unavailable
from .problems import GEOMETRY, Conv, Fold, Problem, Recurrence
from .shapes import Shape


class Ours(Peer):
    """Compiles every graph of the run in one module, or finds them in MAX's cache."""

    kind = "recurrence"
    calm = True
    pool_dtype: ClassVar[str] = "float32"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        from max.driver import CPU
        from max.engine import InferenceSession
        from max.graph import Graph, Module

        from gdn_graph.library import kernel_library

        self.missing: dict[str, str] = {}
        module = Module()
        wanted = []
        for name, layers in settings.graphs:
            peer, graph_name = OURS[name], f"{name}_l{layers}"
            types = peer.types()
            try:
                # Alone first: a build that fails would leave half a graph in the module.
                with Graph(graph_name, input_types=types) as graph:
                    graph.output(*peer.build(graph, layers))
            except (TypeError, ValueError, AttributeError) as error:
                self.missing[graph_name] = str(error).splitlines()[0]
                continue
            with Graph(graph_name, input_types=types, module=module) as graph:
                graph.output(*peer.build(graph, layers))
            wanted.append(graph_name)
        self.models: dict[str, Any] = {}
        if wanted:
            session = InferenceSession(devices=[CPU()])
            loaded = session.load_all(module, custom_extensions=[kernel_library()])
            self.models = {name: loaded[name] for name in wanted}

    @classmethod
    def types(cls) -> list[Any]:
        """Of the graph's inputs."""
        raise NotImplementedError

    @classmethod
    def build(cls, graph: Any, layers: int) -> list[Any]:
        """Adds the ops of so many layers; returns the outputs."""
        raise NotImplementedError

    def load(self, problem: Problem, copies: int) -> None:
        name = f"{self.name}_l{self.graph_layers(problem.shape)}"
        if name in self.missing:
            raise Unavailable(self.missing[name])
        model = self.models[name]
        # Takes the buffers as they are; execute would look at each argument again.
        direct: Callable[[list[Any]], Any] | None = getattr(model, "_execute_device_tensors", None)
        self.execute = direct or (lambda buffers: model.execute(*buffers))
        self.prepare(problem)
        self.pools = [self.pool(problem.state) for _ in range(copies)]
        self.buffers = [self.operands(self.buffer(pool)) for pool in self.pools]

    @classmethod
    def graph_layers(cls, shape: Shape) -> int:
        return shape.layers

    def prepare(self, problem: Any) -> None:
        """Makes the operands that all copies share."""
        raise NotImplementedError

    def operands(self, pool: Any) -> list[Any]:
        """Of the graph, in its order."""
        raise NotImplementedError

    def call(self, copy: int) -> None:
        self.outputs = self.execute(self.buffers[copy])

    def out(self) -> Array:
        return np.stack([np.array(x.to_numpy()) for x in self.outputs])

    def state(self) -> Array:
        pool = self.pools[0]
        if self.pool_dtype == "bfloat16":
            pool = (pool.astype(np.uint32) << 16).view(np.float32)
        return pool

    def pool(self, state: Array) -> Array:
        """A copy of the state in the pool's dtype, bfloat16 as its bits."""
        if self.pool_dtype == "bfloat16":
            return memory.copy((state.view(np.uint32) >> 16).astype(np.uint16))
        return memory.copy(state)

    def buffer(self, pool: Array) -> Any:
        from max.driver import Buffer
        from max.dtype import DType

        buffer = Buffer.from_numpy(pool)
        if self.pool_dtype == "bfloat16":
            buffer = buffer.view(DType.bfloat16, pool.shape)
        return buffer

    @property
    def versions(self) -> dict[str, str]:
        from gdn_graph.library import compiler_version, library_path

        return {"mojo": compiler_version(), "kernels": library_path().parent.name}


class Plain(Ours):
    name = "ours_plain"
    about = "gated_delta_recurrence_fwd"
    twin = "c_rec_paced"
    layers = True
    op_algorithm: ClassVar[str] = "exact"
    verifies: ClassVar[bool] = False

    @classmethod
    def types(cls) -> list[Any]:
        types = [
            _tensor("float32", "N", "C"),
            _tensor("float32", "N", "nv"),
            _tensor("float32", "N", "nv"),
            _buffer(cls.pool_dtype, "slots", "nv", "KD", "VD"),
            _tensor("uint32", "B1"),
        ]
        if cls.verifies:
            types += [_buffer("float32", "rows", "nk", "R", "stride"), _tensor("int64", "K")]
        return [_tensor("uint32", "B"), *types]

    @classmethod
    def build(cls, graph: Any, layers: int) -> list[Any]:
        from max.dtype import DType
        from max.graph import DeviceRef
        from max.graph.ops import constant

        from gdn_graph import ops

        slots, qkv, decay, beta = (v.tensor for v in graph.inputs[:4])
        state, offsets = graph.inputs[4].buffer, graph.inputs[5].tensor
        # A stack of layers has one row, and a constant slot in each, so that no op but ours runs.
        rows = [slots]
        if layers > 1:
            ids = [np.array([layer], np.uint32) for layer in range(layers)]
            rows = [constant(row, DType.uint32, device=DeviceRef.CPU()) for row in ids]
        # Left out where it is the default: older trees do not know it.
        how: dict[str, Any] = {} if cls.op_algorithm == "exact" else {"algorithm": cls.op_algorithm}
        if not cls.verifies:
            return [
                ops.gated_delta_recurrence_fwd(qkv, decay, beta, state, row, offsets, **how)
                for row in rows
            ]
        ring, width = graph.inputs[6].buffer, graph.inputs[7].tensor
        return [
            ops.gated_delta_recurrence_verify_ring_fwd(
                qkv, decay, beta, state, ring, row, row, offsets, width, **how
            )
            for row in rows
        ]

    def prepare(self, problem: Any) -> None:
        assert isinstance(problem, Recurrence)
        n = problem.shape.batch * problem.shape.tokens
        self.window = problem.shape.tokens
        _, nk, _, stride = GEOMETRY.ring_shape(1)
        self.ring = memory.empty((problem.pool_rows, nk, problem.ring_len, stride))
        self.before = [
            _host(np.arange(problem.shape.batch, dtype=np.uint32)),
            *(
                _host(memory.copy(x.reshape(n, -1)))
                for x in (problem.qkv, problem.decay, problem.beta)
            ),
        ]
        self.after = [_host(problem.offsets)]
        if self.verifies:
            self.after += [_host(self.ring), _host(np.zeros(problem.drafts, np.int64))]

    def operands(self, pool: Any) -> list[Any]:
        return [*self.before, pool, *self.after]

    def results(self) -> dict[str, Array]:
        return {"out": self.out(), "state": self.state()}


class PlainBf16(Plain):
    name = "ours_plain_bf16"
    about = "the same on a bfloat16 pool"
    pool_dtype = "bfloat16"
    state_bytes = 2
    tolerances = {"state": 2**-8}


class Verify(Plain):
    name = "ours_verify"
    about = "gated_delta_recurrence_verify_ring_fwd"
    algorithm = "exact verify"
    tokens = (1, 8)
    verifies = True

    def results(self) -> dict[str, Array]:
        records = self.ring[:, :, : self.window]
        return {"out": self.out(), "ring": records, "kept": self.state()}


class VerifyBf16(Verify):
    name = "ours_verify_bf16"
    about = "the same on a bfloat16 pool"
    pool_dtype = "bfloat16"
    state_bytes = 2


class PlainStock(Plain):
    name = "ours_plain_stock"
    about = "ours_plain without gdn_graph.timer_slack()"
    calm = False


class VerifyStock(Verify):
    name = "ours_verify_stock"
    about = "ours_verify without gdn_graph.timer_slack()"
    calm = False


class Block(Plain):
    name = "ours_block"
    about = 'gated_delta_recurrence_fwd, algorithm="block"'
    algorithm = "block"
    op_algorithm = "block"
    twin = "c_blk"


class BlockVerify(Verify):
    name = "ours_block_verify"
    about = 'gated_delta_recurrence_verify_ring_fwd, algorithm="block"'
    algorithm = "block verify"
    op_algorithm = "block"
    twin = "c_verify"


class StateFold(Ours):
    name = "ours_fold"
    about = "gated_delta_state_fold"
    kind = "fold"
    algorithm = "fold"
    layers = True
    twin = "c_fold_paced"

    @classmethod
    def types(cls) -> list[Any]:
        return [
            _buffer(cls.pool_dtype, "slots", "nv", "KD", "VD"),
            _buffer("float32", "rows", "nk", "R", "stride"),
            _tensor("uint32", "L", "B"),
            _tensor("uint32", "L", "B"),
            _tensor("uint32", "B"),
            _tensor("int64", "K"),
        ]

    @classmethod
    def graph_layers(cls, shape: Shape) -> int:
        return 1  # one op whatever the layers

    @classmethod
    def build(cls, graph: Any, layers: int) -> list[Any]:
        from gdn_graph import ops

        state, ring = (v.buffer for v in graph.inputs[:2])
        ops.gated_delta_state_fold(state, ring, *(v.tensor for v in graph.inputs[2:]))
        return []

    def prepare(self, problem: Any) -> None:
        assert isinstance(problem, Fold)
        drafts = np.zeros(problem.ring.shape[2] - 1, np.int64)
        ring, ids = memory.copy(problem.ring), problem.row_ids
        self.after = [_host(x) for x in (ring, ids, ids, problem.accepted, drafts)]

    def operands(self, pool: Any) -> list[Any]:
        return [pool, *self.after]

    def results(self) -> dict[str, Array]:
        return {"state": self.state()}


class StateFoldBf16(StateFold):
    name = "ours_fold_bf16"
    about = "the same on a bfloat16 pool"
    pool_dtype = "bfloat16"
    state_bytes = 2
    tolerances = {"state": 2**-8}


class ConvOp(Ours):
    name = "ours_conv"
    about = "gated_delta_conv1d_fwd"
    kind = "conv"
    algorithm = "conv"
    result: ClassVar[str] = "out"

    @classmethod
    def types(cls) -> list[Any]:
        return [
            _tensor("float32", "N", "C"),
            _tensor("float32", "C", "width"),
            _buffer("float32", "slots", "C", "history"),
            _tensor("uint32", "B"),
            _tensor("uint32", "B1"),
        ]

    @classmethod
    def build(cls, graph: Any, layers: int) -> list[Any]:
        return [cls.conv(*_conv_operands(graph))]

    @classmethod
    def conv(cls, *operands: Any) -> Any:
        from gdn_graph import ops

        return ops.gated_delta_conv1d_fwd(*operands)

    def prepare(self, problem: Any) -> None:
        assert isinstance(problem, Conv)
        self.x = problem.x
        slots = np.arange(problem.shape.batch, dtype=np.uint32)
        self.weight = _host(memory.copy(problem.weight))
        self.after = [_host(slots), _host(problem.offsets)]

    def operands(self, pool: Any) -> list[Any]:
        # The windows are small: here the inputs are what must not be in the caches.
        return [_host(memory.copy(self.x)), self.weight, pool, *self.after]

    def results(self) -> dict[str, Array]:
        return {self.result: self.out(), "state": self.state()}


class ConvSilu(ConvOp):
    name = "ours_conv_silu"
    about = 'gated_delta_conv1d_fwd, activation="silu"'
    result = "silu"

    @classmethod
    def conv(cls, *operands: Any) -> Any:
        from gdn_graph import ops

        how: dict[str, Any] = {"activation": "silu"}  # older trees do not know it
        return ops.gated_delta_conv1d_fwd(*operands, **how)


class ConvThenSilu(ConvOp):
    name = "ours_conv_then_silu"
    about = "gated_delta_conv1d_fwd, then MAX's silu"
    result = "silu"

    @classmethod
    def conv(cls, *operands: Any) -> Any:
        from max.graph.ops import silu

        return silu(super().conv(*operands))


OURS: dict[str, type[Ours]] = {
    peer.name: peer
    for peer in (
        Plain,
        Verify,
        PlainBf16,
        VerifyBf16,
        Block,
        BlockVerify,
        StateFold,
        StateFoldBf16,
        ConvOp,
        ConvSilu,
        ConvThenSilu,
        PlainStock,
        VerifyStock,
    )
}


def _conv_operands(graph: Any) -> list[Any]:
    x, weight, state, slots, offsets = graph.inputs
    return [x.tensor, weight.tensor, state.buffer, slots.tensor, offsets.tensor]


def _tensor(dtype: str, *shape: str) -> Any:
    from max.dtype import DType
    from max.graph import DeviceRef, TensorType

    return TensorType(DType[dtype], shape, DeviceRef.CPU())


def _buffer(dtype: str, *shape: str) -> Any:
    from max.dtype import DType
    from max.graph import BufferType, DeviceRef

    return BufferType(DType[dtype], shape, DeviceRef.CPU())


def _host(array: Array) -> Any:
    from max.driver import Buffer

    return Buffer.from_numpy(np.ascontiguousarray(array))
