"""The C reference, benchmarks/c/gated_delta.c, and the limits of the machine."""

from __future__ import annotations

import ctypes
from time import perf_counter_ns
from typing import Any

import numpy as np

from . import memory, native
from .peer import Array, Peer, Settings
from .problems import Fold, Problem, Recurrence
from .shapes import NUM_KEY_HEADS, NUM_VALUE_HEADS

_POINTERS = ("q", "k", "v", "decay", "beta", "pool", "slot", "out", "factors")


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("B", "T", "nk", "nv")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]


class CRec(Peer):
    name = "c_rec"
    about = "C, token by token, the next head prefetched in one pass"
    layers = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.function = getattr(native.library("gated_delta"), self.name)

    def load(self, problem: Problem, copies: int) -> None:
        assert isinstance(problem, Recurrence)
        shape = problem.shape
        names = ("q", "k", "v", "decay", "beta")
        inputs = {name: memory.copy(getattr(problem, name)) for name in names}
        layers = (shape.layers, *problem.v.shape)
        self.out, self.factors = memory.empty(layers), memory.empty(layers)
        self.slot = np.arange(shape.batch, dtype=np.int32)
        self.pools = [memory.copy(problem.state) for _ in range(copies)]
        self.arrays = inputs  # kept alive: C only has their addresses
        state = problem.state.nbytes // shape.layers
        self.batches = []
        for pool in self.pools:
            calls = []
            for layer in range(shape.layers):
                address = {name: x.ctypes.data for name, x in inputs.items()}
                address["pool"] = pool.ctypes.data + layer * state
                address["slot"] = self.slot.ctypes.data
                address["out"] = self.out[layer].ctypes.data
                address["factors"] = self.factors[layer].ctypes.data
                batch = _Batch(
                    shape.batch,
                    shape.tokens,
                    NUM_KEY_HEADS,
                    NUM_VALUE_HEADS,
                    *(address[name] for name in _POINTERS),
                )
                calls.append(ctypes.byref(batch))
            self.batches.append(calls)

    def call(self, copy: int) -> None:
        for batch in self.batches[copy]:
            self.function(batch, self.threads)

    def results(self) -> dict[str, Array]:
        return {"out": self.out, "state": self.pools[0]}


class CRecPaced(CRec):
    name = "c_rec_paced"
    about = "C, token by token, the prefetch spread over the passes as ours is"


class CBlk(CRec):
    name = "c_blk"
    about = "C, four tokens as one block"
    algorithm = "block"


class CVerify(CRec):
    name = "c_verify"
    about = "C, four tokens as one block, state only read, factors emitted"
    algorithm = "block verify"
    tokens = (1, 4)

    def results(self) -> dict[str, Array]:
        return {"out": self.out, "factors": self.factors, "kept": self.pools[0]}


class CFold(Peer):
    name = "c_fold"
    about = "C, fold of records"
    kind = "fold"
    algorithm = "fold"
    layers = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.function = getattr(native.library("gated_delta"), self.name)

    def load(self, problem: Problem, copies: int) -> None:
        assert isinstance(problem, Fold)
        arrays = [memory.copy(x) for x in (problem.keys, problem.factors, problem.decay)]
        self.arrays = arrays
        rows, records = problem.decay.shape[:2]
        self.slot = np.arange(rows, dtype=np.int32)
        self.pools = [memory.copy(problem.state) for _ in range(copies)]
        lead = (rows, records, NUM_KEY_HEADS, NUM_VALUE_HEADS, *map(_pointer, arrays))
        self.calls = [
            (*lead, _pointer(pool), _pointer(self.slot), self.threads) for pool in self.pools
        ]

    def call(self, copy: int) -> None:
        self.function(*self.calls[copy])

    def results(self) -> dict[str, Array]:
        return {"state": self.pools[0]}


class CFoldPaced(CFold):
    name = "c_fold_paced"
    about = "C, fold of a number of records that the compiler knows, all prefetched"


class Limits(Peer):
    """What the machine can do: slots a second, and bytes a second of each kind of traffic."""

    name = "limits"
    about = "C, multiply-adds and memory traffic alone"

    _FLOATS = 64 << 20
    _TURNS = 1 << 18

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        library = native.library("limits")
        a, b = (memory.empty([self._FLOATS]) for _ in range(2))
        a += 1
        floats = self._FLOATS // (128 * self.threads) * 128 * self.threads
        read, update, copy = (
            getattr(library, f"limit_{what}") for what in ("read", "update", "copy")
        )
        self.arrays = a, b
        n, threads = ctypes.c_size_t(floats), self.threads
        slots = library.limit_multiply_add(ctypes.c_long(1), threads)
        self.calls: list[tuple[str, float, Any]] = [
            (
                "multiply_add",
                slots * self._TURNS,
                lambda: library.limit_multiply_add(ctypes.c_long(self._TURNS), threads),
            ),
        ]
        for hint in (0, 1):
            self.calls += [
                ("read", 4 * floats, lambda h=hint: read(_pointer(a), n, h, threads)),
                ("update", 8 * floats, lambda h=hint: update(_pointer(a), n, h, threads)),
                (
                    "streaming_copy" if hint else "copy",
                    8 * floats,
                    lambda h=hint: copy(_pointer(b), _pointer(a), n, h, threads),
                ),
            ]

    def rates(self) -> dict[str, float]:
        """Slots or bytes a second, each the better of two ways and two tries."""
        best: dict[str, float] = {}
        for _ in range(2):
            for name, work, call in self.calls:
                start = perf_counter_ns()
                call()
                rate = work / (perf_counter_ns() - start) * 1e9
                best[name] = max(best.get(name, 0.0), rate)
        return best


def _pointer(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
