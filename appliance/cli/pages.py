"""A reply's timings, roles, and anything as names and values.

Owns: their wording. Invariant: pure; one subject a line.
Never: computes a figure that the daemon did not send.
"""

from __future__ import annotations

from typing import Any

from appliance.cli.tables import Row, flat
from appliance.cli.text import count, ms, printable, size, word


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
