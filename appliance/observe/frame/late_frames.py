"""Describe what is late, refused, survived or not logged as parts of a frame."""

from __future__ import annotations

import msgspec


class LateFrame(msgspec.Struct):
    """The request whose wait for a token is the longest by its limit."""

    id: str
    client: str
    """The program or address that sent it, else its user."""
    prompt_tokens: int
    waited_ms: float
    """Time since its arrival, or since its last token."""
    limit_ms: float
    """Longest time that it should wait."""
    number: int
    """Requests that wait so, each in whatever phase."""


class SurvivedFrame(msgspec.Struct):
    """The end of the previous daemon, whose requests this one continues."""

    how: str
    """A signal such as `SIGKILL`; `crash`: unknown; `restart`: on purpose."""
    at: str
    """The previous daemon's last sign of life: ISO 8601, UTC."""
    num_kept: int
    """Requests that it left open, and whose clients are connected still."""
    num_waiting: int
    """Kept requests that wait for the model to be loaded."""


class UnwrittenFrame(msgspec.Struct):
    """What the request log lacks while it cannot be written."""

    reason: str
    num_requests: int
    """Requests that have ended since then; their rows wait in memory, or are lost."""
    folder: str
    """The log's folder."""
    would_crash_lose: bool
    """Whether a crash would lose their rows, since `requests.open` cannot be written either."""


class RefusalFrame(msgspec.Struct):
    """Refused requests of one caller for one reason."""

    user: str
    client: str
    """The program or address, as of the newest request; empty: unknown."""
    status: int
    """HTTP status: 429 and 503 for want of room, other 4xx and 501 for the caller's errors."""
    code: str
    message: str
    """What the newest refusal said."""
    number: int
    """Refusals since the daemon started."""
    last_minute: int
    """Refusals in the last 60 s."""
    per_s: float
    """Refusals a second, over the last 10 s."""
    last_at: str
    """The newest refusal: ISO 8601, UTC, milliseconds."""
