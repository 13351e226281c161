"""Run one step: sequences to tensors, through the model, to sampled tokens.

Invariant: a sequence is sampled exactly when the step computes its last known token; a draft does
not change its tokens; when a step is collected the device has finished it, and records count no
token that was refused.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice

import torch

from engine.errors import WorkerFailed
from engine.text.grammar import GrammarError
from engine.wire.sampling import TokenLogprob
from engine.worker.device import Device
from engine.worker.grammars import Grammars, Mask, Masks
from engine.worker.graphs import DecodeGraphs
from engine.worker.model.attention import StepBatch, WindowTables
from engine.worker.model.draw_rows import RowDraw
from engine.worker.model.logit_rules import is_adjusted, rules_of
from engine.worker.model.records import RecordBlocks, record_rows
from engine.worker.model.sampler import NO_DRAW, NO_TOKEN, is_plain
from engine.worker.model.transformer import Transformer
from engine.worker.worker_request import WorkerRequest, draws_of

_NUMBERS_PATIENCE_S = 2.0
_NUMBERS_PAUSE_S = 0.01
_NO_NUMBERS = "the model computed NaN or infinity instead of logits"
_NO_NUMBERS_BEFORE = "the model computed NaN or infinity within the prompt"


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device has begun, to be collected."""

    planned: list[tuple[WorkerRequest, int]]
    sampling: list[WorkerRequest]
    """The sampled sequences, in the order of their logits."""
    logits: torch.Tensor | None
    masks: Future[list[Masks]] | None
    """One per sampled sequence; None: no grammar among them."""
    token_ids: Callable[[], list[int]] | None = None
    """Waits for the tokens that the device has sampled."""
    wait: Callable[[], None] | None = None
    """Waits for a device's step without fetched tokens; None: nothing to wait for."""
    bad_rows: Callable[[], list[int]] | None = None
    """Waits for the step; returns the tokens with NaN or infinity."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of a step for one sequence."""

    token_ids: list[int] = field(default_factory=list)
    """New tokens in order; none within the prompt. The step computes all but the last, too."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One per token, if asked for."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None
    """Why the sequence has no tokens and must end."""
    is_fault: bool = False
    """Whether the model, rather than the request, caused the error."""


class Runner:
    """Execute planned steps on one device.

    Args:
        grammars: of the sequences that have one.
        device: of model and pool; None: the CPU.
        graphs: of the decode steps; None: each kernel is launched separately.
        num_groups: groups of layers that have blocks of their own.
    """

    def __init__(
        self,
        transformer: Transformer,
        pool: torch.Tensor,
        block_size: int,
        grammars: Grammars,
        device: Device | None = None,
        graphs: DecodeGraphs | None = None,
        num_groups: int = 1,
    ) -> None:
        self.block_size = block_size
        self.grammars = grammars
        self.num_groups = num_groups
        self._transformer = transformer
        self._pool = pool
        self._device = device
        self._graphs = graphs
        dtype = str(pool.dtype).removeprefix("torch.")
        self._record_blocks = transformer.config.record_blocks(block_size, dtype)

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
        self._clear_new_blocks([(r, r.num_computed_tokens, n + len(r.draft)) for r, n in planned])
        if graphs is not None:
            logits, tokens = graphs.launch(sampling)
        else:
            batch = self.batch(planned)
            hidden = self._transformer.hidden(batch, self._pool, stops)
            num_sampled = len(sampling) + sum(len(r.draft) for r in sampling)
            if len(hidden) > num_sampled:
                bad_rows = self._bad_rows(hidden)
            logits = self._transformer.logits(hidden, batch)
            if self._device is not None and len(logits) == num_sampled:
                tokens = self._sample_rows(logits, sampling)
        step = planned, sampling, logits, masks
        if self._device is None or tokens is not None:
            return Launched(*step, self._fetched(tokens), bad_rows=bad_rows)
        # without sampling nothing is fetched, but the step's blocks count as written
        return Launched(*step, wait=self._device.mark(), bad_rows=bad_rows)

    def _bad_rows(self, hidden: torch.Tensor) -> Callable[[], list[int]]:
        """Find rows of [num_tokens, hidden_size] with NaN or infinity; the result is read later.

        Logits cover the last token only, and later tokens read keys and values that were made
        finite: they would continue a prompt that was computed wrongly, and other requests would
        find it cached.
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
        """Whether steps are launched and computed asynchronously."""
        return self._device is not None

    def can_follow(self, launched: Launched) -> bool:
        """Say whether the next step of an uncollected one's sequences could start."""
        sequences, graphs = launched.sampling, self._graphs
        if graphs is None or launched.token_ids is None or not graphs.fits(launched.planned):
            return False
        return not any(
            r.draft  # how many of these are right decides what comes next
            or r.num_output_tokens + 1 >= r.until_output
            or r.room(self.block_size) < 2
            for r in sequences
        )

    @torch.inference_mode()
    def follow(self, launched: Launched) -> Launched:
        """Start the next step of an uncollected one's sequences, where it can_follow().

        It continues from the tokens on the device. Its results for ended sequences must be dropped.
        """
        sequences, graphs = launched.sampling, self._graphs
        assert graphs is not None
        self._clear_new_blocks([(r, r.num_computed_tokens + 1, 1) for r in sequences])
        logits, tokens = graphs.launch(sequences, ahead=1)
        return Launched(launched.planned, sequences, logits, None, self._fetched(tokens))

    def extended(self, running: WorkerRequest) -> None:
        """Note new blocks of a sequence."""
        if self._graphs is not None:
            self._graphs.extended(running)

    def _fetched(self, tokens: torch.Tensor | None) -> Callable[[], list[int]] | None:
        if tokens is None or self._device is None:
            return None
        return self._device.fetch(tokens)

    def _sample_rows(
        self, logits: torch.Tensor, sampling: list[WorkerRequest]
    ) -> torch.Tensor | None:
        """Sample tokens on the device, if nothing about them is decided here."""
        assert self._device is not None
        if not sampling or not all(is_plain(r.sampling) for r in sampling):
            return None
        draws = draws_of(sampling)
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
        self._take_back_refused(launched, results)
        return results

    def _take_back_refused(self, launched: Launched, results: list[Sampled]) -> None:
        """Write the records of sequences with refused guesses again, from those before the step.

        A step with guesses has one known token of each sequence.
        """
        num_taken = {
            id(running): len(result.token_ids)
            for (running, _), result in zip(launched.planned, results, strict=True)
        }
        rows, records, first = [], [], 0
        for running in launched.sampling:
            num_right = max(num_taken[id(running)] - 1, 0)
            if running.records is not None and num_right < len(running.draft):
                rows.append((first, 1 + num_right))
                records.append(running.record_blocks)
            first += 1 + len(running.draft)
        if rows:
            self._transformer.write_records(rows, records, self._pool)

    def _results(self, launched: Launched) -> list[Sampled]:
        logits = launched.logits
        if logits is None:
            return [Sampled()] * len(launched.planned)
        if launched.token_ids is not None:
            drawn = iter(launched.token_ids())
            sampled = {
                id(r): _accepted(r.draft, list(islice(drawn, 1 + len(r.draft))))
                for r in launched.sampling
            }
            return [sampled.get(id(r)) or Sampled() for r, _ in launched.planned]
        if launched.wait is not None:
            launched.wait()
        results = []
        of_next: list[torch.Tensor] = []
        rows = iter(logits.unbind())
        for running, num_new_tokens in launched.planned:
            count = running.num_prompt_logprobs(num_new_tokens)
            results.append(self._report_prompt(running, list(islice(rows, count))))
            if running.num_computed_tokens + num_new_tokens == running.num_tokens:
                of_next += islice(rows, 1 + len(running.draft))
        results_of_next = self._choose(launched, of_next)
        chosen = {id(r): c for r, c in zip(launched.sampling, results_of_next, strict=True)}
        for index, (running, _) in enumerate(launched.planned):
            if id(running) in chosen:
                prompt_logprobs = results[index].prompt_logprobs
                results[index] = replace(chosen[id(running)], prompt_logprobs=prompt_logprobs)
        return results

    def _report_prompt(self, running: WorkerRequest, rows: list[torch.Tensor]) -> Sampled:
        """Add log-probabilities of the prompt tokens that follow the rows' positions."""
        num_alternatives = running.sampling.prompt_logprobs
        if num_alternatives is None or not rows:
            return Sampled()
        start = running.num_computed_tokens + 1
        token_ids = running.token_ids[start : start + len(rows)]
        counts = [num_alternatives] * len(rows)
        return Sampled(prompt_logprobs=self._transformer.rate(rows, token_ids, counts))

    def _choose(self, launched: Launched, rows: list[torch.Tensor]) -> list[Sampled]:
        """Sample each sequence's tokens, or explain why it has none.

        A sequence has a row of logits for its next token, and one after each token of its draft.
        All are drawn as if the draft were right; a row counts if it is right up to there.
        """
        left = iter(rows)
        of_next = [list(islice(left, 1 + len(r.draft))) for r in launched.sampling]
        masks: list[Masks] = [[None] * len(own) for own in of_next]
        if launched.masks is not None:
            masks = launched.masks.result()
        asked = [
            [] if isinstance(own, GrammarError) else _draws(running, own, theirs)
            for running, own, theirs in zip(launched.sampling, masks, of_next, strict=True)
        ]
        every = [draw for draws in asked for draw in draws]
        drawn = iter(self._transformer.draw(every) if every else [])
        results = [
            Sampled(error=str(own))
            if isinstance(own, GrammarError)
            else _accepted(running.draft, list(islice(drawn, len(draws))), draws)
            for running, own, draws in zip(launched.sampling, masks, asked, strict=True)
        ]
        return self._rated(asked, results)

    def _rated(self, asked: list[list[RowDraw]], results: list[Sampled]) -> list[Sampled]:
        """Add the log-probabilities of tokens that are to be reported with them."""
        rows, token_ids, counts = [], [], []
        for draws, result in zip(asked, results, strict=True):
            for draw, token_id in zip(draws, result.token_ids, strict=False):
                if draw.params.logprobs is not None:
                    rows.append(draw.logits)
                    token_ids.append(token_id)
                    counts.append(draw.params.logprobs)
        if not rows:
            return results
        rated = iter(self._transformer.rate(rows, token_ids, counts))
        return [
            result
            if not draws or draws[0].params.logprobs is None
            else replace(result, logprobs=list(islice(rated, len(result.token_ids))))
            for draws, result in zip(asked, results, strict=True)
        ]

    def batch(self, planned: list[tuple[WorkerRequest, int]]) -> StepBatch:
        """Build the model's input for a step."""
        input_ids: list[int] = []
        positions: list[int] = []
        token_slots: list[int] = []
        window_slots: list[list[int]] = [[] for _ in range(self.num_groups - 1)]
        logit_rows: list[int] = []
        for running, num_new_tokens in planned:
            start, first_row = running.num_computed_tokens, len(input_ids)
            end = start + num_new_tokens + len(running.draft)
            input_ids += running.token_ids[start : start + num_new_tokens] + running.draft
            positions += range(start, end)
            token_slots += self._token_slots(running.block_table, start, end)
            for number, table in enumerate(running.window_tables):
                window_slots[number] += self._token_slots(table, start, end)
            count = running.num_prompt_logprobs(num_new_tokens)
            logit_rows += range(first_row, first_row + count)
            if start + num_new_tokens == running.num_tokens:
                logit_rows += range(first_row + num_new_tokens - 1, len(input_ids))
        query_lens = [n + len(r.draft) for r, n in planned]
        seq_lens = [r.num_computed_tokens + n + len(r.draft) for r, n in planned]
        block_tables = [r.block_table for r, _ in planned]
        if self._device is not None or any(r.records is not None for r, _ in planned):
            # a shorter table is sooner on a device; beside records, later blocks may hold NaN
            num_blocks = [-(-length // self.block_size) for length in seq_lens]
            block_tables = [t[:n] for t, n in zip(block_tables, num_blocks, strict=True)]
        if self._device is not None:
            tokens = (input_ids, positions, token_slots)
            records = [r.record_blocks for r, _ in planned]
            how = (query_lens, seq_lens, block_tables, logit_rows, records)
            return self._device_batch(tokens, *how)
        return StepBatch(
            input_ids=torch.tensor(input_ids),
            positions=torch.tensor(positions),
            token_slots=torch.tensor(token_slots),
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_tables=block_tables,
            logit_rows=logit_rows,
            records=[r.record_blocks for r, _ in planned],
            windows=[
                WindowTables(torch.tensor(slots), [r.window_tables[number] for r, _ in planned])
                for number, slots in enumerate(window_slots)
            ],
        )

    def _clear_new_blocks(self, steps: list[tuple[WorkerRequest, int, int]]) -> None:
        """Zero the blocks that a step begins, where records share the pool.

        Each sequence is given with its first position in the step, and the number of positions.

        Attention may read a block beyond the written positions, masked: as numbers of the pool's
        dtype a record's bytes may be NaN, which no mask hides.
        """
        size, begun = self.block_size, []
        for running, start, num_new in steps if self._record_blocks else ():
            begun += running.block_table[-(-start // size) : -(-(start + num_new) // size)]
        if begun:
            self.clear(begun)

    def _device_batch(
        self,
        tokens: tuple[list[int], list[int], list[int]],
        query_lens: list[int],
        seq_lens: list[int],
        block_tables: list[list[int]],
        logit_rows: list[int],
        records: list[RecordBlocks],
    ) -> StepBatch:
        """Build the batch on the device, in one asynchronous copy."""
        assert self._device is not None
        longest = max(map(len, block_tables))
        padded = [[*table, *[0] * (longest - len(table))] for table in block_tables]
        width = self._record_blocks
        parts = [*tokens, logit_rows, seq_lens, [i for table in padded for i in table]]
        parts.append(record_rows(records, width) if width else [])
        values = self._device.pinned([value for part in parts for value in part], torch.int32)
        sent = values.to(self._device.torch_device, non_blocking=True)
        *wide, lens, tables, places = torch.split(sent, [len(part) for part in parts])
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
            records=records if width else (),
            device_records=places.view(-1, 2, width) if width else None,
        )

    def _token_slots(self, block_table: list[int], start: int, end: int) -> list[int]:
        """Return pool slots of positions [start, end): block_id * block_size + offset."""
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
        """Zero some blocks of the pool; their memory exists from now on."""
        if self._device is None:
            ids = torch.tensor(block_ids, dtype=torch.int64)
        else:
            pinned = self._device.pinned(block_ids, torch.int64)
            ids = pinned.to(self._pool.device, non_blocking=True)
        self._pool.index_fill_(0, ids, 0)

    def warm_up(self, max_num_batched_tokens: int, max_model_len: int) -> None:
        """Run a prefill and a decode step into block 0, so that the first request is not slow.

        On a device also run a decode step and a short chunk after the longest context, which are
        computed in parts: a serving step must not wait for the compiler of a new kernel.

        Raises:
            WorkerFailed: the model computes NaN or infinity.
        """
        for length in (min(max_num_batched_tokens, self.block_size, max_model_len), 1):
            self._check_numbers(length)
        if self._device is not None:
            for num_new_tokens in (1, min(2, max_model_len)):
                self.dummy_step(1, max_model_len, num_new_tokens)
            if self._record_blocks and self._transformer.rewrites_records:
                self._transformer.write_records([(0, 1)], [RecordBlocks()], self._pool)

    def _check_numbers(self, length: int) -> None:
        """Run a step of one prompt, and check that its logits are finite.

        Another worker that probes its link may write block 0 meanwhile: one success is enough.
        """
        patient_until_s = time.monotonic() + _NUMBERS_PATIENCE_S
        while not self.dummy_step(1, length).isfinite().all():
            if time.monotonic() > patient_until_s:
                raise WorkerFailed(
                    "the model's first step yields NaN or infinity instead of logits",
                    where="the trial step at start",
                    hint="its weights are damaged or overflow in this dtype: try dtype float32, "
                    "and `penstock models verify` for what came from a hub",
                )
            time.sleep(_NUMBERS_PAUSE_S)

    @torch.inference_mode()
    def dummy_step(
        self, num_sequences: int, length: int, num_new_tokens: int | None = None
    ) -> torch.Tensor:
        """Run a step of dummy sequences into block 0, up to the largest size.

        On a device tokens are sampled by both kinds of kernels.

        Args:
            length: of each, in tokens.
            num_new_tokens: of each, its last; None: all are new.

        Returns:
            its logits, float32 [num_sequences, vocab_size].
        """
        blocks, new = [0] * -(-length // self.block_size), num_new_tokens or length

        def dummies(temperature: float) -> list[WorkerRequest]:
            return [
                WorkerRequest.dummy(
                    length, blocks, length - new, temperature, num_groups=self.num_groups
                )
                for _ in range(num_sequences)
            ]

        batch = self.batch([(each, new) for each in dummies(0.0)])
        logits = self._transformer.forward(batch, self._pool)
        if self._device is not None:
            for temperature in (0.0, 1.0):
                self._sample_rows(logits, dummies(temperature))
        return logits


def _accepted(draft: list[int], drawn: list[int], draws: Sequence[RowDraw] = ()) -> Sampled:
    """Take the drawn tokens up to the first that is not the draft's.

    Args:
        draws: of each token; the rules of the first one may leave no token.
    """
    num_right = 0
    while num_right < len(draft) and drawn[num_right : num_right + 1] == [draft[num_right]]:
        num_right += 1
    token_ids = drawn[: num_right + 1]
    if token_ids[-1] == NO_TOKEN:  # after a right guess it is left to the next step
        token_ids.pop()
    if token_ids:
        return Sampled(token_ids)
    rules = draws[0].rules if draws else None
    if rules is not None and (why := rules.why_nothing()) is not None:
        return Sampled(error=why)
    return Sampled(error=_NO_NUMBERS, is_fault=True)


def _draws(running: WorkerRequest, masks: list[Mask], rows: list[torch.Tensor]) -> list[RowDraw]:
    """Describe the draws of a sequence's rows; where its grammar ends a draft there are less."""
    params, first = running.sampling, running.next_index
    if not is_adjusted(params):
        return [RowDraw(row, params, first + place) for place, row in enumerate(rows)]
    ids, num_known = running.ids_with(running.draft), running.num_tokens
    num_prompt_ids = running.num_prompt_tokens - params.output_offset
    return [
        RowDraw(
            row,
            params,
            first + place,
            rules_of(
                params,
                ids,
                num_prompt_ids,
                num_known + place,
                running.stop_token_ids,
                len(row),
                mask,
                running.allowed_bits,
            ),
        )
        for place, (row, mask) in enumerate(zip(rows, masks, strict=False))
    ]
