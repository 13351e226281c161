"""One worker without a server, and the time that its steps take for a prompt."""

from __future__ import annotations

import asyncio
import random

import msgspec

from appliance.fleet.boot import BootPlan
from appliance.fleet.supervisor import Supervisor
from engine.errors import WorkerFailed
from engine.wire.messages import Admit, Report, Stepped
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams


class StepWorker:
    """The decode worker of a plan; it guesses no tokens."""

    def __init__(self, plan: BootPlan) -> None:
        placed, setup = plan.workers[-1]
        self._setup = msgspec.structs.replace(setup, max_drafted=0)
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

    async def start(self) -> None:
        self._supervisor.spawn_all()
        await self._supervisor.run()

    async def stop(self) -> None:
        await self._supervisor.stop()

    async def prefill_ms(self, num_tokens: int) -> float:
        """Add up the steps that compute a prompt of random tokens."""
        self._last_id += 1
        num_blocks = -(-(num_tokens + 1) // self._setup.block_size)
        self._supervisor.send(
            self._name,
            Admit(
                seq_id=self._last_id,
                generation=0,
                token_ids=[self._rng.randrange(self._vocab_size) for _ in range(num_tokens)],
                num_prompt_tokens=num_tokens,
                num_computed_tokens=0,
                block_table=list(range(1, 1 + num_blocks)),
                spec=RunSpec(SamplingParams(1, 0, temperature=0.0, ignore_eos=True)),
                until_output=1,
            ),
        )
        took_ns = 0
        while True:
            report = await self._reports.get()
            if isinstance(report, WorkerFailed):
                raise report
            if isinstance(report, Stepped):
                took_ns += report.ended_ns - report.started_ns
                if any(entry.released for entry in report.entries):
                    return took_ns / 1e6

    def _died(self, name: str, about: str) -> None:
        self._reports.put_nowait(WorkerFailed(about, where=name))
