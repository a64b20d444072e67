"""Writes a tiny Qwen3.5 checkpoint with random weights, for trying the serving path.

    python examples/tiny_qwen35.py out/tiny-qwen35
    max serve --custom-architectures gdn_graph.serve --model out/tiny-qwen35 \\
        --devices cpu --quantization-encoding float32 --max-length 256

The folder holds what `max serve` reads: config.json, model.safetensors, tokenizer.json and
tokenizer_config.json with a chat template. Needs gdn-graph[serve]; no torch, no network.

The tokenizer is byte-level without merges: one token a byte, plus Qwen3.5's special tokens. The
rows of lm_head that do not print are zero, so greedy text is plain ASCII, one character a token,
and runs to the length asked for.

Layouts and names are those of the public Qwen3.5 checkpoints:
https://huggingface.co/docs/transformers/model_doc/qwen3_5
"""

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import TensorSpec, serialize_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Array = npt.NDArray[np.float32]

# What MAX's Qwen3.5 tokenizer and its reasoning and tool parsers look up by name.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)

# MAX hands over a message's content as a list of parts; a plain string is legal too.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == "text" -%}
{{ part.text }}
{%- else -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false -%}
<think>

</think>

{% else -%}
<think>
{% endif -%}
{%- endif -%}
"""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a checkpoint; every field is an option of this script."""

    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 4
    full_attention_interval: int = 4  # every 4th layer is full attention, the others GDN
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 16
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    max_position_embeddings: int = 512

    def layer_types(self) -> list[str]:
        return [
            "linear_attention" if (i + 1) % self.full_attention_interval else "full_attention"
            for i in range(self.num_hidden_layers)
        ]


def tokenizer() -> Tokenizer:
    """One token for each of the 256 bytes, in the byte-level alphabet, then SPECIAL_TOKENS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    result = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return result


class _Weights:
    """Draws random weights and collects them under their checkpoint names."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.tensors: dict[str, Array] = {}

    def linear(self, name: str, out_dim: int, in_dim: int) -> None:
        scale = in_dim**-0.5
        self.tensors[f"{name}.weight"] = self._normal((out_dim, in_dim), scale)

    def norm(self, name: str, dim: int, around: float = 0.0) -> None:
        """Most Qwen3.5 norms multiply by 1 + weight, so they are drawn around 0."""
        self.tensors[f"{name}.weight"] = around + self._normal((dim,), 0.1)

    def attention_layer(self, prefix: str, s: Sizes) -> None:
        # q_proj holds, head by head, a query and then the gate of that head's output.
        self.linear(f"{prefix}.self_attn.q_proj", 2 * s.num_attention_heads * s.head_dim,
                    s.hidden_size)  # fmt: skip
        for name in ("k_proj", "v_proj"):
            self.linear(f"{prefix}.self_attn.{name}", s.num_key_value_heads * s.head_dim,
                        s.hidden_size)  # fmt: skip
        self.linear(f"{prefix}.self_attn.o_proj", s.hidden_size,
                    s.num_attention_heads * s.head_dim)  # fmt: skip
        self.norm(f"{prefix}.self_attn.q_norm", s.head_dim)
        self.norm(f"{prefix}.self_attn.k_norm", s.head_dim)
        self._rest_of_layer(prefix, s)

    def gdn_layer(self, prefix: str, s: Sizes) -> None:
        heads = s.linear_num_value_heads
        value_dim = heads * s.linear_value_head_dim
        conv_dim = 2 * s.linear_num_key_heads * s.linear_key_head_dim + value_dim
        gdn = f"{prefix}.linear_attn"
        self.linear(f"{gdn}.in_proj_qkv", conv_dim, s.hidden_size)
        self.linear(f"{gdn}.in_proj_z", value_dim, s.hidden_size)
        self.linear(f"{gdn}.in_proj_b", heads, s.hidden_size)
        self.linear(f"{gdn}.in_proj_a", heads, s.hidden_size)
        self.linear(f"{gdn}.out_proj", s.hidden_size, value_dim)
        kernel = s.linear_conv_kernel_dim
        self.tensors[f"{gdn}.conv1d.weight"] = self._normal((conv_dim, 1, kernel), kernel**-0.5)
        # Decays from almost none to almost all a token, so that both the near and the far past
        # matter to the output.
        rates = self.random.uniform(0.01, 1.0, heads)
        self.tensors[f"{gdn}.A_log"] = np.log(rates).astype(np.float32)
        self.tensors[f"{gdn}.dt_bias"] = self._normal((heads,), 1.0)
        self.norm(f"{gdn}.norm", s.linear_value_head_dim, around=1.0)
        self._rest_of_layer(prefix, s)

    def _rest_of_layer(self, prefix: str, s: Sizes) -> None:
        self.linear(f"{prefix}.mlp.gate_proj", s.intermediate_size, s.hidden_size)
        self.linear(f"{prefix}.mlp.up_proj", s.intermediate_size, s.hidden_size)
        self.linear(f"{prefix}.mlp.down_proj", s.hidden_size, s.intermediate_size)
        self.norm(f"{prefix}.input_layernorm", s.hidden_size)
        self.norm(f"{prefix}.post_attention_layernorm", s.hidden_size)

    def _normal(self, shape: tuple[int, ...], scale: float) -> Array:
        return (scale * self.random.standard_normal(shape)).astype(np.float32)


def _weights(s: Sizes, vocab: Tokenizer, body: str, mtp: bool, seed: int) -> dict[str, Array]:
    w = _Weights(seed)
    vocab_size = vocab.get_vocab_size()
    w.tensors[f"{body}.embed_tokens.weight"] = w._normal((vocab_size, s.hidden_size), 1.0)
    for i, layer_type in enumerate(s.layer_types()):
        layer = w.gdn_layer if layer_type == "linear_attention" else w.attention_layer
        layer(f"{body}.layers.{i}", s)
    w.norm(f"{body}.norm", s.hidden_size)
    w.linear("lm_head", vocab_size, s.hidden_size)
    prints = [vocab.token_to_id(chr(c)) for c in range(ord("!"), ord("~") + 1)]
    silent = np.setdiff1d(np.arange(vocab_size), prints)
    w.tensors["lm_head.weight"][silent] = 0
    if mtp:
        w.norm("mtp.pre_fc_norm_embedding", s.hidden_size)
        w.norm("mtp.pre_fc_norm_hidden", s.hidden_size)
        w.linear("mtp.fc", s.hidden_size, 2 * s.hidden_size)
        w.attention_layer("mtp.layers.0", s)
        w.norm("mtp.norm", s.hidden_size)
    return w.tensors


def _save(tensors: dict[str, Array], file: Path, dtype: str) -> None:
    """Writes a safetensors file; NumPy has no bfloat16, so its bits are made here."""
    stored: dict[str, npt.NDArray[np.float32 | np.uint16]] = {}
    for name, tensor in tensors.items():
        if dtype == "bfloat16":
            bits = tensor.view(np.uint32)
            to_nearest_even = np.uint32(0x7FFF) + ((bits >> 16) & 1)
            stored[name] = ((bits + to_nearest_even) >> 16).astype(np.uint16)
        else:
            stored[name] = np.ascontiguousarray(tensor)
    specs = {
        name: TensorSpec(
            dtype=dtype, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in stored.items()
    }
    serialize_file(specs, file, metadata={"format": "pt"})


def _config(s: Sizes, vocab: Tokenizer, mtp: bool, dtype: str) -> dict[str, object]:
    partial_rotary_factor = 0.25
    frequencies = int(s.head_dim * partial_rotary_factor) // 2
    of_height = frequencies // 3
    text: dict[str, object] = {f.name: getattr(s, f.name) for f in fields(s)}
    text |= {
        "model_type": "qwen3_5_text",
        "layer_types": s.layer_types(),
        "vocab_size": vocab.get_vocab_size(),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attn_output_gate": True,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": partial_rotary_factor,
            # Frequencies that turn with time, height and width; in text the three are equal.
            "mrope_interleaved": True,
            "mrope_section": [frequencies - 2 * of_height, of_height, of_height],
        },
        "eos_token_id": vocab.token_to_id("<|im_end|>"),
    }
    if not mtp:
        return {"architectures": ["Qwen3_5ForCausalLM"], **text}
    # MAX looks for an MTP head only under the name of the multimodal architecture.
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "image_token_id": vocab.token_to_id("<|image_pad|>"),
        "video_token_id": vocab.token_to_id("<|video_pad|>"),
        "vision_start_token_id": vocab.token_to_id("<|vision_start|>"),
        "vision_end_token_id": vocab.token_to_id("<|vision_end|>"),
        "text_config": {**text, "mtp_num_hidden_layers": 1},
        # MAX reads this field; transformers' default lacks it.
        "vision_config": {"model_type": "qwen3_5_vision", "deepstack_visual_indexes": []},
    }


def write_checkpoint(
    folder: Path,
    sizes: Sizes = Sizes(),
    *,
    mtp: bool = False,
    dtype: str = "float32",
    seed: int = 0,
) -> None:
    """Writes the checkpoint into `folder`, which is made if need be.

    Without `mtp`, a `Qwen3_5ForCausalLM`. With it, a `Qwen3_5ForConditionalGeneration` that has a
    one-layer MTP head and no vision weights: MAX serves it on a GPU with
    `--speculative-method mtp`, and our architecture serves its text model on a CPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab = tokenizer()
    body = "model.language_model" if mtp else "model"
    _save(_weights(sizes, vocab, body, mtp, seed), folder / "model.safetensors", dtype)
    config = _config(sizes, vocab, mtp, dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    vocab.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": sizes.max_position_embeddings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random Qwen3.5 checkpoint.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mtp", action="store_true", help="with a multi-token-prediction head")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    for f in fields(Sizes):
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=int, default=f.default)
    args = parser.parse_args()
    sizes = Sizes(**{f.name: getattr(args, f.name) for f in fields(Sizes)})
    write_checkpoint(args.folder, sizes, mtp=args.mtp, dtype=args.dtype, seed=args.seed)
    size = (args.folder / "model.safetensors").stat().st_size
    print(f"{args.folder}: {size / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
