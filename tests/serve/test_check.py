"""serve-check: what it refuses without starting a server, and what it prints with one."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from serving import MAX_LENGTH, START_SECONDS

from gdn_graph.serve.check import CheckError, check_folder, serve_check
from gdn_graph.serve.server import ServeError


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from gdn_graph.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )


def _serve_check(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return _command("serve-check", str(folder), *options)


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
def test_a_bad_folder_is_refused_in_one_line(fault: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    check_folder(folder, "cpu", "float32")
    change, message = FAULTS[fault]
    change(folder)
    with pytest.raises(CheckError) as raised:
        serve_check(folder)
    assert re.fullmatch(f"serve-check: .*{message}.*", str(raised.value))


def test_the_command_prints_the_line_and_fails(tmp_path: Path) -> None:
    result = _serve_check(tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(r"gdn-graph: serve-check: there is no .*config.json.*\n", result.stderr)


@pytest.mark.parametrize(
    ("device", "encoding", "message"),
    [
        ("cpu", "bfloat16", "encoding is 'bfloat16'; on a cpu it must be float32"),
        ("gpu:0", "float16", "encoding is 'float16'; on a gpu it must be bfloat16 or"),
        ("tpu", "float32", "device is 'tpu'; it must be cpu"),
    ],
)
def test_an_unsupported_encoding_is_refused(
    device: str, encoding: str, message: str, checkpoint: Path
) -> None:
    with pytest.raises(CheckError, match=message):
        serve_check(checkpoint, device=device, encoding=encoding)


def test_a_server_that_does_not_start_is_told_in_one_line(
    stand_in: Callable[[str], None], checkpoint: Path
) -> None:
    stand_in("raise ValueError('the weights are made of cheese')")
    with pytest.raises(ServeError) as raised:
        serve_check(checkpoint)
    told = re.fullmatch(r"serve-check: .*made of cheese \(log: (\S+)\)", str(raised.value))
    assert told
    Path(told[1]).unlink()


def test_the_spec_is_printed() -> None:
    assert _command("serve-spec").stdout == "gdn_graph.serve\n"


@pytest.mark.slow
def test_a_good_folder_is_measured(checkpoint: Path) -> None:
    result = _serve_check(
        checkpoint, "--json", "--max-length", str(MAX_LENGTH), "--max-tokens", "16"
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["tokens"] == len(report["text"]) == 16
    for figure in ("startup_seconds", "first_token_seconds", "tokens_per_second"):
        assert report[figure] > 0
