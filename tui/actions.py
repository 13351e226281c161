"""Describe what an operator can change through the console, and what is asked first.

Owns: the words of the questions.
Invariant: nothing is sent that was not asked about first.
Never: decides who may; the daemon does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from appliance.configuration.settings import ROLES
from appliance.frame import figures as fig
from appliance.frame.protocol import Frame, RequestFrame
from tui import feed
from tui.lines import clean

MAX_TARGET_MS = 86_400_000
ROLE_CHOICES = tuple(
    zip(
        ROLES,
        (
            "each sequence the quickest way",
            "prefill and decode always apart",
            "one worker with all cores",
        ),
        strict=True,
    )
)
TARGETS_HINT = "first token and gap in ms, as 500 20; 0 is relative to an undisturbed machine"


class Action(NamedTuple):
    """Something to confirm and then to do."""

    question: str
    act: Callable[[str], Awaitable[str]]
    """With the daemon's socket; returns what came of it."""


def cancel(request: RequestFrame) -> Action:
    """What cancels a request, and the question that is asked before."""
    user = f" of {clean(request.user)}" if request.user else ""
    question = f"Cancel request {clean(request.id)}{user}?"
    return Action(question, lambda socket_path: feed.cancel(socket_path, request.id))


def drain_or_resume(frame: Frame) -> Action:
    """Take no new work, or take it again."""
    if frame.state == "draining":
        return Action("Take new work again?", feed.resume)
    live = fig.count(frame.num_requests)
    return Action(f"Drain? {live} live requests go on, nothing new is taken.", feed.drain)


def switch_roles(frame: Frame, roles: str) -> Action:
    """Use the workers otherwise."""
    question = f"Switch roles from {frame.roles} to {roles}?"
    return Action(question, lambda path: feed.switch_roles(path, {"roles": roles}))


def set_targets(text: str) -> Action:
    """Aim at other latencies."""
    ttft_ms, itl_ms = targets(text)
    change = {"slo_ttft_ms": ttft_ms, "slo_itl_ms": itl_ms}
    question = f"Set targets: first token {ttft_ms} ms, gap {itl_ms} ms?"
    return Action(question, lambda path: feed.switch_roles(path, change))


def targets(text: str) -> tuple[int, int]:
    """Both targets in milliseconds.

    Raises:
        ValueError: with a sentence that says why.
    """
    words = text.split()
    if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
        raise ValueError("two whole numbers of milliseconds, as 500 20")
    ttft_ms, itl_ms = map(int, words)
    if max(ttft_ms, itl_ms) > MAX_TARGET_MS:
        raise ValueError(f"at most {MAX_TARGET_MS} ms, a day")
    return ttft_ms, itl_ms


def targets_text(frame: Frame) -> str:
    """The targets in force, as they would be typed."""
    return f"{frame.slo_ttft_ms or 0} {frame.slo_itl_ms or 0}"


def problem_of(parse: Callable[[str], object]) -> Callable[[str], str]:
    """What a parser has against a text, in words; empty if nothing."""

    def problem(text: str) -> str:
        try:
            parse(text)
        except ValueError as error:
            return str(error)
        return ""

    return problem
