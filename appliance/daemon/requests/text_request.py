"""Describe an accepted request for vectors or scores: its caller, its texts, how it ended.

Invariant: exactly one terminal reply and one log row per accepted request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from appliance.daemon.requests.request import Peer
from appliance.observe.frame.protocol import RequestFrame
from engine.scheduler.sequences.sequence import Sequence
from engine.wire.finish_reason import FinishReason

COMPUTED = "computed"
"""The finish reason of a request that has had its vectors or scores."""


@dataclass(slots=True, eq=False)
class TextRequest:
    """What a client asked; one reply, one log row."""

    request_id: str
    endpoint: str
    model: str
    peer: Peer
    received_at: str
    """ISO 8601, UTC, milliseconds."""
    arrived_ns: int
    tokenized_ns: int
    """CLOCK_MONOTONIC, as the time of arrival."""
    num_texts: int
    """Texts, or pairs of texts."""
    prompt_tokens: int
    stop: Callable[[], object]
    """Drops what is not computed yet; its reply then says so."""
    client_request_id: str | None = None
    changes: str | None = None
    """What was changed in order to serve it, in words; None: nothing."""
    cancelled_by: str | None = None
    error: str | None = None
    """Why it failed; None: it did not."""
    has_failed: bool = False
    """It ended by an error that is not its client's own."""
    finished_ns: int | None = None
    sequences: tuple[Sequence, ...] = ()
    """Always empty: texts are computed whole."""

    @property
    def finish_reason(self) -> str | None:
        if self.finished_ns is None:
            return None
        if self.error is not None:
            return FinishReason.ERROR
        return COMPUTED if self.cancelled_by is None else FinishReason.ABORT

    def frame(self, now_ns: int) -> RequestFrame:
        """Show it in a list; its time in the queue of texts counts as prefill."""
        reason, end_ns = self.finish_reason, self.finished_ns or now_ns
        age_ms = (end_ns - self.arrived_ns) / 1e6
        return RequestFrame(
            id=self.request_id,
            endpoint=self.endpoint,
            phase="prefilling" if reason is None else "finished",
            model=self.model,
            user=self.peer.name,
            client=self.peer.client or None,
            stream=False,
            num_sequences=self.num_texts,
            prompt_tokens=self.prompt_tokens,
            computed_tokens=self.prompt_tokens if reason == COMPUTED else None,
            output_tokens=None,
            max_tokens=None,
            num_blocks=0,
            worker=None,
            transport=None,
            received_at=self.received_at,
            age_ms=age_ms,
            finish_reason=reason,
            error=self.error,
            tokenize_ms=(self.tokenized_ns - self.arrived_ns) / 1e6,
            queue_ms=0.0,
            prefill_ms=(end_ns - self.tokenized_ns) / 1e6,
            e2e_ms=None if reason is None else age_ms,
            cancelled_by=self.cancelled_by,
            changes=self.changes,
        )
