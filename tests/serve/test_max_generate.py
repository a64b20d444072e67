"""`max generate` on the tiny checkpoint, token by token and logit by logit."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy_qwen35 import Qwen35
from serving import OPTIONS, START_SECONDS, load_example
from transformers import AutoTokenizer

COUNT = 64
# float32 against float64 of logits around 1; transformers is held to the same figure.
TOLERANCE = 1e-4


def _generate(checkpoint: Path, file: Path) -> np.ndarray:
    """The logits [COUNT, vocab] of one `max generate`, whose greedy text was what they say."""
    result = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("max")), "generate", "--model", str(checkpoint)),
            *("--custom-architectures", f"{Path(__file__).parent}:recording", *OPTIONS),
            *("--prompt", "The quick brown fox", "--max-new-tokens", str(COUNT), "--top-k", "1"),
        ],
        env=os.environ | {"GDN_GRAPH_TEST_LOGITS": str(file), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
    logits = np.load(file)
    assert len(logits) == COUNT
    text = AutoTokenizer.from_pretrained(checkpoint).decode(logits.argmax(-1))
    assert text in result.stdout
    return logits


@pytest.fixture(scope="module")
def generated(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return _generate(checkpoint, tmp_path_factory.mktemp("generate") / "logits.npy")


@pytest.fixture(scope="module")
def prompt(checkpoint: Path) -> list[int]:
    """What `max generate` makes of the prompt: a chat of one message."""
    ids: list[int] = AutoTokenizer.from_pretrained(checkpoint).apply_chat_template(
        [{"role": "user", "content": "The quick brown fox"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    return ids


@pytest.mark.slow
def test_greedy_tokens_and_logits_are_those_of_the_numpy_forward(
    generated: np.ndarray, oracle: Qwen35, prompt: list[int]
) -> None:
    tokens = generated.argmax(-1).tolist()
    logits = oracle.steps(prompt, tokens)
    assert logits.argmax(-1).tolist() == tokens
    assert np.abs(generated - logits).max() < TOLERANCE


@pytest.mark.slow
def test_a_slightly_wrong_decay_is_seen(
    generated: np.ndarray, checkpoint: Path, prompt: list[int]
) -> None:
    """The comparison above fails when one layer forgets 1 % faster."""
    wrong = Qwen35(checkpoint)
    wrong.w["model.layers.1.linear_attn.A_log"] += 0.01
    logits = wrong.steps(prompt, generated.argmax(-1).tolist())
    assert np.abs(generated - logits).max() > 10 * TOLERANCE


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to 8 significant bits, to even at a tie."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


@pytest.mark.slow
def test_a_bfloat16_multimodal_checkpoint_is_served_as_text_in_float32(
    checkpoint: Path, prompt: list[int], tmp_path: Path
) -> None:
    """As the published Qwen3.5 checkpoints are; its text weights are those of `checkpoint`."""
    load_example("tiny_qwen35").write_checkpoint(tmp_path / "model", mtp=True, dtype="bfloat16")
    generated = _generate(tmp_path / "model", tmp_path / "logits.npy")
    rounded = Qwen35(checkpoint)
    rounded.w = {name: _bfloat16(tensor) for name, tensor in rounded.w.items()}
    tokens = generated.argmax(-1).tolist()
    assert np.abs(generated - rounded.steps(prompt, tokens)).max() < TOLERANCE
    assert np.abs(generated - Qwen35(checkpoint).steps(prompt, tokens)).max() > 10 * TOLERANCE


@pytest.mark.slow
def test_logits_are_those_of_transformers(
    generated: np.ndarray, checkpoint: Path, oracle: Qwen35, prompt: list[int]
) -> None:
    """The public implementation, where the compare extra is installed, in float32."""
    torch = pytest.importorskip("torch", reason="needs pip install 'gdn-graph[compare]'")
    from transformers import AutoModelForCausalLM

    tokens = generated.argmax(-1).tolist()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0].numpy()
    published = logits[len(prompt) - 1 : -1]
    print(f"max generate: {np.abs(generated - published).max():.1e}")
    print(f"NumPy forward: {np.abs(oracle.steps(prompt, tokens) - published).max():.1e}")
    assert published.argmax(-1).tolist() == tokens
    assert np.abs(generated - published).max() < TOLERANCE
    assert np.abs(oracle.steps(prompt, tokens) - published).max() < TOLERANCE
