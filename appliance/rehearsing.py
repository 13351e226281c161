"""The last part of a start: elastic roles' rehearsal, waited for and put into words.

Owns: the one rehearsal of a daemon, and how long it may take.
Invariant: it ends: with the last worker's answer, with a worker's death, or when time is up.
Never: decides what is rehearsed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from engine.messages import Command, CoresUsed, Rehearsed, Report
from engine.rehearsal import Rehearsal, steps
from engine.router import Router

TIMEOUT_S = 10.0
"""Twenty times what it should take; nobody waits longer for a worker that may hang."""


class Rehearsing:
    """One daemon's.

    Args:
        router: whose roles learn, with blocks of its ledger.
        send: passes a command to a worker.
        max_step_tokens: of prompts, in a worker's step.
    """

    def __init__(
        self, router: Router, send: Callable[[str, Command], None], max_step_tokens: int
    ) -> None:
        self._router = router
        self._send = send
        self._max_step_tokens = max_step_tokens
        self._rehearsal: Rehearsal | None = None
        self._is_over = asyncio.Event()

    async def run(self, max_model_len: int) -> str | None:
        """Rehearse where elastic roles have something to choose; what there is to say about it."""
        roles = self._router.roles
        if roles.roles != "elastic" or roles.acts_static:
            return None
        plan = steps(self._max_step_tokens, max_model_len)
        self._rehearsal = Rehearsal(roles, self._router.ledger, self._send, plan)
        started_s = time.monotonic()
        self._rehearsal.begin()
        self._note()
        try:
            await asyncio.wait_for(self._is_over.wait(), TIMEOUT_S)
        except TimeoutError:
            self._rehearsal.give_up()
        return _words(self._rehearsal, time.monotonic() - started_s)

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
        f"up to {size} prompt tokens a step, {depth:,} before them; up to {batch} replies together"
    )
