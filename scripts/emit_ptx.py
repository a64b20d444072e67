"""Compiles the GPU kernels to PTX, without a GPU, and caches the result.

    python scripts/emit_ptx.py FOLDER [--arch sm_90] [--key-head-dim 128] ...

writes FOLDER/<kernel>_<pool dtype>.ptx and FOLDER/launch.json. The cache lies beside that of the
kernel library and is keyed by the sources, the compiler and the options, so that an edited kernel
is compiled anew.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mojo.run import subprocess_run_mojo

from gdn_graph.library import cache_dir, compiler_version, source_dir

KERNELS = ("conv", "conv_ring", "gates", "fwd", "verify", "fold", "block")
DTYPES = ("f32", "bf16", "f16")
_SOURCE = Path(__file__).with_suffix(".mojo")


@dataclass(frozen=True)
class Build:
    """What the kernels are specialised for."""

    key_head_dim: int = 128
    value_head_dim: int = 128
    ring_len: int = 4
    conv_width: int = 4
    arch: str = "sm_90"
    kernels: tuple[str, ...] = KERNELS
    dtypes: tuple[str, ...] = ("f32", "bf16")
    ring_dtype: str = "f32"  # or bf16

    def _digest(self) -> str:
        digest = hashlib.sha256(f"{compiler_version()} {asdict(self)}".encode())
        for path in [_SOURCE, *sorted(source_dir().rglob("*.mojo"))]:
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()[:16]

    def folder(self) -> Path:
        """Where the PTX is, compiled now if it is not in the cache: <kernel>_<pool dtype>.ptx, and
        launch.json with the threads and blocks of each pool dtype.

        Raises:
            RuntimeError: The compiler failed; the message is its own.
        """
        folder = cache_dir() / "ptx" / self._digest()
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix="build-", dir=folder.parent))
            try:
                self._compile(work)
                try:
                    work.rename(folder)
                except OSError:
                    # Another process was first, with the same content.
                    if not folder.is_dir():
                        raise
            finally:
                shutil.rmtree(work, ignore_errors=True)
        return folder

    def _compile(self, folder: Path) -> None:
        values = {
            "arch": self.arch,
            "KD": self.key_head_dim,
            "VD": self.value_head_dim,
            "ring_len": self.ring_len,
            "width": self.conv_width,
        }
        defines = [f"{name}={value}" for name, value in values.items()]
        defines += [*self.kernels, *self.dtypes, f"ring_{self.ring_dtype}"]
        command = ["run", "--disable-warnings", "-I", str(source_dir().parent)]
        for define in defines:
            command += ["-D", define]
        done = subprocess_run_mojo(
            [*command, str(_SOURCE), str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"emit_ptx: mojo failed on {self}:\n{done.stderr.strip()}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90", help="sm_80, sm_90, sm_90a, sm_100a, ...")
    parser.add_argument("--key-head-dim", type=int, default=128)
    parser.add_argument("--value-head-dim", type=int, default=128)
    parser.add_argument("--ring-len", type=int, default=4)
    parser.add_argument("--conv-width", type=int, default=4)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=("f32", "bf16"))
    options = parser.parse_args(arguments)
    build = Build(
        options.key_head_dim,
        options.value_head_dim,
        options.ring_len,
        options.conv_width,
        options.arch,
        tuple(options.kernels),
        tuple(options.dtypes),
    )
    shutil.copytree(build.folder(), options.folder, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
