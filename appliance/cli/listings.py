"""Define the columns of the CLI's lists.

Invariant: a csv file has a column's `key` as its heading, so keys and their order stay; a request
is described in the console's words (appliance.observe.frame.figures).
"""

from __future__ import annotations

from appliance.cli.tables import TableColumn
from appliance.observe.frame.figures import (
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
    TableColumn("CLIENT", "client", rank=7),
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
    TableColumn("CLIENT", "client", rank=8),
    TableColumn("WAITED FOR", "waited_for", is_wide=True),
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
    TableColumn("LOOK", "action", is_wide=True),
)

MODELS = (
    TableColumn("NAME", "name"),
    TableColumn("STATE", "state"),
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

KEYS = (
    TableColumn("NAME", "name"),
    TableColumn("ROLE", "role"),
)

RANKING = (
    TableColumn("SCORE", "score", lambda value: f"{value:.4f}"),
    TableColumn("LINE", "line", count),
    TableColumn("TEXT", "text"),
)

CHECKSUMS = (
    TableColumn("FILE", "file"),
    TableColumn("SIZE", "size_bytes", size),
    TableColumn("SHA256", "sha256"),
    TableColumn("RESULT", "result"),
)


def usage(by: str) -> tuple[TableColumn, ...]:
    """List the columns of sums by `user`, `model` or `day`."""
    refused = (TableColumn("REFUSED", "refused", count), TableColumn("MOST BY", "refused_most"))
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
        *(() if by == "model" else refused),
    )
