"""Describe a load: arrival times, lengths, trace files.

Invariant: pure but for the file; the same seed gives the same lines.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from engine.errors import ConfigError, FileError
from engine.wire.not_json import NOT_JSON

_A_FILE = "Mooncake published traces in this form"


TRACE_BLOCK_TOKENS = 512
"""Prompt tokens for each of a trace's `hash_ids`."""
TICK_S = 3.0
"""Mooncake's traces tell arrivals in steps of so long."""


class PlannedArrival(NamedTuple):
    """A request that is to be sent, when, and with how many tokens."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """One for each block of the prompt: prompts that begin with the same ids begin alike.
    Empty: the prompt is like no other."""
    block_tokens: int = TRACE_BLOCK_TOKENS


class Lengths(NamedTuple):
    """A number of tokens: fixed, or anything between two with the same chance."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read `512` or `128-1024`.

        Raises:
            ValueError: it is neither.
        """
        low, _, high = text.partition("-")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError("the first is at least 1, and the second not below it")
        return lengths

    def draw(self, rng: random.Random) -> int:
        """Draw one length; all are equally likely."""
        return rng.randint(self.low, self.high)


def drawn(
    rate_per_s: float,
    burstiness: float,
    seconds: float,
    inputs: Lengths,
    outputs: Lengths,
    rng: random.Random,
) -> list[PlannedArrival]:
    """Draw arrivals with gaps of a gamma distribution of mean 1 / rate.

    Args:
        rate_per_s: requests per second, on average.
        burstiness: the distribution's shape, as vLLM's benchmark client has it: 1 is a Poisson
            process, less comes in bursts, more comes evenly.
        inputs: prompt tokens.
    """
    times = _gamma_times(rate_per_s, burstiness, seconds, rng)
    return [PlannedArrival(at_s, inputs.draw(rng), outputs.draw(rng)) for at_s in times]


def _gamma_times(
    rate_per_s: float, burstiness: float, seconds: float, rng: random.Random
) -> Iterator[float]:
    at_s = 0.0
    while (at_s := at_s + rng.gammavariate(burstiness, 1 / (burstiness * rate_per_s))) < seconds:
        yield at_s


def regular(interval_s: float, seconds: float, inputs: int, outputs: int) -> list[PlannedArrival]:
    """Plan an arrival after every `interval_s` with these tokens; at least one."""
    count = max(1, math.ceil(seconds / interval_s) - 1)
    return [PlannedArrival(i * interval_s, inputs, outputs) for i in range(1, count + 1)]


class TraceLine(msgspec.Struct, omit_defaults=True):
    """A request in the traces that Mooncake published, which other load generators read, too."""

    timestamp: float
    """In ms."""
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: list[int] = []
    """One for each 512 tokens of the prompt that are begun; the same id says the same prefix."""


def read_trace(path: Path) -> list[PlannedArrival]:
    """Read arrivals from lines of JSON; times count from the earliest.

    Further keys are ignored.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise FileError("cannot read", error, where=str(path), hint=_A_FILE) from error
    numbered = enumerate(lines, start=1)
    arrivals = sorted(_arrival(line, f"{path}:{n}") for n, line in numbered if line.strip())
    if not arrivals:
        raise ConfigError("the trace has no line", where=str(path), hint=_A_FILE)
    return [each._replace(at_s=each.at_s - arrivals[0].at_s) for each in arrivals]


def _arrival(line: bytes, where: str) -> PlannedArrival:
    try:
        each = msgspec.json.decode(line, type=TraceLine)
    except NOT_JSON as error:
        raise ConfigError(
            f"not a line of a trace: {error}",
            where=where,
            hint='give {"timestamp": ms, "input_length": n, "output_length": n}',
        ) from error
    if each.hash_ids and len(each.hash_ids) != -(-each.input_length // TRACE_BLOCK_TOKENS):
        raise ConfigError(
            f"{len(each.hash_ids)} hash_ids for {each.input_length} tokens",
            where=where,
            hint=f"give one for each {TRACE_BLOCK_TOKENS} tokens that are begun",
        )
    lengths = each.input_length, each.output_length
    return PlannedArrival(each.timestamp / 1000, *lengths, tuple(each.hash_ids))


def spread(arrivals: list[PlannedArrival], rng: random.Random) -> list[PlannedArrival]:
    """Spread arrivals over the trace's ticks; a trace without ticks is unchanged."""
    if len(arrivals) < 2 or any(each.at_s % TICK_S for each in arrivals):
        return arrivals
    return sorted(each._replace(at_s=each.at_s + rng.uniform(0, TICK_S)) for each in arrivals)


def scaled(
    arrivals: list[PlannedArrival], speed: float, length_scale: float
) -> list[PlannedArrival]:
    """Plan the arrivals at another speed and with other lengths.

    Args:
        speed: factor of the pace.
        length_scale: of prompts, outputs and blocks, so that shared parts stay shared.
    """

    def length(num_tokens: int) -> int:
        return max(1, round(num_tokens * length_scale))

    return [
        PlannedArrival(
            each.at_s / speed,
            length(each.input_tokens),
            length(each.output_tokens),
            each.hash_ids,
            length(each.block_tokens),
        )
        for each in arrivals
    ]


def reusable_tokens(arrivals: list[PlannedArrival]) -> list[int | None]:
    """Count each prompt's tokens that an earlier prompt began with; None: not told."""
    seen: set[int] = set()
    found: list[int | None] = []
    for each in arrivals:
        known = list(takewhile(seen.__contains__, each.hash_ids))
        num_tokens = min(len(known) * each.block_tokens, each.input_tokens)
        found.append(num_tokens if each.hash_ids else None)
        seen.update(each.hash_ids)
    return found
