"""GatedDeltaGeometry: from heads and dims to every shape, the ring record and the byte counts.

kernels/gated_delta/ring.mojo says the same of the record in Mojo; a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, SupportsIndex

from max.dtype import DType

PADDING: Final = 0xFFFFFFFF
"""A slot, ring or row id that names no row: -1 as uint32."""

STATE_DTYPES: Final = (DType.float32, DType.bfloat16, DType.float16)
"""What a pool or a ring may hold. A ring of another dtype than float32 is not exact."""

MIN_CONV_WIDTH: Final = 2
MAX_CONV_WIDTH: Final = 8

_RECORD_ALIGNMENT: Final = 32


@dataclass(frozen=True)
class GatedDeltaGeometry:
    """Heads, dims, conv width and ring length of the Gated DeltaNet layers of a model.

    Args:
        num_key_heads: Key (and query) heads, nk.
        num_value_heads: Value heads, nv, a multiple of nk. Value head h reads key head h // group.
        key_head_dim: KD, any size.
        value_head_dim: VD, any size.
        conv_width: Taps of the causal conv, 2 to 8.
        ring_len: Window positions a ring row holds, at least the drafts + 1.
        stride: Elements from one record to the next, if a cache asks for more than the record
            padded to 32 (MAX's has 640 for Qwen3.5-27B, so that its pages divide each other).

    Raises:
        ValueError: If a value is out of range, or nv is no multiple of nk.
        TypeError: If a value is not a whole number.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int = 4
    ring_len: int = 4
    stride: int | None = None

    def __post_init__(self) -> None:
        counts = {
            "num_key_heads": self.num_key_heads,
            "num_value_heads": self.num_value_heads,
            "key_head_dim": self.key_head_dim,
            "value_head_dim": self.value_head_dim,
            "ring_len": self.ring_len,
        }
        whole = counts | {"conv_width": self.conv_width}
        if self.stride is not None:
            whole["stride"] = self.stride
        for name, value in whole.items():
            if not isinstance(value, SupportsIndex):
                raise TypeError(f"GatedDeltaGeometry: {name} is {value!r}; need a whole number")
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"GatedDeltaGeometry: {name} is {value}; need at least 1")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"GatedDeltaGeometry: num_value_heads is {self.num_value_heads}; need a multiple "
                f"of num_key_heads, {self.num_key_heads}"
            )
        if not MIN_CONV_WIDTH <= self.conv_width <= MAX_CONV_WIDTH:
            raise ValueError(
                f"GatedDeltaGeometry: conv_width is {self.conv_width}; need "
                f"{MIN_CONV_WIDTH} to {MAX_CONV_WIDTH}"
            )
        if self.stride is not None and self.stride < self.record_elements:
            raise ValueError(
                f"GatedDeltaGeometry: stride is {self.stride}; need at least the "
                f"{self.record_elements} elements of a record"
            )

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def key_dim(self) -> int:
        """Channels of all keys (and of all queries)."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of all values."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the conv: queries, keys, values, head-major inside each."""
        return 2 * self.key_dim + self.value_dim

    @property
    def record_elements(self) -> int:
        """Elements of one ring record: raw key, delta factors and decays of the group."""
        return self.key_head_dim + self.group * (self.value_head_dim + 1)

    @property
    def record_stride(self) -> int:
        """Elements from one record to the next: stride, or the record padded to 32."""
        if self.stride is not None:
            return self.stride
        return -(-self.record_elements // _RECORD_ALIGNMENT) * _RECORD_ALIGNMENT

    def shard(self, devices: int) -> GatedDeltaGeometry:
        """The heads of one of so many devices: key heads split evenly, each with its value heads.

        Raises:
            ValueError: If devices does not divide the key heads.
        """
        if devices < 1 or self.num_key_heads % devices:
            raise ValueError(
                f"GatedDeltaGeometry: cannot split {self.num_key_heads} key heads over {devices} "
                "devices; need a number that divides them"
            )
        return replace(
            self,
            num_key_heads=self.num_key_heads // devices,
            num_value_heads=self.num_value_heads // devices,
        )

    def record_factors(self, group_head: int) -> slice:
        """Where in a record the delta factors of this group head lie."""
        start = self.key_head_dim + group_head * self.value_head_dim
        return slice(start, start + self.value_head_dim)

    def record_decay(self, group_head: int) -> int:
        """Where in a record the decay of this group head lies."""
        return self.key_head_dim + self.group * self.value_head_dim + group_head

    def recurrent_state_shape(self, slots: int) -> tuple[int, int, int, int]:
        """[slots, nv, KD, VD]"""
        return (slots, self.num_value_heads, self.key_head_dim, self.value_head_dim)

    def conv_state_shape(self, slots: int) -> tuple[int, int, int]:
        """[slots, conv_dim, conv_width - 1]"""
        return (slots, self.conv_dim, self.conv_width - 1)

    def ring_shape(self, rows: int) -> tuple[int, int, int, int]:
        """[rows, nk, ring_len, record_stride]"""
        return (rows, self.num_key_heads, self.ring_len, self.record_stride)

    def conv_ring_shape(self, rows: int) -> tuple[int, int, int]:
        """[rows, ring_len, conv_dim]"""
        return (rows, self.ring_len, self.conv_dim)

    def recurrent_state_bytes(self, layers: int = 1, dtype: DType = DType.float32) -> int:
        """Bytes of recurrent state that one request keeps over so many layers."""
        return layers * _bytes(self.recurrent_state_shape(1), dtype)

    def conv_state_bytes(self, layers: int = 1, dtype: DType = DType.float32) -> int:
        """Bytes of conv window that one request keeps over so many layers."""
        return layers * _bytes(self.conv_state_shape(1), dtype)

    def ring_bytes(self, layers: int = 1, dtype: DType = DType.float32) -> int:
        """Bytes of ring that one request keeps over so many layers, padding included."""
        return layers * _bytes(self.ring_shape(1), dtype)

    def conv_ring_bytes(self, layers: int = 1, dtype: DType = DType.float32) -> int:
        """Bytes of conv ring that one request keeps over so many layers."""
        return layers * _bytes(self.conv_ring_shape(1), dtype)


@dataclass(frozen=True)
class ModelGeometry:
    """The Gated DeltaNet layers of a known model."""

    layers: int
    geometry: GatedDeltaGeometry


MODELS: Final = {
    "qwen3.5-27b": ModelGeometry(48, GatedDeltaGeometry(16, 48, 128, 128, stride=640)),
    "qwen3-next": ModelGeometry(36, GatedDeltaGeometry(16, 32, 128, 128)),
    "tiny": ModelGeometry(4, GatedDeltaGeometry(2, 6, 32, 24)),
}


def _bytes(shape: tuple[int, ...], dtype: DType) -> int:
    size = int(dtype.size_in_bytes)
    for dim in shape:
        size *= dim
    return size
