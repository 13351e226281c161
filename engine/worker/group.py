"""Lead a group's other processes through each step, or follow the first.

The first process plans and draws. It sends the others what a step computes, tokens and tables, so
that they know no sequence. Sums and logits meet in the memory of engine.worker.model.reduction.

Invariant: all compute the same steps in one order, each to its end, or to where the first one says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.shard_bytes import MOST_STEP_TOKENS
from engine.checkpoint.shards import shard_config
from engine.errors import WorkerFailed, WorkerUnfit
from engine.kernels.cpu import Kernels, ProductVariants
from engine.wire.beats import Beats
from engine.wire.messages import Failed, GroupSpec, Setup, WeightsLoaded
from engine.worker.links import FirstLink, Link, StepInputs, encode
from engine.worker.model.attention import StepBatch, WindowTables
from engine.worker.model.compiled import find_kernels
from engine.worker.model.records import RecordBlocks
from engine.worker.model.reduction import GroupShape, Reduction
from engine.worker.model.shards import Shards, Weights, load_shards, prove
from engine.worker.model.transformer import Transformer
from engine.worker.self_test import faults_of_cores

_ROWS_OF_A_SEQUENCE = 8
"""Rows that a sequence which decodes can have in a step: its token and guesses."""
_ROWS = 64

Progress = Callable[[int, int], None]
Stops = Callable[[int, int], bool]
"""Called after each half of a layer with (done, total); true: leave out the rest."""


class Part(NamedTuple):
    """What one process of a group has loaded."""

    weights: Weights
    """What it has whole."""
    shards: Shards
    variants: ProductVariants | None
    """How packed matrices are multiplied; None: none is packed."""
    kernels: Kernels

    def prove(self) -> None:
        """Compute known sums and a product together with the other processes."""
        prove(self.shards.reduction, self.kernels)


class Followers:
    """The other processes of a group, as the first sees them.

    Args:
        fds: of the links to each, in the order of their ranks.
        memory_fd: of what all share.
        beats: takes how long each process waits; None: they are not told.
    """

    def __init__(self, fds: Sequence[int], memory_fd: int, beats: Beats | None = None) -> None:
        self._links = [FirstLink(fd, rank) for rank, fd in enumerate(fds, 1)]
        self._memory_fd, self._beats = memory_fd, beats

    def begin(self, setup: Setup) -> None:
        """Let the others load."""
        assert setup.group is not None
        for rank, link in enumerate(self._links, 1):
            group = msgspec.structs.replace(setup.group, rank=rank)
            link.send(encode(msgspec.structs.replace(setup, cpus=group.cpus[rank], group=group)))

    def load(self, checkpoint: Checkpoint, setup: Setup, progress: Progress) -> Part:
        """Load the first process's shards, and wait until all have theirs.

        Raises:
            WorkerFailed: one of them could not load, or sums over the group are wrong.
        """
        loaded_bytes = total_bytes = 0

        def note(done: int, total: int) -> None:
            nonlocal loaded_bytes, total_bytes
            loaded_bytes, total_bytes = done, total
            progress(done, total)

        part = load_part(checkpoint, setup, self._memory_fd, note)
        for link in self._links:
            while not _has_loaded(link):
                progress(loaded_bytes, total_bytes)  # a sign of its life
        part.prove()
        return part

    def step(self, batch: StepBatch, *, may_stop: bool) -> None:
        """Let all compute a step.

        Raises:
            WorkerFailed: one of them has ended.
        """
        inputs = encode(
            StepInputs(
                batch.input_ids.tolist(),
                batch.positions.tolist(),
                batch.token_slots.tolist(),
                list(batch.query_lens),
                list(batch.seq_lens),
                _lists(batch.block_tables),
                list(batch.logit_rows),
                [(list(each.read), list(each.written)) for each in batch.records],
                [(slots.tolist(), _lists(tables)) for slots, tables in batch.windows],
                may_stop,
            )
        )
        for link in self._links:
            link.send(inputs)

    def tell_waits(self, waited_ns: Sequence[int]) -> None:
        """Let the daemon know how long each process has waited for the others."""
        if self._beats is not None:
            for rank, num_ns in enumerate(waited_ns):
                self._beats.rank_waited(rank, num_ns)


def _lists(tables: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(table) for table in tables]


def _has_loaded(link: FirstLink) -> bool:
    """Wait for a process's next report while it loads."""
    report = link.receive()
    if isinstance(report, Failed):
        kind = WorkerUnfit if report.is_lasting else WorkerFailed
        raise kind(report.what, where=report.where, hint=report.hint)
    return isinstance(report, WeightsLoaded)


def load_part(checkpoint: Checkpoint, setup: Setup, memory_fd: int, progress: Progress) -> Part:
    """Load a process's shards, and map what it shares with the group.

    Raises:
        WorkerUnfit: compiled kernels are missing, or are wrong here.
    """
    group = setup.group
    assert group is not None
    kernels, name = find_kernels("cpu", getattr(torch, setup.dtype))
    faults = faults_of_cores(checkpoint, setup)
    if kernels is None or faults:
        raise WorkerUnfit(
            f"a group computes by compiled kernels alone: {'; '.join(faults.values()) or name}",
            hint="leave + out of --place",
        )
    shape = _shape(checkpoint, setup, group)
    variants = None
    if group.variant is not None:
        variants = ProductVariants(group.variant, group.has_tiles)
    weights, own = load_shards(
        checkpoint,
        setup.dtype,
        shape.own_shards(group.rank),
        shape.num_shards,
        progress,
        is_packed=variants is not None,
    )
    reduction = Reduction(kernels, shape, memory_fd, group.rank)
    config = checkpoint.config.in_groups() if setup.has_window_blocks else checkpoint.config
    shards = Shards(shard_config(config, shape.num_shards), own, reduction)
    return Part(weights, shards, variants, kernels)


def _shape(checkpoint: Checkpoint, setup: Setup, group: GroupSpec) -> GroupShape:
    """Size a group's memory for the largest step: prompts, and all sequences that decode."""
    prompt_rows = max(setup.max_num_batched_tokens, MOST_STEP_TOKENS)
    most_rows = prompt_rows + _ROWS_OF_A_SEQUENCE * setup.pool.num_blocks
    return GroupShape(
        len(group.cpus),
        group.num_shards,
        -(-most_rows // _ROWS) * _ROWS,
        checkpoint.config.hidden_size,
        checkpoint.config.vocab_size,
        getattr(torch, setup.dtype),
    )


class LeadingTransformer(Transformer):
    """The first process's part of a model, whose steps the others compute with it."""

    def __init__(self, followers: Followers, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        shards: Shards = named["shards"]
        self._followers, self._reduction = followers, shards.reduction

    @property
    def rewrites_records(self) -> bool:
        """False for recurrent layers: the others know no earlier step."""
        return self.config.delta is None

    def hidden(
        self, batch: StepBatch, kv: torch.Tensor, stops: Stops | None = None
    ) -> torch.Tensor:
        """Compute the stream as Transformer does, after telling the others; logits must follow."""
        self._followers.step(batch, may_stop=stops is not None)
        if stops is None:
            return super().hidden(batch, kv)
        asked = stops
        return super().hidden(
            batch, kv, lambda done, total: self._reduction.agreed(asked(done, total))
        )

    def logits(self, x: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Compute logits as Transformer does; then every process has come to the step's end."""
        made = super().logits(x, batch)
        self._followers.tell_waits(self._reduction.waited_ns)
        return made


@torch.inference_mode()
def follow(link: Link, transformer: Transformer, shards: Shards, kv: torch.Tensor) -> NoReturn:
    """Compute this process's part of each step of the first, until that ends.

    Raises:
        EOFError: it has ended.
    """
    while True:
        inputs = link.receive()
        assert isinstance(inputs, StepInputs)
        batch = _batch(inputs)
        stops = (lambda _done, _total: shards.reduction.agreed(False)) if inputs.may_stop else None
        transformer.logits(transformer.hidden(batch, kv, stops), batch)


def _batch(inputs: StepInputs) -> StepBatch:
    """Make the first process's batch again."""
    return StepBatch(
        torch.tensor(inputs.input_ids),
        torch.tensor(inputs.positions),
        torch.tensor(inputs.token_slots),
        inputs.query_lens,
        inputs.seq_lens,
        inputs.block_tables,
        inputs.logit_rows,
        [RecordBlocks(*each) for each in inputs.records],
        [WindowTables(torch.tensor(slots), tables) for slots, tables in inputs.windows],
    )
