"""Write one thing as lines of names and values: a request, a reply's timings, roles."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from appliance.cli.tables import Row, flat, folded, word
from appliance.observe.frame import figures, request_facts
from appliance.observe.frame.figures import count, duration, size, transport_text
from appliance.observe.frame.request_facts import STAGES, TTFT_STAGES
from engine.printable import printable


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


_BETWEEN_NAMES = re.compile(r"\.(?!json|jinja)")


def facts(content: Row) -> str:
    """List names and values, one a line."""
    named = {_label(name): _fact(name, value) for name, value in flat(content).items()}
    width = max(map(len, named), default=0)
    return "\n".join(f"{printable(name):<{width}}  {value}" for name, value in named.items())


def _label(name: str) -> str:
    """Put `num_parameters` as `parameters`, and `rows.events` as `rows, events`."""
    name = name.replace("kv_bytes_of_a_request.", "KV_cache_at_").removeprefix("num_")
    parts = _BETWEEN_NAMES.split(name)
    return ", ".join(part if "." in part else part.replace("_", " ") for part in parts)


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
        + (f", {transport_text(path)}" if path else "")
        + (f", targets {' and '.join(targets)}" if targets else "")
    )


_LABEL_WIDTH = 12
_NUMBER_WIDTH = 8


def request_page(frame: Row, *, width: int, bar: str, room: int | None = None) -> str:
    """Write the page of `penstock show` for a request.

    Args:
        width: columns that the bars may fill, labels included.
        bar: one cell of a bar.
        room: the maximum columns of a line; longer facts are wrapped; None: no limit.
    """
    facts = {"request": frame.get("id") or figures.ABSENT, **request_facts.request_facts(frame)}
    lines = [
        folded(f"{label:<{_LABEL_WIDTH}} {printable(text)}", room, _LABEL_WIDTH + 1)
        for label, text in facts.items()
    ]
    return "\n".join([*lines, "", *waterfall(frame, width=width, bar=bar)])


def waterfall(frame: Row, *, width: int, bar: str) -> list[str]:
    """Draw a line for each stage reached, then the sum, the whole and the difference."""
    bars, sums = request_facts.waterfall(frame, width - _LABEL_WIDTH - _NUMBER_WIDTH - 3)
    lines = [
        _line(f"{each.stage}..." if each.is_open else each.stage, each.ms)
        + f"  {' ' * each.start}{bar * each.cells}"
        for each in bars
    ]
    return [line.rstrip() for line in lines] + [_line(*each) for each in sums]


def _line(label: str, value_ms: float) -> str:
    shown = figures.duration(round(value_ms, 3))
    return f"{printable(label):<{_LABEL_WIDTH}} {shown:>{_NUMBER_WIDTH}}"
