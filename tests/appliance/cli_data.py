"""What the daemon says in the tests of the command line."""

from __future__ import annotations

from typing import Any

from tests.worlds.fake_daemon import RID

REQUEST: dict[str, Any] = {
    "id": RID,
    "phase": "decoding",
    "user": "ann",
    "prompt_tokens": 12,
    "output_tokens": 3,
    "max_tokens": 32,
    "age_ms": 1234.5,
    "ttft_ms": 231.4,
    "tokenize_ms": 0.4,
    "queue_ms": 61.0,
    "prefill_ms": 170.0,
    "handoff_ms": 1.82,
    "tpot_ms": 12.04,
    "e2e_ms": None,
    "worker": "decode",
}
FINISHED = {
    **REQUEST,
    "phase": "finished",
    "finish_reason": "length",
    "endpoint": "/v1/completions",
    "received_at": "2026-01-02T03:04:05.678Z",
    "transport": "shm",
    "workers": "prefill0,decode1,decode0",
    "links": "shm,none",
    "handoff_bytes": 1 << 20,
    "decode_wait_ms": 5.0,
    "decode_ms": 362.0,
    "first_itl_ms": 19.0,
    "e2e_ms": 600.22,
    "age_ms": 600.22,
    "prefill_j": 78.4,
    "decode_j": 1204.0,
    "slow_because": "prefill: 170 ms for 12 prompt tokens, usually 20 ms",
}
ENDED = {**REQUEST, "id": "cmpl-0", "phase": "finished", "finish_reason": "stop", "worker": None}
ROW = {
    "cursor": 5,
    "id": RID,
    "received_at": "2026-01-02T03:04:05.678Z",
    "user": None,
    "prompt_tokens": 12,
    "completion_tokens": 32,
    "queue_ms": 0.5,
    "prefill_ms": 20.0,
    "ttft_ms": 20.6,
    "handoff_ms": 0.21,
    "tpot_ms": 9.97,
    "e2e_ms": 61234.0,
    "prefill_j": 0.412,
    "decode_j": None,
    "transport": "alias",
    "finish_reason": "length",
}
FRAME = {
    "version": 1,
    "at": "2026-01-02T03:04:06.000Z",
    "state": "ready",
    "state_reason": "",
    "uptime_s": 192.0,
    "pid": 77,
    "model": "starter",
    "model_note": "random weights",
    "dtype": "float32",
    "max_model_len": 2048,
    "roles": "static",
    "transport": "alias",
    "queue": {
        "queued": 1,
        "prefilling": 1,
        "handing_off": 0,
        "decoding": 2,
        "max_queued": 256,
        "oldest_queued_ms": 12.0,
    },
    "workers": [
        {
            "name": "prefill",
            "state": "ready",
            "device": "cpu 0",
            "pid": 78,
            "num_sequences": 1,
            "prefill_tokens_per_s": 812.4,
            "decode_tokens_per_s": 0.0,
            "num_restarts": 0,
        }
    ],
    "pools": [
        {
            "name": "kv",
            "num_blocks": 512,
            "block_bytes": 1 << 20,
            "free": 500,
            "active": 10,
            "reserved": 2,
            "owners": [
                {"user": "ann", "num_blocks": 8, "num_requests": 2},
                {"user": "svc\x1b[2J", "num_blocks": 4, "num_requests": 1},
            ],
        }
    ],
    "handoff": {
        "transport": "alias",
        "num_in_flight": 1,
        "handoffs_per_s": 2.5,
        "bytes_per_s": 0.0,
        "probe_bytes_per_s": None,
        "num_failed": 0,
    },
    "slo_ttft_ms": 500,
    "slo_itl_ms": None,
    "limit": "queue: 1 sequence waits for prefill",
    "alerts": [
        {
            "code": "worker.down",
            "severity": "error",
            "message": "worker decode\x1b[1m is restarting",
            "since": "2026-01-02T03:04:01.000Z",
            "subject": "decode",
        },
        {
            "code": "queue.wait",
            "severity": "warning",
            "message": "a request waits for 0.3 s already",
            "since": "2026-01-02T03:04:05.000Z",
            "subject": "",
        },
    ],
    "energy": {
        "total_j": 812.5,
        "prefill_j": 204.0,
        "decode_j": 310.25,
        "unattributed_j": 298.25,
        "window_s": 60.0,
        "power_w": 48.25,
        "prefill_j_per_token": 0.0124,
        "decode_j_per_token": 0.31,
        "method": "counters, by tokens computed",
    },
    "latency": {
        "window_s": 60.0,
        "num_requests": 4,
        "ttft_ms_p50": 20.0,
        "ttft_ms_p95": 41.0,
        "itl_ms_p50": 9.5,
        "itl_ms_p95": 12.0,
        "itl_ms_max": None,
        "handoff_ms_p50": 0.2,
        "ttft_slo_ratio": 0.9824,
    },
    "totals": {
        "accepted": 9,
        "finished": 4,
        "refused": 0,
        "aborted": 1,
        "failed": 0,
        "prompt_tokens": 120,
        "output_tokens": 300,
    },
    "devices": [{"name": "package-0", "power_w": None}],
}

HOSTILE = '=cmd\x1b[2J,"\n\u202eb\u009b1m'
"""What a name must not do: move a cursor, turn a line around, be a formula, end a cell."""

EVENTS = [
    {
        "cursor": 8,
        "run_id": 1,
        "at": "2026-01-02T03:04:06.000Z",
        "severity": "error",
        "code": "worker.died",
        "message": f"the worker {HOSTILE} died",
        "actor": None,
    },
    {
        "cursor": 7,
        "run_id": 1,
        "at": "2026-01-02T03:04:05.000Z",
        "severity": "info",
        "code": "drain.started",
        "message": "takes no new requests",
        "actor": "ann",
    },
]
USAGE = [
    {
        "user": "ann",
        "requests": 12,
        "errors": 1,
        "prompt_tokens": 3400,
        "completion_tokens": 512,
        "prefill_ms": 1200.5,
        "decode_ms": 65000.0,
        "prefill_j": 210.5,
        "decode_j": 1034.0,
        "energy_j": 1244.5,
        "j_per_token": 2.430664,
        "refused": 135381,
        "refused_most": "python3 4711 (404)",
    },
    {
        "user": HOSTILE,
        "requests": 1,
        "errors": 0,
        "prompt_tokens": 4,
        "completion_tokens": 0,
        "prefill_ms": None,
        "decode_ms": None,
        "prefill_j": None,
        "decode_j": None,
        "energy_j": None,
        "j_per_token": None,
    },
]
WHOAMI = {"name": "ann", "role": "operator", "uid": 1000, "key": None}
