"""List the scenarios: settings of a daemon, and what its clients send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from appliance.configuration.wanted_workers import parse_place
from appliance.fleet.placement import available_cores
from tests.sweep.machine import Call

STORY = "Once upon a time there was a machine that was told to end at any moment. "
GUESSES = {"speculate": "auto"}
OTHER = RECURRENT = "qwen3_next"
WINDOWED = "gemma3_text"
BLOCK_TOKENS = 64
BLOCK_BYTES = 48 << 10
CORES = available_cores()


def room(num_blocks: int, max_model_len: int = 1024) -> dict[str, int]:
    """Settings of pools in which not everything has room."""
    return {"max_model_len": max_model_len, "kv_memory_bytes": num_blocks * BLOCK_BYTES}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One daemon and its clients."""

    options: dict[str, Any]
    calls: Callable[[], list[Call]]
    shows: str | None = None
    """The column of the log that some row of an undisturbed run counts in."""
    may_differ: frozenset[str] = field(default_factory=frozenset)
    """Calls whose replies depend on timing: their clients leave, or a queue is full."""
    models: tuple[str, ...] = ("llama",)
    """Families of the models, the first one's first; others are named by theirs."""


def prompt(number: int, num_letters: int = 150) -> str:
    return (f"{number}: " + STORY * 20)[:num_letters]


def completion(name: str, number: int, max_tokens: int, **more: Any) -> Call:
    letters, at_s = more.pop("letters", 150), more.pop("at_s", 0.0)
    rest = {key: more.pop(key) for key in ("hangs_up_after", "pause_s", "after") if key in more}
    body = {"prompt": prompt(number, letters), "max_tokens": max_tokens, "stream": True} | more
    return Call(name, "/v1/completions", body, at_s=at_s, **rest)


def of_blocks(name: str, letters: str, **more: Any) -> Call:
    """Ask with a prompt of one block for each letter, and a token more."""
    ids = [ord(letter) for letter in letters for _ in range(BLOCK_TOKENS)]
    return Call(name, "/v1/completions", {"prompt": [*ids, 33], "max_tokens": 6}, **more)


def tool_calls() -> list[Call]:
    look = {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}
    asked = {"messages": [{"role": "user", "content": "~" + prompt(3, 60)}]}
    chat = asked | {"tools": [{"type": "function", "function": look}], "max_tokens": 90}
    tool = {"name": "look", "input_schema": {"type": "object"} | look["parameters"]}
    message = asked | {"tools": [tool], "max_tokens": 90, "model": "any"}
    path = "/v1/chat/completions"
    return [
        Call("streamed", path, chat | {"stream": True}),
        Call("several", path, chat | {"n": 2, "seed": 5, "user": "b"}, at_s=0.01),
        Call("messages", "/v1/messages", message),
        completion("plain", 2, 20, at_s=0.02),
    ]


def several_choices() -> list[Call]:
    """Choices of several users at once."""
    return [
        completion(f"user {i}", i, 14 + i, n=1 + i % 3, seed=i, user=f"user {i}", at_s=0.004 * i)
        for i in range(5)
    ]


def swaps() -> list[Call]:
    """Ask for another model while requests of the first are under way, and the first again."""
    other = {"model": OTHER}
    return [
        completion("first", 1, 25),
        completion("other", 2, 15, at_s=0.02, **other),
        completion("also first", 3, 25, at_s=0.03),
        completion("other again", 4, 15, after="other", **other),
        completion("first again", 5, 10, at_s=0.1, after="other"),
        completion("at last", 6, 8, after="first again", **other),
    ]


def two_users() -> list[Call]:
    return [
        completion("streamed", 1, 20),
        completion("whole", 2, 30, at_s=0.01, stream=False),
        completion("long", 3, 12, at_s=0.02, letters=700),
    ]


def choices() -> list[Call]:
    return [
        completion("three", 1, 15, n=3, seed=5),
        completion("stopped", 2, 60, at_s=0.01, stop=["q", "Z", "~"]),
        completion("best", 3, 10, at_s=0.02, n=2, seed=7, stream=False),
    ]


def every_api() -> list[Call]:
    chat = {"model": "any", "messages": [{"role": "user", "content": prompt(7)}]}
    response = {"input": prompt(8), "stream": True}
    generate = {"model": "any", "prompt": prompt(9)}
    return [
        Call("chat", "/v1/chat/completions", chat | {"max_tokens": 12, "stream": True}),
        Call("messages", "/v1/messages", chat | {"max_tokens": 11, "stream": True}),
        Call("responses", "/v1/responses", response | {"max_output_tokens": 16}),
        Call("ollama", "/api/generate", generate | {"options": {"num_predict": 10}}),
        Call("chat whole", "/v1/chat/completions", chat | {"max_tokens": 9}, at_s=0.02),
    ]


def leaving() -> list[Call]:
    return [
        completion("stays", 1, 30),
        completion("leaves early", 2, 60, hangs_up_after=1),
        completion("leaves late", 3, 60, at_s=0.005, hangs_up_after=3000),
        completion("comes after", 4, 10, at_s=0.06),
    ]


def leaving_crowd() -> list[Call]:
    """Clients leave, some time after they have read enough, while others wait for their blocks."""
    leave = [
        completion(f"leaves {i}", i, 150, letters=100, hangs_up_after=1000, pause_s=0.01 * i)
        for i in range(1, 4)
    ]
    wait = [completion(f"waits {i}", 10 + i, 40, letters=180, at_s=0.01) for i in range(4)]
    return [*leave, *wait]


def slow_readers() -> list[Call]:
    return [
        completion("slow", 1, 40, pause_s=0.02),
        completion("slower", 2, 40, pause_s=0.1),
        completion("quick", 3, 25, at_s=0.01),
    ]


def conversations() -> list[Call]:
    first, path = prompt(1, 400), "/v1/completions"
    return [
        completion("turn 1", 1, 10, letters=400),
        Call("turn 2", path, {"prompt": first + STORY * 3, "max_tokens": 12}, after="turn 1"),
        Call("turn 3", path, {"prompt": first + STORY * 6, "max_tokens": 12}, after="turn 2"),
        completion("other user", 2, 20, letters=300, at_s=0.03),
        of_blocks("blocks", "ABC"),
        of_blocks("blocks in another order", "ACB", after="blocks"),
    ]


def crowd(max_tokens: int = 140) -> list[Call]:
    """Short prompts and long replies, which need more blocks than there are: some are preempted."""
    return [
        completion(f"user {i}", i, max_tokens, letters=40 + 10 * i, at_s=0.002 * i)
        for i in range(5)
    ]


def many() -> list[Call]:
    return [completion(f"user {i}", i, 6, letters=80, at_s=0.001 * i) for i in range(7)]


def again() -> list[Call]:
    """A conversation that was evicted from the pool meanwhile."""
    return [
        completion("first", 1, 5, letters=600),
        completion("same", 1, 5, letters=600, after="first"),
        *(completion(f"other {i}", 10 + i, 5, letters=900, after="same") for i in range(3)),
        completion("again", 1, 8, letters=600, after="other 2"),
        completion("and again", 1, 8, letters=640, after="again"),
    ]


def _split(transport: str, place: str = "1x1 forced", roles: str = "static") -> dict[str, Any]:
    return {"transport": transport, "roles": roles, "place": parse_place(place)}


def _in_groups() -> str:
    """Place workers of two processes each; real ones would share these cores."""
    each = "+".join(map(str, (CORES[0], CORES[-1])))
    return f"prefill={each} decode={each} forced"


SCENARIOS = {
    "alias": Scenario(_split("alias"), two_users),
    "shm": Scenario(_split("shm"), two_users, "handoff_blocks"),
    "peer": Scenario(_split("peer"), two_users, "handoff_blocks"),
    "elastic": Scenario(_split("alias", roles="elastic"), two_users),
    "colocated": Scenario({"roles": "colocated"}, two_users),
    "2x1 peer": Scenario(_split("peer", "2x1 forced"), many),
    "1x2 shm": Scenario(_split("shm", "1x2 forced", "elastic"), many),
    "2x2 peer": Scenario(_split("peer", "2x2 forced", "elastic"), two_users),
    "groups": Scenario(_split("shm", _in_groups()), two_users, "handoff_blocks"),
    "choices": Scenario(_split("alias"), choices),
    "every api": Scenario(_split("shm"), every_api),
    "leaving": Scenario(
        _split("shm"), leaving, may_differ=frozenset({"leaves early", "leaves late"})
    ),
    "leaving crowd": Scenario(
        _split("alias") | room(9, 256),
        leaving_crowd,
        may_differ=frozenset({"leaves 1", "leaves 2", "leaves 3"}),
    ),
    "slow readers": Scenario(_split("peer"), slow_readers),
    "conversations": Scenario(_split("shm"), conversations, "cached_tokens"),
    "crowd": Scenario(_split("alias") | GUESSES | room(9, 256), crowd, "preemptions"),
    "crowd elastic": Scenario(
        _split("alias", roles="elastic") | GUESSES | room(9, 256), crowd, "preemptions"
    ),
    "crowd peer": Scenario(_split("peer") | GUESSES | room(19, 256), crowd, "preemptions"),
    "DRAM": Scenario(
        _split("alias") | room(20) | {"dram_cache": 4 << 20}, again, "restored_tokens"
    ),
    "SSD": Scenario(_split("alias") | room(20) | {"ssd_cache": 64 << 20}, again, "restored_tokens"),
    "tool calls": Scenario(_split("shm"), tool_calls),
    "several choices": Scenario(_split("peer"), several_choices),
    "slow readers of guesses": Scenario(_split("shm") | GUESSES, slow_readers),
    "swaps": Scenario(_split("alias") | {"min_stay_s": 0.2}, swaps, models=("llama", OTHER)),
    "parked": Scenario(
        _split("shm") | {"min_stay_s": 0.2, "keep_resident": 2}, swaps, models=("llama", OTHER)
    ),
    "recurrent": Scenario(_split("alias"), conversations, "cached_tokens", models=(RECURRENT,)),
    "recurrent peer": Scenario(_split("peer"), conversations, "cached_tokens", models=(RECURRENT,)),
    "recurrent crowd": Scenario(
        _split("shm") | room(26, 256), partial(crowd, 110), "preemptions", models=(RECURRENT,)
    ),
    "windows": Scenario(_split("shm"), conversations, "cached_tokens", models=(WINDOWED,)),
    "windows SSD": Scenario(
        _split("peer") | room(50) | {"ssd_cache": 64 << 20},
        again,
        "cached_tokens",
        models=(WINDOWED,),
    ),
    "2x2 crowd": Scenario(
        _split("alias", "2x2 forced") | GUESSES | room(10, 256), crowd, "preemptions"
    ),
    "2x2 shm crowd": Scenario(
        _split("shm", "2x2 forced") | GUESSES | room(30, 256), crowd, "preemptions"
    ),
    "2x2 peer crowd": Scenario(
        _split("peer", "2x2 forced") | GUESSES | room(24, 256), crowd, "preemptions"
    ),
    "SSD peer": Scenario(
        _split("peer") | room(48) | {"ssd_cache": 64 << 20}, again, "cached_tokens"
    ),
}
