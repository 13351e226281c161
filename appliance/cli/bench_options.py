"""Define the options that the benchmarks share.

Invariant: an option means the same in every verb.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.bench.load import (
    Load,
)
from appliance.bench.workloads import Lengths, read_trace, scaled, spread
from appliance.cli.tables import within

DEFAULT_SECONDS = 30.0

Specs = Annotated[
    list[str],
    typer.Argument(
        metavar="SERVER...",
        help="static, colocated or elastic: a daemon started for it; or a running server: a socket"
        " or http://HOST:PORT. NAME= before it names it. Ratios are relative to the first.",
    ),
]
ArmsModel = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="Model of the started daemons.")
]
Rounds = Annotated[int, typer.Option(callback=within(1), help="Rounds per server.")]
Alone = Annotated[
    bool, typer.Option("--alone", help="Restart daemons for each turn, so that one runs at a time.")
]
PromptText = Annotated[
    bool, typer.Option("--prompt-text", help="Send words: for servers without /tokenize.")
]
Seed = Annotated[int, typer.Option(help="Random seed of schedules, lengths and prompts.")]
Save = Annotated[Path | None, typer.Option(help="Write all samples to this JSON file.")]
Seconds = Annotated[
    float, typer.Option(callback=within(0.1), help="Seconds of a turn; requests may end later.")
]
Speed = Annotated[
    float, typer.Option(callback=within(0.001), help="Speed of the workload: 2 is twice as fast.")
]
LengthScale = Annotated[
    float,
    typer.Option(
        callback=within(0.0001),
        help="Factor on the workload's lengths: 0.25 is a quarter of the tokens.",
    ),
]
SloTtft = Annotated[float | None, typer.Option(help="Goodput: most ms to the first token.")]
SloItl = Annotated[float | None, typer.Option(help="Goodput: most ms of a reply's p99 ITL.")]


def _load(
    concurrency: Annotated[
        int | None,
        typer.Option(callback=within(1), help="Closed loop: number of open requests; default 1."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(callback=within(0.001), help="Open loop: requests per second.")
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(callback=within(0.01), help="With --rate: 1 is Poisson, less is burstier."),
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(help="Open loop: a trace in Mooncake's format (JSON lines)."),
    ] = None,
    speed: Speed = 1.0,
    length_scale: LengthScale = 1.0,
    seconds: Annotated[
        float | None,
        typer.Option(
            callback=within(0.1), help="Seconds of a turn; default 30, or the whole trace."
        ),
    ] = None,
    input_tokens: Annotated[
        str, typer.Option(metavar="LENGTH", help="Prompt length: 512, or random from 128-1024.")
    ] = ("512"),
    output_tokens: Annotated[
        str, typer.Option(metavar="LENGTH", help="Reply length, in the same forms.")
    ] = "64",
    seed: Seed = 0,
) -> Load:
    """Build the load from the options."""
    given = [each for each in (concurrency, rate, trace) if each is not None]
    if len(given) > 1:
        raise typer.BadParameter("give one of --concurrency, --rate and --trace")
    if trace is None and (speed, length_scale) != (1.0, 1.0):
        raise typer.BadParameter("--speed and --length-scale are of a --trace")
    arrivals = None
    if trace is not None:
        # the seed orders requests within their ticks, so that all servers get equal loads
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
