"""Ask the recorded questions all the time, and judge every reply."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from dataclasses import dataclass
from random import Random

from tests.faults.questions import Question, answer_of
from tests.faults.subject import Subject
from tests.faults.wire import Manner, Reply, ask
from tests.sweep.replies import Said, read

SPREAD_S = 0.5
"""By which a death and its client's notice of it may differ."""
MAX_DEATHS = 4
"""Of workers, after which a request ends with an error that says so."""
BUSY = (408, 429, 503)
BAD = ("wrong", "lost", "failed", "unanswered")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, and how it ended."""

    rid: str
    began_s: float
    ended_s: float
    verdict: str
    """right, left, refused, cut (with the daemon), given up (documented), or one of BAD."""
    is_accepted: bool
    about: str = ""


class Clients:
    """So many threads, each of which asks one question after the other."""

    def __init__(self, subject: Subject, questions: list[Question], count: int, seed: int) -> None:
        self.outcomes: list[Outcome] = []
        self._subject, self._questions = subject, questions
        self._numbers, self._is_over = itertools.count(), threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_on, args=(Random(f"{seed} {i}"),), daemon=True)
            for i in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, patience_s: float) -> int:
        """Let every client end its question; return how many did not."""
        self._is_over.set()
        deadline = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def counts(self) -> Counter[str]:
        return Counter(outcome.verdict for outcome in self.outcomes)

    def _ask_on(self, rng: Random) -> None:
        while not self._is_over.is_set():
            outcome = self._ask_one(rng)
            if outcome.verdict == "down":
                self._is_over.wait(0.1)
                continue
            self.outcomes.append(outcome)
            if outcome.verdict == "refused":
                self._is_over.wait(rng.uniform(0.1, 0.6))

    def _ask_one(self, rng: Random) -> Outcome:
        question, rid = rng.choice(self._questions), f"soak-{next(self._numbers)}"
        door, manner = rng.choice(self._subject.doors), _manner(rng)
        began_s = time.monotonic()
        reply = ask(door, question.path, question.body, rid=rid, manner=manner)
        ended_s = time.monotonic()
        verdict, about = self._judge(question, reply, manner, began_s, ended_s)
        is_accepted = reply.status == 200
        if verdict in BAD:
            shown = f"{question.path} status {reply.status} {reply.problem} {about}"
            about = f"{rid} ({ended_s - began_s:.1f} s): {shown}"
        return Outcome(rid, began_s, ended_s, verdict, is_accepted, about)

    def _judge(
        self, question: Question, reply: Reply, manner: Manner, began_s: float, ended_s: float
    ) -> tuple[str, str]:
        """Compare a reply with the right answer; return the verdict and what shows it."""
        span = (began_s - SPREAD_S, ended_s + SPREAD_S)
        is_ended = self._subject.has_ended_in(*span)
        if not reply.has_connected:
            return "down", ""
        if manner.leaves_after is not None and reply.status == 200:
            return "left", ""
        if reply.status == 0:
            return ("cut", "") if self._subject.has_stopped_in(*span) else ("unanswered", "")
        if reply.status in BUSY:
            return "refused", ""
        said = read(reply)
        if said.errors or reply.status != 200:
            return self._judge_error(said, reply, span)
        if said.is_ended:
            answer = answer_of(said)
            is_right = answer == question.right
            return ("right", "") if is_right else ("wrong", f"{answer}: {question.right}")
        if not all(question.texts.get(i, "").startswith(text) for i, text in said.texts.items()):
            return "wrong", f"{dict(said.texts)} is no beginning of {question.right}"
        # a stop waits some seconds for clients that read slowly what is complete
        is_slow_at_stop = manner.read_pause_s and self._subject.has_stopped_in(*span)
        is_cut = is_ended or is_slow_at_stop
        return ("cut", "") if is_cut else ("lost", f"after {len(reply.body)} bytes")

    def _judge_error(self, said: Said, reply: Reply, span: tuple[float, float]) -> tuple[str, str]:
        if self._subject.has_ended_in(*span):
            return "cut", ""
        if f"died {MAX_DEATHS} times" in reply.body.decode(errors="replace"):
            return "given up", str(said.errors)
        return "failed", reply.body[-300:].decode(errors="replace")


def _manner(rng: Random) -> Manner:
    """Choose how a client behaves: most read well, some are slow, some leave."""
    drawn = rng.random()
    if drawn < 0.08:
        return Manner(leaves_after=rng.choice([0, 100, 1000, 5000]))
    if drawn < 0.16:
        return Manner(read_pause_s=rng.uniform(0.002, 0.05))
    if drawn < 0.24:
        return Manner(send_pause_s=rng.uniform(0.01, 0.4))
    return Manner()
