"""What a request says about its logits, before one is drawn: bias, minimum, grammar, penalties.

The order and the formulas are vLLM's. Bias first; then what may not come at all: ids that would end
the output too early, and what the grammar does not allow. Penalties last.
Owns: SamplingParams' fields that look at tokens rather than at the distribution.
Called by: engine.workers.runner, for the rows that ask for it; other rows cost nothing.
Invariant: a row's result is a function of its own logits, parameters and tokens.
Never: draws, changes a row that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from engine.sequence import SamplingParams


def is_adjusted(params: SamplingParams) -> bool:
    """True if the logits are not drawn from as the model gives them."""
    return bool(
        params.logit_bias
        or params.min_tokens
        or params.grammar is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def adjust(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    ending_ids: Collection[int],
    allowed: bytes | None,
) -> None:
    """Change one row in place.

    Args:
        logits: [vocab_size] float32.
        params: of the row's sequence.
        prompt_ids: its prompt.
        output_ids: its output so far.
        ending_ids: ids that would end it.
        allowed: one byte per id, 0 where the grammar forbids it; None without a grammar.
    """
    if params.logit_bias:
        for token_id, bias in params.logit_bias.items():
            if token_id < len(logits):
                logits[token_id] += bias
    if allowed is not None or len(output_ids) < params.min_tokens:
        forbidden = _forbidden(
            len(logits), len(output_ids) < params.min_tokens, ending_ids, allowed
        )
        logits.masked_fill_(forbidden.to(logits.device), -torch.inf)
    _penalize(logits, params, prompt_ids, output_ids)


def _forbidden(
    vocab_size: int, is_too_early: bool, ending_ids: Collection[int], allowed: bytes | None
) -> torch.Tensor:
    """What may not come at all, one bool per id."""
    endings = torch.zeros(vocab_size, dtype=torch.bool)
    if is_too_early:
        endings[[i for i in ending_ids if i < vocab_size]] = True
    if allowed is None:
        return endings
    by_grammar = torch.frombuffer(bytearray(allowed), dtype=torch.uint8) == 0
    both = endings | by_grammar
    # a complete grammar allows nothing but the end, and then the minimum has to give way
    return by_grammar if both.all() else both


def _penalize(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
) -> None:
    """Repetition over prompt and output; frequency and presence over the output alone."""
    if params.repetition_penalty != 1.0:
        ids = torch.tensor([*prompt_ids, *output_ids], dtype=torch.int64, device=logits.device)
        seen = logits[ids]
        penalty = params.repetition_penalty
        logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if params.frequency_penalty or params.presence_penalty:
        ids = torch.tensor(output_ids, dtype=torch.int64)
        counts = ids.bincount(minlength=len(logits)).to(logits.device)
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
