"""Print the results of benchmarks as pages and tables.

Invariant: progress is on stderr, as a bar only where that is a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from appliance.bench.statistics import (
    QUANTILES,
    TIMES,
)
from appliance.cli import terminal
from appliance.cli.tables import Format, Listing, Row, TableColumn
from appliance.cli.terminal import ProgressLine
from appliance.observe.frame.figures import (
    duration,
    factor,
    fine_ratio,
    measured_ms,
    named,
    unitless,
)
from engine.printable import printable

BAR_CELLS = 24
TOLD_BURSTS = 0.1
"""Share of tokens in bursts from which the page says what its ITL is."""


def right(text: Any) -> str:
    """Align text to the right, like numbers."""
    return str(text)


COMPARISON = (
    TableColumn("ARM", "arm"),
    TableColumn("METRIC", "metric", instead="metric_text"),
    TableColumn("MEDIAN", "median", right, instead="median_text"),
    TableColumn("LOW", "low", right, instead="low_text"),
    TableColumn("HIGH", "high", right, instead="high_text"),
    TableColumn("RATIO", "ratio", factor),
    TableColumn("R LOW", "ratio_low", factor),
    TableColumn("R HIGH", "ratio_high", factor),
    TableColumn("A/A LOW", "band_low", factor, is_wide=True),
    TableColumn("A/A HIGH", "band_high", factor, is_wide=True),
    TableColumn("VERDICT", "verdict"),
)

DEVICE = (
    TableColumn("WHAT", "what"),
    TableColumn("SHAPE", "shape"),
    TableColumn("P50", "ms", duration),
    TableColumn("RATE", "rate", right, instead="rate_text"),
    TableColumn("UNIT", "unit", is_wide=True),
    TableColumn("OF CEILING", "share", fine_ratio),
)
TRANSPORTS = (
    *DEVICE[:-1],
    TableColumn("OF ONE COPY", "share", fine_ratio),
)


def run_page(content: Row) -> str:
    """Write the page of `penstock bench run`: quantiles of each time, then the other figures."""
    figures = content["figures"]
    quantiles = (TableColumn(q.upper(), q, measured_ms) for q in QUANTILES)
    columns = [TableColumn("", "name"), *quantiles]
    times = [
        {"name": unitless(name)} | {q: figures[f"{name}_{q}"] for q in QUANTILES} for name in TIMES
    ]
    shown = {f"{name}_{q}" for name in TIMES for q in QUANTILES}
    rest = {unitless(name): named(name, figures[name]) for name in figures if name not in shown}
    statuses = ", ".join(f"{n} x {status}" for status, n in content["statuses"].items())
    rest["statuses"] = printable(statuses)
    width = max(map(len, rest))
    lines = [f"{name:<{width}}  {text}" for name, text in rest.items()]
    page = Listing("bench", columns, Format.TABLE).render(times)
    burst = figures["burst_ratio"] or 0.0
    if burst >= TOLD_BURSTS:
        page += (
            f"itl is between events: {fine_ratio(burst)} of the tokens came in bursts; see tpot\n"
        )
    return page + "\n" + "\n".join(lines)


def texts_page(figures: Row) -> str:
    """Write the page of `penstock bench texts`."""
    shown = {unitless(name): named(name, value) for name, value in figures.items()}
    width = max(map(len, shown))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in shown.items())


class Bar:
    """Show a measurement's progress: on a terminal one changing line, otherwise a line per turn."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns
        self._turn = 0
        self._line = ProgressLine()

    def turn(self, label: str) -> Callable[[float], None]:
        """Begin the next turn; the returned function takes its finished share."""
        self._turn += 1
        about = f"{self._turn}/{self._num_turns} {printable(label)}"
        if not sys.stderr.isatty():
            terminal.note(f"penstock: turn {about}")
            return lambda _: None

        def draw(share: float) -> None:
            full = round(share * BAR_CELLS)
            self._line.say(f"[{'#' * full}{'.' * (BAR_CELLS - full)}] {about}")

        return draw

    def end(self) -> None:
        """Clear the line for what comes next."""
        self._line.end()
