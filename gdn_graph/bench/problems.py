"""The inputs of a shape and the right results, from the float64 specification."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gdn_graph import reference
from gdn_graph.geometry import GatedDeltaGeometry

from .shapes import CONV_WIDTH, HEAD_DIM, NUM_KEY_HEADS, NUM_VALUE_HEADS, Shape

Array = NDArray[Any]

GEOMETRY = GatedDeltaGeometry(NUM_KEY_HEADS, NUM_VALUE_HEADS, HEAD_DIM, HEAD_DIM, CONV_WIDTH)


class Recurrence:
    """q, k [B, T, nk, 128], v [B, T, nv, 128], decay and beta [B, T, nv], state
    [L * B, nv, 128, 128]; row layer * B + b of it is row b in that layer, and the layers share
    everything else.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        rng = np.random.default_rng(7 + 1000 * shape.batch + shape.tokens)
        rows, nk, nv = (shape.batch, shape.tokens), NUM_KEY_HEADS, NUM_VALUE_HEADS
        self.q, self.k = _normal(rng, *rows, nk, HEAD_DIM), _normal(rng, *rows, nk, HEAD_DIM)
        self.v = _normal(rng, *rows, nv, HEAD_DIM)
        # As models make them: A from slow heads to fast ones, softplus of a shifted gate.
        rate = np.linspace(0.02, 1.0, nv, dtype=np.float32)
        softplus = np.log1p(np.exp(_normal(rng, *rows, nv) - 1))
        self.decay: Array = np.exp(-rate * softplus).astype(np.float32)
        self.beta: Array = (1 / (1 + np.exp(-_normal(rng, *rows, nv)))).astype(np.float32)
        self.state = _short(0.1 * _normal(rng, *GEOMETRY.recurrent_state_shape(self.pool_rows)))

    @property
    def pool_rows(self) -> int:
        return self.shape.layers * self.shape.batch

    @property
    def cold_bytes(self) -> int:
        """Bytes that a call must find outside the caches, and so are kept in several copies."""
        return int(self.state.nbytes)

    @property
    def ring_len(self) -> int:
        return max(self.shape.tokens, 4)

    @property
    def drafts(self) -> int:
        """K of a verify; a row of one token is verified in a batch where others have a draft."""
        return max(self.shape.tokens - 1, 1)

    @cached_property
    def offsets(self) -> Array:
        return np.arange(self.shape.batch + 1, dtype=np.uint32) * np.uint32(self.shape.tokens)

    @cached_property
    def qkv(self) -> Array:
        n = self.shape.batch * self.shape.tokens
        return np.concatenate([x.reshape(n, -1) for x in (self.q, self.k, self.v)], axis=1)

    @cached_property
    def right(self) -> dict[str, Array]:
        """out [L, B, T, nv, 128] and state of the plain op, and the records [L * B, nk, T, stride]
        of a verify, whose factors are also [L, B, T, nv, 128] for normalised keys.
        """
        s = self.shape
        n = s.batch * s.tokens
        ring = np.zeros((self.pool_rows, NUM_KEY_HEADS, s.tokens, GEOMETRY.record_stride))
        state = self.state.astype(np.float64)
        gates = self.qkv, self.decay.reshape(n, -1), self.beta.reshape(n, -1)
        out = []
        for layer in range(s.layers):
            slots = layer * s.batch + np.arange(s.batch, dtype=np.uint32)
            out.append(
                reference.gated_delta_recurrence_verify_ring_fwd(
                    *gates, state, ring, slots, slots, self.offsets, 1
                )
            )
        rows = np.arange(self.pool_rows, dtype=np.uint32)[None]
        kept = np.full(self.pool_rows, s.tokens, np.uint32)
        reference.gated_delta_state_fold(state, ring, rows, rows, kept, 1)
        factors = np.stack(
            [ring[..., GEOMETRY.record_factors(j)] for j in range(GEOMETRY.group)], axis=2
        )
        length = np.sqrt((self.k.astype(np.float64) ** 2).sum(-1) + reference.EPS)
        lead = (s.layers, s.batch)
        factors = factors.reshape(*lead, NUM_VALUE_HEADS, s.tokens, HEAD_DIM).swapaxes(2, 3)
        return {
            "out": np.stack(out).reshape(*lead, s.tokens, NUM_VALUE_HEADS, HEAD_DIM),
            "state": state,
            "ring": ring,
            "factors": factors * np.repeat(length, GEOMETRY.group, -1)[..., None],
        }


class Fold:
    """keys [L * B, J, nk, 128], factors [L * B, J, nv, 128], decay [L * B, J, nv], state
    [L * B, nv, 128, 128].
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        rng = np.random.default_rng(shape.tokens)
        rows = (shape.batch * shape.layers, shape.tokens)
        self.keys = _normal(rng, *rows, NUM_KEY_HEADS, HEAD_DIM) / np.float32(HEAD_DIM**0.5)
        self.factors = _normal(rng, *rows, NUM_VALUE_HEADS, HEAD_DIM)
        self.decay = rng.uniform(0.9, 1, (*rows, NUM_VALUE_HEADS)).astype(np.float32)
        self.state = _short(0.1 * _normal(rng, *GEOMETRY.recurrent_state_shape(rows[0])))

    @cached_property
    def ring(self) -> Array:
        """The records, as a verify leaves them: [L * B, nk, ring length, stride]."""
        g, (rows, records) = GEOMETRY, self.decay.shape[:2]
        ring = np.zeros((rows, NUM_KEY_HEADS, max(records, g.ring_len), g.record_stride))
        ring = ring.astype(np.float32)
        grouped = (rows, records, NUM_KEY_HEADS, g.group)
        factors = self.factors.reshape(*grouped, HEAD_DIM).transpose(0, 2, 1, 3, 4)
        decay = self.decay.reshape(grouped).transpose(0, 2, 1, 3)
        ring[:, :, :records, :HEAD_DIM] = self.keys.swapaxes(1, 2)
        for j in range(g.group):
            ring[:, :, :records, g.record_factors(j)] = factors[..., j, :]
            ring[:, :, :records, g.record_decay(j)] = decay[..., j]
        return ring

    @property
    def cold_bytes(self) -> int:
        return int(self.state.nbytes)

    @property
    def row_ids(self) -> Array:
        rows = np.arange(len(self.state), dtype=np.uint32)
        return rows.reshape(self.shape.layers, self.shape.batch)

    @property
    def accepted(self) -> Array:
        return np.full(self.shape.batch, self.shape.tokens, np.uint32)

    @cached_property
    def right(self) -> dict[str, Array]:
        state = self.state.astype(np.float64)
        ids = self.row_ids
        reference.gated_delta_state_fold(state, self.ring, ids, ids, self.accepted, 1)
        return {"state": state}


class Conv:
    """x [B * T, conv_dim], weight [conv_dim, 4], window [B, conv_dim, 3]."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        rng = np.random.default_rng(shape.tokens)
        self.x = _normal(rng, shape.batch * shape.tokens, GEOMETRY.conv_dim)
        self.weight = _normal(rng, GEOMETRY.conv_dim, CONV_WIDTH)
        self.state = _normal(rng, *GEOMETRY.conv_state_shape(shape.batch))

    @property
    def cold_bytes(self) -> int:
        return int(self.x.nbytes)

    @cached_property
    def offsets(self) -> Array:
        return np.arange(self.shape.batch + 1, dtype=np.uint32) * np.uint32(self.shape.tokens)

    @cached_property
    def right(self) -> dict[str, Array]:
        state = self.state.astype(np.float64)
        slots = np.arange(self.shape.batch, dtype=np.uint32)
        out = reference.gated_delta_conv1d_fwd(self.x, self.weight, state, slots, self.offsets)
        return {"out": out, "silu": out / (1 + np.exp(-out)), "state": state}


Problem = Recurrence | Fold | Conv


def problem(shape: Shape) -> Problem:
    """The problem of a shape."""
    kinds: dict[str, type[Problem]] = {"recurrence": Recurrence, "fold": Fold, "conv": Conv}
    return kinds[shape.kind](shape)


def error(got: Array, right: Array) -> float:
    """max |difference| over max |right|; NaN if any is."""
    difference = np.abs(np.asarray(got, np.float64).reshape(right.shape) - right).max()
    return float(difference / np.abs(right).max())


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def _short(state: Array) -> Array:
    """Cut to what bfloat16 holds, so that pools of both dtypes start from one state."""
    cut: Array = (state.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return cut
