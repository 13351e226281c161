"""Attend within whole texts that lie end to end, each token to all of its text or a part of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring texts of one length, which one call computes, or a long text alone."""

    first: int
    """The row of the first one's first token."""
    length: int
    count: int


def runs_of(lengths: list[int], max_rows: int) -> list[Run]:
    """List the runs of texts that lie end to end; texts of more than `max_rows` are alone."""
    runs, first = [], 0
    for length, equal in groupby(lengths):
        num_texts = len(list(equal))
        count = num_texts if length <= max_rows else 1
        for _ in range(num_texts // count):
            runs.append(Run(first, length, count))
            first += length * count
    return runs


@dataclass(frozen=True, slots=True)
class Reach:
    """Which tokens of its text each token reads."""

    is_causal: bool
    """Whether it reads no token behind it."""
    window: int | None
    """The number of tokens on each side; None: all."""

    def of(self, start: int, end: int, length: int) -> tuple[int, int]:
        """Return the first and the end of what the tokens [start, end) read."""
        low = 0 if self.window is None else max(start - self.window, 0)
        high = length if self.window is None else min(end + self.window, length)
        return low, min(high, end) if self.is_causal else high

    def mask(self, start: int, end: int, length: int, device: torch.device) -> torch.Tensor | None:
        """Mark the keys that each query reads, bool [queries, keys]; None: no mask is needed."""
        low, high = self.of(start, end, length)
        is_plain = self.window is None or high - low <= self.window + 1
        if is_plain and (not self.is_causal or start == 0):
            return None
        places = torch.arange(low, high, device=device)
        distance = torch.arange(start, end, device=device)[:, None] - places
        reads = torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            reads &= distance.abs() <= self.window
        if self.is_causal:
            reads &= distance >= 0
        return reads


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    runs: list[Run],
    reach: Reach,
    *,
    scale: float,
    max_rows: int,
) -> Iterator[torch.Tensor]:
    """Yield the results of rows, [some of the rows, all heads' values], in their order.

    Args:
        q: [num_rows, num_heads, head_dim], as k and v, which may have fewer heads.
        runs: where the texts lie.
        reach: which tokens are read.
        scale: what products are multiplied by.
        max_rows: queries of a long text that are computed at once.
    """
    for run in runs:
        for start in range(0, run.length, max_rows):
            end = min(start + max_rows, run.length)
            low, high = reach.of(start, end, run.length)
            mask = reach.mask(start, end, run.length, q.device)
            queries = _by_text(q, run, start, end)
            keys, values = (_by_text(each, run, low, high) for each in (k, v))
            if (shares := q.shape[1] // k.shape[1]) > 1:
                # as many heads as queries have: without that, torch holds all products at once
                keys, values = (each.repeat_interleave(shares, 1) for each in (keys, values))
            is_causal = mask is None and reach.is_causal
            found = F.scaled_dot_product_attention(
                queries, keys, values, mask, is_causal=is_causal, scale=scale
            )
            yield found.transpose(1, 2).reshape(run.count * (end - start), -1)


def _by_text(rows: torch.Tensor, run: Run, start: int, end: int) -> torch.Tensor:
    """View tokens [start, end) of a run's texts as [texts, heads, tokens, head_dim]."""
    if run.count == 1:
        return rows[run.first + start : run.first + end].transpose(0, 1)[None]
    texts = rows[run.first : run.first + run.count * run.length]
    return texts.view(run.count, run.length, *rows.shape[1:]).transpose(1, 2)
