"""Check the parameters of queries of the request log.

Invariant: every field of a query is safe to run: times are in the log's own form, stages are known
names.
Never: lets a client write SQL; ignores a parameter that it cannot read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, cast

from appliance.json.fields import invalid_value
from engine.errors import RequestError

MAX_ROWS = 10_000
DEFAULT_ROWS = 20
SEVERITIES = ("info", "warning", "error")
"""The severities in ascending order; a query names the lowest one that it wants."""
STAGES = ("ttft", "queue", "prefill", "handoff", "decode", "tpot", "e2e")
"""Stages that a query can filter by."""

UsageBy = Literal["user", "model", "day"]
USAGE_BY: tuple[UsageBy, ...] = ("user", "model", "day")

MAX_DIGITS = 18
"""Maximum digits of a whole number in a query, so that it fits 64 bits."""
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGO = re.compile(r"-?(\d{1,9})([smhdw])", re.ASCII)
_SLOW = re.compile(r"(\w+)\s*([<>])\s*(\d{1,12}(?:\.\d{1,6})?)\s*(ms|s)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class SlowFilter:
    """A bound on one stage: `ttft>500`."""

    stage: str
    """One of STAGES."""
    is_above: bool
    """True for >, false for <."""
    bound_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowQuery:
    """Which requests to list; None: no condition."""

    limit: int = DEFAULT_ROWS
    since: str | None = None
    until: str | None = None
    """The first moment after the span."""
    user: str | None = None
    """Peer.name: a user's name, `key:NAME` or `uid:N`."""
    failed_only: bool = False
    slow: SlowFilter | None = None
    after: int | None = None
    """Only rows written after the one with this `cursor`, the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventQuery:
    """Which events to list; like RowQuery."""

    limit: int = DEFAULT_ROWS
    since: str | None = None
    until: str | None = None
    severity: str = "info"
    """The lowest severity to list; one of SEVERITIES."""
    after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """Which sums to compute, over requests received in [since, until)."""

    by: UsageBy = "user"
    since: str | None = None
    until: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of time, [since, until); None: unbounded."""

    since: str | None = None
    until: str | None = None


def row_query(params: Mapping[str, str]) -> RowQuery:
    """Read a query from `limit`, `since`, `until`, `user`, `errors`, `slow`, `after`.

    Raises:
        RequestError: 400, with the parameter's name.
    """
    return RowQuery(
        limit=_limit(params),
        since=_time(params, "since"),
        until=_time(params, "until"),
        user=params.get("user") or None,
        failed_only=_flag(params, "errors"),
        slow=_slow(params),
        after=_integer(params, "after"),
    )


def most_rows(params: Mapping[str, str]) -> int:
    """Read `limit`; without it return the maximum."""
    return _limit(params) if "limit" in params else MAX_ROWS


def event_query(params: Mapping[str, str]) -> EventQuery:
    """Read a query from `limit`, `since`, `until`, `severity`, `after`; raises as row_query()."""
    return EventQuery(
        limit=_limit(params),
        since=_time(params, "since"),
        until=_time(params, "until"),
        severity=_one_of(params, "severity", SEVERITIES),
        after=_integer(params, "after"),
    )


def usage_query(params: Mapping[str, str]) -> UsageQuery:
    """Read a query from `by`, `since`, `until`; raises as row_query()."""
    return UsageQuery(
        by=cast(UsageBy, _one_of(params, "by", USAGE_BY)),
        since=_time(params, "since"),
        until=_time(params, "until"),
    )


def span_query(params: Mapping[str, str]) -> Span:
    """Read a span from `since`, `until`; raises as row_query()."""
    return Span(since=_time(params, "since"), until=_time(params, "until"))


def parse_time(text: str, param: str, now: datetime) -> str:
    """Parse `1h` or `-1h` (before now) or ISO 8601, by default in UTC, into the log's form.

    Raises:
        RequestError: 400, naming `param`.
    """
    try:
        if ago := _AGO.fullmatch(text):
            at = now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        else:
            at = datetime.fromisoformat(text)
            at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
        return log_time(at)
    except (ValueError, OverflowError) as error:
        raise invalid_value(
            param, "must be a time such as 2026-01-31T12:00:00Z, or an age such as 30m, 1h, 2d"
        ) from error


def log_time(at: datetime) -> str:
    """Format a time as protocol.utc_now() does; such times sort as text."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _time(params: Mapping[str, str], name: str) -> str | None:
    text = params.get(name)
    return None if text is None else parse_time(text, name, datetime.now(UTC))


def _slow(params: Mapping[str, str]) -> SlowFilter | None:
    text = params.get("slow")
    if text is None:
        return None
    match = _SLOW.fullmatch(text.strip())
    if match is None or match[1] not in STAGES:
        raise invalid_value(
            "slow", f"must be a stage and a time such as ttft>500 (ms) or e2e>2s; {_listed(STAGES)}"
        )
    scale = 1000 if match[4] == "s" else 1
    return SlowFilter(match[1], match[2] == ">", float(match[3]) * scale)


def _limit(params: Mapping[str, str]) -> int:
    limit = _integer(params, "limit")
    if limit is None:
        return DEFAULT_ROWS
    if not 1 <= limit <= MAX_ROWS:
        raise invalid_value("limit", f"must be between 1 and {MAX_ROWS}")
    return limit


def _integer(params: Mapping[str, str], name: str) -> int | None:
    text = params.get(name)
    if text is None:
        return None
    # isdecimal alone lets other scripts' digits through, and int() long ones.
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        what = f"`{name}` must be a whole number"
        raise RequestError(what, code="invalid_type", param=name)
    if digits != text:
        raise invalid_value(name, "must not be negative")
    if len(text) > MAX_DIGITS:
        raise invalid_value(name, "is too large")
    return int(text)


def _flag(params: Mapping[str, str], name: str) -> bool:
    return _one_of(params, name, ("false", "true", "0", "1")) in ("true", "1")


def _one_of(params: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """Return the parameter's value; the first allowed one by default."""
    value = params.get(name, allowed[0])
    if value not in allowed:
        raise invalid_value(name, f"must be {_listed(allowed)}")
    return value


def _listed(words: tuple[str, ...]) -> str:
    return f"one of {', '.join(words)}"
