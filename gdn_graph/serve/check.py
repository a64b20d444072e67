"""Does this machine serve this checkpoint on our ops, and how fast: `gdn-graph serve-check`."""

import json
import os
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from openai import DefaultHttpxClient, OpenAI, OpenAIError

from gdn_graph.serve.server import ServeError, Server, max_serve

_ARCHITECTURES: Final = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
_TOKENIZER_FILES: Final = ("tokenizer.json", "vocab.json")

# Encodings MAX takes for these architectures, and the safetensors dtypes each can be read from.
_ENCODINGS: Final = {
    "cpu": {"float32": {"F32", "BF16"}},
    "gpu": {
        "bfloat16": {"F32", "BF16"},
        "float32": {"F32", "BF16"},
        "float8_e4m3fn": {"F32", "BF16", "F8_E4M3"},
        "float4_e2m1fnx2": {"F32", "BF16", "F8_E4M3", "U8"},
    },
}

_PROMPT: Final = "The quick brown fox"


class CheckError(ValueError):
    """This checkpoint cannot be served as asked; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(f"serve-check: {message}")


@dataclass(frozen=True)
class Report:
    """What serve-check measured on one request at a time.

    Attributes:
        startup_seconds: Start of the server to its first answer.
        first_token_seconds: A request to its first token.
        tokens_per_second: Tokens after the first, over the time they took.
        tokens: Tokens generated.
        text: What was generated, greedily.
    """

    startup_seconds: float
    first_token_seconds: float
    tokens_per_second: float
    tokens: int
    text: str


def check_folder(folder: Path, device: str, encoding: str) -> None:
    """Raises CheckError unless `folder` holds a checkpoint that `device` can serve at `encoding`.

    Reads config.json and the headers of the weights only.
    """
    kind = "gpu" if device.startswith("gpu") else device
    if kind not in _ENCODINGS:
        raise CheckError(f"device is {device!r}; it must be cpu, gpu or gpu:N")
    if encoding not in _ENCODINGS[kind]:
        raise CheckError(
            f"encoding is {encoding!r}; on a {kind} it must be {' or '.join(_ENCODINGS[kind])}"
        )
    if not folder.is_dir():
        raise CheckError(f"{folder} is not a folder; name a folder that holds a checkpoint")
    architectures = _read_json(folder / "config.json").get("architectures") or []
    if not any(name in _ARCHITECTURES for name in architectures):
        raise CheckError(
            f"{folder / 'config.json'} names the architectures {architectures}; "
            f"it must name {' or '.join(_ARCHITECTURES)}"
        )
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckError(
            f"{folder} has no tokenizer; it must hold {' or '.join(_TOKENIZER_FILES)} "
            "(copy them from the published model)"
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise CheckError(f"{folder} holds no *.safetensors, which the weights are read from")
    for file in weights:
        unread = sorted(_dtypes(file) - _ENCODINGS[kind][encoding])
        if unread:
            raise CheckError(
                f"{file} holds {' and '.join(unread)} weights; at {encoding} on a {kind} they "
                f"must be {' or '.join(sorted(_ENCODINGS[kind][encoding]))}"
            )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckError(f"there is no {file}; name a folder that holds a checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckError(f"{file} holds a {type(value).__name__}; it must hold an object")
    return value


def _dtypes(file: Path) -> set[str]:
    """The dtypes in a safetensors file: a u64 header length, then the header in JSON."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError, struct.error):
        raise CheckError(f"{file} is not a safetensors file") from None


def openai_client(server: Server, timeout: float = 600) -> OpenAI:
    """Talks to a server of this machine: past any proxy, each request once, for timeout seconds."""
    direct = DefaultHttpxClient(trust_env=False)
    return OpenAI(
        base_url=server.url, api_key="none", max_retries=0, timeout=timeout, http_client=direct
    )


def measure(server: Server, max_tokens: int) -> Report:
    """Times the second of two equal requests, and holds their greedy answers to be the same."""
    api = openai_client(server)
    first, second = (_ask(api, server, max_tokens) for _ in range(2))
    if first.text != second.text:
        raise ServeError(f"two equal requests gave {first.text!r} and then {second.text!r}")
    return second


def _ask(client: OpenAI, server: Server, max_tokens: int) -> Report:
    start = time.monotonic()
    stream = client.completions.create(
        model=server.model,
        prompt=_PROMPT,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, tokens, first_token, end = "", 0, start, start
    for chunk in stream:
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
        if chunk.choices and chunk.choices[0].text:
            end = time.monotonic()
            first_token = end if not text else first_token
            text += chunk.choices[0].text
    if not text:
        raise ServeError(f"the server answered a request for {max_tokens} tokens with no text")
    return Report(
        startup_seconds=server.startup_seconds,
        first_token_seconds=first_token - start,
        tokens_per_second=(tokens - 1) / (end - first_token) if end > first_token else 0.0,
        tokens=tokens,
        text=text,
    )


def serve_check(
    folder: Path,
    *,
    device: str = "cpu",
    encoding: str | None = None,
    max_length: int = 512,
    max_tokens: int = 64,
    timeout_seconds: float = 900.0,
) -> Report:
    """Serves `folder` on a free loopback port, asks it, and ends the server.

    Args:
        folder: A Qwen3.5 checkpoint.
        device: cpu, gpu or gpu:N.
        encoding: MAX's name of a dtype; by default float32 on a CPU and bfloat16 on a GPU.
        max_length: Tokens a request may take, prompt included.
        max_tokens: Tokens to generate.
        timeout_seconds: How long the server may take to answer.

    Raises:
        CheckError: The checkpoint cannot be served as asked; no server was started.
        ServeError: The server did not start or did not answer; its log is kept and named.
    """
    encoding = encoding or ("float32" if device == "cpu" else "bfloat16")
    check_folder(folder, device, encoding)
    options = [
        *("--devices", device, "--quantization-encoding", encoding),
        *("--max-length", str(max_length)),
        # Else MAX takes text for reasoning until </think>, and completions show none of it.
        *("--reasoning-parser", "none"),
    ]
    descriptor, name = tempfile.mkstemp(prefix="gdn-graph-serve-", suffix=".log")
    os.close(descriptor)
    log = Path(name)
    try:
        with max_serve(folder, options, log, timeout_seconds=timeout_seconds) as server:
            report = measure(server, max_tokens)
    except (ServeError, OpenAIError) as error:
        raise ServeError(f"serve-check: {error} (log: {log})") from error
    log.unlink()
    return report
