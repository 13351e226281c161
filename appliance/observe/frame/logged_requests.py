"""Show a request of the log as frames show requests: at its end, or as far as it had come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from appliance.observe.frame.latency import stages
from appliance.observe.frame.protocol import RequestFrame
from engine.scheduler.sequences.sequence import Stamps

_STAMPS = (
    *("tokenized", "started", "first_token", "attached", "decode_started"),
    *("second_token", "last_token"),
)


def of_all(max_tokens: int | None, num_sequences: int) -> int | None:
    """Count what all sequences may output; None: vectors or scores were asked for."""
    return None if max_tokens is None else int(max_tokens) * int(num_sequences)


def stages_of_row(row: Mapping[str, Any], age_us: float = math.inf) -> dict[str, Any]:
    """Divide a row's request into stages, as far as it had come at an age, or at its end."""
    at_us = {name: row[f"t_{name}_us"] for name in _STAMPS}
    took_us = {"restored": row.get("restored_us")}
    if age_us == math.inf:
        at_us["finished"], took_us["paused"] = row["t_finished_us"], row.get("paused_us")
    known = took_us | {name: us for name, us in at_us.items() if us is None or us <= age_us}
    found = {f"{name}_ns": 1000 * us for name, us in known.items() if us is not None}
    num_tokens = row["num_timed_tokens"] or 0 if age_us == math.inf else 0
    return asdict(stages(Stamps(0, **found), num_tokens))


def ended_frame(row: Mapping[str, Any], worker: str | None = None) -> RequestFrame:
    """Turn a row, with its stages, into a frame; an older row may lack columns.

    Args:
        worker: that ran it; None: the row does not name one.
    """
    names = RequestFrame.__struct_fields__
    shown: dict[str, Any] = {name: row[name] for name in names if name in row}
    shown["output_tokens"] = num_output = row["completion_tokens"]
    num_computed = row["prompt_tokens"] + max((num_output or 0) - 1, 0)  # all but the last
    shown["computed_tokens"] = None if num_output is None else num_computed
    shown["max_tokens"] = of_all(row["max_tokens"], row["num_sequences"])
    shown |= {"phase": "finished", "stream": bool(row["stream"]), "num_blocks": 0}
    return RequestFrame(**shown, worker=worker, age_ms=row.get("e2e_ms") or 0.0)
