"""What lists and pages show: columns, names and values, one request's stages as bars.

Owns: which fields of a row are shown, under which title; their wording. Invariant: pure; one
subject a line; the order of the stages.
Invariant: a csv file gets a column's `key` as its heading, so keys and their order are kept.
Never: computes a figure that the daemon did not send.
"""

from __future__ import annotations

from typing import Any

from appliance.cli.tables import (
    Row,
    TableColumn,
    count,
    flat,
    joules,
    large,
    ms,
    printable,
    short_id,
    short_time,
    size,
    word,
)

REQUESTS = (
    TableColumn("ID", "id", short=short_id),
    TableColumn("PHASE", "phase", instead="finish_reason"),
    TableColumn("USER", "user", rank=5),
    TableColumn("IN", "prompt_tokens", count),
    TableColumn("OUT", "output_tokens", count),
    TableColumn("MAX", "max_tokens", count, rank=4),
    TableColumn("AGE", "age_ms", ms),
    TableColumn("TTFT", "ttft_ms", ms, rank=1),
    TableColumn("TPOT", "tpot_ms", ms, rank=2),
    TableColumn("WORKER", "worker", rank=3),
    TableColumn("WAITS FOR", "waits_for", rank=6),
    TableColumn("QUEUE", "queue_ms", ms, is_wide=True),
    TableColumn("PREFILL", "prefill_ms", ms, is_wide=True),
    TableColumn("HANDOFF", "handoff_ms", ms, is_wide=True),
    TableColumn("E2E", "e2e_ms", ms, is_wide=True),
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
    TableColumn("RECEIVED", "received_at", short=short_time),
    TableColumn("ID", "id", short=short_id),
    TableColumn("USER", "user", rank=4),
    TableColumn("IN", "prompt_tokens", count),
    TableColumn("OUT", "completion_tokens", count),
    TableColumn("QUEUE", "queue_ms", ms, rank=2),
    TableColumn("PREFILL", "prefill_ms", ms, rank=5),
    TableColumn("TTFT", "ttft_ms", ms, rank=3),
    TableColumn("HANDOFF", "handoff_ms", ms, rank=6),
    TableColumn("TPOT", "tpot_ms", ms, rank=1),
    TableColumn("E2E", "e2e_ms", ms),
    TableColumn("PATH", "transport", rank=7),
    TableColumn("END", "finish_reason"),
    TableColumn("TOKENIZE", "tokenize_ms", ms, is_wide=True),
    TableColumn("WAIT", "decode_wait_ms", ms, is_wide=True),
    TableColumn("DECODE", "decode_ms", ms, is_wide=True),
    TableColumn("CACHED", "cached_tokens", count, is_wide=True),
    TableColumn("RESTORE", "restore_ms", ms, is_wide=True),
    TableColumn("MOVED", "handoff_bytes", size, is_wide=True),
    TableColumn("PAUSED", "paused_ms", ms, is_wide=True),
    TableColumn("RECOVERIES", "recoveries", count, is_wide=True),
    TableColumn("PREEMPTIONS", "preemptions", count, is_wide=True),
    TableColumn("MODEL", "model", is_wide=True),
    TableColumn("ENDPOINT", "endpoint", is_wide=True),
    TableColumn("STATUS", "http_status", count, is_wide=True),
    TableColumn("SEED", "seed", count, is_wide=True),
    TableColumn("CANCELLED BY", "cancelled_by", is_wide=True),
    TableColumn("CLIENT ID", "client_rid", is_wide=True),
    TableColumn("PREFILL J", "prefill_j", joules, is_wide=True),
    TableColumn("DECODE J", "decode_j", joules, is_wide=True),
    TableColumn("ERROR", "error", is_wide=True),
    TableColumn("WORKERS", "workers", is_wide=True),
    TableColumn("LINKS", "links", is_wide=True),
)

EVENTS = (
    TableColumn("AT", "at", short=short_time),
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
    TableColumn("PARAMS", "num_parameters", large),
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
    TableColumn("KV TOKENS", "kv_tokens", count),
    TableColumn("FITS", "verdict"),
    TableColumn("QUANTISED, WOULD", "quantised"),
)

CHECKSUMS = (
    TableColumn("FILE", "file"),
    TableColumn("SIZE", "size_bytes", size),
    TableColumn("SHA256", "sha256"),
    TableColumn("RESULT", "result"),
)


def usage(by: str) -> tuple[TableColumn, ...]:
    """Sums by `user`, `model` or `day`."""
    return (
        TableColumn(by.upper(), by),
        TableColumn("REQUESTS", "requests", count),
        TableColumn("ERRORS", "errors", count),
        TableColumn("IN", "prompt_tokens", count),
        TableColumn("OUT", "completion_tokens", count),
        TableColumn("PREFILL", "prefill_ms", ms),
        TableColumn("DECODE", "decode_ms", ms),
        TableColumn("ENERGY", "energy_j", joules),
        TableColumn("J/TOKEN", "j_per_token", joules),
    )


# A reply's timings, roles, and anything as names and values.
# Never: computes a figure that the daemon did not send.


def stats_line(frame: Row) -> str:
    """`penstock run --stats`, from the request as the daemon measured it."""
    parts = [f"in {count(frame.get('prompt_tokens'))} out {count(frame.get('output_tokens'))}"]
    stages = ["tokenize", "queue", "prefill"]
    if frame.get("restore_ms") is not None:
        stages.insert(2, "restore")
    shares = " ".join(f"{stage} {ms(frame.get(f'{stage}_ms'))}" for stage in stages)
    parts.append(f"ttft {ms(frame.get('ttft_ms'))} ({shares})")
    later = ("handoff", "decode_wait", "decode", "paused", "first_itl", "tpot", "e2e")
    reached = [name for name in later if frame.get(f"{name}_ms") is not None]
    parts += [f"{name} {ms(frame[f'{name}_ms'])}" for name in reached]
    return "  ".join([*parts, f"id {printable(frame.get('id'))}"])


def facts(content: Row) -> str:
    """Names and values, one a line."""
    named = {name: _fact(name, value) for name, value in flat(content).items()}
    width = max(map(len, named), default=0)
    return "\n".join(f"{printable(name):<{width}}  {value}" for name, value in named.items())


def _fact(name: str, value: Any) -> str:
    """A value; what its name says to be bytes, as a size."""
    return size(value) if "_bytes" in name and isinstance(value, int) else word(value)


def roles_text(frame: Row) -> str:
    """What the workers are for, and the targets that somebody has set."""
    path = frame.get("transport")
    named = (("ttft", frame.get("slo_ttft_ms")), ("gaps", frame.get("slo_itl_ms")))
    targets = [f"{name} {ms(value)}" for name, value in named if value is not None]
    return (
        f"{frame.get('roles')}"
        + (f", handoff by {path}" if path else "")
        + (f", targets {' and '.join(targets)}" if targets else "")
    )
