"""The verbs that measure the device itself: bench kernels, steps, transports.

Owns: their tables.
Invariant: each figure is beside the ceiling that was measured in the same run.
Never: measures: appliance.bench.steps does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.cli import terminal
from appliance.cli.bench_pages import DEVICE
from appliance.cli.tables import Format, document
from appliance.cli.terminal import Output
from appliance.cli.text import size
from appliance.configuration.setting_kinds import a_path

Model = Annotated[
    Path | None,
    typer.Argument(help="A folder, whose shape is taken; without, that of Llama 3.1 8B."),
]
Small = Annotated[bool, typer.Option("--small", help="Little work, to see that it works.")]


def kernels(model: Model = None, small: Small = False, output: Output = Format.TABLE) -> None:
    """Time the parts of a layer on the device, beside its copy bandwidth and matmul rate."""
    _measure("kernels", model, small, output)


def steps(model: Model = None, small: Small = False, output: Output = Format.TABLE) -> None:
    """Time whole steps on the device, with random weights."""
    _measure("steps", model, small, output)


def transports(model: Model = None, small: Small = False, output: Output = Format.TABLE) -> None:
    """Time KV blocks on their way through host memory, beside one large copy."""
    _measure("transports", model, small, output)


def _measure(kind: str, model: Path | None, is_small: bool, output: Format) -> None:
    from appliance.bench.steps import measure_device

    found = measure_device(kind, None if model is None else a_path(model), is_small=is_small)
    if output is Format.JSON:
        terminal.write(document("bench", found) + "\n")
        return
    tflop_per_s = found["matmul_flop_per_s"] / 1e12
    terminal.note(
        f"{found['device']}, torch {found['torch']}, {found['dtype']}, "
        f"attention {found['attention']}: copies "
        f"{size(found['copy_bytes_per_s'])}/s, multiplies {tflop_per_s:.2f} TFLOP/s"
    )
    terminal.write(terminal.listing("bench", DEVICE, output).render(found["data"]))
