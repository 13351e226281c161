"""The columns of every list.

Owns: which fields of a row are shown, under which title.
Invariant: a csv file gets a column's `key` as its heading, so keys and their order are kept.
Never: computes a figure that the daemon did not send.
"""

from __future__ import annotations

from appliance.cli.tables import Column
from appliance.cli.text import count, joules, large, ms, short_id, short_time, size

REQUESTS = (
    Column("ID", "id", short=short_id),
    Column("PHASE", "phase", instead="finish_reason"),
    Column("USER", "user", rank=5),
    Column("IN", "prompt_tokens", count),
    Column("OUT", "output_tokens", count),
    Column("MAX", "max_tokens", count, rank=4),
    Column("AGE", "age_ms", ms),
    Column("TTFT", "ttft_ms", ms, rank=1),
    Column("TPOT", "tpot_ms", ms, rank=2),
    Column("WORKER", "worker", rank=3),
    Column("WAITS FOR", "waits_for", rank=6),
    Column("QUEUE", "queue_ms", ms, is_wide=True),
    Column("PREFILL", "prefill_ms", ms, is_wide=True),
    Column("HANDOFF", "handoff_ms", ms, is_wide=True),
    Column("E2E", "e2e_ms", ms, is_wide=True),
    Column("BLOCKS", "num_blocks", count, is_wide=True),
    Column("ENDPOINT", "endpoint", is_wide=True),
    Column("RECEIVED", "received_at", is_wide=True),
    Column("END", "finish_reason", is_wide=True),
    Column("PREFILL J", "prefill_j", joules, is_wide=True),
    Column("DECODE J", "decode_j", joules, is_wide=True),
    Column("ERROR", "error", is_wide=True),
    Column("WHY SLOW", "slow_because", is_wide=True),
)

LOG = (
    Column("RECEIVED", "received_at", short=short_time),
    Column("ID", "id", short=short_id),
    Column("USER", "user", rank=4),
    Column("IN", "prompt_tokens", count),
    Column("OUT", "completion_tokens", count),
    Column("QUEUE", "queue_ms", ms, rank=2),
    Column("PREFILL", "prefill_ms", ms, rank=5),
    Column("TTFT", "ttft_ms", ms, rank=3),
    Column("HANDOFF", "handoff_ms", ms, rank=6),
    Column("TPOT", "tpot_ms", ms, rank=1),
    Column("E2E", "e2e_ms", ms),
    Column("PATH", "transport", rank=7),
    Column("END", "finish_reason"),
    Column("TOKENIZE", "tokenize_ms", ms, is_wide=True),
    Column("WAIT", "decode_wait_ms", ms, is_wide=True),
    Column("DECODE", "decode_ms", ms, is_wide=True),
    Column("CACHED", "cached_tokens", count, is_wide=True),
    Column("RESTORE", "restore_ms", ms, is_wide=True),
    Column("MOVED", "handoff_bytes", size, is_wide=True),
    Column("PAUSED", "paused_ms", ms, is_wide=True),
    Column("RECOVERIES", "recoveries", count, is_wide=True),
    Column("PREEMPTIONS", "preemptions", count, is_wide=True),
    Column("MODEL", "model", is_wide=True),
    Column("ENDPOINT", "endpoint", is_wide=True),
    Column("STATUS", "http_status", count, is_wide=True),
    Column("SEED", "seed", count, is_wide=True),
    Column("CANCELLED BY", "cancelled_by", is_wide=True),
    Column("CLIENT ID", "client_rid", is_wide=True),
    Column("PREFILL J", "prefill_j", joules, is_wide=True),
    Column("DECODE J", "decode_j", joules, is_wide=True),
    Column("ERROR", "error", is_wide=True),
    Column("WORKERS", "workers", is_wide=True),
    Column("LINKS", "links", is_wide=True),
)

EVENTS = (
    Column("AT", "at", short=short_time),
    Column("SEVERITY", "severity"),
    Column("CODE", "code"),
    Column("BY", "actor", is_wide=True),
    Column("MESSAGE", "message"),
)

ALERTS = (
    Column("SEVERITY", "severity"),
    Column("CODE", "code"),
    Column("SINCE", "since"),
    Column("MESSAGE", "message"),
    Column("SUBJECT", "subject", is_wide=True),
)

MODELS = (
    Column("NAME", "name"),
    Column("FAMILY", "family"),
    Column("PARAMS", "num_parameters", large),
    Column("DTYPE", "dtype"),
    Column("SIZE", "size_bytes", size),
    Column("PROBLEM", "problem"),
    Column("CONTEXT", "max_model_len", count, is_wide=True),
    Column("FOLDER", "folder", is_wide=True),
)

FITS = (
    Column("WHERE", "place"),
    Column("MEMORY", "memory_bytes", size),
    Column("WEIGHTS", "weights_bytes", size),
    Column("KV TOKENS", "kv_tokens", count),
    Column("FITS", "verdict"),
    Column("QUANTISED, WOULD", "quantised"),
)

CHECKSUMS = (
    Column("FILE", "file"),
    Column("SIZE", "size_bytes", size),
    Column("SHA256", "sha256"),
    Column("RESULT", "result"),
)


def usage(by: str) -> tuple[Column, ...]:
    """Sums by `user`, `model` or `day`."""
    return (
        Column(by.upper(), by),
        Column("REQUESTS", "requests", count),
        Column("ERRORS", "errors", count),
        Column("IN", "prompt_tokens", count),
        Column("OUT", "completion_tokens", count),
        Column("PREFILL", "prefill_ms", ms),
        Column("DECODE", "decode_ms", ms),
        Column("ENERGY", "energy_j", joules),
        Column("J/TOKEN", "j_per_token", joules),
    )
