"""What is timed: one line of a table per peer and shape, and the least work that it can take."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

NUM_KEY_HEADS: Final = 16
NUM_VALUE_HEADS: Final = 32
HEAD_DIM: Final = 128
CONV_WIDTH: Final = 4
CONV_DIM: Final = (2 * NUM_KEY_HEADS + NUM_VALUE_HEADS) * HEAD_DIM


@dataclass(frozen=True)
class Shape:
    """One table.

    Args:
        kind: "recurrence" (of `layers` layers in turn), "fold" (of `tokens` records, all layers at
            once) or "conv".
        batch: Rows, B.
        tokens: Tokens of each row, or records.
        layers: Layers; their states are all different.
    """

    kind: str
    batch: int
    tokens: int
    layers: int = 1

    @property
    def name(self) -> str:
        if self.kind == "fold":
            return f"fold{self.tokens}-b{self.batch}-l{self.layers}"
        layers = f"-l{self.layers}" if self.layers > 1 else ""
        return f"{'conv-' if self.kind == 'conv' else ''}t{self.tokens}-b{self.batch}{layers}"

    @property
    def title(self) -> str:
        rows = f"{self.batch} row{'s' if self.batch > 1 else ''}"
        layers = f", {self.layers} layers" if self.layers > 1 else ""
        if self.kind == "fold":
            records = f"{self.tokens} record{'s' if self.tokens > 1 else ''}"
            return f"fold of {records}, {rows}{layers}"
        tokens = f"{self.tokens} token{'s' if self.tokens > 1 else ''}"
        return f"{self.kind}, {tokens} a row, {rows}{layers}"

    @property
    def units(self) -> int:
        """Head-tokens of one call; heads of a fold; channel-tokens of a conv."""
        rows = self.batch * self.layers
        if self.kind == "fold":
            return rows * NUM_VALUE_HEADS
        return rows * self.tokens * (CONV_DIM if self.kind == "conv" else NUM_VALUE_HEADS)

    @property
    def unit(self) -> str:
        return {"fold": "head", "conv": "channel-token"}.get(self.kind, "head-token")

    @property
    def state_elements(self) -> int:
        """Elements of recurrent state that one call goes through."""
        return self.batch * self.layers * NUM_VALUE_HEADS * HEAD_DIM * HEAD_DIM

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _recurrences(tokens: int, *batches: int) -> tuple[Shape, ...]:
    return tuple(Shape("recurrence", batch, tokens) for batch in batches)


_FOLDS: Final = tuple(Shape("fold", 8, records, 4) for records in (4, 1))
_STACKS: Final = tuple(Shape("recurrence", 1, tokens, 16) for tokens in (4, 1))

SETS: Final = {
    "quick": (*_recurrences(4, 8, 1), *_recurrences(1, 8), _FOLDS[0]),
    "default": (
        *_recurrences(4, 1, 8, 32),
        *_recurrences(1, 1, 8, 32),
        *_recurrences(2, 1, 8, 32),
        *_STACKS,
        *_FOLDS,
        *_recurrences(512, 1),
        Shape("conv", 1, 4096),
    ),
    "full": (
        *_recurrences(4, 1, 2, 4, 8, 16, 32),
        *_recurrences(1, 1, 2, 4, 8, 16, 32),
        *_recurrences(2, 1, 2, 4, 8, 16, 32),
        *_recurrences(8, 1, 8, 32),
        *_STACKS,
        *_FOLDS,
        *(Shape("fold", 1, records, 4) for records in (4, 1)),
        *_recurrences(512, 1),
        *_recurrences(2048, 1),
        Shape("conv", 1, 4096),
        Shape("conv", 8, 512),
    ),
}
"""The shapes of a run of each length."""


@dataclass(frozen=True)
class Work:
    """The least that a call can do: multiply or multiply-add slots, and bytes from memory."""

    slots: float
    traffic: str
    """"read", "update" (every byte read and written in place) or "copy"."""
    moved: float
    """Bytes; a byte that is read and written counts twice, as in the limits."""

    def seconds(self, limits: dict[str, float]) -> float:
        """Given slots and bytes a second: what takes longer, if both go on at once."""
        # "streaming_copy" is a copy too.
        rate = max(rate for name, rate in limits.items() if name.endswith(self.traffic))
        return max(self.slots / limits["multiply_add"], self.moved / rate)


def least_work(algorithm: str, shape: Shape, state_bytes: int = 4) -> Work:
    """The work of an algorithm: "exact", "block", either with " verify", "fold" or "conv".

    In token order every token multiplies by the decay, adds k f^T, and sums kv and readout: four
    slots a state element. A block of n <= 4 tokens sums S^T k and S^T q in 2 n slots and, unless it
    is a verify, scales and adds in n + 1. The state comes from memory once a call. Inputs, outputs
    and records are left out: they are a few per cent of it.
    """
    elements = shape.state_elements
    if algorithm == "conv":
        channels = shape.batch * shape.tokens * CONV_DIM
        return Work(CONV_WIDTH * channels, "copy", 8 * channels)
    if algorithm == "fold":
        return Work(2 * shape.tokens * elements, "update", 2 * state_bytes * elements)
    verify = algorithm.endswith("verify")
    if algorithm.startswith("block"):
        blocks = [min(4, shape.tokens - t) for t in range(0, shape.tokens, 4)]
        slots = sum(2 * n + (0 if verify else n + 1) for n in blocks)
    else:
        slots = 4 * shape.tokens
    if verify:
        return Work(slots * elements, "read", state_bytes * elements)
    return Work(slots * elements, "update", 2 * state_bytes * elements)
