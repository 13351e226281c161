"""Show a request of the log as frames show requests: at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.observe.frame.protocol import RequestFrame


def of_all(max_tokens: int | None, num_sequences: int) -> int | None:
    """Count what all sequences may output; None: vectors or scores were asked for."""
    return None if max_tokens is None else int(max_tokens) * int(num_sequences)


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
