"""What the benchmarks share: options, the page of one arm, columns of several, the bar.

Owns: how a load is written on the command line; their wording.
Invariant: the bar is on stderr, and only where that is a terminal.
Never: computes a figure.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.bench.load import Load
from appliance.bench.statistics import QUANTILES, TIMES
from appliance.bench.workloads import Lengths, read_trace, scaled, spread
from appliance.cli import terminal
from appliance.cli.tables import Format, Listing, Row, TableColumn, printable
from appliance.frame.figures import ABSENT, count, duration, fine_ratio

# The options that the benchmarks share.
# Invariant: an option means the same in every verb. Never: measures.


DEFAULT_SECONDS = 30.0

Specs = Annotated[
    list[str],
    typer.Argument(
        metavar="ARM...",
        help="static, colocated, elastic: a daemon started for it; or a server that is there: a"
        " socket or http://HOST:PORT. NAME= may precede. The first is the base of all ratios.",
    ),
]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="For the daemons that are started.")
]
Rounds = Annotated[int, typer.Option(min=1, help="How often every arm has its turn.")]
Alone = Annotated[
    bool, typer.Option("--alone", help="Start daemons anew for each turn, one at a time.")
]
PromptText = Annotated[
    bool, typer.Option("--prompt-text", help="Send words, for servers that know no /tokenize.")
]
Seed = Annotated[int, typer.Option(help="Of schedules, lengths, prompts and turns.")]
Save = Annotated[Path | None, typer.Option(help="Keep every sample in this JSON file.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw distributions to this SVG.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Of a turn; what was sent may end later.")]
Speed = Annotated[float, typer.Option(min=0.001, help="A workload's times: 2 is twice as fast.")]
LengthScale = Annotated[
    float, typer.Option(min=0.0001, help="A workload's lengths: 0.25 is a quarter of the tokens.")
]
SloTtft = Annotated[float | None, typer.Option(help="Goodput: first token within so many ms.")]
SloItl = Annotated[float | None, typer.Option(help="Goodput: p99 of a reply's gaps within.")]


def _load(
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: so many requests open; 1 by default.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Open loop: requests per second.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=0.01, help="With --rate: 1 is Poisson, less comes in bursts.")
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(help="Open loop: JSON lines in the form of Mooncake's traces."),
    ] = None,
    speed: Speed = 1.0,
    length_scale: LengthScale = 1.0,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Of a turn: 30, or all of the trace.")
    ] = None,
    input_tokens: Annotated[str, typer.Option(help="Of a prompt: 512, or any of 128-1024.")] = (
        "512"
    ),
    output_tokens: Annotated[str, typer.Option(help="Of a reply, likewise.")] = "64",
    seed: Seed = 0,
) -> Load:
    """The load that the options describe."""
    given = [each for each in (concurrency, rate, trace) if each is not None]
    if len(given) > 1:
        raise typer.BadParameter("give one of --concurrency, --rate and --trace")
    if trace is None and (speed, length_scale) != (1.0, 1.0):
        raise typer.BadParameter("--speed and --length-scale are of a --trace")
    arrivals = None
    if trace is not None:
        # within their ticks in an order of the seed's, so that all arms have the same
        ticked = spread(read_trace(trace), random.Random(f"{seed}/ticks"))
        arrivals = tuple(scaled(ticked, speed, length_scale))
    whole_s = DEFAULT_SECONDS if arrivals is None else max(arrivals[-1].at_s, 1.0)
    return Load(
        seconds=whole_s if seconds is None else seconds,
        inputs=_lengths(input_tokens),
        outputs=_lengths(output_tokens),
        concurrency=concurrency if given else 1,
        rate_per_s=rate,
        burstiness=burstiness,
        trace=arrivals,
        seed=seed,
    )


def under_load(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options of a load in place of its parameter `load`."""
    own = inspect.signature(verb, eval_str=True).parameters
    shared = inspect.signature(_load, eval_str=True).parameters

    def with_load(**given: Any) -> None:
        load = _load(**{name: given.pop(name) for name in shared})
        verb(load=load, **given)

    together = [*(p for name, p in own.items() if name != "load"), *shared.values()]
    named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in together]
    with_load.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    with_load.__doc__ = verb.__doc__
    return with_load


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: give 512 or 128-1024 ({error})") from error


# --------------------------------------------------------------------------------------------------


BAR_CELLS = 24


def figure(value: Any) -> str:
    """A number to four digits; a count as it is, and so what is in words already."""
    if isinstance(value, str):
        return value
    return ABSENT if value is None else f"{value:.4g}" if isinstance(value, float) else count(value)


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
    TableColumn("P50", "ms_p50", duration),
    TableColumn("MIN", "ms_min", duration),
    TableColumn("MAX", "ms_max", duration),
    TableColumn("TOK/S", "tokens_per_s", figure),
    TableColumn("STEPS", "steps", count, is_wide=True),
)

DEVICE = (
    TableColumn("WHAT", "what"),
    TableColumn("SHAPE", "shape"),
    TableColumn("P50", "ms", duration),
    TableColumn("RATE", "rate", figure, instead="rate_text"),
    TableColumn("UNIT", "unit", is_wide=True),
    TableColumn("OF CEILING", "share", fine_ratio),
)


def run_page(content: Row) -> str:
    """`penstock bench run`: quantiles of each time, then the rest, one a line."""
    figures = content["figures"]
    columns = [TableColumn("", "name"), *(TableColumn(q.upper(), q, duration) for q in QUANTILES)]
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
