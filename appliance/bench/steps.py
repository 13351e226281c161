"""Time a worker's steps without HTTP, queue or text.

The worker is given prompts and computes them as it would for clients; what is taken is the times
in its reports of steps, which begin and end in the worker.
Owns: the sequences that are given to it.
Invariant: a step is taken only if it is all prefill of one prompt, or a decode step of the whole
batch; the first round warms up and is not taken.
Never: imports torch.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from appliance.configuration.config import ServeConfig
from appliance.fleet.boot import BootPlan, make_plan
from appliance.fleet.supervisor import Supervisor
from appliance.frame.latency import quantile
from engine.errors import ConfigError, WorkerFailed
from engine.wire.messages import Admit, Report, Setup, Stepped
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams


class StepCase(NamedTuple):
    """A number of sequences with a number of prompt tokens each."""

    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> StepCase:
        """Read `8x128`.

        Raises:
            ValueError: it is no such pair.
        """
        batch, _, context = text.partition("x")
        case = cls(int(batch), int(context))
        if min(case) < 1:
            raise ValueError("both are at least 1")
        return case


class Kind(NamedTuple):
    """Steps that should take the same time."""

    kind: str
    """`prefill` or `decode`."""
    batch: int
    num_tokens: int
    """Sum over all sequences in the step."""
    context: int
    """Tokens of each sequence before the prompt's chunk, or before the first decode step."""


class MeasuredSteps(msgspec.Struct):
    """One kind of step and every time that it took."""

    kind: str
    batch: int
    num_tokens: int
    context: int
    samples_ms: list[float]

    def row(self) -> dict[str, object]:
        """Return a row of figures, times in milliseconds."""
        middle_ms = quantile(self.samples_ms, 0.5)
        return {
            "kind": self.kind,
            "batch": self.batch,
            "num_tokens": self.num_tokens,
            "context": self.context,
            "ms_p50": middle_ms,
            "ms_min": min(self.samples_ms),
            "ms_max": max(self.samples_ms),
            "tokens_per_s": self.num_tokens / middle_ms * 1000 if middle_ms else None,
            "steps": len(self.samples_ms),
        }


async def time_steps(
    config: ServeConfig,
    cases: list[StepCase],
    *,
    num_rounds: int,
    num_steps: int,
    tick: Callable[[float], None],
) -> list[MeasuredSteps]:
    """Time the steps of every case, prefill first, on the worker that decodes.

    Args:
        config: the model, its dtype, and the roles, which say how many cores the worker has.
        cases: what to run, in every round.
        num_rounds: how often; one more is run to warm up.
        num_steps: decode steps of each turn.
        tick: called with the share that is done.

    Raises:
        ConfigError: a case is larger than the model or its pool.
        WorkerFailed: the worker could not start or keep running.
    """
    plan = await asyncio.to_thread(make_plan, config)
    worker = _Worker(plan)
    for case in cases:
        worker.check(case, num_steps)
    taken: dict[Kind, list[float]] = {}
    try:
        await worker.start()
        for turn in range((num_rounds + 1) * len(cases)):
            tick(turn / ((num_rounds + 1) * len(cases)))
            times = await worker.run(cases[turn % len(cases)], num_steps)
            if turn >= len(cases):
                for kind, step_ms in times:
                    taken.setdefault(kind, []).append(step_ms)
    finally:
        await worker.stop()
    tick(1.0)
    ordered = sorted(taken, key=lambda kind: (kind.kind != "prefill", *kind))
    return [MeasuredSteps(*kind, taken[kind]) for kind in ordered]


class _Worker:
    """One worker of a plan, and what it reports."""

    def __init__(self, plan: BootPlan) -> None:
        placed, setup = plan.workers[-1]
        self._setup = msgspec.structs.replace(setup, max_drafted=0)  # each step is as asked
        self._name = placed.name
        self._vocab_size = plan.checkpoint.config.vocab_size
        self._rng = random.Random(0)
        self._reports: asyncio.Queue[Report | WorkerFailed] = asyncio.Queue()
        self._last_id = 0
        self._supervisor = Supervisor(
            plan.workers,
            plan.inherited_fds,
            on_report=lambda name, report: self._reports.put_nowait(report),
            on_ready=lambda name: None,
            on_died=self._died,
            on_lost=self._died,
        )

    def check(self, case: StepCase, num_steps: int) -> None:
        """Refuse what does not fit."""
        room = self._setup.pool.num_blocks - 1
        needed = case.batch * _num_blocks(case, num_steps, self._setup)
        where = f"{case.batch}x{case.context}"
        if case.context + num_steps + 1 > self._setup.max_model_len:
            longest = self._setup.max_model_len - num_steps - 1
            raise ConfigError(
                f"the model takes {longest} tokens of context here",
                where=where,
                hint="choose with --case, as 1x512",
            )
        if needed > room:
            raise ConfigError(
                f"it needs {needed} blocks of KV and there are {room}",
                where=where,
                hint="give the pool more with PENSTOCK_KV_MEMORY",
            )

    async def start(self) -> None:
        self._supervisor.spawn_all()
        await self._supervisor.run()

    async def stop(self) -> None:
        await self._supervisor.stop()

    async def run(self, case: StepCase, num_steps: int) -> list[tuple[Kind, float]]:
        """Run a case to its end; its steps in order."""
        live = {self._admit(case, index, num_steps) for index in range(case.batch)}
        times = []
        while live:
            report = await self._reports.get()
            if isinstance(report, WorkerFailed):
                raise report
            if not isinstance(report, Stepped):
                continue
            if (kind := kind_of(report, case)) is not None:
                times.append((kind, (report.ended_ns - report.started_ns) / 1e6))
            live -= {entry.seq_id for entry in report.entries if entry.released}
        return times

    def _admit(self, case: StepCase, index: int, num_steps: int) -> int:
        """Send one sequence of a case, on blocks of its own."""
        self._last_id += 1
        count = _num_blocks(case, num_steps, self._setup)
        self._supervisor.send(
            self._name,
            Admit(
                seq_id=self._last_id,
                generation=0,
                token_ids=[self._rng.randrange(self._vocab_size) for _ in range(case.context)],
                num_prompt_tokens=case.context,
                num_computed_tokens=0,
                block_table=list(range(1 + index * count, 1 + (index + 1) * count)),
                spec=RunSpec(SamplingParams(num_steps + 1, 0, temperature=0.0, ignore_eos=True)),
                until_output=num_steps + 1,
            ),
        )
        return self._last_id

    def _died(self, name: str, about: str) -> None:
        self._reports.put_nowait(WorkerFailed(about, where=name))


def kind_of(step: Stepped, case: StepCase) -> Kind | None:
    """Classify a step; None if it was a mixture or had not the whole batch."""
    scheduled = [entry for entry in step.entries if entry.num_scheduled_tokens]
    if not step.num_prefill_tokens and step.num_decode_tokens == case.batch:
        return Kind("decode", case.batch, case.batch, case.context)
    if step.num_decode_tokens == 0 and len(scheduled) == 1:
        count = scheduled[0].num_scheduled_tokens
        return Kind("prefill", 1, count, scheduled[0].num_computed_tokens - count)
    return None


def _num_blocks(case: StepCase, num_steps: int, setup: Setup) -> int:
    """Count the KV blocks of one sequence of this case."""
    return -(-(case.context + num_steps + 1) // setup.block_size)
