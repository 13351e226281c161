"""The last part of a start: elastic roles' rehearsal, waited for and put into words.

Owns: the one rehearsal of a daemon, and how long it may take.
Invariant: it ends: with the last worker's answer, with a worker's death, or when time is up.
Never: decides where requests go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from appliance.fleet.balance import StepMemory, is_two_better, key_of, pair_times, programme
from appliance.fleet.boot import BootPlan
from engine.schedule.rehearsal import Rehearsal, steps
from engine.schedule.router import Router
from engine.wire.messages import Command, CoresUsed, Rehearsed, Report

TIMEOUT_S = 10.0
"""Twenty times what it should take; nobody waits longer for a worker that may hang."""


class Rehearsing:
    """One daemon's.

    Args:
        router: whose roles learn, with blocks of its ledger.
        send: passes a command to a worker.
        max_step_tokens: of prompts, in a worker's step.
        memory: keeps what steps took for the next start; None: nothing is placed by that.
        is_trial: two workers share a device, and are timed to find whether one would be better.
    """

    def __init__(
        self,
        router: Router,
        send: Callable[[str, Command], None],
        max_step_tokens: int,
        memory: StepMemory | None = None,
        *,
        is_trial: bool = False,
    ) -> None:
        self._memory = memory
        self._is_trial = is_trial and memory is not None
        if memory is not None and self._is_trial:  # before anything can fail
            memory.write(msgspec.structs.replace(memory.read(), is_trying=True))
        self._router = router
        self._send = send
        self._max_step_tokens = max_step_tokens
        self._rehearsal: Rehearsal | None = None
        self._is_over = asyncio.Event()

    async def run(self, max_model_len: int) -> str | None:
        """Rehearse where elastic roles have something to choose; what there is to say about it."""
        roles = self._router.roles
        if self._is_trial and self._memory is not None:
            return await self._try_two(self._memory, max_model_len)
        if roles.roles != "elastic" or roles.acts_static:
            return None
        plan = steps(self._max_step_tokens, max_model_len)
        started_s = time.monotonic()
        made = await self._rehearse(Rehearsal(roles, self._router.ledger, self._send, plan))
        if self._memory is not None and made.made:
            known = self._memory.read()
            self._memory.write(msgspec.structs.replace(known, steps=made.made))
        return _words(made, time.monotonic() - started_s)

    async def _try_two(self, memory: StepMemory, max_model_len: int) -> str:
        """Time two workers on one device, and go on with the better; why that is."""
        router = self._router
        prefill, decode = router.places.names
        turns = programme(prefill, decode, self._max_step_tokens, max_model_len)
        made = await self._rehearse(Rehearsal(router.roles, router.ledger, self._send, [], turns))
        times = pair_times(made.by_turn)
        if times is None:
            return "two workers on one device could not be timed; the next start has one"
        memory.write(msgspec.structs.replace(memory.read(), pair=times, is_trying=False))
        has_two, why = is_two_better(times)
        if has_two:
            return f"both workers go on: {why}"
        router.switch_roles("colocated", time.monotonic_ns())
        return f"{decode} does everything, and the next start has no other worker: {why}"

    async def _rehearse(self, rehearsal: Rehearsal) -> Rehearsal:
        """Until it is over, or has lasted too long."""
        self._rehearsal = rehearsal
        rehearsal.begin()
        self._note()
        try:
            await asyncio.wait_for(self._is_over.wait(), TIMEOUT_S)
        except TimeoutError:
            rehearsal.give_up()
        return rehearsal

    def reported(self, worker: str, report: Report) -> None:
        """A worker has said something; the router has heard it already."""
        if self._rehearsal is None:
            return
        if isinstance(report, Rehearsed):
            self._rehearsal.rehearsed(worker, report)
        elif isinstance(report, CoresUsed):
            self._rehearsal.go_on()
        self._note()

    def died(self) -> None:
        """A worker has: what is known by now has to do."""
        if self._rehearsal is not None:
            self._rehearsal.give_up()
            self._note()

    def _note(self) -> None:
        if self._rehearsal is not None and self._rehearsal.is_over:
            self._is_over.set()


def _words(rehearsal: Rehearsal, elapsed_s: float) -> str:
    """`timed 48 steps in 0.5 s, by which each prompt gets its worker: ...`."""
    made = rehearsal.made
    size = max((step.num_tokens for step in made), default=0)
    depth = max((step.num_before for step in made if step.num_tokens == size), default=0)
    batch = max((step.num_sequences for step in made), default=0)
    return (
        f"timed {len(made)} steps in {elapsed_s:.1f} s, by which each prompt gets its worker: "
        f"chunks of up to {size} tokens after up to {depth:,}; up to {batch} replies together"
    )


def rehearsing_of(
    plan: BootPlan, state_dir: Path, router: Router, send: Callable[[str, Command], None]
) -> Rehearsing:
    """That of a plan; what steps take on its GPUs is kept in the state directory."""
    gpu = next((worker.gpu for worker in plan.placement.workers if worker.gpu is not None), None)
    memory = None
    if gpu is not None:
        memory = StepMemory(state_dir, key_of(plan.checkpoint, plan.dtype, gpu))
    placement = plan.placement
    return Rehearsing(router, send, placement.max_step_tokens, memory, is_trial=placement.is_trial)
