"""The verbs that measure: servers, workloads for them, and the device itself.

Owns: how a load is written on the command line; the pages and tables of results.
Invariant: whatever is printed can be computed again from what --save keeps.
Never: measures: appliance.bench does.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import platform
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from appliance.bench import statistics
from appliance.bench.arms import (
    INTERFERENCE_METRICS,
    LOAD_METRICS,
    ROLES,
    Arms,
    interleaved,
    rows,
    turn_metrics,
)
from appliance.bench.conversations import APIS, TurnPace, converse
from appliance.bench.load import (
    InterferencePlan,
    InterferenceResult,
    Load,
    Measured,
    Target,
    disturb,
    measure,
)
from appliance.bench.statistics import (
    QUANTILES,
    TIMES,
    Figures,
    GoodputTargets,
    Sample,
    by_turn,
    summarize,
    times,
)
from appliance.bench.workloads import (
    CONVERSATIONS,
    Lengths,
    PlannedConversation,
    lines,
    read_conversations,
    read_trace,
    scaled,
    spread,
    trace,
)
from appliance.cli import terminal
from appliance.cli.terminal import (
    Format,
    Host,
    Listing,
    Output,
    ProgressLine,
    Row,
    TableColumn,
    document,
    printable,
    within,
)
from appliance.client import GenerationFailed
from appliance.configuration import config
from appliance.configuration.setting_kinds import a_path
from appliance.frame.figures import (
    bytes_per_s,
    count,
    duration,
    factor,
    fine_ratio,
    flops,
    measured_ms,
    named,
    rate,
    unitless,
)
from appliance.frame.protocol import utc_now
from engine.errors import FileError

# What the benchmarks share: options, the page of one arm, columns of several, the bar.
# Invariant: the bar is on stderr, and only where that is a terminal.
# Never: computes a figure.


# The options that the benchmarks share.
# Invariant: an option means the same in every verb. Never: measures.


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
    str | None, typer.Option("--model", "-m", help="Model of the started daemons.")
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
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Draw the distributions into this SVG file.")
]
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
SloItl = Annotated[float | None, typer.Option(help="Goodput: most ms of a reply's p99 gap.")]


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
        str, typer.Option(help="Prompt length: 512, or random from 128-1024.")
    ] = ("512"),
    output_tokens: Annotated[str, typer.Option(help="Reply length, in the same forms.")] = "64",
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


def right(text: Any) -> str:
    """What is in words already, as numbers stand in a table: at the right."""
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

STEPS = (
    TableColumn("STEP", "kind"),
    TableColumn("BATCH", "batch", count),
    TableColumn("TOKENS", "num_tokens", count),
    TableColumn("CONTEXT", "context", count),
    TableColumn("P50", "ms_p50", duration),
    TableColumn("MIN", "ms_min", duration),
    TableColumn("MAX", "ms_max", duration),
    TableColumn("TOK/S", "tokens_per_s", rate),
    TableColumn("STEPS", "steps", count, is_wide=True),
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
    """`penstock bench run`: quantiles of each time, then the rest, one a line."""
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
    return Listing("bench", columns, Format.TABLE).render(times) + "\n" + "\n".join(lines)


class Bar:
    """How far the measurement is: on a terminal one line that changes, else one line a turn."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns
        self._turn = 0
        self._line = ProgressLine()

    def turn(self, label: str) -> Callable[[float], None]:
        """Begin the next turn; the result takes the share of it that is done."""
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


# --------------------------------------------------------------------------------------------------


# The verbs that measure the device itself: bench kernels, steps, transports.
# Invariant: each figure is beside the ceiling that was measured in the same run.
# Never: measures: appliance.bench.steps does.


Model = Annotated[
    Path | None,
    typer.Argument(
        help="Folder of a model for its shape. Default: Llama 3.1 8B, with the layers that fit."
    ),
]
Small = Annotated[bool, typer.Option("--small", help="A small size, to check that it works.")]


def kernels(model: Model = None, small: Small = False, output: Output = Format.TABLE) -> None:
    """Time the parts of a layer, beside the device's copy bandwidth and matmul rate.

    OF CEILING is a part's rate to one of these, timed first: 100% is all that the device can do.
    More says that something else disturbed that ceiling, or that a cache held what was read.
    """
    _measure("kernels", model, small, output)


def steps(model: Model = None, small: Small = False, output: Output = Format.TABLE) -> None:
    """Time whole steps, with random weights.

    OF CEILING is a step's rate to the device's copy bandwidth or matmul rate, timed first: 100% is
    all that it can do. More says that something else disturbed that ceiling, or that a cache held
    what was read.
    """
    _measure("steps", model, small, output)


def transports(model: Model = None, small: Small = False, output: Output = Format.TABLE) -> None:
    """Time the copy of KV blocks through host memory, beside one copy of as many bytes.

    OF ONE COPY is how fast they are beside it; 100% where they are as fast, more where faster.
    """
    _measure("transports", model, small, output)


_ABOVE = (
    "more than 100% of a ceiling: something else disturbed it while it was timed, or a cache held"
    " what was read; on an idle machine, with a model that no cache holds, shares are below"
)


def _measure(kind: str, model: Path | None, is_small: bool, output: Format) -> None:
    from appliance.bench.steps import measure_device

    if model is None and not is_small:
        terminal.note(
            "penstock: no folder is named, so the shape is Llama 3.1 8B's with the layers that fit;"
            " on a CPU this takes minutes, and --small seconds"
        )
    found = measure_device(kind, None if model is None else a_path(model), is_small=is_small)
    if output is Format.JSON:
        terminal.write(document("bench", found) + "\n")
        return
    if model is None and not is_small:
        layers = f"{found['num_layers']} of its 32 layers, as memory allows"
        terminal.note(f"penstock: the shape is Llama 3.1 8B's, {layers}")
    about = f"{found['device']}, torch {found['torch']}, {found['dtype']}"
    copies = bytes_per_s(found["copy_bytes_per_s"])
    multiplies = flops(found["matmul_flop_per_s"])
    ceilings = f"ceilings: reads and writes {copies}, multiplies {multiplies}"
    # blocks that are copied count once, and their ceiling is a copy of their own
    is_of_copies = kind == "transports"
    tail = "" if is_of_copies else f", attention {found['attention']}; {ceilings}"
    terminal.note(f"{about}{tail}")
    if output.is_for_people:
        for row in found["data"]:
            in_words = flops if row["unit"] == "FLOP/s" else bytes_per_s
            row["rate_text"] = in_words(row["rate"])
    if not is_of_copies and any(row["share"] > 1 for row in found["data"]):
        terminal.note(f"penstock: {_ABOVE}")
    columns = TRANSPORTS if is_of_copies else DEVICE
    terminal.write(terminal.listing("bench", columns, output).render(found["data"]))


# bench workload: conversations and traces as files; and where `bench turns` gets its own.


KINDS = ("trace", *CONVERSATIONS)

Count = Annotated[
    int,
    typer.Option(callback=within(1), help="Number of conversations, or of requests of a trace."),
]


def workload(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    count: Count = 8,
    seed: Seed = 0,
) -> None:
    """Print a workload as JSON lines, for --trace of run and compare or --workload of turns.

    A trace has the form that Mooncake published: timestamp (ms, in ticks of 3 s), input_length,
    output_length, hash_ids of 512 tokens each.
    """
    if kind not in KINDS:
        raise typer.BadParameter(f"kinds are {', '.join(KINDS)}")
    rng = random.Random(f"{seed}/{kind}")
    drawn = trace(rng, count) if kind == "trace" else CONVERSATIONS[kind](rng, count)
    terminal.write(lines(drawn))


def conversations_of(name: str, count: int, seed: int) -> list[PlannedConversation]:
    """Those of a kind, drawn, or those of a file."""
    if name in CONVERSATIONS:
        return CONVERSATIONS[name](random.Random(f"{seed}/{name}"), count)
    return read_conversations(Path(name))


# --------------------------------------------------------------------------------------------------


bench = typer.Typer(help="Measure this daemon and other servers.", no_args_is_help=True)
for verb in (kernels, steps, transports):
    bench.command(verb.__name__)(verb)
bench.command("workload")(workload)

_MAX_ERRORS_TOLD = 3
_DRAWN = {"time to first token": "ttft_ms", "gaps between tokens": "itl_ms"}


@bench.command("run")
@under_load
def run(
    load: Load,
    host: Host = None,
    slo_ttft_ms: SloTtft = None,
    slo_itl_ms: SloItl = None,
    prompt_text: PromptText = False,
    save: Save = None,
    plot_file: PlotFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Put one server under load: the daemon, or the one at --host."""
    bar, place = Bar(1), str(terminal.client(host).address)
    arms = Arms([place], model=None, is_text=prompt_text, seed=load.seed)
    with arms, arms.ready(place) as target:
        measured = asyncio.run(measure(target, load, place, 0, bar.turn(place)))
    bar.end()
    figures = _figures(measured, GoodputTargets(slo_ttft_ms, slo_itl_ms))
    about = {"figures": figures, "statuses": _statuses(measured.samples)}
    _keep(about, [measured], save)
    _draw({place: [measured]}, plot_file)
    _tell_errors(measured.samples)
    if output is Format.JSON:
        _write(about, [measured])
    else:
        terminal.show("bench", about, output, lambda: run_page(about))
    _check_any(measured.samples)


@bench.command("compare")
@under_load
def compare(
    specs: Specs,
    load: Load,
    model: ArmsModel = None,
    rounds: Rounds = 3,
    alone: Alone = False,
    slo_ttft_ms: SloTtft = None,
    slo_itl_ms: SloItl = None,
    prompt_text: PromptText = False,
    save: Save = None,
    plot_file: PlotFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Put several servers under the same load, in interleaved turns.

    The first has two turns in each round: by how much they differ is the A/A band, and a ratio
    within it says nothing.
    """
    slo, bar = GoodputTargets(slo_ttft_ms, slo_itl_ms), Bar(rounds * (len(specs) + 1))

    def turn(target: Target, label: str, round_index: int) -> Measured:
        return asyncio.run(measure(target, load, label, round_index, bar.turn(label)))

    with Arms(specs, model=model, is_text=prompt_text, is_alone=alone, seed=load.seed) as arms:
        results = interleaved(arms, rounds, load.seed, turn)
    bar.end()
    figures = {label: [_figures(m, slo) for m in turns] for label, turns in results.items()}
    measured = [each for turns in results.values() for each in turns]
    samples = [sample for each in measured for sample in each.samples]
    _draw(results, plot_file)
    _tell_errors(samples)
    _show(rows(figures, LOAD_METRICS), measured, save, output)
    _check_any(samples)


@bench.command("turns")
def turns(
    specs: Specs,
    workload: Annotated[
        str, typer.Option(help="chat, agent, or a file from `bench workload`.")
    ] = "chat",
    count: Count = 8,
    api: Annotated[str, typer.Option(help=f"API to use: {', '.join(APIS)}.")] = "chat",
    speed: Speed = 1.0,
    length_scale: LengthScale = 1.0,
    model: ArmsModel = None,
    slo_ttft_ms: SloTtft = None,
    slo_itl_ms: SloItl = None,
    rounds: Rounds = 1,
    alone: Alone = False,
    prompt_text: PromptText = False,
    seed: Seed = 0,
    save: Save = None,
    output: Output = Format.TABLE,
) -> None:
    """Hold conversations with servers; measures TTFT and cache hits by turn.

    Every server and turn gets a system prompt and words of its own, so that nothing is cached but
    what its conversations have said. infinite_hit_ratio is at most what a cache could have had.
    """
    if api not in APIS:
        raise typer.BadParameter(f"APIs are {', '.join(APIS)}")
    conversations = conversations_of(workload, count, seed)
    slo = GoodputTargets(slo_ttft_ms, slo_itl_ms)
    pace, num_runs = TurnPace(api, speed, length_scale), rounds * (len(specs) + 1)
    least = duration(num_runs * pace.least_s(conversations) * 1000)
    terminal.note(f"penstock: {num_runs} runs; beginnings and pauses alone take {least} (--speed)")
    bar = Bar(num_runs)

    def turn(target: Target, label: str, round_index: int) -> Measured:
        return asyncio.run(
            converse(target, conversations, pace, label, round_index, bar.turn(label))
        )

    with Arms(specs, model=model, is_text=prompt_text, is_alone=alone, seed=seed) as arms:
        results = interleaved(arms, rounds, seed, turn)
    bar.end()
    figures = {
        label: [_figures(each, slo) | by_turn(each.samples) for each in turns]
        for label, turns in results.items()
    }
    measured = [each for turns in results.values() for each in turns]
    samples = [sample for each in measured for sample in each.samples]
    _tell_errors(samples)
    names = [each for of_label in figures.values() for each in of_label]
    _show(rows(figures, turn_metrics(names)), measured, save, output)
    _check_any(samples)


@bench.command("interference")
def interference(
    specs: Specs,
    streams: Annotated[
        int, typer.Option(callback=within(1), help="Number of replies that stream all the time.")
    ] = 2,
    prompt_tokens: Annotated[
        int, typer.Option(callback=within(1), help="Length of each long prompt.")
    ] = 1500,
    every: Annotated[
        float, typer.Option(callback=within(0.01), help="Seconds between prompts.")
    ] = 2.0,
    seconds: Seconds = 20.0,
    model: ArmsModel = None,
    rounds: Rounds = 3,
    alone: Alone = False,
    prompt_text: PromptText = False,
    seed: Seed = 0,
    save: Save = None,
    plot_file: PlotFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Measure how long prompts stretch the token gaps of running replies.

    Each turn has three parts: the prompts alone, the replies alone (quiet), both (loaded).
    """
    plan, bar = (
        InterferencePlan(streams, prompt_tokens, every, seconds),
        Bar(rounds * (len(specs) + 1)),
    )

    def turn(target: Target, label: str, round_index: int) -> InterferenceResult:
        return asyncio.run(disturb(target, plan, label, round_index, bar.turn(label)))

    with Arms(specs, model=model, is_text=prompt_text, is_alone=alone, seed=seed) as arms:
        results = interleaved(arms, rounds, seed, turn)
    bar.end()
    figures = {label: [each.figures() for each in turns] for label, turns in results.items()}
    disturbed = [each for turns in results.values() for each in turns]
    if plot_file is not None:
        gaps = {
            label: [g for d in turns for g in d.loaded_itl_ms] for label, turns in results.items()
        }
        _write_file(plot_file, statistics.cumulative({"gaps while prompts arrive": gaps}))
    _tell_errors([sample for each in disturbed for sample in (*each.alone, *each.loaded)])
    _show(rows(figures, INTERFERENCE_METRICS), disturbed, save, output)


@bench.command("step")
def step(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a model. Default: the one of the settings.")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(metavar="BxN", help="B sequences of N tokens. May be repeated."),
    ] = None,
    roles: Annotated[
        str, typer.Option(help="colocated: all cores; static: those of a decode worker.")
    ] = ("colocated"),
    rounds: Rounds = 3,
    save: Save = None,
    output: Output = Format.TABLE,
) -> None:
    """Time a worker's steps without HTTP: prefill by chunk and context, decode by batch."""
    from appliance.bench import steps  # with all that starts a worker

    if roles not in ROLES:
        raise typer.BadParameter(f"roles are {', '.join(ROLES)}")
    try:
        cases = [steps.StepCase.parse(text) for text in case or ("1x512", "1x2048", "8x128")]
    except ValueError as error:
        raise typer.BadParameter(f"give cases as 8x128 ({error})") from error
    settings, bar = config.load({"model": model, "roles": roles, "transport": "auto"}), Bar(1)
    tick = bar.turn("steps")
    timed = asyncio.run(
        steps.time_steps(settings, cases, num_rounds=rounds, num_steps=24, tick=tick)
    )
    bar.end()
    rows = [each.row() for each in timed]
    _keep({"data": rows}, timed, save)
    if output is Format.JSON:
        _write({"data": rows}, timed)
    else:
        terminal.write(terminal.listing("bench", STEPS, output).render(rows))


def _figures(measured: Measured, slo: GoodputTargets) -> Figures:
    return summarize(measured.samples, measured.window_ms, slo, measured.energy_j)


def _statuses(samples: Sequence[Sample]) -> dict[str, int]:
    """How often each HTTP status came; `none` where no reply did."""
    return dict(Counter("none" if s.status is None else str(s.status) for s in samples))


def _show(
    rows: list[dict[str, Any]],
    measured: Sequence[msgspec.Struct],
    save: Path | None,
    form: Format,
) -> None:
    _keep({"data": rows}, measured, save)
    if form is Format.JSON:
        _write({"data": rows}, measured)
        return
    if form.is_for_people:
        figures = ("median", "low", "high")
        rows = [
            row
            | {f"{key}_text": named(row["metric"], row[key]) for key in figures}
            | {"metric_text": unitless(row["metric"])}
            for row in rows
        ]
    terminal.write(terminal.listing("bench", COMPARISON, form).render(rows))


def _write(about: Row, measured: Sequence[msgspec.Struct]) -> None:
    terminal.write(terminal.document("bench", _with_samples(about, measured)) + "\n")


def _with_samples(about: Row, measured: Sequence[msgspec.Struct]) -> dict[str, Any]:
    """Figures with what they were computed from, and where and how that was measured."""
    return {
        "at": utc_now(),
        "command": sys.argv[1:],
        "machine": {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0))},
        "python": platform.python_version(),
        **about,
        "turns": msgspec.to_builtins(measured),
    }


def _cpu_name() -> str | None:
    """As the kernel has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), None)


def _keep(about: Row, measured: Sequence[msgspec.Struct], path: Path | None) -> None:
    if path is not None:
        _write_file(path, json.dumps(_with_samples(about, measured)) + "\n")


def _draw(results: Mapping[str, Sequence[Measured]], path: Path | None) -> None:
    if path is None:
        return
    seen = {
        label: times(sample for each in turns for sample in each.samples)
        for label, turns in results.items()
    }
    panels = {title: {label: seen[label][name] for label in seen} for title, name in _DRAWN.items()}
    _write_file(path, statistics.cumulative(panels))


def _write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        hint = "name a file in a folder that you may write to"
        raise FileError("cannot write", error, where=str(path), hint=hint) from error


def _check_any(samples: Sequence[Sample]) -> None:
    """Raises GenerationFailed where no reply was whole, which no figure says loudly enough."""
    if samples and not any(sample.is_completed for sample in samples):
        hint = "what went wrong is told above; lengths and rate are this command's options"
        raise GenerationFailed("no reply came to its end", hint=hint)


def _tell_errors(samples: Sequence[Sample]) -> None:
    """What went wrong, most frequent first."""
    seen = Counter(sample.error for sample in samples if sample.error is not None)
    for error, number in seen.most_common(_MAX_ERRORS_TOLD):
        terminal.note(f"penstock: {number} x {printable(error)}")
