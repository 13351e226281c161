"""Choose the next token of each row of logits as its request asks, by the kernels or by torch.

Invariant: both choose the same tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels.cpu import Kernels
from engine.wire.sampling import SamplingParams, TokenLogprob
from engine.worker.model.logit_rules import Rules, adjust, has_penalties
from engine.worker.model.sampler import draw_of, logprobs, sample_rows

_NO_RULES = (0, 0, 0, 0, 1.0, 0.0, 0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class RowDraw:
    """A row of logits, and the draw that is wanted of it."""

    logits: torch.Tensor
    """[vocab_size] float32."""
    params: SamplingParams
    index: int
    """How many tokens the sequence has generated before."""
    rules: Rules | None = None
    """None: the logits stay as they are."""


def draw_by_torch(rows: Sequence[RowDraw]) -> list[int]:
    """Choose one token per row; NO_TOKEN where its logit is not finite."""
    logits = torch.stack([row.logits for row in rows])
    for changed, row in zip(logits, rows, strict=True):
        if row.rules is not None:
            adjust(changed, row.rules)
    draws = torch.tensor([draw_of(row.params, row.index) for row in rows], dtype=torch.float64)
    return sample_rows(logits, draws.to(logits.device)).tolist()


def rate_by_torch(
    rows: Sequence[torch.Tensor], token_ids: Sequence[int], num_alternatives: Sequence[int]
) -> list[TokenLogprob]:
    """Compute log-probabilities of one token per row, and of as many of its likeliest."""
    return logprobs(torch.stack([*rows]), token_ids, num_alternatives)


def draw_by_kernels(kernels: Kernels, rows: Sequence[RowDraw]) -> list[int]:
    """Choose one token per row as draw_by_torch() does."""
    fields: list[float] = []
    kept: list[array[int] | array[float]] = []
    for row in rows:
        fields += draw_of(row.params, row.index)
        fields.append(row.logits.data_ptr())
        fields += _NO_RULES if row.rules is None else _fields_of(row.rules, kept)
    return _draw(kernels, array("d", fields), len(rows), len(rows[0].logits))


def sample_by_kernels(
    kernels: Kernels, logits: torch.Tensor, draws: torch.Tensor | None
) -> torch.Tensor:
    """Draw the tokens [n] as sample_rows() does."""
    num_rows, vocab_size = logits.shape
    width = logits.stride(0) * logits.element_size()
    fields: list[float] = []
    for row in range(num_rows):
        fields += [0.0] * 6 if draws is None else draws[row].tolist()
        fields += (logits.data_ptr() + row * width, *_NO_RULES)
    return torch.tensor(_draw(kernels, array("d", fields), num_rows, vocab_size))


def _draw(kernels: Kernels, fields: array[float], num_rows: int, vocab_size: int) -> list[int]:
    token_ids = array("q", bytes(8 * num_rows))
    kernels.draw(_address(token_ids), _address(fields), num_rows, vocab_size, _num_threads())
    return token_ids.tolist()


def _fields_of(rules: Rules, kept: list[array[int] | array[float]]) -> tuple[float, ...]:
    """Write a row's rules for the kernels; what they have addresses of is kept."""
    allowed = array("B", rules.allowed or b"")
    added = array("d", [number for pair in rules.added.items() for number in pair])
    kept += allowed, added, rules.ids
    has_ids = has_penalties(rules.params)
    return (
        _address(allowed) if allowed else 0,
        _address(rules.ids) if has_ids else 0,
        rules.num_prompt_ids if has_ids else 0,
        rules.num_ids if has_ids else 0,
        rules.params.repetition_penalty,
        rules.params.frequency_penalty,
        rules.params.presence_penalty,
        _address(added),
        len(added) // 2,
    )


def rate_by_kernels(
    kernels: Kernels,
    rows: Sequence[torch.Tensor],
    token_ids: Sequence[int],
    num_alternatives: Sequence[int],
) -> list[TokenLogprob]:
    """Compute log-probabilities as rate_by_torch() does."""
    vocab_size, fields = len(rows[0]), array("q")
    counts = [min(count, vocab_size) for count in num_alternatives]
    for row, token_id, count in zip(rows, token_ids, counts, strict=True):
        fields.extend((row.data_ptr(), token_id, count))
    width = 1 + max(counts)
    values, ids = array("f", bytes(4 * width * len(rows))), array("q", bytes(8 * width * len(rows)))
    places = _address(values), _address(ids), _address(fields)
    kernels.rate(*places, len(rows), vocab_size, width, _num_threads())
    return [
        TokenLogprob(
            values[first],
            ids[first + 1 : first + 1 + count].tolist(),
            values[first + 1 : first + 1 + count].tolist(),
            ids[first],
        )
        for first, count in zip(range(0, len(ids), width), counts, strict=True)
    ]


def _address(numbers: array[int] | array[float]) -> int:
    return numbers.buffer_info()[0]


def _num_threads() -> int:
    return torch.get_num_threads()
