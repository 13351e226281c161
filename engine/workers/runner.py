"""The step: from sequences to tensors, through the model, to sampled tokens.

Owns: nothing but the model and the pool it writes.
Called by: the worker loop, launch then collect.
Invariant: a sequence is sampled exactly when the step computes its last known token.
Never: ends a sequence, sends a message, looks at a role.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.sampler import sample
from engine.model.transformer import StepBatch, Transformer
from engine.sequence import TokenLogprob
from engine.workers.running import Running

Sampled = tuple[int | None, TokenLogprob | None]


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way."""

    planned: list[tuple[Running, int]]
    sampling: list[Running]
    logits: torch.Tensor | None


class Runner:
    """Executes planned steps on one device."""

    def __init__(self, transformer: Transformer, pool: torch.Tensor, block_size: int) -> None:
        self.block_size = block_size
        self._transformer = transformer
        self._pool = pool

    @torch.inference_mode()
    def launch(self, planned: list[tuple[Running, int]]) -> Launched:
        """Start one step: each sequence with its number of new tokens."""
        sampling = [r for r, n in planned if r.num_computed_tokens + n == r.num_tokens]
        if not planned:
            return Launched(planned, sampling, None)
        logits = self._transformer.forward(self._batch(planned), self._pool)
        return Launched(planned, sampling, logits)

    @torch.inference_mode()
    def collect(self, launched: Launched) -> list[Sampled]:
        """Wait for a step; one result per planned sequence, (None, None) if its prompt goes on."""
        if launched.logits is None or not launched.sampling:
            return [(None, None)] * len(launched.planned)
        results = iter(
            sample(
                launched.logits,
                [r.sampling for r in launched.sampling],
                [r.num_output_tokens for r in launched.sampling],
            )
        )
        is_sampled = set(map(id, launched.sampling))
        return [next(results) if id(r) in is_sampled else (None, None) for r, _ in launched.planned]

    def _batch(self, planned: list[tuple[Running, int]]) -> StepBatch:
        input_ids: list[int] = []
        positions: list[int] = []
        token_slots: list[int] = []
        logit_rows: list[int] = []
        for running, num_new_tokens in planned:
            start = running.num_computed_tokens
            end = start + num_new_tokens
            input_ids += running.token_ids[start:end]
            positions += range(start, end)
            token_slots += self._token_slots(running.block_table, start, end)
            if end == running.num_tokens:
                logit_rows.append(len(input_ids) - 1)
        return StepBatch(
            input_ids=torch.tensor(input_ids),
            positions=torch.tensor(positions),
            token_slots=torch.tensor(token_slots),
            query_lens=[n for _, n in planned],
            seq_lens=[r.num_computed_tokens + n for r, n in planned],
            block_tables=[r.block_table for r, _ in planned],
            logit_rows=logit_rows,
        )

    def _token_slots(self, block_table: list[int], start: int, end: int) -> list[int]:
        """Places in the pool of positions [start, end): block_id * block_size + offset."""
        size = self.block_size
        slots: list[int] = []
        while start < end:
            offset = start % size
            count = min(size - offset, end - start)
            first = block_table[start // size] * size + offset
            slots += range(first, first + count)
            start += count
        return slots

    def warm_up(self, max_step_tokens: int) -> None:
        """Run a prefill and a decode step into block 0, so that the first request is not slow."""
        num_tokens = min(max_step_tokens, self.block_size)
        for length in (num_tokens, 1):
            batch = StepBatch(
                input_ids=torch.zeros(length, dtype=torch.int64),
                positions=torch.arange(length),
                token_slots=torch.arange(length),
                query_lens=[length],
                seq_lens=[length],
                block_tables=[[0]],
                logit_rows=[length - 1],
            )
            with torch.inference_mode():
                self._transformer.forward(batch, self._pool)
