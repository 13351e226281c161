"""Define the verbs that measure servers, workloads and devices.

Invariant: whatever is printed can be computed again from what --save keeps.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from appliance.bench.arms import Arms
from appliance.bench.comparison import INTERFERENCE_METRICS, LOAD_METRICS, rows
from appliance.bench.exchange import Target
from appliance.bench.load import (
    InterferencePlan,
    InterferenceResult,
    Load,
    Measured,
    disturb,
    measure,
)
from appliance.bench.rounds import interleaved
from appliance.bench.sample import Sample
from appliance.bench.statistics import (
    Figures,
    GoodputTargets,
    summarize,
)
from appliance.bench.texts import TextLoad, measure_texts
from appliance.cli import tables, terminal
from appliance.cli.bench_device import kernels, steps, transports
from appliance.cli.bench_options import (
    Alone,
    ArmsModel,
    PromptText,
    Rounds,
    Save,
    Seconds,
    Seed,
    SloItl,
    SloTtft,
    Specs,
    under_load,
)
from appliance.cli.bench_pages import COMPARISON, Bar, run_page, texts_page
from appliance.cli.tables import Format, Row, within
from appliance.cli.terminal import Host, Output
from appliance.client.calls import GenerationFailed
from appliance.observe.frame.figures import fine_ratio, named, unitless
from appliance.observe.frame.protocol import utc_now
from engine.errors import FileError
from engine.printable import printable

bench = typer.Typer(help="Measure this daemon and other servers.", no_args_is_help=True)
for verb in (kernels, steps, transports):
    bench.command(verb.__name__)(verb)

_MAX_ERRORS_TOLD = 3


@bench.command("run")
@under_load
def run(
    load: Load,
    host: Host = None,
    slo_ttft_ms: SloTtft = None,
    slo_itl_ms: SloItl = None,
    prompt_text: PromptText = False,
    save: Save = None,
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
    _tell_errors(measured.samples)
    _tell_starved([measured])
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
    _tell_errors(samples)
    _tell_starved(measured)
    _show(rows(figures, LOAD_METRICS), measured, save, output)
    _check_any(samples)


@bench.command("texts")
def texts(
    tokens: Annotated[int, typer.Option(callback=within(1), help="Tokens of a text, nearly.")] = 64,
    at_once: Annotated[
        int, typer.Option("--texts", callback=within(1), help="Texts of a request.")
    ] = 32,
    concurrency: Annotated[
        int, typer.Option(callback=within(1), help="Number of open requests.")
    ] = 2,
    seconds: Seconds = 10.0,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="As the server calls it.")
    ] = None,
    seed: Seed = 0,
    host: Host = None,
    output: Output = Format.TABLE,
) -> None:
    """Measure how many texts become vectors in a second: by the daemon, or the server at --host."""
    client, bar = terminal.client(host), Bar(1)
    load = TextLoad(tokens, at_once, concurrency, seconds, model, seed)
    figures = measure_texts(client, load, bar.turn(str(client.address)))
    bar.end()
    terminal.show("bench", {"figures": figures}, output, lambda: texts_page(figures))


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
    output: Output = Format.TABLE,
) -> None:
    """Measure how long prompts stretch the ITL of running replies.

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
    _tell_errors([sample for each in disturbed for sample in (*each.alone, *each.loaded)])
    _show(rows(figures, INTERFERENCE_METRICS), disturbed, save, output)


def _figures(measured: Measured, slo: GoodputTargets) -> Figures:
    return summarize(
        measured.samples, measured.window_ms, slo, measured.energy_j, measured.starved_ratio
    )


def _statuses(samples: Sequence[Sample]) -> dict[str, int]:
    """Count each HTTP status; `none` stands for no reply."""
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
    terminal.write(tables.document("bench", _with_samples(about, measured)) + "\n")


def _with_samples(about: Row, measured: Sequence[msgspec.Struct]) -> dict[str, Any]:
    """Add to the figures their samples, and where and how they were measured."""
    return {
        "at": utc_now(),
        "command": sys.argv[1:],
        "machine": {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0))},
        "python": platform.python_version(),
        **about,
        "turns": msgspec.to_builtins(measured),
    }


def _cpu_name() -> str | None:
    """Return the CPU's name from the kernel."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), None)


def _keep(about: Row, measured: Sequence[msgspec.Struct], path: Path | None) -> None:
    if path is not None:
        _write_file(path, json.dumps(_with_samples(about, measured)) + "\n")


def _write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        hint = "name a file in a folder that you may write to"
        raise FileError("cannot write", error, where=str(path), hint=hint) from error


def _check_any(samples: Sequence[Sample]) -> None:
    """Raise GenerationFailed if no reply completed."""
    if samples and not any(sample.is_completed for sample in samples):
        hint = "see the errors above; check lengths and rate"
        raise GenerationFailed("no reply completed", hint=hint)


def _tell_starved(measured: Sequence[Measured]) -> None:
    """Say if other programs kept the workers from their cores: then figures mean little."""
    shares = [each.starved_ratio for each in measured if each.starved_ratio is not None]
    if (most := max(shares, default=0.0)) > 0:
        terminal.note(
            f"penstock: other programs starved the workers {fine_ratio(most)} of the time"
        )
        terminal.note("hint: `ps aux --sort=-%cpu` shows them; end them, and measure again")


def _tell_errors(samples: Sequence[Sample]) -> None:
    """Print the errors, the most frequent first."""
    seen = Counter(sample.error for sample in samples if sample.error is not None)
    for error, number in seen.most_common(_MAX_ERRORS_TOLD):
        terminal.note(f"penstock: {number} x {printable(error)}")
