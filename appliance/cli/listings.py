"""Define the columns of the CLI's lists and pages.

Owns: which fields of a row are shown, under which title.
Invariant: pure; a csv file has a column's `key` as its heading, so keys and their order stay; a
request is described in the console's words (appliance.frame.figures).
Never: computes a figure that the daemon did not send.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from appliance.cli.tables import Row, TableColumn, flat, folded, printable, word
from appliance.frame import figures
from appliance.frame.figures import (
    STAGES,
    TTFT_STAGES,
    age,
    count,
    day_and_time,
    duration,
    joules,
    plain,
    short_count,
    short_id,
    size,
)

REQUESTS = (
    TableColumn("ID", "id", short=short_id),
    TableColumn("PHASE", "phase", instead="finish_reason"),
    TableColumn("USER", "user", rank=5),
    TableColumn("IN", "prompt_tokens", count),
    TableColumn("OUT", "output_tokens", count),
    TableColumn("MAX", "max_tokens", count, rank=4),
    TableColumn("TIME", "age_ms", age),
    TableColumn("TTFT", "ttft_ms", duration, rank=1),
    TableColumn("TPOT", "tpot_ms", duration, rank=2),
    TableColumn("WORKER", "worker", rank=3),
    TableColumn("WAITS FOR", "waits_for", rank=6),
    TableColumn("QUEUE", "queue_ms", duration, is_wide=True),
    TableColumn("PREFILL", "prefill_ms", duration, is_wide=True),
    TableColumn("HANDOFF", "handoff_ms", duration, is_wide=True),
    TableColumn("E2E", "e2e_ms", duration, is_wide=True),
    TableColumn("BLOCKS", "num_blocks", count, is_wide=True),
    TableColumn("ENDPOINT", "endpoint", is_wide=True),
    TableColumn("RECEIVED", "received_at", is_wide=True),
    TableColumn("END", "finish_reason", is_wide=True),
    TableColumn("PREFILL J", "prefill_j", joules, is_wide=True),
    TableColumn("DECODE J", "decode_j", joules, is_wide=True),
    TableColumn("ERROR", "error", is_wide=True),
    TableColumn("WHY SLOW", "slow_because", is_wide=True),
)

LOG = (
    TableColumn("RECEIVED", "received_at", short=day_and_time),
    TableColumn("ID", "id", short=short_id),
    TableColumn("USER", "user", rank=4),
    TableColumn("IN", "prompt_tokens", count),
    TableColumn("OUT", "completion_tokens", count),
    TableColumn("QUEUE", "queue_ms", duration, rank=2),
    TableColumn("PREFILL", "prefill_ms", duration, rank=5),
    TableColumn("TTFT", "ttft_ms", duration, rank=3),
    TableColumn("HANDOFF", "handoff_ms", duration, rank=6),
    TableColumn("TPOT", "tpot_ms", duration, rank=1),
    TableColumn("E2E", "e2e_ms", duration),
    TableColumn("PATH", "transport", rank=7),
    TableColumn("END", "finish_reason"),
    TableColumn("TOKENIZE", "tokenize_ms", duration, is_wide=True),
    TableColumn("WAIT", "decode_wait_ms", duration, is_wide=True),
    TableColumn("DECODE", "decode_ms", duration, is_wide=True),
    TableColumn("CACHED", "cached_tokens", count, is_wide=True),
    TableColumn("RESTORE", "restore_ms", duration, is_wide=True),
    TableColumn("MOVED", "handoff_bytes", size, is_wide=True),
    TableColumn("PAUSED", "paused_ms", duration, is_wide=True),
    TableColumn("RECOVERIES", "recoveries", count, is_wide=True),
    TableColumn("PREEMPTIONS", "preemptions", count, is_wide=True),
    TableColumn("MODEL", "model", is_wide=True),
    TableColumn("ENDPOINT", "endpoint", is_wide=True),
    TableColumn("STATUS", "http_status", plain, is_wide=True),
    TableColumn("SEED", "seed", plain, is_wide=True),
    TableColumn("CANCELLED BY", "cancelled_by", is_wide=True),
    TableColumn("CLIENT ID", "client_rid", is_wide=True),
    TableColumn("PREFILL J", "prefill_j", joules, is_wide=True),
    TableColumn("DECODE J", "decode_j", joules, is_wide=True),
    TableColumn("ERROR", "error", is_wide=True),
    TableColumn("WORKERS", "workers", is_wide=True),
    TableColumn("LINKS", "links", is_wide=True),
)

EVENTS = (
    TableColumn("AT", "at", short=day_and_time),
    TableColumn("SEVERITY", "severity"),
    TableColumn("CODE", "code"),
    TableColumn("BY", "actor", is_wide=True),
    TableColumn("MESSAGE", "message"),
)

ALERTS = (
    TableColumn("SEVERITY", "severity"),
    TableColumn("CODE", "code"),
    TableColumn("SINCE", "since"),
    TableColumn("MESSAGE", "message"),
    TableColumn("SUBJECT", "subject", is_wide=True),
)

MODELS = (
    TableColumn("NAME", "name"),
    TableColumn("FAMILY", "family"),
    TableColumn("PARAMS", "num_parameters", short_count),
    TableColumn("DTYPE", "dtype"),
    TableColumn("SIZE", "size_bytes", size),
    TableColumn("PROBLEM", "problem"),
    TableColumn("CONTEXT", "max_model_len", count, is_wide=True),
    TableColumn("FOLDER", "folder", is_wide=True),
)

FITS = (
    TableColumn("WHERE", "place"),
    TableColumn("MEMORY", "memory_bytes", size),
    TableColumn("WEIGHTS", "weights_bytes", size),
    TableColumn("MOST KV TOKENS", "kv_tokens", count),
    TableColumn("FITS", "verdict"),
    TableColumn("FITS IF QUANTISED", "quantised"),
)

CHECKSUMS = (
    TableColumn("FILE", "file"),
    TableColumn("SIZE", "size_bytes", size),
    TableColumn("SHA256", "sha256"),
    TableColumn("RESULT", "result"),
)

TEXTS = (
    TableColumn("WAY", "way"),
    TableColumn("PROMPT", "prompt_tokens", count),
    TableColumn("CACHED", "cached_tokens", count),
    TableColumn("EQUAL", "equal_tokens", count),
    TableColumn("OF", "output_tokens", count),
    TableColumn(
        "MARGIN", "margin", lambda value: figures.ABSENT if value is None else f"{value:.1e}"
    ),
    TableColumn("RESULT", "result"),
)


def usage(by: str) -> tuple[TableColumn, ...]:
    """List the columns of sums by `user`, `model` or `day`."""
    return (
        TableColumn(by.upper(), by),
        TableColumn("REQUESTS", "requests", count),
        TableColumn("ERRORS", "errors", count),
        TableColumn("IN", "prompt_tokens", count),
        TableColumn("OUT", "completion_tokens", count),
        TableColumn("PREFILL", "prefill_ms", duration),
        TableColumn("DECODE", "decode_ms", duration),
        TableColumn("ENERGY", "energy_j", joules),
        TableColumn("J/TOKEN", "j_per_token", joules),
    )


# A reply's timings, roles, and anything as names and values.
# Never: computes a figure that the daemon did not send.


def stats_line(frame: Row) -> str:
    """Write the line of `penstock run --stats` from the request as the daemon measured it."""
    parts = [f"in {count(frame.get('prompt_tokens'))} out {count(frame.get('output_tokens'))}"]
    before = _reached(frame, TTFT_STAGES)
    parts.append(f"ttft {duration(frame.get('ttft_ms'))} ({' '.join(before)})")
    parts += _reached(frame, (*STAGES[len(TTFT_STAGES) :], "first_itl", "tpot", "e2e"))
    return "  ".join([*parts, f"id {printable(frame.get('id'))}"])


def _reached(frame: Row, names: Iterable[str]) -> list[str]:
    known = ((name, frame.get(f"{name}_ms")) for name in names)
    return [f"{name} {duration(value_ms)}" for name, value_ms in known if value_ms is not None]


_PLAIN = ("uid", "migration")
"""Numbers that are names."""


def facts(content: Row) -> str:
    """List names and values, one a line."""
    named = {_label(name): _fact(name, value) for name, value in flat(content).items()}
    width = max(map(len, named), default=0)
    return "\n".join(f"{printable(name):<{width}}  {value}" for name, value in named.items())


def _label(name: str) -> str:
    """Put `num_parameters` as `parameters`, and `rows.events` as `rows, events`."""
    name = name.replace("kv_bytes_of_a_request.", "KV_cache_at_")
    return name.removeprefix("num_").replace("_", " ").replace(".", ", ")


def _fact(name: str, value: Any) -> str:
    """Format a value: bytes as a size, counts with commas."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if "_bytes" in name and is_number:
        return size(value)
    return count(value) if is_number and name not in _PLAIN else word(value)


def roles_text(frame: Row) -> str:
    """Describe the workers' roles and the configured targets."""
    path = frame.get("transport")
    named = (("ttft", frame.get("slo_ttft_ms")), ("itl", frame.get("slo_itl_ms")))
    targets = [f"{name} {duration(value)}" for name, value in named if value is not None]
    return (
        f"{frame.get('roles')}"
        + (f", handoff by {path}" if path else "")
        + (f", targets {' and '.join(targets)}" if targets else "")
    )


_LABEL_WIDTH = 12
_NUMBER_WIDTH = 8


def request_page(frame: Row, *, width: int, bar: str, room: int | None = None) -> str:
    """Write the page of `penstock show` for a request.

    Args:
        frame: a RequestFrame.
        width: columns that the bars may fill, labels included.
        bar: one cell of a bar.
        room: the maximum columns of a line; longer facts are wrapped; None: no limit.
    """
    facts = {"request": frame.get("id") or figures.ABSENT, **figures.request_facts(frame)}
    lines = [
        folded(f"{label:<{_LABEL_WIDTH}} {printable(text)}", room, _LABEL_WIDTH + 1)
        for label, text in facts.items()
    ]
    return "\n".join([*lines, "", *waterfall(frame, width=width, bar=bar)])


def waterfall(frame: Row, *, width: int, bar: str) -> list[str]:
    """Draw a line for each stage reached, then the sum, the whole and the difference."""
    bars, sums = figures.waterfall(frame, width - _LABEL_WIDTH - _NUMBER_WIDTH - 3)
    lines = [
        _line(f"{each.stage}..." if each.is_open else each.stage, each.ms)
        + f"  {' ' * each.start}{bar * each.cells}"
        for each in bars
    ]
    return [line.rstrip() for line in lines] + [_line(*each) for each in sums]


def _line(label: str, value_ms: float) -> str:
    shown = figures.duration(round(value_ms, 3))
    return f"{printable(label):<{_LABEL_WIDTH}} {shown:>{_NUMBER_WIDTH}}"
