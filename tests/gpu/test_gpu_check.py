"""scripts/gpu_check.py without a GPU: its launches in the simulator, its packing of arguments."""

from __future__ import annotations

from types import SimpleNamespace

import gpu_check
import numpy as np
import pytest
from ptxsim import TileTensor


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (2, 3, 4, 5)])
def test_tiles_are_packed_as_the_kernels_take_them(shape):
    address = 0x7F00_0000_1000
    array = SimpleNamespace(data=SimpleNamespace(ptr=address))
    want = TileTensor(np.zeros(shape, np.float32), shape).pack(address)
    assert gpu_check.Tile(array, shape).pack() == want


@pytest.mark.slow
def test_build_and_check(tmp_path, capsys):
    gpu_check.main(["build", str(tmp_path)])
    gpu_check.main(["run", str(tmp_path), "--simulate"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("ok  ") for line in lines) == 4

    answers = dict(np.load(tmp_path / "f32.npz"))
    answers["true_out"][0, 0] += 0.1 * np.abs(answers["true_out"]).max()
    np.savez(tmp_path / "f32.npz", **answers)
    with pytest.raises(SystemExit, match="a kernel is wrong"):
        gpu_check.main(["run", str(tmp_path), "--simulate"])
