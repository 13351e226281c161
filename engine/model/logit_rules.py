"""Change logits as a request says: bias, minimum, grammar, penalties.

Owns: the order and formulas, which are vLLM's.
Invariant: a row's result is a function of its own logits, parameters and tokens.
Never: draws, or changes a row that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from engine.wire.sampling import SamplingParams


def is_adjusted(params: SamplingParams) -> bool:
    """Say whether logits change before a token is drawn."""
    return bool(
        params.logit_bias
        or params.min_tokens
        or params.grammar is not None
        or params.allowed_token_ids is not None
        or params.bad_words
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


class NothingAllowedError(ValueError):
    """What was asked leaves no token that could come next; the message is for the client."""


def adjust(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    ending_ids: Collection[int],
    allowed: bytes | None,
    allowed_ids: torch.Tensor | None = None,
) -> None:
    """Change one row in place.

    Args:
        logits: [vocab_size] float32.
        ending_ids: ids that would end it.
        allowed: one byte per id, 0 where the grammar forbids it; None without a grammar.
        allowed_ids: [num_allowed] int64, `params.allowed_token_ids`; None where it is.

    Raises:
        NothingAllowedError: all tokens are forbidden.
    """
    if params.logit_bias:
        for token_id, bias in params.logit_bias.items():
            if token_id < len(logits):
                logits[token_id] += bias
    is_too_early = len(output_ids) < params.min_tokens
    bad_ids = [
        last
        for *before, last in params.bad_words
        if last < len(logits) and before == list(output_ids[len(output_ids) - len(before) :])
    ]
    if allowed is not None or allowed_ids is not None or bad_ids or is_too_early:
        forbidden = torch.zeros(len(logits), dtype=torch.bool)
        if allowed is not None:
            forbidden |= torch.frombuffer(bytearray(allowed), dtype=torch.uint8) == 0
        if allowed_ids is not None:
            others = torch.ones(len(logits), dtype=torch.bool)
            others[allowed_ids[allowed_ids < len(logits)]] = False
            forbidden |= others
        forbidden[bad_ids] = True
        if forbidden.all():
            raise NothingAllowedError(_nothing_left(params))
        if is_too_early:
            endings = [one for one in ending_ids if one < len(logits)]
            # a complete grammar allows nothing but the end, and then the minimum has to give way
            if allowed is None or not _is_complete(allowed, endings):
                forbidden[endings] = True
            if forbidden.all():
                raise NothingAllowedError(_nothing_left(params, "`min_tokens`"))
        logits.masked_fill_(forbidden.to(logits.device), -torch.inf)
    _penalize(logits, params, prompt_ids, output_ids)


def _is_complete(allowed: bytes, ending_ids: Collection[int]) -> bool:
    """Say whether a grammar allows only the end of the output."""
    num_endings = sum(bool(allowed[one]) for one in {*ending_ids})
    return len(allowed) - allowed.count(0) == num_endings


def _nothing_left(params: SamplingParams, *others: str) -> str:
    limits = {
        "the grammar": params.grammar is not None,
        "`allowed_token_ids`": params.allowed_token_ids is not None,
        "`bad_words`": bool(params.bad_words),
    }
    named = [*(name for name, is_set in limits.items() if is_set), *others]
    return f"no token is left by {' and '.join(named)}"


def _penalize(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
) -> None:
    """Apply penalties: repetition over prompt and output, the others over the output."""
    if params.repetition_penalty != 1.0:
        ids = torch.tensor([*prompt_ids, *output_ids], dtype=torch.int64, device=logits.device)
        seen = logits[ids]
        penalty = params.repetition_penalty
        logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if params.frequency_penalty or params.presence_penalty:
        ids = torch.tensor(output_ids, dtype=torch.int64)
        counts = ids.bincount(minlength=len(logits)).to(logits.device)
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
