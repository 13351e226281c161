"""Describe one measured request.

Invariant: a figure that was not observed is None, or missing from the gaps; never 0.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import msgspec

from appliance.bench.reply_events import ReceivedReply

REFUSALS = (429, 503)
BURST_SHARE = 0.1
"""Gaps below this share of a reply's time per token are within a burst."""


class Sample(msgspec.Struct):
    """One request. Times count from the moment at which it was due, so a late client shows."""

    offered_ms: float
    """When it was due, from the beginning of the measurement."""
    late_ms: float
    """How much later it was sent: the load generator's own lag."""
    status: int | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that were not computed again, by the server's count."""
    reusable_tokens: int | None = None
    """Prompt tokens that earlier requests began with, as an infinite cache would find; None: not
    known."""
    turn: int | None = None
    """The turn of its conversation, from 1; None: it has no conversation."""
    output_tokens: int | None = None
    """The server's count."""
    ttft_ms: float | None = None
    itl_ms: list[float] = []
    """Every gap that was seen: between two events with tokens, however many tokens each has."""
    e2e_ms: float | None = None
    merged_tokens: int = 0
    """Tokens without a gap of their own, because they came in one event with another.

    Where the server does not say which tokens an event has: tokens without text, such as half a
    character, have no event."""
    event_tokens: list[int] = []
    """Tokens of each event; 1 where the server does not say which an event has."""

    @property
    def is_refused(self) -> bool:
        """The server said that it has no room."""
        return self.status in REFUSALS

    @property
    def is_completed(self) -> bool:
        """Whether the reply came to its end, with all its tokens."""
        return self.error is None and self.e2e_ms is not None

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per token after the first event, by the server's count of tokens."""
        if not self.is_completed or self.ttft_ms is None or not self.itl_ms:
            return None
        num_first = self.event_tokens[0] if self.event_tokens else 1
        if self.output_tokens is None or self.output_tokens <= num_first:
            return None
        return sum(self.itl_ms) / (self.output_tokens - num_first)

    @property
    def burst_tokens(self) -> int:
        """Tokens that came with or right behind another, so that no gap is the time of a step."""
        step_ms = self.tpot_ms or 0.0
        return self.merged_tokens + sum(gap_ms < BURST_SHARE * step_ms for gap_ms in self.itl_ms)

    def token_times_ms(self) -> list[float]:
        """List each token's time since the start; tokens of one event share it."""
        times_ms = self.event_times_ms()
        tokens = self.event_tokens or [1] * len(times_ms)
        pairs = zip(times_ms, tokens, strict=True)
        return [at_ms for at_ms, num_tokens in pairs for _ in range(num_tokens)]

    def event_times_ms(self) -> list[float]:
        """List the time of each event with tokens since the start."""
        if self.ttft_ms is None:
            return []
        return list(accumulate(self.itl_ms, initial=self.offered_ms + self.ttft_ms))


def sample_of(reply: ReceivedReply, *, origin_ns: int, due_ns: int) -> Sample:
    """Make a sample of a reply.

    Args:
        reply: ended, or cut off by its deadline, which is an error unless the caller clears it.
        origin_ns: the beginning of the measurement.
        due_ns: when the request was to be sent.
    """
    sample = Sample(
        offered_ms=(due_ns - origin_ns) / 1e6,
        late_ms=(reply.sent_ns - due_ns) / 1e6,
        status=reply.status,
        error=reply.problem,
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
        output_tokens=reply.output_tokens,
    )
    if reply.events:
        sample.ttft_ms = (reply.events[0].at_ns - due_ns) / 1e6
        sample.event_tokens = [event.num_tokens for event in reply.events]
        sample.itl_ms = [
            (event.at_ns - before.at_ns) / 1e6 for before, event in pairwise(reply.events)
        ]
        counted = sum(sample.event_tokens)
        # a server that does not say which tokens an event has may still say how many there were
        sample.merged_tokens = max(counted, reply.output_tokens or 0) - len(reply.events)
    if reply.ended_ns is not None and reply.problem is None:
        sample.e2e_ms = (reply.ended_ns - due_ns) / 1e6
    return sample
