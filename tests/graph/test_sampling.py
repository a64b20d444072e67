"""Acceptance inside the graph, against the rule written out row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

from gdn_graph.sampling import greedy_acceptance, sampled_acceptance

VOCABULARY = 13
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def accept(session: InferenceSession) -> Callable[..., list[tuple[Array, Array]]]:
    """Greedy, looked-up drafts and drawn drafts, all in one graph of any N, B and K."""
    cpu = DeviceRef.CPU()
    with Graph(
        "acceptance",
        input_types=[
            TensorType(DType.float32, ["n", VOCABULARY], cpu),
            TensorType(DType.int64, ["n"], cpu),
            TensorType(DType.uint32, ["b1"], cpu),
            TensorType(DType.int64, ["b"], cpu),
            TensorType(DType.int64, ["k"], cpu),
            TensorType(DType.float32, ["b", "columns"], cpu),
            TensorType(DType.float32, ["n", VOCABULARY], cpu),
        ],
    ) as graph:
        logits, tokens, offsets, drafts, width, uniforms, q = (v.tensor for v in graph.inputs)
        operands = (logits, tokens, offsets, drafts, width)
        graph.output(
            *greedy_acceptance(*operands),
            *sampled_acceptance(*operands, uniforms, temperature=0.7),
            *sampled_acceptance(*operands, uniforms, draft_probabilities=q, temperature=0.7),
        )
    model = session.load(graph)

    def run(
        logits: Array, tokens: Array, lengths: Array, drafts: Array, uniforms: Array, q: Array
    ) -> list[tuple[Array, Array]]:
        outputs = model.execute(
            logits,
            tokens,
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32),
            np.asarray(drafts, np.int64),
            np.zeros(uniforms.shape[1] - 1, np.int64),
            uniforms,
            q,
        )
        values = [np.array(output.to_numpy()) for output in outputs]
        return list(zip(values[::2], values[1::2], strict=True))

    return run


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def written_out(
    rule: str,
    logits: Array,
    tokens: Array,
    lengths: Array,
    drafts: Array,
    uniforms: Array,
    q: Array,
) -> tuple[list[int], list[int]]:
    """Both rules, one row and one draft at a time, in float64."""
    kept, following = [], []
    begin = 0
    p = softmax(logits.astype(np.float64) / 0.7)
    for b, (length, count) in enumerate(zip(lengths, drafts, strict=True)):
        last = begin + length - count - 1
        if length == 0:
            kept.append(0)
            following.append(-1)
            continue
        accepted = 0
        refused: Array | None = None
        for j in range(count):
            t = last + 1 + j
            if rule == "greedy":
                ok = logits[t - 1].argmax() == tokens[t]
            else:
                drawn_from = np.eye(VOCABULARY)[tokens[t]] if rule == "looked up" else q[t]
                ok = uniforms[b, j] < p[t - 1, tokens[t]] / drawn_from[tokens[t]]
                refused = None if ok else drawn_from
            if not ok:
                break
            accepted += 1
        judge = last + accepted
        if rule == "greedy":
            following.append(int(logits[judge].argmax()))
        else:
            rest = p[judge] if refused is None else np.maximum(p[judge] - refused, 0)
            following.append(
                int(np.searchsorted(np.cumsum(rest), uniforms[b, -1] * rest.sum(), "right"))
            )
        kept.append(length - count + accepted)
        begin += length
    return kept, following


@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_rules_row_by_row(accept: Callable[..., Any], k: int) -> None:
    rng = np.random.default_rng(k)
    drafts = rng.integers(0, k + 1, 40)
    lengths = drafts + rng.integers(1, 4, 40)
    lengths[7], drafts[7] = 0, 0
    lengths[11], drafts[11] = 9, 0
    n = lengths.sum()
    logits = 3 * rng.standard_normal((n, VOCABULARY), np.float32)
    # Half of the drafts are what the model would say.
    tokens = np.roll(logits.argmax(1), 1)
    tokens = np.where(rng.random(n) < 0.4, rng.integers(0, VOCABULARY, n), tokens)
    q = softmax(2 * rng.standard_normal((n, VOCABULARY))).astype(np.float32)
    uniforms = rng.random((40, k + 1), np.float32)
    results = accept(logits, tokens, lengths, drafts, uniforms, q)
    accepted = []
    for rule, (kept, following) in zip(("greedy", "looked up", "drawn"), results, strict=True):
        want_kept, want_following = written_out(rule, logits, tokens, lengths, drafts, uniforms, q)
        assert kept.dtype == np.uint32
        assert kept.tolist() == want_kept
        assert following.tolist() == want_following
        accepted.append((kept - (lengths - drafts)).sum())
    if k:
        assert 0 < accepted[0] < drafts.sum(), "the case tests nothing"


@pytest.mark.parametrize("drawn", [False, True])
def test_speculative_sampling_keeps_the_distribution(
    accept: Callable[..., Any], drawn: bool
) -> None:
    """The first token out of a step is distributed as the model says, whatever the drafter does."""
    rng = np.random.default_rng(1)
    rows = 40_000
    p_logits = rng.standard_normal(VOCABULARY).astype(np.float32)
    p = softmax(p_logits / 0.7)
    q = softmax(rng.standard_normal(VOCABULARY)).astype(np.float32)
    drafts = rng.choice(VOCABULARY, rows, p=q / q.sum()) if drawn else np.full(rows, 5)
    tokens = np.stack([np.zeros(rows, np.int64), drafts], 1).reshape(-1)
    both = accept(
        np.tile(p_logits, (2 * rows, 1)),
        tokens,
        np.full(rows, 2),
        np.ones(rows, np.int64),
        rng.random((rows, 2), np.float32),
        np.tile(q, (2 * rows, 1)),
    )
    kept, following = both[2 if drawn else 1]
    first = np.where(kept == 2, drafts, following)
    counts = np.bincount(first, minlength=VOCABULARY)
    chi2 = ((counts - rows * p) ** 2 / (rows * p)).sum()
    # The 0.999 quantile of chi-squared with 12 degrees of freedom.
    assert chi2 < 32.9
    # The control: accepting every draft is far off.
    naive = np.bincount(drafts, minlength=VOCABULARY)
    assert ((naive - rows * p) ** 2 / (rows * p)).sum() > 1000


def test_temperature_of_zero_is_refused() -> None:
    with Graph("cold", input_types=[TensorType(DType.float32, ["n", 3], DeviceRef.CPU())]) as g:
        x = g.inputs[0].tensor
        with pytest.raises(ValueError, match="temperature is 0; need above 0"):
            sampled_acceptance(x, x, x, x, x, x, temperature=0)
