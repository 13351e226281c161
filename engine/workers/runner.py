"""Run one step: sequences to tensors, through the model, to sampled tokens.

Owns: nothing but the model and the pool it writes.
Invariant: a sequence is sampled exactly when the step computes its last known token; when a step
is collected the device has done all of it.
Never: ends a sequence, sends a message, looks at a role.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from engine.errors import WorkerFailed
from engine.model.logit_rules import NothingAllowedError, adjust, is_adjusted
from engine.model.sampler import NO_DRAW, NO_TOKEN, draw_of, is_plain, logprobs, sample
from engine.model.transformer import StepBatch, Transformer
from engine.text.grammar import GrammarError
from engine.wire.sampling import TokenLogprob
from engine.workers.device import Device
from engine.workers.graphs import DecodeGraphs
from engine.workers.worker_request import Grammars, Mask, WorkerRequest

_NUMBERS_PATIENCE_S = 2.0
_NUMBERS_PAUSE_S = 0.01
_NO_NUMBERS = "the model has computed NaN or infinity in place of logits"
_NO_NUMBERS_BEFORE = "the model has computed NaN or infinity from a token of the prompt on"


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device has begun, to be collected."""

    planned: list[tuple[WorkerRequest, int]]
    sampling: list[WorkerRequest]
    """Those that are, in the order of their logits."""
    logits: torch.Tensor | None
    masks: Future[list[Mask]] | None
    """One for each sequence that is sampled; None: no grammar among them."""
    token_ids: Callable[[], list[int]] | None = None
    """Waits for the tokens of those that are sampled, where the device has chosen them."""
    wait: Callable[[], None] | None = None
    """Waits for a device's step whose tokens are not fetched; None: nothing is to be waited for."""
    bad_rows: Callable[[], list[int]] | None = None
    """Waits for the step; the tokens that no numbers came of, where logits do not tell of all."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step yielded for one sequence."""

    token_ids: list[int] = field(default_factory=list)
    """In order; none while the prompt goes on. The step computes all but the last, too."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One for each of them, if asked for."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None
    """Why the sequence has no tokens and cannot go on."""
    is_fault: bool = False
    """That is not for what was asked, but for what the model computes."""


class Runner:
    """Executes planned steps on one device.

    Args:
        transformer: the model.
        pool: its KV.
        block_size: of the pool.
        grammars: of the sequences that have one.
        device: that of model and pool; None: the CPU.
        graphs: of the decode steps; None: each is launched piece by piece.
    """

    def __init__(
        self,
        transformer: Transformer,
        pool: torch.Tensor,
        block_size: int,
        grammars: Grammars,
        device: Device | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.block_size = block_size
        self.grammars = grammars
        self._transformer = transformer
        self._pool = pool
        self._device = device
        self._graphs = graphs

    @torch.inference_mode()
    def launch(
        self,
        planned: list[tuple[WorkerRequest, int]],
        stops: Callable[[int, int], bool] | None = None,
    ) -> Launched:
        """Start one step: each sequence with its number of new tokens; `stops` as in hidden()."""
        sampling = [r for r, n in planned if r.num_computed_tokens + n == r.num_tokens]
        if not planned:
            return Launched(planned, sampling, None, None)
        graphs = self._graphs
        if graphs is not None and not graphs.fits(planned):
            graphs = None
        if graphs is not None:
            sampling = graphs.in_rows(sampling)
        # masks first: they are computed while the model is
        has_grammar = any(r.matcher is not None for r in sampling)
        masks = self.grammars.masks(sampling) if has_grammar else None
        tokens = bad_rows = None
        if graphs is not None:
            logits, tokens = graphs.launch(sampling)
        else:
            batch = self.batch(planned)
            hidden = self._transformer.hidden(batch, self._pool, stops)
            if len(hidden) > len(sampling):
                bad_rows = self._bad_rows(hidden)
            logits = self._transformer.logits(hidden, batch)
            if self._device is not None and len(logits) == len(sampling):
                tokens = self._sample_rows(logits, sampling)
        step = planned, sampling, logits, masks
        if self._device is None or tokens is not None:
            return Launched(*step, self._fetched(tokens), bad_rows=bad_rows)
        # where nothing is sampled nobody reads anything, but what the step writes counts as there
        return Launched(*step, wait=self._device.mark(), bad_rows=bad_rows)

    def _bad_rows(self, hidden: torch.Tensor) -> Callable[[], list[int]]:
        """Which rows of [num_tokens, hidden_size] hold NaN or infinity, to be asked later.

        Logits tell of the last token only, and later tokens read keys and values that were made
        finite: they would go on from a prompt that was not understood, and others find it cached.
        """
        # a sum is a quarter of isfinite()'s time, and finite unless what it is of would overflow
        finite = hidden.sum(-1, dtype=torch.float32).isfinite()
        whole = finite.all().view(1)
        is_whole = whole.tolist if self._device is None else self._device.fetch(whole)
        return lambda: [] if all(is_whole()) else (~finite).nonzero()[:, 0].tolist()

    @property
    def num_layers(self) -> int:
        return self._transformer.config.num_layers

    @property
    def is_on_device(self) -> bool:
        """True where steps are launched, and computed meanwhile."""
        return self._device is not None

    @torch.inference_mode()
    def follow(self, launched: Launched) -> Launched | None:
        """Start the step after one that is not collected, for the same sequences; None: cannot.

        It goes on from the tokens on the device. What it computes for a sequence that turns out to
        have ended is to be thrown away.
        """
        sequences, graphs = launched.sampling, self._graphs
        if graphs is None or launched.token_ids is None or not graphs.fits(launched.planned):
            return None
        if any(r.num_output_tokens + 1 >= r.until_output for r in sequences):
            return None
        if any(r.room(self.block_size) < 2 for r in sequences):
            return None
        logits, tokens = graphs.launch(sequences, ahead=1)
        return Launched(launched.planned, sequences, logits, None, self._fetched(tokens))

    def extended(self, running: WorkerRequest) -> None:
        """A sequence has more blocks."""
        if self._graphs is not None:
            self._graphs.extended(running)

    def _fetched(self, tokens: torch.Tensor | None) -> Callable[[], list[int]] | None:
        if tokens is None or self._device is None:
            return None
        return self._device.fetch(tokens)

    def _sample_rows(
        self, logits: torch.Tensor, sampling: list[WorkerRequest]
    ) -> torch.Tensor | None:
        """Tokens chosen on the device, if nothing about them has to be decided here."""
        assert self._device is not None
        if not sampling or not all(is_plain(r.sampling) for r in sampling):
            return None
        draws = [draw_of(r.sampling, r.next_index) for r in sampling]
        if all(draw == NO_DRAW for draw in draws):
            return self._transformer.sample_rows(logits, None)
        flat = self._device.pinned([value for draw in draws for value in draw], torch.float64)
        on_device = flat.to(self._device.torch_device, non_blocking=True)
        return self._transformer.sample_rows(logits, on_device.view(len(draws), -1))

    @torch.inference_mode()
    def collect(self, launched: Launched) -> list[Sampled]:
        """Wait for a step; one result per planned sequence."""
        results = self._results(launched)
        bad_rows = [] if launched.bad_rows is None else launched.bad_rows()
        if bad_rows:
            ends = list(accumulate(count for _, count in launched.planned))
            for index in {bisect_right(ends, row) for row in bad_rows}:
                results[index] = Sampled(error=_NO_NUMBERS_BEFORE, is_fault=True)
        return results

    def _results(self, launched: Launched) -> list[Sampled]:
        logits = launched.logits
        if logits is None:
            return [Sampled()] * len(launched.planned)
        if launched.token_ids is not None:
            tokens = zip(map(id, launched.sampling), launched.token_ids(), strict=True)
            sampled = {
                of: Sampled(error=_NO_NUMBERS, is_fault=True)
                if token_id == NO_TOKEN
                else Sampled([token_id])
                for of, token_id in tokens
            }
            return [sampled.get(id(r)) or Sampled() for r, _ in launched.planned]
        if launched.wait is not None:
            launched.wait()
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

    def batch(self, planned: list[tuple[WorkerRequest, int]]) -> StepBatch:
        """What the model is told of a step."""
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
        query_lens = [n for _, n in planned]
        seq_lens = [r.num_computed_tokens + n for r, n in planned]
        block_tables = [r.block_table for r, _ in planned]
        if self._device is not None:
            # no kernel reads beyond a sequence's length, and a shorter table is sooner there
            num_blocks = [-(-length // self.block_size) for length in seq_lens]
            block_tables = [t[:n] for t, n in zip(block_tables, num_blocks, strict=True)]
            tokens = (input_ids, positions, token_slots)
            return self._device_batch(tokens, query_lens, seq_lens, block_tables, logit_rows)
        return StepBatch(
            input_ids=torch.tensor(input_ids),
            positions=torch.tensor(positions),
            token_slots=torch.tensor(token_slots),
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_tables=block_tables,
            logit_rows=logit_rows,
        )

    def _device_batch(
        self,
        tokens: tuple[list[int], list[int], list[int]],
        query_lens: list[int],
        seq_lens: list[int],
        block_tables: list[list[int]],
        logit_rows: list[int],
    ) -> StepBatch:
        """The same on the device, in one copy that nobody waits for."""
        assert self._device is not None
        longest = max(map(len, block_tables))
        padded = [[*table, *[0] * (longest - len(table))] for table in block_tables]
        parts = [*tokens, logit_rows, seq_lens, [i for table in padded for i in table]]
        values = self._device.pinned([value for part in parts for value in part], torch.int32)
        sent = values.to(self._device.torch_device, non_blocking=True)
        *wide, lens, tables = torch.split(sent, [len(part) for part in parts])
        input_ids, positions, token_slots, rows = (part.long() for part in wide)
        return StepBatch(
            input_ids=input_ids,
            positions=positions,
            token_slots=token_slots,
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_tables=block_tables,
            logit_rows=logit_rows,
            device_tables=tables.view(len(block_tables), longest),
            device_lens=lens,
            device_logit_rows=rows,
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

    def clear(self, block_ids: list[int]) -> None:
        """Forget what is in some blocks of the pool; their memory is there from now on."""
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self._pool.device)
        self._pool.index_fill_(0, ids, 0)

    def warm_up(self, max_num_batched_tokens: int, max_model_len: int) -> None:
        """Run a prefill and a decode step into block 0, so that the first request is not slow.

        On a device also a decode step after the longest context, which is computed in parts: no
        step that serves may be the first to need a kernel, for it would wait for the compiler.

        Raises:
            WorkerFailed: what the model computes are no numbers.
        """
        for length in (min(max_num_batched_tokens, self.block_size, max_model_len), 1):
            self._check_numbers(length)
        if self._device is not None:
            self.dummy_step(1, max_model_len, num_new_tokens=1)

    def _check_numbers(self, length: int) -> None:
        """A step of one prompt, whose logits must be finite.

        Another worker that tries its link may write block 0 meanwhile: one success is enough.
        """
        patient_until_s = time.monotonic() + _NUMBERS_PATIENCE_S
        while not self.dummy_step(1, length).isfinite().all():
            if time.monotonic() > patient_until_s:
                raise WorkerFailed(
                    "the model's first step yields NaN or infinity in place of logits",
                    where="the step that is tried at start",
                    hint="its weights are damaged or overflow in this dtype: try dtype float32, "
                    "and `penstock models verify` for what came from a hub",
                )
            time.sleep(_NUMBERS_PAUSE_S)

    @torch.inference_mode()
    def dummy_step(
        self, num_sequences: int, length: int, num_new_tokens: int | None = None
    ) -> torch.Tensor:
        """Run a step of new sequences into block 0, as large as the largest to come, perhaps.

        On a device tokens are chosen in both ways that there are kernels for.

        Args:
            num_sequences: in the step.
            length: of each, in tokens.
            num_new_tokens: of each, its last; None: all are new.

        Returns:
            its logits, float32 [num_sequences, vocab_size].
        """
        blocks, new = [0] * -(-length // self.block_size), num_new_tokens or length

        def dummies(temperature: float) -> list[WorkerRequest]:
            return [
                WorkerRequest.dummy(length, blocks, length - new, temperature)
                for _ in range(num_sequences)
            ]

        batch = self.batch([(each, new) for each in dummies(0.0)])
        logits = self._transformer.forward(batch, self._pool)
        if self._device is not None:
            for temperature in (0.0, 1.0):
                self._sample_rows(logits, dummies(temperature))
        return logits


def _report_prompt(running: WorkerRequest, logits: torch.Tensor) -> Sampled:
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
    errors: list[str | None] = [None] * len(sequences)
    if any(map(is_adjusted, params)):
        logits = raw_logits.clone()
        rows = zip(logits, sequences, masks, strict=True)
        errors = [_adjust(row, r, mask) for row, r, mask in rows]
    if not sequences:
        return []
    samples = sample(logits, params, [r.next_index for r in sequences], raw_logits)
    chosen = raw_logits.gather(-1, _column([each for each, _ in samples], raw_logits))
    are_numbers = chosen.isfinite()[:, 0].tolist()
    return [
        Sampled(error=error)
        if error
        else Sampled([token_id], [logprob] if logprob else [])
        if is_number
        else Sampled(error=_NO_NUMBERS, is_fault=True)
        for error, (token_id, logprob), is_number in zip(errors, samples, are_numbers, strict=True)
    ]


def _column(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Places in rows of logits, [num_rows, 1]."""
    return torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]


def _adjust(row: torch.Tensor, running: WorkerRequest, mask: Mask) -> str | None:
    """Change a row of logits as its request says; why that leaves no token, or None."""
    if isinstance(mask, GrammarError):
        return str(mask)
    if is_adjusted(running.sampling):
        ids = running.prompt_ids, running.output_ids, running.stop_token_ids
        try:
            adjust(row, running.sampling, *ids, mask, running.allowed_ids)
        except NothingAllowedError as error:
            return str(error)
    return None
