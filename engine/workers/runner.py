"""The step: from sequences to tensors, through the model, to sampled tokens.

Owns: nothing but the model and the pool it writes.
Called by: the worker loop, launch then collect.
Invariant: a sequence is sampled exactly when the step computes its last known token.
Never: ends a sequence, sends a message, looks at a role.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch

from engine.grammar import GrammarError
from engine.model.adjust import adjust, is_adjusted
from engine.model.sampler import logprobs, sample
from engine.model.transformer import StepBatch, Transformer
from engine.sequence import TokenLogprob
from engine.workers.grammars import Grammars, Mask
from engine.workers.running import Running


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way."""

    planned: list[tuple[Running, int]]
    sampling: list[Running]
    logits: torch.Tensor | None
    masks: Future[list[Mask]] | None
    """One for each sequence that is sampled; None: no grammar among them."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step yielded for one sequence."""

    token_id: int | None = None
    """None while the prompt goes on."""
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None
    """Why the sequence has no token and cannot go on."""


class Runner:
    """Executes planned steps on one device."""

    def __init__(
        self, transformer: Transformer, pool: torch.Tensor, block_size: int, grammars: Grammars
    ) -> None:
        self.block_size = block_size
        self.grammars = grammars
        self._transformer = transformer
        self._pool = pool

    @torch.inference_mode()
    def launch(self, planned: list[tuple[Running, int]]) -> Launched:
        """Start one step: each sequence with its number of new tokens."""
        sampling = [r for r, n in planned if r.num_computed_tokens + n == r.num_tokens]
        if not planned:
            return Launched(planned, sampling, None, None)
        # masks first: they are computed while the model is
        has_grammar = any(r.matcher is not None for r in sampling)
        masks = self.grammars.masks(sampling) if has_grammar else None
        logits = self._transformer.forward(self._batch(planned), self._pool)
        return Launched(planned, sampling, logits, masks)

    @torch.inference_mode()
    def collect(self, launched: Launched) -> list[Sampled]:
        """Wait for a step; one result per planned sequence."""
        logits = launched.logits
        if logits is None:
            return [Sampled()] * len(launched.planned)
        results = []
        sampled_rows, row = [], 0
        for running, num_new_tokens in launched.planned:
            count = running.num_prompt_logprobs(num_new_tokens)
            results.append(_report_prompt(running, logits[row : row + count]))
            row += count
            if running.num_computed_tokens + num_new_tokens == running.num_tokens:
                sampled_rows.append(row)
                row += 1
        if len(sampled_rows) < len(logits):
            logits = logits[sampled_rows]
        chosen = {
            id(r): c for r, c in zip(launched.sampling, _choose(launched, logits), strict=True)
        }
        for index, (running, _) in enumerate(launched.planned):
            if id(running) in chosen:
                prompt_logprobs = results[index].prompt_logprobs
                results[index] = replace(chosen[id(running)], prompt_logprobs=prompt_logprobs)
        return results

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
            first_row = len(input_ids) - num_new_tokens
            count = running.num_prompt_logprobs(num_new_tokens)
            logit_rows += range(first_row, first_row + count)
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


def _report_prompt(running: Running, logits: torch.Tensor) -> Sampled:
    """Log-probabilities of the prompt tokens after the positions that the logits are of."""
    num_alternatives = running.sampling.prompt_logprobs
    if num_alternatives is None or not len(logits):
        return Sampled()
    start = running.num_computed_tokens + 1
    token_ids = running.token_ids[start : start + len(logits)]
    return Sampled(prompt_logprobs=logprobs(logits, token_ids, num_alternatives))


def _choose(launched: Launched, raw_logits: torch.Tensor) -> list[Sampled]:
    """A token for each sequence that is sampled, or why it has none; one row of logits each."""
    sequences = launched.sampling
    params = [r.sampling for r in sequences]
    no_masks: list[Mask] = [None] * len(sequences)
    masks = no_masks if launched.masks is None else launched.masks.result()
    logits = raw_logits
    if any(map(is_adjusted, params)):
        logits = raw_logits.clone()
        for row, r, mask in zip(logits, sequences, masks, strict=True):
            if is_adjusted(r.sampling) and not isinstance(mask, GrammarError):
                adjust(row, r.sampling, r.prompt_ids, r.output_ids, r.stop_token_ids, mask)
    samples = sample(logits, params, [r.num_output_tokens for r in sequences], raw_logits)
    return [
        Sampled(error=str(mask)) if isinstance(mask, GrammarError) else Sampled(token_id, logprob)
        for mask, (token_id, logprob) in zip(masks, samples, strict=True)
    ]
