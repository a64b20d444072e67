"""Generate with and without speculation: the same text in fewer steps.

    python examples/speculative_generation.py

A tiny random model continues five prompts as one batch, drafts looked up in the text so far.
"""

from max.driver import CPU
from max.engine import InferenceSession

from gdn_graph.generate import (
    ByteTokenizer,
    GatedDeltaLM,
    Generator,
    ModelConfig,
    Summary,
    random_weights,
)

PROMPTS = ["The state folds, and ", "a", "abcabcabc", "ring ring ring", "Zwölf Boxkämpfer"]

config = ModelConfig()
generator = Generator(
    config,
    random_weights(GatedDeltaLM(config), seed=0),
    InferenceSession(devices=[CPU()]),
    slots=len(PROMPTS),
)
tokenizer = ByteTokenizer()
prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]


def run(drafts: int) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in prompts]
    summary = Summary()
    for step in generator.generate(prompts, max_new_tokens=100, drafts=drafts):
        summary.add(step)
        for text, new in zip(texts, step.tokens, strict=True):
            text += new
    figures = summary.figures()
    print(
        f"{drafts} drafts: {summary.steps} steps, {figures['tokens_per_step']:.2f} tokens per "
        f"step, acceptance length {figures['acceptance_length']:.2f}"
    )
    return texts


plain = run(drafts=0)
assert run(drafts=3) == plain
print("the texts are equal")
