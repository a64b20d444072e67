"""Acceptance of drafts inside the graph: num_accepted goes to the commit without a host in between.

Row b of a verify holds tokens that are settled and then num_drafts[b] drafts. The logits of a token
say what should follow it, so those of the token before a draft judge it. Both rules return

    num_accepted   uint32 [B]   settled tokens plus accepted drafts: what commit takes
    next_token     int64 [B]    what follows the last of them; -1 for a row without tokens

Symbols: N tokens of the verify (at least one), B rows, K the length of verify_width.
"""

from __future__ import annotations

from dataclasses import dataclass

from max.dtype import DType
from max.graph import Dim, TensorValue, ops


def greedy_acceptance(
    logits: TensorValue,
    tokens: TensorValue,
    input_row_offsets: TensorValue,
    num_drafts: TensorValue,
    verify_width: TensorValue,
) -> tuple[TensorValue, TensorValue]:
    """Accepts the longest run of drafts that are each the most likely token.

    Args:
        logits: [N, vocabulary], float.
        tokens: int64 [N], the tokens of the verify.
        input_row_offsets: [B + 1], integers.
        num_drafts: [B], integers, at most K and below the tokens of the row.
        verify_width: [K] on the CPU.

    Returns:
        num_accepted and next_token, see the module.
    """
    best = ops.squeeze(ops.cast(ops.argmax(logits, axis=-1), DType.int64), -1)
    rows = _Rows.of(input_row_offsets, num_drafts, verify_width, logits.shape[0])
    draft = ops.gather(tokens, rows.draft, axis=0)
    expected = ops.gather(best, rows.before_draft, axis=0)
    accepted = rows.accepted(ops.equal(draft, expected))
    last = rows.clamped(rows.first_draft + accepted - 1)
    return rows.result(accepted, ops.gather(best, last, axis=0))


def sampled_acceptance(
    logits: TensorValue,
    tokens: TensorValue,
    input_row_offsets: TensorValue,
    num_drafts: TensorValue,
    verify_width: TensorValue,
    uniforms: TensorValue,
    *,
    draft_probabilities: TensorValue | None = None,
    temperature: float = 1.0,
) -> tuple[TensorValue, TensorValue]:
    """Speculative sampling: tokens come out as if sampled from the model alone.

    A draft x is accepted with probability min(1, p(x) / q(x)), for p of the model and q of the
    drafter. At the first rejection the next token is drawn from max(p - q, 0), normalised; when
    all are accepted, from p. Source: Leviathan et al., 2023 (arXiv 2211.17192), and Chen et al.,
    2023 (arXiv 2302.01318).

    Args:
        logits: As for greedy_acceptance.
        tokens: As for greedy_acceptance.
        input_row_offsets: As for greedy_acceptance.
        num_drafts: As for greedy_acceptance.
        verify_width: As for greedy_acceptance.
        uniforms: float32 [B, K + 1] in [0, 1), independent: column j decides draft j, the last
            draws the next token.
        draft_probabilities: float32 [N, vocabulary]: what each draft was drawn from; rows of
            settled tokens are not used. None for drafts that were not drawn but looked up: q is
            then 1 at the draft.
        temperature: Above 0; divides the logits.

    Returns:
        num_accepted and next_token, see the module.

    Raises:
        ValueError: If temperature is not above 0.
    """
    if temperature <= 0:
        raise ValueError(
            f"sampled_acceptance: temperature is {temperature}; need above 0 (at 0 use "
            "greedy_acceptance)"
        )
    probabilities = ops.softmax(ops.cast(logits, DType.float32) / temperature)
    vocabulary = logits.shape[1]
    rows = _Rows.of(input_row_offsets, num_drafts, verify_width, logits.shape[0])
    draft = ops.gather(tokens, rows.draft, axis=0)

    p = _pick(probabilities, rows.before_draft, draft)
    q = 1.0 if draft_probabilities is None else _pick(draft_probabilities, rows.draft, draft)
    uniforms = ops.rebind(uniforms, rows.draft.shape)
    accepted = rows.accepted(uniforms * q < p)

    last = rows.clamped(rows.first_draft + accepted - 1)
    rejected = rows.clamped(rows.first_draft + accepted)
    p_next = ops.gather(probabilities, last, axis=0)
    if draft_probabilities is None:
        token = ops.range(
            0, vocabulary, 1, out_dim=vocabulary, dtype=DType.int64, device=logits.device
        )
        refused = ops.unsqueeze(ops.gather(tokens, rejected, axis=0), 1)
        q_next = ops.cast(ops.equal(ops.unsqueeze(token, 0), refused), DType.float32)
    else:
        q_next = ops.gather(draft_probabilities, rejected, axis=0)
    # Past the last draft nothing was refused, and the token comes from p itself.
    was_refused = ops.cast(ops.unsqueeze(accepted < rows.num_drafts, 1), DType.float32)
    residual = ops.relu(p_next - q_next * was_refused)
    # Rounding can leave nothing of p - q where a draft was refused by a hair.
    residual = ops.where(ops.sum(residual, axis=-1) > 0, residual, p_next)
    cumulative = ops.cumsum(residual, axis=-1)
    total = cumulative[:, -1:]
    reached = uniforms[:, -1:] * total
    # The second condition keeps rounding from going past the last token that can be drawn.
    before = ops.logical_and(cumulative <= reached, cumulative < total)
    drawn = ops.squeeze(ops.sum(ops.cast(before, DType.int64), axis=-1), -1)
    return rows.result(accepted, drawn)


def _pick(table: TensorValue, rows: TensorValue, columns: TensorValue) -> TensorValue:
    """table[rows, columns], elementwise."""
    return ops.gather_nd(table, ops.stack([rows, columns], axis=-1))


@dataclass(frozen=True)
class _Rows:
    """Where the drafts of every row lie. Column K never holds a draft, so K may be 0."""

    num_drafts: TensorValue
    """int64 [B]"""
    length: TensorValue
    """int64 [B]"""
    first_draft: TensorValue
    """int64 [B]: the token of the first draft, if there is one."""
    draft: TensorValue
    """int64 [B, K + 1]: the token of draft j, clamped to the tokens there are."""
    before_draft: TensorValue
    """int64 [B, K + 1]: the token whose logits judge draft j, clamped likewise."""
    is_draft: TensorValue
    """bool [B, K + 1]"""
    last_token: TensorValue
    """int64 []: N - 1"""

    @staticmethod
    def of(
        input_row_offsets: TensorValue,
        num_drafts: TensorValue,
        verify_width: TensorValue,
        tokens: Dim,
    ) -> _Rows:
        device = num_drafts.device
        count = ops.cast(num_drafts, DType.int64)
        offsets = ops.cast(input_row_offsets, DType.int64)
        begin, end = (ops.rebind(part, count.shape) for part in (offsets[:-1], offsets[1:]))
        last_token = ops.shape_to_tensor([tokens])[0].to(device) - 1
        columns = verify_width.shape[0] + 1
        column = ops.range(0, columns, 1, out_dim=columns, dtype=DType.int64, device=device)
        column = ops.unsqueeze(column, 0)
        first = end - count
        draft = ops.unsqueeze(first, 1) + column
        return _Rows(
            count,
            end - begin,
            first,
            ops.min(draft, last_token),
            ops.max(ops.min(draft - 1, last_token), 0),
            column < ops.unsqueeze(count, 1),
            last_token,
        )

    def clamped(self, token: TensorValue) -> TensorValue:
        return ops.max(ops.min(token, self.last_token), 0)

    def accepted(self, matches: TensorValue) -> TensorValue:
        """int64 [B]: how many drafts match before the first that does not."""
        misses = 1 - ops.cast(ops.logical_and(self.is_draft, matches), DType.int64)
        run = ops.equal(ops.cumsum(misses, axis=1), 0)
        return ops.squeeze(ops.sum(ops.cast(run, DType.int64), axis=1), 1)

    def result(
        self, accepted: TensorValue, next_token: TensorValue
    ) -> tuple[TensorValue, TensorValue]:
        kept = self.length - self.num_drafts + accepted
        return ops.cast(kept, DType.uint32), ops.where(self.length > 0, next_token, -1)
