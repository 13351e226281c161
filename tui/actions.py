"""Describe what an operator can change through the console, with a question before each change.

Invariant: nothing is sent without a question.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from appliance.configuration.settings import ROLES
from appliance.observe.frame import figures as fig
from appliance.observe.frame.protocol import Frame, RequestFrame
from tui import feed
from tui.lines import clean

MAX_TARGET_MS = 86_400_000
ROLE_CHOICES = tuple(
    zip(
        ROLES,
        (
            "choose the best route for each prompt",
            "always separate prefill and decode",
            "one worker with all cores",
        ),
        strict=True,
    )
)
TARGETS_HINT = "TTFT and ITL in ms, e.g. 500 20; 0: relative to an undisturbed machine"


class Action(NamedTuple):
    """A question, and the action after a yes."""

    question: str
    act: Callable[[str], Awaitable[str]]
    """Takes the daemon's socket; returns the outcome."""


def cancel(request: RequestFrame) -> Action:
    """Make the action that cancels a request."""
    user = f" of {clean(request.user)}" if request.user else ""
    question = f"Cancel request {clean(request.id)}{user}?"
    return Action(question, lambda socket_path: feed.cancel(socket_path, request.id))


def drain_or_resume(frame: Frame) -> Action:
    """Make the action that rejects new requests, or accepts them again."""
    if frame.state == "draining":
        return Action("Take new work again?", feed.resume)
    live = fig.count(frame.num_requests)
    return Action(f"Drain? {live} live requests continue; new requests are rejected.", feed.drain)


def switch_roles(frame: Frame, roles: str) -> Action:
    """Make the action that changes the workers' roles."""
    question = f"Switch roles from {frame.roles} to {roles}?"
    return Action(question, lambda path: feed.switch_roles(path, {"roles": roles}))


def set_targets(text: str) -> Action:
    """Make the action that changes the latency targets."""
    ttft_ms, itl_ms = targets(text)
    change = {"slo_ttft_ms": ttft_ms, "slo_itl_ms": itl_ms}
    question = f"Set targets: TTFT {ttft_ms} ms, gap {itl_ms} ms?"
    return Action(question, lambda path: feed.switch_roles(path, change))


def targets(text: str) -> tuple[int, int]:
    """Parse both targets in milliseconds.

    Raises:
        ValueError: with a sentence that says why.
    """
    words = text.split()
    if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
        raise ValueError("give two whole numbers of milliseconds, e.g. 500 20")
    ttft_ms, itl_ms = map(int, words)
    if max(ttft_ms, itl_ms) > MAX_TARGET_MS:
        raise ValueError(f"at most {MAX_TARGET_MS} ms, a day")
    return ttft_ms, itl_ms


def targets_text(frame: Frame) -> str:
    """Return the targets in force, in the form in which they are typed."""
    return f"{frame.slo_ttft_ms or 0} {frame.slo_itl_ms or 0}"


def problem_of(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Turn a parser into a check that returns its error; empty: valid."""

    def problem(text: str) -> str:
        try:
            parse(text)
        except ValueError as error:
            return str(error)
        return ""

    return problem
