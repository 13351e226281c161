"""Run the worker's loop: take commands, plan, launch, collect, report.

A GPU gets the next step before this one is collected, if only the tokens can differ: then it never
waits for the host. A sequence that turns out to have ended is in one step too many. A step with
guesses waits for the step before it, since a guess continues tokens that the host knows.

A worker does not know its role: a role is what the router admits.

Invariants: one message per step; a sequence's release is reported after the last step that touched
its blocks; cores change between two steps, and a parked worker computes nothing and waits on its
channel; nothing here waits for a device's copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch

from engine.wire.channel import WorkerChannel
from engine.wire.finish_reason import FinishReason
from engine.wire.messages import (
    Admit,
    Begun,
    Command,
    ComputeTexts,
    Copy,
    CoresUsed,
    Extend,
    Extension,
    MapPool,
    MeasureSteps,
    Release,
    SequenceStep,
    SharedMemory,
    Stepped,
    StopMeasuring,
    UseCores,
)
from engine.worker.affinity import use_cores
from engine.worker.copying import Copier
from engine.worker.device import Device
from engine.worker.kv_pool import PagesAhead
from engine.worker.measuring import StepMeasuring
from engine.worker.plan import is_chunk, plan
from engine.worker.runner import Launched, Runner, Sampled
from engine.worker.speculation import Speculation
from engine.worker.text_batches import TextBatches
from engine.worker.worker_request import WorkerRequest

MIN_COPYING_NS = 5_000_000
"""Minimum time for host memory copies between two steps, if any are due."""


@dataclass(slots=True)
class _LaunchedStep:
    """A launched, uncollected step."""

    planned: list[tuple[WorkerRequest, int]]
    launched: Launched
    num_prefill_tokens: int
    started_ns: int
    num_cores: int
    is_ahead: bool = False
    """Whether it was launched before the step before it was collected."""


class StepLoop:
    """One worker's loop: commands in, steps, reports out."""

    def __init__(
        self,
        channel: WorkerChannel,
        runner: Runner,
        *,
        pools: dict[str, torch.Tensor],
        eos_token_ids: tuple[int, ...],
        max_num_batched_tokens: int,
        device: Device | None = None,
        map_pool: Callable[[SharedMemory], torch.Tensor] | None = None,
        own_cores: list[int] | None = None,
        use_cores: Callable[[list[int]], None] = use_cores,
        pages: PagesAhead | None = None,
        speculation: Speculation | None = None,
        texts: TextBatches | None = None,
    ) -> None:
        self._channel = channel
        self._runner = runner
        self._measuring = StepMeasuring(runner, channel.has_commands)
        self._copier = Copier(pools, runner.block_size, channel.send, device)
        self._eos_token_ids = eos_token_ids
        self._max_step_tokens = max_num_batched_tokens
        self._map_pool = map_pool
        self._pages = pages
        self._use_cores = use_cores
        self._speculation = speculation
        self._texts = texts
        self._own_cores = frozenset(own_cores or ())
        self._given = self._used = own_cores or []
        """The cores it may use, then the cores it uses."""
        self._goes_home = False
        """Whether the next step leaves borrowed cores: their owner just got work."""
        self._is_parked = False
        self._running: dict[int, WorkerRequest] = {}
        self._entries: list[SequenceStep] = []
        """Releases to report with the next message."""
        self._flight: _LaunchedStep | None = None
        """The step launched after an uncollected one."""
        self._is_after_chunk = False
        """Whether the previous step computed an incomplete prompt's chunk."""
        self._ended: list[WorkerRequest] = []
        """Sequences of that step that ended in the previous one."""
        self._device_free_ns: int | None = None
        """When the device had computed all its steps; None: unknown, or the worker was idle."""

    def run(self) -> NoReturn:
        """Loop until the channel closes (raises ChannelClosed)."""
        while True:
            is_idle = self._is_parked or not self._with_room()
            has_more = self._flight is not None or self._copier.has_work or self._has_texts
            waits = is_idle and not has_more
            if waits and self._pages is not None and not self._is_parked:
                while not self._channel.has_commands() and self._pages.make_next():
                    pass
            if waits:
                self._device_free_ns = None
            for command in self._channel.receive(wait=waits):
                self._apply(command)
            self.turn()

    def turn(self) -> None:
        """Run one step, and compute texts until something else is due, a part at least."""
        self.step()
        if self._texts is not None and self._has_texts:
            self._texts.compute(self._is_awaited)

    @property
    def _has_texts(self) -> bool:
        return self._texts is not None and self._texts.has_work and not self._is_parked

    def _is_awaited(self) -> bool:
        """Say whether texts must wait for a step or a command."""
        is_due = self._flight is not None or bool(self._with_room()) or self._copier.has_work
        return is_due or self._channel.has_commands()

    def step(self) -> None:
        """Run one step: plan, launch, collect, send; then start copying the filled blocks."""
        flight = self._flight or self._launch()
        self._flight = self._follow(flight)
        # where steps follow at once, the time of one that did not says nothing about them
        is_usual = flight.is_ahead or not self._runner.can_follow(flight.launched)
        entries = self._collect(flight)
        planned = flight.planned
        planned_ids = {r.seq_id for r, _ in planned}
        for running in [r for r in self._running.values() if r.seq_id not in planned_ids]:
            if running.is_complete:  # it came complete, from a worker that has died
                entries.append(self._entry(running))
                self._copier.advance(running)
        ended_ns = time.monotonic_ns()
        if self._flight is not None:
            self._flight.started_ns = ended_ns  # the device computes one after the other
        self._goes_home = any(e.released == "moved" for e in entries)
        if self._speculation is not None and is_usual:
            self._speculation.timed((ended_ns - self._began_ns(flight)) / 1e6)
        self._device_free_ns = ended_ns if self._runner.is_on_device else None
        if entries:
            self._report(flight, entries, ended_ns)
        for running, _ in planned:
            self._copier.advance(running)
        # limits the wait of the next step to what sharing the cores would cost
        self._copier.work(ended_ns + max(ended_ns - flight.started_ns, MIN_COPYING_NS))

    def _began_ns(self, flight: _LaunchedStep) -> int:
        """Tell since when a step has kept the device from the next; waiting for it counts."""
        if flight.is_ahead or self._device_free_ns is None:
            return flight.started_ns
        return self._device_free_ns

    def _report(self, flight: _LaunchedStep, entries: list[SequenceStep], ended_ns: int) -> None:
        num_tokens = sum(n for _, n in flight.planned)
        num_accepted = sum(len(e.token_ids) - 1 for e in entries if e.num_drafted and e.token_ids)
        self._channel.send(
            Stepped(
                flight.started_ns,
                ended_ns,
                flight.num_prefill_tokens,
                num_tokens - flight.num_prefill_tokens + num_accepted,
                entries,
                None if flight.num_cores == len(self._given) else flight.num_cores,
            )
        )

    def _launch(self) -> _LaunchedStep:
        """Start the due step."""
        started_ns = time.monotonic_ns()
        runnable = [] if self._is_parked else self._runnable()
        planned = [
            (r, min(r.capped(n), r.room(self._runner.block_size)))
            for r, n in plan(
                runnable,
                self._max_step_tokens,
                started_ns,
                is_after_chunk=self._is_after_chunk,
            )
        ]
        planned.sort(key=lambda each: each[1])  # few rows come first, as StepBatch wants them
        self._is_after_chunk = is_chunk(planned)
        num_prefill_tokens = sum(
            n for r, n in planned if r.num_computed_tokens < r.num_prompt_tokens
        )
        if planned:
            self._choose_cores()
        if self._speculation is not None:
            self._speculation.draft(planned, len(self._used))
        launched = self._runner.launch(planned)
        return _LaunchedStep(planned, launched, num_prefill_tokens, started_ns, len(self._used))

    def _choose_cores(self) -> None:
        """Compute on the given cores; for a step after a handoff, on own cores alone.

        The worker that got the sequence takes its cores back at once. Its message arrives when the
        next chunk of another prompt is running, which would share them for its whole length. Chats
        that start their turns together would meet this every time.
        """
        home = [cpu for cpu in self._given if cpu in self._own_cores]
        cpus = home if self._goes_home and home else self._given
        if cpus != self._used:
            self._use_cores(cpus)
            self._used = cpus

    def _follow(self, flight: _LaunchedStep) -> _LaunchedStep | None:
        """Start the sequences' next step, if no other sequence needs to run."""
        planned = flight.planned
        is_whole = all(self._running.get(r.seq_id) is r for r, _ in planned)
        if not is_whole or len(planned) < len(self._running) or self._is_parked:
            return None
        if not self._runner.can_follow(flight.launched):
            return None
        if self._speculation is not None and self._speculation.waits(planned, len(self._used)):
            return None
        launched = self._runner.follow(flight.launched)
        return _LaunchedStep(planned, launched, 0, flight.started_ns, flight.num_cores, True)

    def _collect(self, flight: _LaunchedStep) -> list[SequenceStep]:
        """Wait for a step; return the results of sequences that were not dropped meanwhile."""
        sampled = self._runner.collect(flight.launched)
        entries, self._entries = self._entries, []
        ended, self._ended = self._ended, []
        entries += [self._entry(running, is_dropped=True) for running in ended]
        for (running, num_new_tokens), result in zip(flight.planned, sampled, strict=True):
            if self._running.get(running.seq_id) is running:
                entries.append(self._finish_step(running, num_new_tokens, result))
        return entries

    def _with_room(self) -> list[WorkerRequest]:
        """List the sequences with something to compute and a block for it."""
        size = self._runner.block_size
        return [r for r in self._running.values() if not r.is_complete and r.room(size) > 0]

    def _runnable(self) -> list[WorkerRequest]:
        """List the sequences to compute; wait for a grammar if none is ready."""
        unfinished = self._with_room()
        pending = [r.matcher for r in unfinished if r.matcher is not None]
        if len(pending) == len(unfinished) and not self._copier.has_work:
            wait(pending, return_when=FIRST_COMPLETED)
        return [r for r in unfinished if r.is_ready]

    def _finish_step(
        self, running: WorkerRequest, num_new_tokens: int, result: Sampled
    ) -> SequenceStep:
        is_decoding = running.is_decoding
        num_drafted, running.draft = len(running.draft), []
        num_taken, reason = running.take(result.token_ids)
        if num_drafted and self._speculation is not None:
            self._speculation.checked(running, num_drafted, num_taken)
        if not result.is_fault:  # else its blocks are nothing that others may find
            running.computed(num_new_tokens + max(num_taken - 1, 0))
        if result.error is not None:
            reason = FinishReason.ERROR
        return self._entry(
            running,
            result,
            num_taken,
            finish_reason=None if reason is None else str(reason),
            num_scheduled_tokens=num_new_tokens + num_drafted,
            is_decoding=is_decoding,
            num_drafted=num_drafted,
        )

    def _entry(
        self,
        running: WorkerRequest,
        result: Sampled | None = None,
        num_taken: int = 0,
        *,
        finish_reason: str | None = None,
        num_scheduled_tokens: int = 0,
        is_decoding: bool = False,
        is_dropped: bool = False,
        num_drafted: int = 0,
    ) -> SequenceStep:
        """Report a sequence; drop it if it has ended, is dropped, or has reached its target."""
        has_ended = bool(finish_reason) or is_dropped
        is_over = has_ended or running.is_complete
        is_released = is_over and (is_dropped or self._flight is None)
        if is_over:
            self._running.pop(running.seq_id, None)
            if self._speculation is not None:
                self._speculation.end(running)
        if has_ended:
            self._copier.drop(running)
        if is_over and not is_released:
            self._ended.append(running)
        result = result or Sampled()
        released = running.dropped_for if has_ended else "moved"
        return SequenceStep(
            seq_id=running.seq_id,
            generation=running.generation,
            num_computed_tokens=running.num_computed_tokens,
            token_ids=result.token_ids[:num_taken],
            logprobs=result.logprobs[:num_taken],
            finish_reason=finish_reason,
            released=released if is_released else None,
            num_scheduled_tokens=num_scheduled_tokens,
            admitted_ns=running.admitted_ns,
            is_decoding=is_decoding,
            prompt_logprobs=result.prompt_logprobs,
            error=result.error,
            is_fault=result.is_fault,
            valid_record=running.valid_record,
            num_drafted=num_drafted,
            drafter=running.drafter if num_drafted else "",
        )

    def _apply(self, command: Command) -> None:
        match command:
            case Admit():
                self._running[command.seq_id] = self._take(command)
            case Release(seq_id, generation, reason):
                dropped = self._running.get(seq_id)
                if dropped is not None and dropped.generation == generation:
                    dropped.dropped_for = reason
                    self._entries.append(self._entry(dropped, is_dropped=True))
            case Extend(extensions):
                for extension in extensions:
                    self._extend(extension)
            case Copy(filled_by=filler):
                filling = None if filler is None else self._running.get(filler.seq_id)
                self._copier.take(command, filling)
            case MapPool(pool, memory):
                assert self._map_pool is not None, "on cores pools are mapped at start"
                opened = None if memory is None else partial(self._map_pool, memory)
                self._copier.remap(pool, opened)
            case MeasureSteps():
                self._channel.send(self._measuring.measure(command))
            case ComputeTexts():
                assert self._texts is not None, "it holds no model of texts"
                self._texts.take(command)
            case StopMeasuring():
                pass  # its arrival has ended what was measured
            case UseCores(cpus):
                self._take_cores(cpus)
            case _:
                raise TypeError(f"unexpected {type(command).__name__} while running")

    def _take_cores(self, cpus: list[int]) -> None:
        self._is_parked = not cpus
        if cpus:
            self._use_cores(cpus)
            self._given = self._used = cpus
        self._channel.send(CoresUsed(cpus))

    def _extend(self, extension: Extension) -> None:
        """Add blocks to a table, unless its sequence has ended or was admitted again."""
        extended = self._running.get(extension.seq_id)
        if extended is not None and extended.generation == extension.generation:
            extended.block_table.extend(extension.block_ids)
            self._use_blocks(extension.block_ids)
            for table, ids in zip(extended.window_tables, extension.window_ids, strict=True):
                table.extend(ids)
                self._use_blocks(ids)
            self._runner.extended(extended)

    def _use_blocks(self, block_ids: list[int]) -> None:
        if self._pages is not None:
            self._pages.use(block_ids)

    def _take(self, admit: Admit) -> WorkerRequest:
        if admit.is_suspect:
            self._channel.send(Begun(admit.seq_id, admit.generation))
        for table in (admit.block_table, *admit.window_tables):
            self._use_blocks(table)
        grammar = admit.spec.sampling.grammar
        matcher = None if grammar is None else self._runner.grammars.compile(grammar)
        return WorkerRequest.of(admit, self._eos_token_ids, time.monotonic_ns(), matcher)
