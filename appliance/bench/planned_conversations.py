"""Plan the conversations of a workload: turns, lengths, pauses.

Owns: what is typical of a chat and of an agent.
Never: makes a text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from appliance.bench.workloads import _A_FILE, TICK_S, TRACE_BLOCK_TOKENS, TraceLine
from engine.errors import ConfigError, FileError

Count = Annotated[int, msgspec.Meta(ge=1)]


class PlannedTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a conversation, whose prompt is all that was said before and this."""

    input_tokens: Count
    """New ones: what the user says, or a tool's result."""
    output_tokens: Count
    think_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """From the end of the reply before to this request."""


class PlannedConversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Turns one after the other, and what all conversations of a workload have in front."""

    turns: Annotated[list[PlannedTurn], msgspec.Meta(min_length=1)]
    starts_at_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    shared_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Of a system prompt, the same in all of them; tools come on top."""
    has_tools: bool = False
    """It is an agent's: what comes in is the result of the call that was answered with."""


def chats(rng: random.Random, count: int) -> list[PlannedConversation]:
    """People who ask two to ten times: a long first message, then short ones, with pauses."""
    return [
        PlannedConversation(
            turns=[
                PlannedTurn(
                    rng.randint(200, 2000) if number == 0 else rng.randint(20, 200),
                    rng.randint(50, 300),
                    rng.expovariate(1 / 8) if number else 0.0,
                )
                for number in range(rng.randint(2, 10))
            ],
            starts_at_s=start_s,
            shared_tokens=128,
        )
        for start_s in _starts(rng, count, every_s=4.0)
    ]


def agents(rng: random.Random, count: int) -> list[PlannedConversation]:
    """Agents on one system prompt with tools: 20 to 40 calls, each with a result that is read.

    All prompts together have about a hundred tokens for each that is written.
    """
    return [
        PlannedConversation(
            turns=[
                PlannedTurn(
                    rng.randint(100, 300) if number == 0 else rng.randint(50, 350),
                    rng.randint(20, 80),
                    rng.expovariate(1.0) if number else 0.0,
                )
                for number in range(rng.randint(20, 40))
            ],
            starts_at_s=start_s,
            shared_tokens=1500,
            has_tools=True,
        )
        for start_s in _starts(rng, count, every_s=10.0)
    ]


CONVERSATIONS: dict[str, Callable[[random.Random, int], list[PlannedConversation]]] = {
    "chat": chats,
    "agent": agents,
}


def trace(rng: random.Random, count: int) -> list[TraceLine]:
    """Requests to a service in the form of Mooncake's traces, with their 3-second ticks.

    Half of them go on from an earlier prompt with what was answered and more; the others begin,
    behind one of a few system prompts of which some are asked much more often.
    """
    systems = [[number] for number in range(8)]
    next_id, now_s = len(systems), 0.0
    earlier: list[list[int]] = []
    lines: list[TraceLine] = []
    for _ in range(count):
        now_s += rng.expovariate(0.5)
        if earlier and rng.random() < 0.5:
            before = earlier.pop(rng.randrange(len(earlier)))
        else:
            before = systems[min(int(rng.paretovariate(1.0)) - 1, len(systems) - 1)]
        num_new = 1 + min(int(rng.paretovariate(1.2)), 15)
        hash_ids = [*before, *range(next_id, next_id + num_new)]
        next_id += num_new
        length = len(hash_ids) * TRACE_BLOCK_TOKENS - rng.randrange(TRACE_BLOCK_TOKENS)
        output_tokens = max(1, int(rng.lognormvariate(4.5, 0.8)))
        tick_ms = int(now_s // TICK_S * TICK_S * 1000)
        lines.append(TraceLine(tick_ms, length, output_tokens, hash_ids))
        earlier = [*earlier, hash_ids[:-1]][-32:]  # the last block was not full
    return lines


def lines(workload: Sequence[PlannedConversation | TraceLine]) -> str:
    """The workload as the lines of its file."""
    return "".join(msgspec.json.encode(each).decode() + "\n" for each in workload)


def read_conversations(path: Path) -> list[PlannedConversation]:
    """Conversations from lines of JSON.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong.
    """
    try:
        read = path.read_bytes().splitlines()
    except OSError as error:
        raise FileError("cannot read", error, where=str(path), hint=_A_FILE) from error
    found = []
    for number, line in enumerate(read, start=1):
        try:
            found += [msgspec.json.decode(line, type=PlannedConversation)] if line.strip() else []
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"not a conversation: {error}",
                where=f"{path}:{number}",
                hint="`penstock bench workload chat` writes such a file",
            ) from error
    if not found:
        raise ConfigError("the file has no conversation", where=str(path), hint=_A_FILE)
    return found


def _starts(rng: random.Random, count: int, every_s: float) -> list[float]:
    """A Poisson process from 0 on."""
    starts, now_s = [], 0.0
    for _ in range(count):
        starts.append(now_s)
        now_s += rng.expovariate(1 / every_s)
    return starts
