"""How benchmarks look: the page of one arm, the columns of several, the bar while they run.

Owns: their wording.
Invariant: the bar is on stderr, and only where that is a terminal.
Never: computes a figure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from appliance.bench.statistics import QUANTILES, TIMES
from appliance.cli import terminal
from appliance.cli.tables import Format, Listing, Row, TableColumn
from appliance.cli.text import DASH, count, ms, printable

BAR_CELLS = 24


def figure(value: Any) -> str:
    """A number to four digits; a count as it is."""
    return DASH if value is None else f"{value:.4g}" if isinstance(value, float) else count(value)


COMPARISON = (
    TableColumn("ARM", "arm"),
    TableColumn("METRIC", "metric"),
    TableColumn("MEDIAN", "median", figure),
    TableColumn("LOW", "low", figure),
    TableColumn("HIGH", "high", figure),
    TableColumn("RATIO", "ratio", figure),
    TableColumn("R LOW", "ratio_low", figure),
    TableColumn("R HIGH", "ratio_high", figure),
    TableColumn("A/A LOW", "band_low", figure, is_wide=True),
    TableColumn("A/A HIGH", "band_high", figure, is_wide=True),
    TableColumn("VERDICT", "verdict"),
)

STEPS = (
    TableColumn("STEP", "kind"),
    TableColumn("BATCH", "batch", count),
    TableColumn("TOKENS", "num_tokens", count),
    TableColumn("CONTEXT", "context", count),
    TableColumn("P50", "ms_p50", ms),
    TableColumn("MIN", "ms_min", ms),
    TableColumn("MAX", "ms_max", ms),
    TableColumn("TOK/S", "tokens_per_s", figure),
    TableColumn("STEPS", "steps", count, is_wide=True),
)

DEVICE = (
    TableColumn("WHAT", "what"),
    TableColumn("SHAPE", "shape"),
    TableColumn("P50", "ms", ms),
    TableColumn("RATE", "rate", figure),
    TableColumn("UNIT", "unit"),
    TableColumn("OF CEILING", "share", figure),
)


def run_page(content: Row) -> str:
    """`penstock bench run`: quantiles of each time, then the rest, one a line."""
    figures = content["figures"]
    columns = [TableColumn("", "name"), *(TableColumn(q.upper(), q, ms) for q in QUANTILES)]
    times = [
        {"name": name.removesuffix("_ms")} | {q: figures[f"{name}_{q}"] for q in QUANTILES}
        for name in TIMES
    ]
    shown = {f"{name}_{q}" for name in TIMES for q in QUANTILES}
    rest = {name: value for name, value in figures.items() if name not in shown}
    rest["statuses"] = ", ".join(f"{n} x {status}" for status, n in content["statuses"].items())
    width = max(map(len, rest))
    lines = [
        f"{name:<{width}}  {printable(value) if isinstance(value, str) else figure(value)}"
        for name, value in rest.items()
    ]
    return Listing("bench", columns, Format.TABLE).render(times) + "\n" + "\n".join(lines)


class Bar:
    """How far the measurement is: on a terminal one line that changes, else one line a turn."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns
        self._turn = 0
        self._is_terminal = sys.stderr.isatty()

    def turn(self, label: str) -> Callable[[float], None]:
        """Begin the next turn; the result takes the share of it that is done."""
        self._turn += 1
        about = f"{self._turn}/{self._num_turns} {printable(label)}"
        if not self._is_terminal:
            terminal.note(f"penstock: turn {about}")
        return lambda share: self._draw(about, share)

    def end(self) -> None:
        """Clear the line for what comes next."""
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _draw(self, about: str, share: float) -> None:
        if self._is_terminal:
            full = round(share * BAR_CELLS)
            sys.stderr.write(f"\r\x1b[K[{'#' * full}{'.' * (BAR_CELLS - full)}] {about}")
            sys.stderr.flush()
