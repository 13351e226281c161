"""Capture decode steps as CUDA graphs by batch size, and replay them.

Launching a decode step of few sequences takes the host longer than the device needs to compute it.
A graph is launched in one call, but reads fixed addresses, for a fixed number of sequences. So
there is one graph for each of a few batch sizes and two widths of block table; a step takes the
smallest that it fits, and fills it up with rows that read and write the padding block 0. A guessed
token takes a row, too: it sees the keys before it in the table of its sequence.

Sampling is captured separately: its kind does not depend on the step's width. It leaves the tokens
on the device, where the next step can read them before the host has seen them. Sequences keep their
rows while others come and go: a newcomer takes a free row, or else the sequence in the last row
moves there, so that few tables are rewritten.
Invariant: a replay's inputs are written before it, in the device's order; a table is its
sequence's as far as that goes, and begins with block 0 where it belongs to none.
Never: allocates after capture; decides which sequences step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import is_

import torch

from engine.wire.sampling import SamplingParams
from engine.worker.device import Device
from engine.worker.model.attention import StepBatch
from engine.worker.model.proof_judge import difference, seeded
from engine.worker.model.records import RecordBlocks, record_rows
from engine.worker.model.sampler import NO_DRAW, NUM_DRAW_FIELDS, draw_of, is_plain
from engine.worker.model.transformer import Transformer
from engine.worker.worker_request import WorkerRequest, draws_of

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORT_CONTEXT_TOKENS = 4096
"""Attention splits a step's work by the longest possible context.

Two classes keep short contexts, the usual ones, from being split for the longest."""
_NUM_FIELDS = 6
"""Integers per row: token id, position, slot, length, row whose last token is its id, and table."""


def _padding(table: int) -> tuple[int, ...]:
    """Fill a row that no token needs; its table belongs to no sequence."""
    return 0, 0, 0, 1, -1, table


def _made_up_draws(size: int) -> torch.Tensor:
    """Make draws of a batch: with filters and without, and greedy ones."""
    kinds = [(1.0, 1.0), (1.0, 0.9), (0.0, 1.0)]
    params = [
        SamplingParams(1, 5, temperature=temperature, top_p=top_p) for temperature, top_p in kinds
    ]
    rows = [draw_of(params[i % len(params)], i) for i in range(size)]
    return torch.tensor(rows, dtype=torch.float64)


def bucket_of(size: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of ascending sizes that is large enough."""
    return next((each for each in sizes if each >= size), None)


class DecodeGraphs:
    """Hold all graphs of one model over one pool.

    Args:
        transformer: one that is_capturable.
        max_model_len: tokens of the longest sequence.
        max_batch: sequences of the largest step; larger steps use no graph.
    """

    def __init__(
        self,
        transformer: Transformer,
        pool: torch.Tensor,
        device: Device,
        *,
        block_size: int,
        max_model_len: int,
        max_batch: int = BATCH_SIZES[-1],
    ) -> None:
        self._transformer, self._pool, self._device = transformer, pool, device
        self._block_size = block_size
        self.batch_sizes = [size for size in BATCH_SIZES if size <= max_batch]
        longest = -(-max_model_len // block_size)
        self.widths = sorted({min(-(-SHORT_CONTEXT_TOKENS // block_size), longest), longest})
        rows, on = self.batch_sizes[-1], device.torch_device
        self._fields = torch.zeros(_NUM_FIELDS * rows, dtype=torch.int32, device=on)
        self._draws = torch.zeros(rows, NUM_DRAW_FIELDS, dtype=torch.float64, device=on)
        self._tables = torch.zeros(rows, longest, dtype=torch.int32, device=on)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=on)
        dtype = str(pool.dtype).removeprefix("torch.")
        self._record_blocks = transformer.config.record_blocks(block_size, dtype)
        num_values = rows * 2 * self._record_blocks + rows + 1
        self._records = torch.zeros(num_values, dtype=torch.int32, device=on)
        """The record blocks of each run of rows, then where runs begin."""
        vocab_size = transformer.config.vocab_size
        self._logits = torch.zeros(rows, vocab_size, dtype=torch.float32, device=on)
        self._stepping: list[WorkerRequest] = []
        """The sequences of the previous step, in the order asked for."""
        self._owners: list[WorkerRequest] = []
        """The sequences of the previous step, by tables."""
        self._steps: dict[tuple[int, int], Callable[[], None]] = {}
        self._samplers: dict[tuple[int, bool], Callable[[], None]] = {}
        self.capture_ms = 0.0

    @torch.inference_mode()
    def capture(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Record all of them, the largest first, whose memory the others then fit into."""
        started_ns = time.monotonic_ns()
        self._write([_padding(0)] * self.batch_sizes[-1])
        for size in reversed(self.batch_sizes):
            for is_greedy in (False, True):
                sampler = self._sampler(size, is_greedy)
                self._samplers[size, is_greedy] = self._device.capture(sampler)
            # fields lie one after the other at each size's own distance
            self._write([_padding(0)] * size)
            self._write_records([], size, 0)
            for width in reversed(self.widths):
                self._steps[size, width] = self._device.capture(self._step(size, width))
            heartbeat()
        self.capture_ms = (time.monotonic_ns() - started_ns) / 1e6

    @torch.inference_mode()
    def wrong_replay(self) -> str | None:
        """Describe a replay that is not what its kernels compute one by one; None: all are right.

        Rows are of sequences in blocks of their own, as far as the pool goes: short ones, and ones
        as long as a table. Nothing else may be in the pool.
        """
        dtype, generator = self._pool.dtype, seeded(0)
        for (size, width), replay in self._steps.items():
            num = self._make_up(size, width, generator)
            found = self._compared(replay, self._step(size, width), self._logits[:num])
            about = difference("replay", *found, dtype)
            if about is not None:
                return f"{size} rows, tables of {width} blocks: {about}"
        for (size, is_greedy), replay in self._samplers.items():
            logits = torch.randn(size, self._logits.shape[1], generator=generator) * 4
            self._logits[:size].copy_(logits)
            self._draws[:size].copy_(_made_up_draws(size))
            tokens = self._tokens[:size]
            if not torch.equal(*self._compared(replay, self._sampler(size, is_greedy), tokens)):
                return f"{size} rows: other tokens"
        self._pool[: 1 + self.batch_sizes[-1] * (1 + 2 * self._record_blocks)].zero_()
        return None

    def _compared(
        self, replay: Callable[[], None], step: Callable[[], None], made: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replay a graph, then run its kernels one by one; return what each made, on the host."""
        results = []
        for run in (replay, step):
            made.fill_(-1)
            run()
            results.append(made.cpu())
        return results[0], results[1]

    def _make_up(self, size: int, width: int, generator: torch.Generator) -> int:
        """Write the rows of a step: as many sequences as there are blocks for, then padding."""
        block_size, records = self._block_size, self._record_blocks
        num = min(size, (len(self._pool) - 1) // (1 + 2 * records))
        lengths = [1, block_size, block_size + 1, width * block_size, 2]
        vocab_size = self._logits.shape[1]
        ids = torch.randint(vocab_size, (size,), generator=generator).tolist()
        rows, tables, blocks = [], {}, []
        for place in range(num):
            position = min(lengths[place % len(lengths)], width * block_size) - 1
            block = 1 + place
            slot = block * block_size + position % block_size
            rows.append((ids[place], position, slot, position + 1, -1, place))
            tables[place] = [block] * width
            first = 1 + num + 2 * records * place
            written = range(first + records, first + 2 * records)
            blocks.append(RecordBlocks(range(first, first + records), written))
        self._write_tables(tables)
        self._write(rows + [_padding(0)] * (size - num))
        if records:
            self._write_record_blocks(blocks + [RecordBlocks()] * (size - num), range(size + 1))
        return num

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that have been captured."""
        return len(self._steps) + len(self._samplers)

    def fits(self, planned: list[tuple[WorkerRequest, int]]) -> bool:
        """Say whether a step has one known token per sequence and a graph."""
        return (
            0 < sum(1 + len(r.draft) for r, _ in planned) <= self.batch_sizes[-1]
            and all(n == 1 and r.is_decoding for r, n in planned)
            and not any(r.num_prompt_logprobs(1) for r, _ in planned)
        )

    @torch.inference_mode()
    def in_rows(self, sequences: Sequence[WorkerRequest]) -> list[WorkerRequest]:
        """Order the sequences by their tables, and put these in place."""
        num = len(sequences)
        if num == len(self._stepping) and all(map(is_, sequences, self._stepping)):
            return self._owners
        staying, num_before = set(map(id, sequences)), len(self._owners)
        rows = [r if id(r) in staying else None for r in self._owners[:num]]
        rows += [None] * (num - len(rows))
        placed = set(map(id, rows))
        moving = (r for r in sequences if id(r) not in placed)
        owners = [next(moving) if r is None else r for r in rows]
        written: dict[int, list[int]] = {
            i: owners[i].block_table for i in range(num) if not rows[i]
        }
        written.update((row, []) for row in range(num, num_before))
        self._stepping, self._owners = list(sequences), owners
        self._write_tables(written)
        return owners

    @torch.inference_mode()
    def extended(self, running: WorkerRequest) -> None:
        """Write the new blocks of a sequence into its table, if it has one."""
        rows = [row for row, owner in enumerate(self._owners) if owner is running]
        self._write_tables(dict.fromkeys(rows, running.block_table))

    @torch.inference_mode()
    def launch(
        self, sequences: Sequence[WorkerRequest], ahead: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Start a step of each sequence's last known token and its draft.

        Args:
            sequences: as in_rows() has returned them.
            ahead: 1 if the previous step, of equal sequences without drafts, has not been
                collected: then their last tokens are read from the device, where it leaves them.

        Returns:
            logits [num_rows, vocab_size], valid until the next launch, and the tokens [num_rows]
            if all of them could be sampled on the device; a sequence has 1 + len(draft) rows.
        """
        rows = [row for place, r in enumerate(sequences) for row in self._rows(r, place, ahead)]
        num = len(rows)
        size = bucket_of(num, self.batch_sizes)
        most = max(length for _, _, _, length, *_ in rows)
        width = bucket_of(-(-most // self._block_size), self.widths)
        if size is None or width is None:
            raise ValueError(f"no graph for {num} rows of up to {most} tokens")
        self._write(rows + [_padding(len(sequences))] * (size - num))
        self._write_records(sequences, size, ahead)
        self._steps[size, width]()
        logits = self._logits[:num]
        if not all(is_plain(r.sampling) for r in sequences):
            return logits, None
        draws = draws_of(sequences, ahead)
        is_greedy = all(draw == NO_DRAW for draw in draws)
        if not is_greedy:
            flat = [value for draw in draws for value in draw] + [*NO_DRAW] * (size - num)
            values = self._device.pinned(flat, torch.float64)
            self._draws[:size].copy_(values.view(size, -1), non_blocking=True)
        self._samplers[size, is_greedy]()
        return logits, self._tokens[:num]

    def _rows(self, running: WorkerRequest, table: int, ahead: int) -> list[tuple[int, ...]]:
        """Describe a sequence's rows: its last known token, and the guesses after it."""
        first, size = running.num_computed_tokens + ahead, self._block_size
        token_ids = [0] if ahead else [running.token_ids[first], *running.draft]
        return [
            (
                token_id,
                position,
                running.block_table[position // size] * size + position % size,
                position + 1,
                table if ahead else -1,
                table,
            )
            for position, token_id in enumerate(token_ids, first)
        ]

    def _write(self, rows: list[tuple[int, ...]]) -> None:
        """Fill in the integers of a step: each field of all rows, then the next."""
        values = self._device.pinned(
            [value for field in zip(*rows, strict=True) for value in field], torch.int32
        )
        self._fields[: len(values)].copy_(values, non_blocking=True)

    def _write_records(self, sequences: Sequence[WorkerRequest], size: int, ahead: int) -> None:
        """Fill in which records a step reads and writes, where the model keeps any.

        A sequence's rows are one run through its record; rows that fill up are runs of their own.
        """
        if not self._record_blocks:
            return
        records = [r.record_blocks_ahead() if ahead else r.record_blocks for r in sequences]
        records += [RecordBlocks()] * (size - len(records))
        starts = list(accumulate((1 + len(r.draft) for r in sequences), initial=0))
        starts += range(starts[-1] + 1, size + 1)
        starts += [size] * (size + 1 - len(starts))
        self._write_record_blocks(records, starts)

    def _write_record_blocks(self, records: list[RecordBlocks], starts: Iterable[int]) -> None:
        """Write the blocks of each record, then where the rows of each begin."""
        flat = [*record_rows(records, self._record_blocks), *starts]
        values = self._device.pinned(flat, torch.int32)
        self._records[: len(values)].copy_(values, non_blocking=True)

    def _write_tables(self, tables: dict[int, list[int]]) -> None:
        """Replace some rows' tables in one copy; an empty one by block 0."""
        if not tables:
            return
        width = min(max(1, *map(len, tables.values())), self._tables.shape[1])
        values = list(tables)
        for table in tables.values():
            values += table[:width]
            values += [0] * (width - len(table))
        pinned = self._device.pinned(values, torch.int32)
        sent = pinned.to(self._device.torch_device, non_blocking=True)
        rows, columns = sent[: len(tables)].long(), sent[len(tables) :].view(-1, width)
        self._tables[:, :width].index_copy_(0, rows, columns)

    def _step(self, size: int, width: int) -> Callable[[], None]:
        """Return the forward pass of one size, which leaves logits."""
        fields = self._fields[: _NUM_FIELDS * size].view(_NUM_FIELDS, size)
        tables = self._tables[:, :width]
        records = starts = None
        if self._record_blocks:
            num_blocks = size * 2 * self._record_blocks
            records = self._records[:num_blocks].view(size, 2, -1)
            starts = self._records[num_blocks : num_blocks + size + 1]

        def step() -> None:
            token_ids, positions, slots, _, sources, places = fields.long()
            # NO_TOKEN ends its sequence, of which this may be the step too many
            last = self._tokens[sources.clamp(min=0)].clamp(min=0)
            batch = StepBatch(
                input_ids=torch.where(sources >= 0, last, token_ids),
                positions=positions,
                token_slots=slots,
                query_lens=[1] * size,
                seq_lens=[width * self._block_size] * size,
                block_tables=(),
                logit_rows=range(size),
                device_tables=tables.index_select(0, places),
                device_lens=fields[3],
                device_records=records,
                device_record_starts=starts,
            )
            self._logits[:size].copy_(self._transformer.forward(batch, self._pool))

        return step

    def _sampler(self, size: int, is_greedy: bool) -> Callable[[], None]:
        """Return the sampling of tokens from the logits."""
        logits, tokens = self._logits[:size], self._tokens[:size]
        draws = None if is_greedy else self._draws[:size]

        def sample() -> None:
            tokens.copy_(self._transformer.sample_rows(logits, draws))

        return sample
