"""serve-check: what it refuses without starting a server, and what it prints with one."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from serving import MAX_LENGTH

from gdn_graph.serve.check import check_folder, serve_check


def _architecture(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [name]}))

    return change


def _float16_weights(folder: Path) -> None:
    save_file({"x": np.zeros(1, np.float16)}, folder / "model.safetensors")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "is not a folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "there is no .*config.json"),
    "config of junk": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "config of a list": (lambda f: (f / "config.json").write_text("[]"), "must hold an object"),
    "other model": (_architecture("LlamaForCausalLM"), "LlamaForCausalLM.*must name Qwen3_5"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no .*safetensors"),
    "cut weights": (lambda f: (f / "model.safetensors").write_bytes(b"\x09"), "not a safetensors"),
    "float16 weights": (_float16_weights, "F16 weights.*must be BF16 or F32"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_folder_is_refused_in_one_line(
    fault: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    check_folder(folder, "cpu", "float32")
    change, message = FAULTS[fault]
    change(folder)
    assert serve_check(folder) == 1
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert re.search(message, out)


@pytest.mark.parametrize(
    ("device", "encoding", "message"),
    [
        ("cpu", "bfloat16", "encoding is 'bfloat16'; on a cpu it must be float32"),
        ("gpu:0", "float16", "encoding is 'float16'; on a gpu it must be bfloat16 or"),
        ("tpu", "float32", "device is 'tpu'; it must be cpu"),
    ],
)
def test_an_unsupported_encoding_is_refused(
    device: str,
    encoding: str,
    message: str,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert serve_check(checkpoint, device=device, encoding=encoding) == 1
    assert message in capsys.readouterr().out


def test_a_server_that_does_not_start_is_told_in_one_line(
    stand_in: Callable[[str], None], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("raise ValueError('the weights are made of cheese')")
    assert serve_check(checkpoint) == 1
    out = capsys.readouterr().out
    assert re.fullmatch(r"serve-check: .*made of cheese \(log: (\S+)\)\n", out)
    Path(out.split()[-1].rstrip(")")).unlink()


@pytest.mark.slow
def test_a_good_folder_is_measured(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_check(checkpoint, max_length=MAX_LENGTH, max_tokens=16) == 0
    out = capsys.readouterr().out
    for label in ("startup", "first token", "tokens per second", "greedy text"):
        assert label in out
