"""A plain forward pass of a Qwen3.5 text checkpoint in NumPy float64: the oracle of these tests.

Written from the model's published definition, one token after another and one layer after
another, and sharing nothing with gdn_graph or MAX. test_transformers.py holds it and the served
model together with the public transformers implementation.
"""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[np.float64]


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _normalised(x: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


class Qwen35:
    """The text model of one checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def steps(self, prompt: list[int], tokens: list[int]) -> Array:
        """The logits [len(tokens), vocab] from which each of the tokens after `prompt` is chosen.

        `tokens` is the greedy continuation exactly when it is the argmax of every row.
        """
        return self.logits(prompt + tokens)[len(prompt) - 1 : -1]

    def logits(self, tokens: list[int]) -> Array:
        """The logits [N, vocab] after each of N tokens."""
        x = self.w["model.embed_tokens.weight"][tokens]
        for i, layer_type in enumerate(self.config["layer_types"]):
            layer = f"model.layers.{i}"
            mixer = self._gdn if layer_type == "linear_attention" else self._attention
            x = x + mixer(layer, self._norm(f"{layer}.input_layernorm", x))
            x = x + self._mlp(layer, self._norm(f"{layer}.post_attention_layernorm", x))
        return self._linear("lm_head", self._norm("model.norm", x))

    def _linear(self, name: str, x: Array) -> Array:
        return x @ self.w[f"{name}.weight"].T

    def _norm(self, name: str, x: Array) -> Array:
        return _normalised(x, self.config["rms_norm_eps"]) * (1 + self.w[f"{name}.weight"])

    def _mlp(self, layer: str, x: Array) -> Array:
        up = self._linear(f"{layer}.mlp.up_proj", x)
        return self._linear(
            f"{layer}.mlp.down_proj", _silu(self._linear(f"{layer}.mlp.gate_proj", x)) * up
        )

    def _gdn(self, layer: str, x: Array) -> Array:
        c, gdn, count = self.config, f"{layer}.linear_attn", len(x)
        key_heads, value_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        key_dim, value_dim = c["linear_key_head_dim"], c["linear_value_head_dim"]

        qkv = self._linear(f"{gdn}.in_proj_qkv", x)
        taps = self.w[f"{gdn}.conv1d.weight"][:, 0].T  # [kernel, channel], the last one is now
        past = np.concatenate([np.zeros((len(taps) - 1, qkv.shape[1])), qkv])
        qkv = _silu(np.stack([(past[t : t + len(taps)] * taps).sum(0) for t in range(count)]))
        q, k, v = np.split(qkv, [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)

        def unit_per_value_head(heads: Array) -> Array:
            heads = heads.reshape(count, key_heads, key_dim)
            heads = heads / np.sqrt((heads * heads).sum(-1, keepdims=True) + 1e-6)
            return np.repeat(heads, value_heads // key_heads, axis=1)

        q, k = unit_per_value_head(q) / np.sqrt(key_dim), unit_per_value_head(k)
        v = v.reshape(count, value_heads, value_dim)
        beta = _sigmoid(self._linear(f"{gdn}.in_proj_b", x))
        a = self._linear(f"{gdn}.in_proj_a", x) + self.w[f"{gdn}.dt_bias"]
        decay = np.exp(-np.exp(self.w[f"{gdn}.A_log"]) * np.logaddexp(0, a))

        state = np.zeros((value_heads, key_dim, value_dim))
        out = np.empty((count, value_heads, value_dim))
        for t in range(count):
            state = state * decay[t, :, None, None]
            recalled = np.einsum("hkv,hk->hv", state, k[t])
            delta = beta[t, :, None] * (v[t] - recalled)
            state = state + np.einsum("hk,hv->hkv", k[t], delta)
            out[t] = np.einsum("hkv,hk->hv", state, q[t])

        z = self._linear(f"{gdn}.in_proj_z", x).reshape(out.shape)
        out = _normalised(out, c["rms_norm_eps"]) * self.w[f"{gdn}.norm.weight"] * _silu(z)
        return self._linear(f"{gdn}.out_proj", out.reshape(count, -1))

    def _attention(self, layer: str, x: Array) -> Array:
        c, attn, count = self.config, f"{layer}.self_attn", len(x)
        heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]

        q, gate = np.split(
            self._linear(f"{attn}.q_proj", x).reshape(count, heads, 2 * dim), 2, axis=-1
        )
        k = self._linear(f"{attn}.k_proj", x).reshape(count, kv_heads, dim)
        v = self._linear(f"{attn}.v_proj", x).reshape(count, kv_heads, dim)
        q = self._rotated(self._norm(f"{attn}.q_norm", q))
        k = self._rotated(self._norm(f"{attn}.k_norm", k))
        k, v = (np.repeat(heads_, heads // kv_heads, axis=1) for heads_ in (k, v))

        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", weights, v) * _sigmoid(gate)
        return self._linear(f"{attn}.o_proj", out.reshape(count, -1))

    def _rotated(self, x: Array) -> Array:
        """Rotary positions on the first dims of each head; pair i is dims i and i + half."""
        rope = self.config["rope_parameters"]
        dim = int(x.shape[-1] * rope["partial_rotary_factor"])
        half = dim // 2
        angles = np.arange(len(x))[:, None] / rope["rope_theta"] ** (np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b, rest = x[..., :half], x[..., half:dim], x[..., dim:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
