"""What a user would take instead: torch, transformers, ONNX Runtime, loops in numba."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any, ClassVar

import numpy as np

from gdn_graph.reference import EPS

from . import memory
from .peer import Array, Peer, Settings, Unavailable
from .problems import Conv, Fold, Problem, Recurrence
from .shapes import HEAD_DIM, NUM_KEY_HEADS, NUM_VALUE_HEADS


class Library(Peer):
    """A peer of PyPI packages; the first names those that are shown."""

    packages: ClassVar[tuple[str, ...]]

    def module(self, name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise Unavailable(
                f"{name} is not there ({error}); pip install 'gdn-graph[compare]'"
            ) from None

    @property
    def versions(self) -> dict[str, str]:
        return {package: importlib.metadata.version(package) for package in self.packages}


class _Torch(Library):
    packages: ClassVar[tuple[str, ...]] = ("torch",)

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.torch = self.module("torch")
        self.torch.set_num_threads(settings.threads)
        self.torch.set_grad_enabled(False)


class TorchEager(_Torch):
    name = "torch_eager"
    about = "transformers' torch_recurrent_gated_delta_rule"
    packages = ("torch", "transformers")
    function: ClassVar[str] = "torch_recurrent_gated_delta_rule"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        model = self.module("transformers.models.qwen3_5.modeling_qwen3_5")
        rule = getattr(model, self.function)
        how = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}

        def run(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
            return rule(q, k, v, g=g, beta=beta, initial_state=state, **how)

        self.run: Any = run

    def load(self, problem: Problem, copies: int) -> None:
        assert isinstance(problem, Recurrence)
        p, tensor = problem, self.torch.from_numpy
        q, k = _repeat(p.q), _repeat(p.k)  # as its callers do
        self.inputs = [tensor(memory.copy(x)) for x in (q, k, p.v, np.log(p.decay), p.beta)]
        self.pools = [tensor(memory.copy(p.state)) for _ in range(copies)]

    def call(self, copy: int) -> None:
        self.out, self.pools[copy] = self.run(*self.inputs, self.pools[copy])

    def results(self) -> dict[str, Array]:
        return {"out": self.out.numpy(), "state": self.pools[0].numpy()}


class TorchChunk(TorchEager):
    name = "torch_chunk"
    about = "transformers' torch_chunk_gated_delta_rule"
    function = "torch_chunk_gated_delta_rule"
    tokens = (64, 1 << 30)


class TorchCompile(TorchEager):
    name = "torch_compile"
    about = "torch.compile of transformers' torch_recurrent_gated_delta_rule"
    tokens = (1, 8)  # it unrolls the tokens

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.run = self.torch.compile(self.run, dynamic=False, fullgraph=True)


class OnnxRuntime(Library):
    name = "onnxruntime"
    about = "com.microsoft.LinearAttention, given normalised queries and keys"
    packages = ("onnxruntime",)

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.onnx = self.module("onnx")
        self.ort = self.module("onnxruntime")

    def load(self, problem: Problem, copies: int) -> None:
        assert isinstance(problem, Recurrence)
        rows = [problem.shape.batch, problem.shape.tokens]
        state = list(problem.state.shape)
        width = NUM_VALUE_HEADS * HEAD_DIM
        make, kind = self.onnx.helper, self.onnx.TensorProto.FLOAT
        sizes = {
            "q": [*rows, width],
            "k": [*rows, width],
            "v": [*rows, width],
            "state": state,
            "g": [*rows, NUM_VALUE_HEADS],
            "beta": [*rows, NUM_VALUE_HEADS],
        }
        node = make.make_node(
            "LinearAttention",
            list(sizes),
            ["out", "new_state"],
            domain="com.microsoft",
            q_num_heads=NUM_VALUE_HEADS,
            kv_num_heads=NUM_VALUE_HEADS,
            update_rule="gated_delta",
        )
        graph = make.make_graph(
            [node],
            "gated_delta",
            [make.make_tensor_value_info(name, kind, size) for name, size in sizes.items()],
            [
                make.make_tensor_value_info("out", kind, [*rows, width]),
                make.make_tensor_value_info("new_state", kind, state),
            ],
        )
        opsets = [make.make_opsetid("", 21), make.make_opsetid("com.microsoft", 1)]
        model = make.make_model(graph, opset_imports=opsets, ir_version=10)
        options = self.ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        session = self.ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        arrays = {
            "q": _repeat(_unit(problem.q)).reshape(sizes["q"]),
            "k": _repeat(_unit(problem.k)).reshape(sizes["k"]),
            "v": problem.v.reshape(sizes["v"]),
            "g": np.log(problem.decay),
            "beta": problem.beta,
        }
        inputs = {name: self.value(x) for name, x in arrays.items()}
        self.out = self.value(np.zeros([*rows, width], np.float32))
        # The op does not write in place: each copy is two states, which change roles.
        self.pools = [
            [self.value(problem.state), self.value(np.zeros_like(problem.state))]
            for _ in range(copies)
        ]
        self.session = session
        self.bindings = [
            [self.bind(inputs, *pair), self.bind(inputs, *pair[::-1])] for pair in self.pools
        ]
        self.turns = [0] * copies

    def value(self, array: Array) -> Any:
        return self.ort.OrtValue.ortvalue_from_numpy(memory.copy(array))

    def bind(self, inputs: dict[str, Any], state: Any, new_state: Any) -> Any:
        binding = self.session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_input("state", state)
        binding.bind_ortvalue_output("out", self.out)
        binding.bind_ortvalue_output("new_state", new_state)
        return binding

    def call(self, copy: int) -> None:
        turn = self.turns[copy]
        self.session.run_with_iobinding(self.bindings[copy][turn])
        self.turns[copy] = 1 - turn

    def results(self) -> dict[str, Array]:
        return {"out": self.out.numpy(), "state": self.pools[0][1].numpy()}


class Numba(Library):
    name = "numba"
    about = "plain loops, parallel over rows and value heads"
    packages = ("numba",)

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        numba = self.module("numba")
        numba.set_num_threads(settings.threads)
        self.loops = numba.njit(parallel=True, fastmath=True)(_loops(numba.prange))

    def load(self, problem: Problem, copies: int) -> None:
        assert isinstance(problem, Recurrence)
        p = problem
        self.inputs = [memory.copy(x) for x in (p.q, p.k, p.v, p.decay, p.beta)]
        self.out = memory.empty(p.v.shape)
        self.pools = [memory.copy(p.state) for _ in range(copies)]

    def call(self, copy: int) -> None:
        self.loops(*self.inputs, self.pools[copy], self.out)

    def results(self) -> dict[str, Array]:
        return {"out": self.out, "state": self.pools[0]}


class TorchFoldEager(_Torch):
    name = "torch_fold_eager"
    about = "mul_ and addcmul_, record by record"
    kind = "fold"
    algorithm = "fold"
    layers = True

    def load(self, problem: Problem, copies: int) -> None:
        assert isinstance(problem, Fold)
        tensor = self.torch.from_numpy
        self.keys = tensor(memory.copy(_repeat(problem.keys)))
        self.factors = tensor(memory.copy(problem.factors))
        self.decay = tensor(memory.copy(problem.decay))
        self.pools = [tensor(memory.copy(problem.state)) for _ in range(copies)]

    def call(self, copy: int) -> None:
        self.fold(self.pools[copy], self.keys, self.factors, self.decay)

    def fold(self, state: Any, keys: Any, factors: Any, decay: Any) -> None:
        for j in range(keys.shape[1]):
            state.mul_(decay[:, j, :, None, None])
            state.addcmul_(keys[:, j, :, :, None], factors[:, j, :, None, :])

    def results(self) -> dict[str, Array]:
        return {"state": self.pools[0].numpy()}


class TorchFoldMatmul(TorchFoldEager):
    name = "torch_fold_baddbmm"
    about = "one baddbmm_ of all records"

    def fold(self, state: Any, keys: Any, factors: Any, decay: Any) -> None:
        rows, records, heads, size = keys.shape
        # after[j] is the product of the decays from record j on.
        after = decay.flip([1]).cumprod(1).flip([1])
        weight = self.torch.cat([after[:, 1:], self.torch.ones_like(after[:, :1])], 1)
        flat = state.view(rows * heads, size, -1)
        flat.mul_(after[:, 0].reshape(-1, 1, 1))
        left = keys.permute(0, 2, 3, 1).reshape(rows * heads, size, records)
        right = (factors * weight[..., None]).transpose(1, 2).reshape(rows * heads, records, -1)
        flat.baddbmm_(left, right)


class TorchFoldCompile(TorchFoldEager):
    name = "torch_fold_compile"
    about = "torch.compile of the records in turn"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)

        def fold(state: Any, keys: Any, factors: Any, decay: Any) -> None:
            x = state
            for j in range(keys.shape[1]):
                x = x * decay[:, j, :, None, None]
                x = x + keys[:, j, :, :, None] * factors[:, j, :, None, :]
            state.copy_(x)

        self.compiled = self.torch.compile(fold, dynamic=False)

    def call(self, copy: int) -> None:
        self.compiled(self.pools[copy], self.keys, self.factors, self.decay)


class TorchConv(_Torch):
    name = "torch_conv_silu"
    about = "conv1d and silu on channels-first rows, as transformers does it; no window"
    kind = "conv"
    algorithm = "conv"

    def load(self, problem: Problem, copies: int) -> None:
        assert isinstance(problem, Conv)
        tensor, width = self.torch.from_numpy, problem.weight.shape[1]
        rows = problem.x.reshape(problem.shape.batch, problem.shape.tokens, -1).swapaxes(1, 2)
        rows = np.concatenate([problem.state, rows], axis=2)
        self.weight = tensor(memory.copy(problem.weight.reshape(-1, 1, width)))
        self.pools = [tensor(memory.copy(rows)) for _ in range(copies)]

    def call(self, copy: int) -> None:
        functional, x = self.torch.nn.functional, self.pools[copy]
        self.out = functional.silu(functional.conv1d(x, self.weight, groups=x.shape[1]))

    def results(self) -> dict[str, Array]:
        return {"silu": self.out.transpose(1, 2).contiguous().numpy()}


LIBRARIES: dict[str, type[Library]] = {
    peer.name: peer
    for peer in (
        OnnxRuntime,
        Numba,
        TorchCompile,
        TorchChunk,
        TorchEager,
        TorchFoldCompile,
        TorchFoldMatmul,
        TorchFoldEager,
        TorchConv,
    )
}


def _unit(x: Array) -> Array:
    """Each vector over its length."""
    unit: Array = x / np.sqrt((x * x).sum(-1, keepdims=True) + np.float32(EPS))
    return unit


def _repeat(x: Array) -> Array:
    """A key head for each value head."""
    return np.repeat(x, NUM_VALUE_HEADS // NUM_KEY_HEADS, 2)


def _loops(prange: Any) -> Any:
    """The loops that a good programmer would write first."""
    eps = np.float32(EPS)

    def loops(q: Any, k: Any, v: Any, decay: Any, beta: Any, pool: Any, out: Any) -> None:
        rows, tokens, nk, size = q.shape
        nv = v.shape[2]
        for w in prange(rows * nv):
            b = w // nv
            h = w % nv
            kh = h // (nv // nk)
            state = pool[b, h]
            factor = np.empty(size, np.float32)
            total = np.empty(size, np.float32)
            for t in range(tokens):
                qq = np.float32(0)
                kk = np.float32(0)
                for x in range(size):
                    qq += q[b, t, kh, x] ** 2
                    kk += k[b, t, kh, x] ** 2
                q_scale = np.float32(1) / np.sqrt(qq + eps) / np.sqrt(np.float32(size))
                k_scale = np.float32(1) / np.sqrt(kk + eps)
                d = decay[b, t, h]
                for y in range(size):
                    factor[y] = 0
                    total[y] = 0
                for x in range(size):
                    kx = k[b, t, kh, x] * k_scale
                    for y in range(size):
                        factor[y] += state[x, y] * kx
                for y in range(size):
                    factor[y] = beta[b, t, h] * (v[b, t, h, y] - d * factor[y])
                for x in range(size):
                    kx = k[b, t, kh, x] * k_scale
                    qx = q[b, t, kh, x] * q_scale
                    for y in range(size):
                        z = state[x, y] * d + kx * factor[y]
                        state[x, y] = z
                        total[y] += z * qx
                for y in range(size):
                    out[b, t, h, y] = total[y]

    return loops
