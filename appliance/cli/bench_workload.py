"""bench workload: conversations and traces as files; and where `bench turns` gets its own.

Owns: the kinds' names. Never: measures.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import typer

from appliance.bench.workloads import (
    CONVERSATIONS,
    PlannedConversation,
    lines,
    read_conversations,
    trace,
)
from appliance.cli import bench_options as options
from appliance.cli import terminal

KINDS = ("trace", *CONVERSATIONS)

Count = Annotated[int, typer.Option(min=1, help="Conversations, or requests of a trace.")]


def workload(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    count: Count = 8,
    seed: options.Seed = 0,
) -> None:
    """Write a workload as JSON lines: for --trace of run and compare, or --workload of turns.

    A trace has the form that Mooncake published: timestamp (ms, in ticks of 3 s), input_length,
    output_length, hash_ids of 512 tokens each.
    """
    if kind not in KINDS:
        raise typer.BadParameter(f"kinds are {', '.join(KINDS)}")
    rng = random.Random(f"{seed}/{kind}")
    drawn = trace(rng, count) if kind == "trace" else CONVERSATIONS[kind](rng, count)
    terminal.write(lines(drawn))


def conversations(name: str, count: int, seed: int) -> list[PlannedConversation]:
    """Those of a kind, drawn, or those of a file."""
    if name in CONVERSATIONS:
        return CONVERSATIONS[name](random.Random(f"{seed}/{name}"), count)
    return read_conversations(Path(name))
