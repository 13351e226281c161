"""Define the verbs that measure the device.

Invariant: each figure is beside the ceiling that was measured in the same run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.cli import terminal
from appliance.cli.bench_pages import DEVICE, TRANSPORTS
from appliance.cli.tables import Format, document
from appliance.cli.terminal import Output
from appliance.configuration.setting_kinds import a_path
from appliance.observe.frame.figures import bytes_per_s, flops

Model = Annotated[
    Path | None,
    typer.Argument(
        help="Folder of a model for its shape. Default: Llama 3.1 8B, with the layers that fit."
    ),
]
Dtype = Annotated[
    str | None, typer.Option(metavar="CHOICE", help="Of the weights. Default: the model's own.")
]
Small = Annotated[bool, typer.Option("--small", help="A small size, to check that it works.")]


def kernels(
    model: Model = None, dtype: Dtype = None, small: Small = False, output: Output = Format.TABLE
) -> None:
    """Time the parts of a layer, beside the device's copy bandwidth and matmul rate.

    OF CEILING is a part's rate to one of these, timed first: 100% is all that the device can do.
    More says that something else disturbed that ceiling, or that a cache held what was read.
    """
    _measure("kernels", model, small, output, dtype)


def steps(
    model: Model = None, dtype: Dtype = None, small: Small = False, output: Output = Format.TABLE
) -> None:
    """Time whole steps, with random weights.

    OF CEILING is a step's rate to the device's copy bandwidth or matmul rate, timed first: 100% is
    all that it can do. More says that something else disturbed that ceiling, or that a cache held
    what was read.
    """
    _measure("steps", model, small, output, dtype)


def transports(model: Model = None, small: Small = False, output: Output = Format.TABLE) -> None:
    """Time the copy of KV blocks through host memory, beside one copy of as many bytes.

    OF ONE COPY is how fast they are beside it; 100% where they are as fast, more where faster.
    """
    _measure("transports", model, small, output)


_ABOVE = "above 100%: another load disturbed the ceiling's timing, or a CPU cache held the data"


def _measure(
    kind: str, model: Path | None, is_small: bool, output: Format, dtype: str | None = None
) -> None:
    from appliance.bench.device_parts import measure_device

    if model is None and not is_small:
        terminal.note(
            "penstock: using the shape of Llama 3.1 8B (default). On a CPU this takes minutes; "
            "--small takes seconds"
        )
    folder = None if model is None else a_path(model)
    found = measure_device(kind, folder, dtype, is_small=is_small)
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
