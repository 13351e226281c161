"""Change logits as a request says: bias, minimum, grammar, penalties.

The order and formulas are vLLM's; engine/kernels/draws.c has them, too.

Invariant: a row's result is a function of its own logits, parameters and tokens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass

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
        or has_penalties(params)
    )


def has_penalties(params: SamplingParams) -> bool:
    """Say whether logits depend on the tokens of prompt or output."""
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


@dataclass(frozen=True, slots=True)
class Rules:
    """Hold what changes one row of logits."""

    params: SamplingParams
    ids: array[int]
    """Prompt and output, int64, maybe with more behind them."""
    num_prompt_ids: int
    num_ids: int
    forbidden: frozenset[int]
    """Ends of bad words."""
    endings: frozenset[int]
    """Ids that would end the output too early."""
    allowed: bytes | None
    """A bit for each token in words of 32, the lowest first; None: all are allowed."""
    vocab_size: int

    @property
    def added(self) -> dict[int, float]:
        """What is added to logits: biases, and minus infinity where a token is forbidden."""
        biases = {i: bias for i, bias in self.params.logit_bias.items() if i < self.vocab_size}
        return biases | dict.fromkeys(self.forbidden | self.endings, -math.inf)

    def why_nothing(self) -> str | None:
        """Say for the client what leaves no token that could come next; None: one is left."""
        if not self._num_left(self.forbidden):
            return _nothing_left(self.params)
        if not self._num_left(self.forbidden | self.endings):
            return _nothing_left(self.params, "`min_tokens`")
        return None

    def _num_left(self, forbidden: frozenset[int]) -> int:
        if self.allowed is None:
            return self.vocab_size - len(forbidden)
        return _count(self.allowed) - _count(self.allowed, forbidden)


def rules_of(
    params: SamplingParams,
    ids: array[int],
    num_prompt_ids: int,
    num_ids: int,
    ending_ids: Collection[int],
    vocab_size: int,
    allowed: bytes | None,
    only: bytes | None,
) -> Rules:
    """Collect what changes a row.

    Args:
        ids: as Rules has them.
        ending_ids: ids that would end the output.
        allowed: bits as Rules has them, of what the grammar allows; None without a grammar.
        only: bits of `params.allowed_token_ids`, by bits_of(); None: all ids.
    """
    num_outputs = num_ids - num_prompt_ids
    forbidden = {
        last
        for *before, last in params.bad_words
        if last < vocab_size
        and len(before) <= num_outputs
        and before == ids[num_ids - len(before) : num_ids].tolist()
    }
    endings = frozenset[int]()
    if num_outputs < params.min_tokens:
        endings = frozenset(one for one in ending_ids if one < vocab_size)
        # a complete grammar allows nothing but the end, and then the minimum has to give way
        if allowed is not None and _count(allowed) == _count(allowed, endings):
            endings = frozenset()
    if only is not None:
        num_bytes = -(-vocab_size // 32) * 4
        only = only.ljust(num_bytes, b"\0")[:num_bytes]
        allowed = only if allowed is None else _both(allowed, only)
    counts = num_prompt_ids, num_ids
    return Rules(params, ids, *counts, frozenset(forbidden), endings, allowed, vocab_size)


def bits_of(ids: Iterable[int]) -> bytes:
    """Set a bit for each id, the lowest first, up to the last id."""
    bits = bytearray()
    for i in ids:
        if i >> 3 >= len(bits):
            bits.extend(bytes((i >> 3) + 1 - len(bits)))
        bits[i >> 3] |= 1 << (i & 7)
    return bytes(bits)


def _count(bits: bytes, ids: Collection[int] | None = None) -> int:
    """Count the bits that are set, of all ids or of some."""
    if ids is None:
        return int.from_bytes(bits, "little").bit_count()
    return sum(bits[i >> 3] >> (i & 7) & 1 for i in ids)


def _both(left: bytes, right: bytes) -> bytes:
    both = int.from_bytes(left, "little") & int.from_bytes(right, "little")
    return both.to_bytes(len(left), "little")


def _nothing_left(params: SamplingParams, *others: str) -> str:
    limits = {
        "the grammar": params.grammar is not None,
        "`allowed_token_ids`": params.allowed_token_ids is not None,
        "`bad_words`": bool(params.bad_words),
    }
    named = [*(name for name, is_set in limits.items() if is_set), *others]
    return f"no token is left by {' and '.join(named)}"


def adjust(logits: torch.Tensor, rules: Rules) -> None:
    """Change one row [vocab_size] of float32 in place."""
    for token_id, bias in rules.added.items():
        logits[token_id] += bias
    if rules.allowed is not None:
        bits = torch.frombuffer(bytearray(rules.allowed), dtype=torch.uint8)[:, None]
        is_allowed = (bits >> torch.arange(8, dtype=torch.uint8)) & 1
        forbidden = is_allowed.flatten()[: len(logits)] == 0
        logits.masked_fill_(forbidden.to(logits.device), -torch.inf)
    if has_penalties(rules.params):
        _penalize(logits, rules)


def _penalize(logits: torch.Tensor, rules: Rules) -> None:
    """Apply penalties: repetition over prompt and output, the others over the output."""
    params = rules.params
    ids = torch.tensor(rules.ids[: rules.num_ids].tolist(), dtype=torch.int64)
    if params.repetition_penalty != 1.0:
        places = ids.to(logits.device)
        seen = logits[places]
        penalty = params.repetition_penalty
        logits[places] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if params.frequency_penalty or params.presence_penalty:
        counts = ids[rules.num_prompt_ids :].bincount(minlength=len(logits)).to(logits.device)
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
