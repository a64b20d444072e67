"""The GPU kernels on a GPU: checked against the specification, then timed.

    python scripts/gpu_check.py build FOLDER    needs gdn-graph with its test extra, and no GPU
    python scripts/gpu_check.py run FOLDER      needs an NVIDIA GPU, NumPy and CuPy; nothing else

`build` compiles the kernels to PTX for sm_80, sm_90a and sm_100a and writes cases with the answers
of the specification in float64 and, to the bit, of the PTX simulator. `run` loads the PTX through
the CUDA driver (a GPU of another kind takes the sm_80 PTX, which its driver compiles), checks every
kernel, and prints a table; it takes less than five minutes. A red check ends it before any timing.

A row of the table is one launch: the median over replays of a CUDA graph, whose launches go through
pool rows that together are several times the L2 cache, so that each finds its state in memory. The
share is of the bandwidth of a device-to-device copy measured in the same run. Bytes are the
compulsory traffic: the state read (and written, for the plain op and the fold), tokens, outputs and
records. `run --simulate` checks with the simulator in place of a GPU, and times nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ARCHES = ("sm_80", "sm_90a", "sm_100a")
DTYPES = ("f32", "bf16")
KD = VD = 128
KEY_HEADS = 16
RING_LENS = (4, 8)
CONV_WIDTH = 4
TOLERANCE = {"out": 2e-5, "ring": 2e-5, "f32": 1e-5, "bf16": 1e-2}
BATCHES, VALUE_HEADS, WINDOWS = (1, 8, 32, 128), (32, 48), (1, 2, 4, 8)


# The case that is checked: a full window, an overlong row, one token, an empty row, a padding row.
CHECK = {"lengths": (4, 7, 1, 0, 3, 2), "key_heads": 2, "value_heads": 6, "ring_len": 4}
PADDING = 0xFFFFFFFF


@dataclass(frozen=True)
class Tile:
    """A row-major TileTensor, as the kernels take it by value."""

    array: Any  # NumPy in simulation, CuPy on a GPU
    shape: tuple[int, ...]

    def pack(self) -> bytes:
        """The data pointer, the shape, and the strides but the last, which is 1."""
        strides = [int(np.prod(self.shape[i + 1 :])) for i in range(len(self.shape) - 1)]
        words = [self.array.data.ptr, *self.shape, *strides]
        return b"".join(int(word).to_bytes(8, "little") for word in words)


@dataclass(frozen=True)
class Launch:
    kernel: str
    grid: tuple[int, int, int]
    threads: int
    args: tuple[Any, ...]  # 32-bit integers and Tiles


def tile(array: Any) -> Tile:
    return Tile(array, tuple(array.shape))


def recurrence(
    name: str, sizes: dict[str, int], wide: bool, t: dict[str, Any], dtype: str
) -> Launch:
    """A launch of fwd, verify, fwd_block or verify_block over the tensors t."""
    rows, nv, slots = len(t["slot_idx"]), t["state"].shape[1], "wide" if wide else "narrow"
    nk = (t["qkv"].shape[1] - nv * VD) // (2 * KD)
    args = [rows, nv, nk, nk * KD]
    names = ("out", "state", "slot_idx", "qkv", "decay", "beta", "offsets")
    args += [tile(t[name]) for name in names]
    if name.startswith("verify"):
        args += [tile(t["ring"]), tile(t["ring_slot_idx"]), t["ring"].shape[3]]
    args += [t["qkv"].shape[1], 1, nv, 1, nv * VD, 1]
    grid = (nv // nk, nk, rows * sizes[f"{slots}_splits"])
    return Launch(f"{name}_{dtype}", grid, sizes[f"{slots}_threads"], tuple(args))


def fold(sizes: dict[str, int], t: dict[str, Any], dtype: str) -> Launch:
    layers, rows = t["row_ids"].shape
    nv, nk = t["state"].shape[1], t["ring"].shape[1]
    args = (rows, layers, nv, nk, tile(t["state"]), tile(t["row_ids"]), tile(t["ring"]))
    args += (tile(t["ring_row_ids"]), t["ring"].shape[3], tile(t["accepted"]))
    grid = (layers * rows, nv // nk * sizes["fold_parts"], nk)
    return Launch(f"fold_{dtype}", grid, sizes["fold_threads"], args)


def conv(t: dict[str, Any], dtype: str) -> Launch:
    rows, (tokens, channels) = len(t["slot_idx"]), t["x"].shape
    args = (rows, tokens, channels, tile(t["x"]), tile(t["weight"]), tile(t["conv_state"]))
    args += (tile(t["slot_idx"]), tile(t["offsets"]), tile(t["conv_out"]))
    args += (channels, 1, CONV_WIDTH, 1, channels, 1)
    return Launch(f"conv_{dtype}", (-(-channels // 128), rows, 1), 128, args)


# --- build ---------------------------------------------------------------------------------------


def build(folder: Path) -> None:
    """Writes FOLDER/<arch>/ring<len>/*.ptx and launch.json, and FOLDER/<dtype>.npz."""
    import shutil

    from emit_ptx import Build

    for arch in ARCHES:
        for ring_len in RING_LENS:
            built = Build(KD, VD, ring_len, CONV_WIDTH, arch, dtypes=DTYPES).folder()
            shutil.copytree(built, folder / arch / f"ring{ring_len}", dirs_exist_ok=True)
    for dtype in DTYPES:
        np.savez(folder / f"{dtype}.npz", **answers(folder, dtype))
    print(f"built {folder}: copy it and this file to a machine with a GPU, and run there")


def answers(folder: Path, dtype: str) -> dict[str, Array]:
    """Inputs, and what the specification and the simulator make of them."""
    from gdn_graph import reference

    found = inputs(dtype)
    for algorithm in ("", "_block"):
        bits = simulate_all(folder, dtype, algorithm, {k: v.copy() for k, v in found.items()})
        found |= {f"bits{algorithm}_{name}": array for name, array in bits.items()}
    t = {name: array.copy() for name, array in found.items()}
    state, conv_state = values(t["state"], dtype), values(t["conv_state"], dtype)
    rows = t["slot_idx"], t["offsets"]
    found["true_conv_out"] = reference.gated_delta_conv1d_fwd(
        t["x"], t["weight"], conv_state, *rows
    )
    found["true_conv_state"] = conv_state
    gates = t["qkv"], t["decay"], t["beta"]
    ring, verified = t["ring"].astype(np.float64), state.copy()
    found["true_out"] = reference.gated_delta_recurrence_fwd(*gates, state, *rows)
    found["true_state"] = state
    reference.gated_delta_recurrence_verify_ring_fwd(
        *gates, verified, ring, t["slot_idx"], t["ring_slot_idx"], t["offsets"], 1
    )
    found["true_ring"] = ring
    return found


def values(pool: Array, dtype: str) -> Array:
    """float64 values of a pool; bfloat16 is held as its bits."""
    if dtype == "bf16":
        pool = (pool.astype(np.uint32) << 16).view(np.float32)
    return pool.astype(np.float64)


def inputs(dtype: str) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    lengths, nk, nv = CHECK["lengths"], CHECK["key_heads"], CHECK["value_heads"]
    rows, tokens, channels = len(lengths), sum(lengths) + 2, 2 * nk * KD + nv * VD

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32)

    def pool(*shape: int) -> Array:
        x = 0.3 * normal(*shape)
        return (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else x

    slots = rng.permutation(rows + 2)[:rows].astype(np.uint32)
    ring_slots = rng.permutation(rows + 1)[:rows].astype(np.uint32)
    slots[-1] = ring_slots[-1] = PADDING
    stride = -(-(KD + nv // nk * (VD + 1)) // 32) * 32
    return {
        "x": normal(tokens, channels),
        "qkv": normal(tokens, channels),
        "decay": rng.uniform(0.6, 1, (tokens, nv)).astype(np.float32),
        "beta": rng.uniform(0, 1, (tokens, nv)).astype(np.float32),
        "weight": normal(channels, CONV_WIDTH),
        "state": pool(rows + 2, nv, KD, VD),
        "conv_state": pool(rows + 2, channels, CONV_WIDTH - 1),
        "ring": np.zeros((rows + 1, nk, CHECK["ring_len"], stride), np.float32),
        "slot_idx": slots,
        "ring_slot_idx": ring_slots,
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32),
        "row_ids": slots[None].copy(),
        "ring_row_ids": ring_slots[None].copy(),
        "accepted": np.array(lengths, np.uint32),
    }


def cycle(
    sizes: dict[str, int], dtype: str, algorithm: str, wide: bool, t: dict[str, Any]
) -> list[Launch]:
    """Conv; the plain op on a copy of the pool; verify and fold of every window in full."""
    plain = {**t, "out": t["plain_out"], "state": t["plain_state"]}
    return [
        conv(t, dtype),
        recurrence(f"fwd{algorithm}", sizes, wide, plain, dtype),
        recurrence(f"verify{algorithm}", sizes, wide, t, dtype),
        fold(sizes, t, dtype),
    ]


RESULTS = ("conv_out", "conv_state", "plain_out", "plain_state", "out", "state", "ring")


def outputs_of(t: dict[str, Any]) -> dict[str, Any]:
    """Adds the tensors that the launches write first."""
    tokens, channels = t["x"].shape
    nv = t["state"].shape[1]
    t["conv_out"] = np.full((tokens, channels), np.nan, np.float32)
    t["plain_out"] = np.full((tokens, nv * VD), np.nan, np.float32)
    t["out"] = t["plain_out"].copy()
    t["plain_state"] = t["state"].copy()
    return t


def simulate_all(folder: Path, dtype: str, algorithm: str, t: dict[str, Array]) -> dict[str, Array]:
    """The launches of `cycle` in the simulator."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "ptxsim"))
    from ptxsim import Buffer, Kernel, TileTensor

    ptx = folder / "sm_90a" / f"ring{CHECK['ring_len']}"
    sizes = json.loads((ptx / "launch.json").read_text())[dtype]
    t = outputs_of(t)
    for launch in cycle(sizes, dtype, algorithm, False, t):
        args = [
            TileTensor(Buffer(a.array), a.shape) if isinstance(a, Tile) else a for a in launch.args
        ]
        kernel = Kernel.from_ptx((ptx / f"{launch.kernel}.ptx").read_text())
        kernel.launch(launch.grid, launch.threads, args, races=True)
    return {name: t[name] for name in RESULTS}


# --- run -----------------------------------------------------------------------------------------


class Cuda:
    """The kernels of a folder, through the CUDA driver, beside CuPy's memory and streams."""

    def __init__(self, folder: Path) -> None:
        import cupy

        self.cupy = cupy
        cupy.cuda.runtime.free(0)  # makes the primary context, and makes it current
        self.driver = ctypes.CDLL("libcuda.so.1")
        device = cupy.cuda.Device()
        capability = device.compute_capability
        self.arch = {"90": "sm_90a", "100": "sm_100a"}.get(capability, "sm_80")
        self.folder = folder / self.arch
        attributes = device.attributes
        self.processors = int(attributes["MultiProcessorCount"])
        self.l2_bytes = int(attributes["L2CacheSize"])
        name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
        self.description = f"{name} (compute capability {capability}), PTX of {self.arch}"
        self.functions: dict[Path, Any] = {}

    def sizes(self, ring_len: int, dtype: str) -> dict[str, int]:
        text = (self.folder / f"ring{ring_len}" / "launch.json").read_text()
        sizes: dict[str, int] = json.loads(text)[dtype]
        return sizes

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self.driver, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()}")

    def function(self, ring_len: int, kernel: str) -> Any:
        path = self.folder / f"ring{ring_len}" / f"{kernel}.ptx"
        if path not in self.functions:
            text = path.read_text()
            entry = re.search(r"\.entry\s+(\w+)", text)
            assert entry, f"{path} has no kernel"
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), text.encode() + b"\0")
            name = entry[1].encode()
            self._call("cuModuleGetFunction", ctypes.byref(function), module, name)
            self.functions[path] = function
        return self.functions[path]

    def launch(self, ring_len: int, launch: Launch, stream: Any) -> None:
        packed = [
            a.pack() if isinstance(a, Tile) else int(a).to_bytes(4, "little") for a in launch.args
        ]
        buffers = [ctypes.create_string_buffer(data, len(data)) for data in packed]
        pointers = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(b) for b in buffers))
        self._call(
            "cuLaunchKernel",
            self.function(ring_len, launch.kernel),
            *(ctypes.c_uint(n) for n in (*launch.grid, launch.threads, 1, 1, 0)),
            ctypes.c_void_p(stream.ptr),
            pointers,
            None,
        )

    def seconds(self, launches: Sequence[Launch], ring_len: int, replays: int = 15) -> float:
        """The median time of one launch, over replays of a graph of them all."""
        stream = self.cupy.cuda.Stream(non_blocking=True)
        for one in launches[:1]:
            self.launch(ring_len, one, stream)  # loads the module, which a capture may not
        stream.synchronize()
        with stream:
            stream.begin_capture()
            for one in launches:
                self.launch(ring_len, one, stream)
            graph = stream.end_capture()
        return self.median(lambda: graph.launch(stream), stream, replays) / len(launches)

    def median(self, work: Any, stream: Any, replays: int) -> float:
        times = []
        for i in range(replays + 2):
            begin, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            begin.record(stream)
            work()
            end.record(stream)
            end.synchronize()
            if i >= 2:  # warm
                times.append(self.cupy.cuda.get_elapsed_time(begin, end) / 1e3)
        return statistics.median(times)

    def copy_bandwidth(self) -> float:
        """Bytes read and written a second by a copy of 1 GiB."""
        source = self.cupy.zeros(1 << 30, self.cupy.uint8)
        target = self.cupy.empty_like(source)
        stream = self.cupy.cuda.Stream(non_blocking=True)
        copy = lambda: target.data.copy_from_device_async(source.data, source.nbytes, stream)  # noqa: E731
        return 2 * source.nbytes / self.median(copy, stream, 15)


def check(folder: Path, cuda: Cuda | None) -> bool:
    """Every kernel against the answers; prints a line each. Without a GPU, in the simulator."""
    ring_len = CHECK["ring_len"]
    good = True
    for dtype in DTYPES:
        known = dict(np.load(folder / f"{dtype}.npz"))
        given = {k: v for k, v in known.items() if not k.startswith(("true_", "bits_"))}
        for algorithm in ("", "_block"):
            bits = {name: known[f"bits{algorithm}_{name}"] for name in RESULTS}
            for wide in (False, True) if cuda else (False,):
                t = outputs_of({name: array.copy() for name, array in given.items()})
                if cuda:
                    t = {name: cuda.cupy.asarray(array) for name, array in t.items()}
                    stream = cuda.cupy.cuda.Stream.null
                    sizes = cuda.sizes(ring_len, dtype)
                    for launch in cycle(sizes, dtype, algorithm, wide, t):
                        cuda.launch(ring_len, launch, stream)
                    got = {name: cuda.cupy.asnumpy(t[name]) for name in RESULTS}
                else:
                    got = simulate_all(folder, dtype, algorithm, t)
                form = algorithm.strip("_") or "exact"
                label = f"{dtype} pool, {form}, {'wide' if wide else 'narrow'} blocks"
                good &= judge(label, dtype, got, known, bits)
    return good


def judge(
    label: str, dtype: str, got: dict[str, Array], known: dict[str, Array], bits: dict[str, Array]
) -> bool:
    """Compares with the specification, the pair with each other to the bit, and the simulator."""
    true = {"conv_out": "conv_out", "out": "out", "ring": "ring"}
    true |= {"state": "state", "conv_state": "conv_state"}
    good = True
    errors = {}
    for name, truth in true.items():
        pool = name in ("state", "conv_state")
        x = values(got[name], dtype) if pool else got[name].astype(np.float64)
        want = known[f"true_{truth}"]
        errors[name] = float(np.abs(x - want).max() / np.abs(want).max())
        limit = TOLERANCE[dtype] if pool else TOLERANCE.get(name, TOLERANCE["out"])
        good &= errors[name] <= limit  # a NaN, which is an output not written, fails too
    exact = same(got["plain_out"], got["out"]) and same(got["plain_state"], got["state"])
    good &= exact
    same_as_simulated = sum(same(got[name], bits[name]) for name in RESULTS)
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(
        f"{'ok  ' if good else 'FAIL'} {label}: error {shown}; verify + fold = plain to the bit: "
        f"{'yes' if exact else 'NO'}; tensors as simulated: {same_as_simulated} of {len(RESULTS)}"
    )
    return good


def same(a: Array, b: Array) -> bool:
    return a.tobytes() == b.tobytes()


def timing_tensors(
    cuda: Cuda, dtype: str, batch: int, nv: int, window: int, ring_len: int
) -> list[dict[str, Any]]:
    """Sets of tensors of one shape that share pools: together several times the L2 cache."""
    xp = cuda.cupy
    head_bytes = KD * VD * (4 if dtype == "f32" else 2)
    sets = max(2, -(-4 * cuda.l2_bytes // (batch * nv * head_bytes)))
    channels, rows = 2 * KEY_HEADS * KD + nv * VD, sets * batch
    stride = -(-(KD + nv // KEY_HEADS * (VD + 1)) // 32) * 32
    if dtype == "f32":
        state = xp.full((rows, nv, KD, VD), 0.01, xp.float32)
    else:
        state = xp.full((rows, nv, KD, VD), 0x3C24, xp.uint16)  # 0.01
    ring = xp.full((rows, KEY_HEADS, ring_len, stride), 0.01, xp.float32)
    tokens = batch * window
    found = []
    for i in range(sets):
        slots = xp.arange(i * batch, (i + 1) * batch, dtype=xp.uint32)
        found.append(
            {
                "qkv": xp.full((tokens, channels), 0.1, xp.float32),
                "decay": xp.full((tokens, nv), 0.9, xp.float32),
                "beta": xp.full((tokens, nv), 0.5, xp.float32),
                "out": xp.empty((tokens, nv * VD), xp.float32),
                "state": state,
                "ring": ring,
                "slot_idx": slots,
                "ring_slot_idx": slots,
                "offsets": xp.arange(0, tokens + 1, window, dtype=xp.uint32),
                "row_ids": slots[None],
                "ring_row_ids": slots[None],
                "accepted": xp.full(batch, window, xp.uint32),
            }
        )
    return found


def compulsory_bytes(kernel: str, dtype: str, batch: int, nv: int, window: int) -> int:
    state = batch * nv * KD * VD * (4 if dtype == "f32" else 2)
    record = 4 * batch * window * (KEY_HEADS * KD + nv * (VD + 1))
    tokens = 4 * batch * window * (2 * KEY_HEADS * KD + 2 * nv * VD + 2 * nv)
    if kernel == "fold":
        return 2 * state + record
    return state + tokens + (record if kernel.startswith("verify") else state)


def measure(cuda: Cuda) -> None:
    """Prints the table."""
    bandwidth = cuda.copy_bandwidth()
    print(
        f"\n{cuda.description}; copy bandwidth {bandwidth / 1e9:,.0f} GB/s; * is what the op picks"
    )
    print("| kernel | pool | nv | B | T | narrow µs | wide µs | MB | GB/s | of copy |")
    print("| --- | --- | --: | --: | --: | --: | --: | --: | --: | --: |")
    for dtype in DTYPES:
        for nv in VALUE_HEADS:
            for batch in BATCHES:
                for window in WINDOWS:
                    measure_shape(cuda, bandwidth, dtype, nv, batch, window)


def measure_shape(
    cuda: Cuda, bandwidth: float, dtype: str, nv: int, batch: int, window: int
) -> None:
    ring_len = min(r for r in RING_LENS if r >= window)
    sizes = cuda.sizes(ring_len, dtype)
    sets = timing_tensors(cuda, dtype, batch, nv, window, ring_len)
    prefers_wide = batch * nv * sizes["wide_splits"] >= 2 * cuda.processors  # as gpu/launch.mojo
    for kernel in ("fwd", "verify", "verify_block", "fold"):
        if kernel == "fold":
            times = [cuda.seconds([fold(sizes, t, dtype) for t in sets], ring_len)]
            shown, best = [f"{times[0] * 1e6:.1f}", ""], times[0]
        else:
            times = [
                cuda.seconds([recurrence(kernel, sizes, w, t, dtype) for t in sets], ring_len)
                for w in (False, True)
            ]
            best = times[prefers_wide]
            shown = [f"{x * 1e6:.1f}{'*' * (w == prefers_wide)}" for w, x in enumerate(times)]
        size = compulsory_bytes(kernel, dtype, batch, nv, window)
        rate = size / best
        print(
            f"| {kernel} | {dtype} | {nv} | {batch} | {window} | {shown[0]} | {shown[1]} "
            f"| {size / 1e6:.1f} | {rate / 1e9:,.0f} | {rate / bandwidth:.0%} |",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("build", "compile and prepare, without a GPU"), ("run", "check and time")):
        command = commands.add_parser(name, help=text)
        command.add_argument("folder", type=Path)
    command.add_argument("--simulate", action="store_true", help="check without a GPU")
    command.add_argument("--check-only", action="store_true", help="time nothing")
    options = parser.parse_args(arguments)
    if options.command == "build":
        options.folder.mkdir(parents=True, exist_ok=True)
        build(options.folder)
        return
    cuda = None if options.simulate else Cuda(options.folder)
    if not check(options.folder, cuda):
        sys.exit("gpu_check: a kernel is wrong; nothing was timed")
    if cuda and not options.check_only:
        measure(cuda)


if __name__ == "__main__":
    main()
