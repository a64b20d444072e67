"""A small language model of Gated DeltaNet layers, decoded with and without speculation.

    x = embedding;  x += linear_attn(input_layernorm(x)) in every layer;  logits = lm_head(norm(x))

Drafts are looked up in the text so far (prompt lookup), so no second model is needed. A step is one
execution: verify, greedy acceptance and commit stand in one graph. Speculation changes how many
steps the text takes, never the text.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, TensorType, TensorValue
from max.nn import Embedding, LayerList, Linear, Module, RMSNorm
from rich.console import Console

from .geometry import GatedDeltaGeometry
from .layer import (
    GatedDeltaNet,
    LayerState,
    Projections,
    checkpoint_names,
    checkpoint_weights,
    projections_of,
)
from .sampling import greedy_acceptance
from .speculative import SpeculativeStates, StateSpec, Window

MAX_NGRAM: Final = 3
"""Longest run of last tokens that the drafter looks for."""


@dataclass(frozen=True)
class ModelConfig:
    """Shapes of the model. The default is small enough for a test and reads bytes."""

    vocab_size: int = 256
    hidden_size: int = 64
    layers: int = 3
    geometry: GatedDeltaGeometry = field(
        default_factory=lambda: GatedDeltaGeometry(2, 4, 16, 24, ring_len=8)
    )
    projections: Projections = "separate"
    rms_norm_eps: float = 1e-6
    eos_token: int | None = None

    @staticmethod
    def of_folder(folder: Path) -> ModelConfig:
        """The config of a checkpoint: its config.json, with the names of Qwen3-Next and Qwen3.5.

        Raises:
            FileNotFoundError: If there is no config.json, or no weights.
            ValueError: If it has other layers than linear attention.
        """
        file = Path(folder) / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"generate: no config.json in {folder}")
        config = json.loads(file.read_text())
        config = config.get("text_config", config)
        other = sorted(set(config.get("layer_types", ())) - {"linear_attention"})
        if other:
            raise ValueError(
                f"generate: {file} has layers of type {', '.join(other)}; this model has "
                "linear_attention layers only"
            )
        return ModelConfig(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            layers=config["num_hidden_layers"],
            geometry=GatedDeltaGeometry(
                config["linear_num_key_heads"],
                config["linear_num_value_heads"],
                config["linear_key_head_dim"],
                config["linear_value_head_dim"],
                config.get("linear_conv_kernel_dim", 4),
                ring_len=8,
            ),
            projections=projections_of(checkpoint_names(folder)),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            eos_token=config.get("eos_token_id"),
        )


class _Block(Module):
    def __init__(self, config: ModelConfig, device: DeviceRef) -> None:
        super().__init__()
        self.input_layernorm = _norm(config)
        self.linear_attn = GatedDeltaNet(
            config.hidden_size,
            config.geometry,
            device=device,
            projections=config.projections,
            rms_norm_eps=config.rms_norm_eps,
        )

    def __call__(self, x: TensorValue, state: LayerState) -> TensorValue:
        return x + self.linear_attn(self.input_layernorm(x), state)


class _Body(Module):
    def __init__(self, config: ModelConfig, device: DeviceRef) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, DType.float32, device)
        self.layers = LayerList([_Block(config, device) for _ in range(config.layers)])
        self.norm = _norm(config)

    def __call__(self, tokens: TensorValue, window: Window) -> TensorValue:
        x = self.embed_tokens(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, window.layer(i))
        return self.norm(x)


class GatedDeltaLM(Module):
    """The model, float32, with the weight names of the public checkpoints."""

    def __init__(self, config: ModelConfig, device: DeviceRef | None = None) -> None:
        super().__init__()
        device = device or DeviceRef.CPU()
        self.model = _Body(config, device)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, DType.float32, device)

    def __call__(self, tokens: TensorValue, window: Window) -> TensorValue:
        """Logits [N, vocab_size] of the tokens int64 [N] of all rows."""
        return self.lm_head(self.model(tokens, window))


def _norm(config: ModelConfig) -> RMSNorm:
    # The public checkpoints store these norms' weights as their distance from one.
    return RMSNorm(config.hidden_size, DType.float32, eps=config.rms_norm_eps, weight_offset=1.0)


def random_weights(module: Module, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Weights drawn from a seed, of a size that keeps the text from being one letter."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, weight in sorted(module.raw_state_dict().items()):
        shape = [int(dim) for dim in weight.shape]
        values = rng.standard_normal(shape)
        if name.endswith("A_log"):
            values = np.log(rng.uniform(0.1, 2, shape))
        elif name.endswith("linear_attn.norm.weight"):
            values = np.ones(shape)
        elif name.endswith("norm.weight"):
            values = np.zeros(shape)
        elif len(shape) > 1 and "embed" not in name:
            values /= np.sqrt(shape[-1])
        weights[name] = values.astype(np.float32)
    return weights


def look_up(tokens: Sequence[int], count: int, max_ngram: int = MAX_NGRAM) -> list[int]:
    """Drafts for what follows tokens: what followed the last place with the same ending.

    Args:
        tokens: The text so far.
        count: The most drafts wanted.
        max_ngram: The longest ending that is looked for; shorter ones are tried after it.

    Returns:
        Up to count tokens, none if no ending was seen before.
    """
    text = list(tokens)
    for n in range(min(max_ngram, len(text) - 1), 0, -1):
        ending = text[-n:]
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == ending:
                # Past its end the text goes on with the drafts themselves, as a period does.
                for i in range(count):
                    text.append(text[start + n + i])
                return text[len(tokens) :]
    return []


@dataclass(frozen=True)
class Step:
    """What one execution gave.

    Attributes:
        tokens: New tokens of each prompt, none for one that is finished.
        drafted: Drafts of each prompt that were verified.
        accepted: Drafts of each prompt that were accepted.
        seconds: Wall time of the step.
    """

    tokens: list[list[int]]
    drafted: list[int]
    accepted: list[int]
    seconds: float


class Generator:
    """The model compiled, its states, and the loop that decodes.

    Args:
        config: Shapes; geometry.ring_len - 1 is the most drafts of a step.
        weights: Of GatedDeltaLM, as random_weights or checkpoint_weights give them.
        session: Compiles and runs.
        slots: The most prompts at one time.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        session: InferenceSession,
        *,
        slots: int = 1,
    ) -> None:
        self.config = config
        model = GatedDeltaLM(config)
        model.load_state_dict(weights)

        def forward(inputs: Sequence[Any], windows: list[Window]) -> list[TensorValue]:
            tokens, drafts = (value.tensor for value in inputs)
            (window,) = windows
            num_accepted, next_token = greedy_acceptance(
                model(tokens, window),
                tokens,
                window.input_row_offsets,
                drafts,
                window.verify_width,
            )
            window.commit(num_accepted)
            return [num_accepted, next_token]

        cpu = DeviceRef.CPU()
        self.states = SpeculativeStates(
            StateSpec(config.geometry, config.layers, slots),
            session,
            forward,
            [
                TensorType(DType.int64, ["tokens"], cpu),
                TensorType(DType.int64, ["batch"], cpu),
            ],
            weights=model.state_dict(),
            name="generate",
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, drafts: int = 0
    ) -> Iterator[Step]:
        """Decodes all prompts greedily, as one batch.

        Args:
            prompts: Tokens of each, at least one.
            max_new_tokens: Of each prompt; the end-of-text token may end one earlier.
            drafts: The most drafts of a step; 0 decodes without speculation.

        Yields:
            A Step per execution; the first is the prefill and gives one token to each prompt.

        Raises:
            ValueError: If a prompt is empty or has an unknown token, or drafts is more than the
                ring takes.
            RuntimeError: If there are more prompts than free slots.
        """
        most = self.config.geometry.ring_len - 1
        if not 0 <= drafts <= most:
            raise ValueError(f"generate: drafts is {drafts}; need 0 to {most}, ring_len - 1")
        for i, prompt in enumerate(prompts):
            if not prompt or not all(0 <= t < self.config.vocab_size for t in prompt):
                raise ValueError(
                    f"generate: prompt {i} is {list(prompt)}; need one token or more, each of 0 "
                    f"to {self.config.vocab_size - 1}"
                )
        if len(prompts) > self.states.free_slots:
            raise RuntimeError(
                f"generate: {len(prompts)} prompts for {self.states.free_slots} free slots; make "
                "the Generator with more slots"
            )
        texts = [list(prompt) for prompt in prompts]
        slots = [self.states.admit() for _ in prompts]
        try:
            yield from self._decode(texts, slots, max_new_tokens, drafts)
        finally:
            for slot in slots:
                self.states.release(slot)

    def _decode(
        self, texts: list[list[int]], slots: list[int], max_new_tokens: int, drafts: int
    ) -> Iterator[Step]:
        ends = [len(text) + max_new_tokens for text in texts]
        pending = [list(text) for text in texts]  # tokens the states have not seen
        running = list(range(len(texts))) if max_new_tokens > 0 else []
        prefill = True
        while running:
            start = time.perf_counter()
            guesses = {
                i: [] if prefill else look_up(texts[i], min(drafts, ends[i] - len(texts[i]) - 1))
                for i in running
            }
            rows = [pending[i] + guesses[i] for i in running]
            counts = [len(guesses[i]) for i in running]
            num_accepted, next_token = self.states.verify(
                np.concatenate(rows).astype(np.int64),
                np.array(counts, np.int64),
                slots=[slots[i] for i in running],
                lengths=[len(row) for row in rows],
                drafts=counts,
            )
            kept, following = num_accepted.to_numpy(), next_token.to_numpy()
            new: list[list[int]] = [[] for _ in texts]
            drafted, accepted = [0] * len(texts), [0] * len(texts)
            for b, i in enumerate(running):
                accepted[i] = int(kept[b]) - len(pending[i])
                drafted[i] = counts[b]
                new[i] = [*guesses[i][: accepted[i]], int(following[b])]
                if self.config.eos_token in new[i]:
                    new[i] = new[i][: new[i].index(self.config.eos_token) + 1]
                    ends[i] = len(texts[i]) + len(new[i])
                texts[i] += new[i]
                pending[i] = [texts[i][-1]]
            running = [i for i in running if len(texts[i]) < ends[i]]
            prefill = False
            yield Step(new, drafted, accepted, time.perf_counter() - start)


@dataclass
class Summary:
    """Figures of a generation, without its prefill."""

    steps: int = 0
    tokens: int = 0
    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    verified_rows: int = 0
    seconds: float = 0.0

    def add(self, step: Step) -> None:
        self.steps += 1
        self.tokens += sum(map(len, step.tokens))
        self.rows += sum(bool(tokens) for tokens in step.tokens)
        self.drafted += sum(step.drafted)
        self.accepted += sum(step.accepted)
        self.verified_rows += sum(count > 0 for count in step.drafted)
        self.seconds += step.seconds

    def figures(self) -> dict[str, float]:
        """Acceptance length: tokens out of a verify that had drafts, the one it adds included."""
        return {
            "steps": self.steps,
            "acceptance_length": 1 + self.accepted / max(self.verified_rows, 1),
            "accepted_share": self.accepted / max(self.drafted, 1),
            "tokens_per_step": self.tokens / max(self.rows, 1),
            "ms_per_step": 1e3 * self.seconds / max(self.steps, 1),
        }


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Text as UTF-8 bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token % 256 for token in tokens).decode(errors="replace")


class FileTokenizer:
    """The tokenizer.json of a checkpoint."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer as Loaded  # comes with max[serve]

        self._loaded = Loaded.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        return list(self._loaded.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._loaded.decode(list(tokens)))


def load(
    weights: Path | None, seed: int, drafts: int
) -> tuple[ModelConfig, Mapping[str, Any], Tokenizer]:
    """Config, weights and tokenizer of a checkpoint folder, or of a seed if there is none."""
    config = ModelConfig() if weights is None else ModelConfig.of_folder(weights)
    if drafts >= config.geometry.ring_len:
        config = replace(config, geometry=replace(config.geometry, ring_len=drafts + 1))
    model = GatedDeltaLM(config)
    if weights is None:
        return config, random_weights(model, seed), ByteTokenizer()
    file = weights / "tokenizer.json"
    tokenizer: Tokenizer = FileTokenizer(file) if file.is_file() else ByteTokenizer()
    return config, checkpoint_weights(weights, model), tokenizer


def run(
    prompt: str,
    *,
    max_new_tokens: int,
    drafts: int,
    seed: int,
    weights: Path | None,
    as_json: bool,
) -> None:
    """What `gdn-graph generate` does: streams the text to stdout, the figures to stderr.

    Args:
        prompt: Text to continue.
        max_new_tokens: Tokens to add.
        drafts: The most drafts of a step; 0 decodes without speculation.
        seed: Of the random weights.
        weights: A checkpoint folder instead of random weights.
        as_json: Print one JSON object at the end instead.
    """
    notes = Console(stderr=True)
    config, values, tokenizer = load(weights, seed, drafts)
    tokens = tokenizer.encode(prompt)
    with notes.status("compiling the model (a minute or more, the first time)"):
        generator = Generator(config, values, InferenceSession(devices=[CPU()]))
    summary = Summary()
    out: list[int] = []
    shown = 0
    if not as_json:
        sys.stdout.write(prompt)
    for number, step in enumerate(generator.generate([tokens], max_new_tokens, drafts)):
        out += step.tokens[0]
        if number > 0:
            summary.add(step)
        if not as_json:
            # The end of the text may be a part of a character yet.
            text = tokenizer.decode(out).rstrip("\ufffd")
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = max(shown, len(text))
    figures = summary.figures()
    if as_json:
        result = {
            "prompt": prompt,
            "text": tokenizer.decode(out),
            "tokens": out,
            "drafts": drafts,
            "seed": None if weights else seed,
            **figures,
        }
        print(json.dumps(result, indent=2))
        return
    sys.stdout.write(tokenizer.decode(out)[shown:] + "\n")
    notes.print(
        f"{len(out)} tokens in {summary.steps + 1} steps: acceptance length "
        f"{figures['acceptance_length']:.2f}, {figures['tokens_per_step']:.2f} tokens per step, "
        f"{figures['ms_per_step']:.2f} ms per step"
    )
