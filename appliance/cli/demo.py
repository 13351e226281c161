"""Ask the starter model about a long document while short chats stream.

Invariant: every answer is compared with the correct one; every figure was measured in this run, and
the demo's own daemon is stopped afterwards.
Never: uses a running daemon, or a model other than the starter.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import cycle
from typing import Any

import typer

from appliance.cli import terminal
from appliance.cli.tables import folded
from appliance.client.calls import Client, ClientError, Stream
from appliance.client.ephemeral import daemon
from appliance.observe.frame.figures import duration, size
from appliance.observe.frame.latency import quantile

_MACHINE = re.compile(r"[a-z]+-[a-z]+-\d+")
"""Matches the names of the runbook's machines, such as `amber-web-42`."""
NUM_CHATS = 2
_TEXT_AT = 9
"""The column in which questions and answers begin, after their marks."""
QUIET_S = 3.0
_CHATS = ("Who are you?", "What can you do?", "Tell me a joke.", "What is the capital of France?")


@dataclass(frozen=True, slots=True)
class TokenItl:
    """The time between two tokens of one reply."""

    ended_s: float
    ms: float


class DemoChats:
    """Stream short chats one after another until the `with` ends."""

    def __init__(self, client: Client) -> None:
        self.itls: list[TokenItl] = []
        self._client = client
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._talk, args=(n,)) for n in range(NUM_CHATS)]

    def __enter__(self) -> DemoChats:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def itls_between(self, start_s: float, end_s: float) -> list[float]:
        """Return the inter-token latencies that ended in this span, in milliseconds."""
        return [itl.ms for itl in list(self.itls) if start_s <= itl.ended_s <= end_s]

    def _talk(self, first: int) -> None:
        for question in cycle(_CHATS[first:] + _CHATS[:first]):
            if self._is_over.is_set():
                return
            try:
                with self._client.stream("/v1/chat/completions", _body(question)) as events:
                    last_s = None
                    for _ in _pieces(events):
                        now_s = time.perf_counter()
                        if last_s is not None:
                            self.itls.append(TokenItl(now_s, (now_s - last_s) * 1e3))
                        last_s = now_s
            except ClientError as error:
                terminal.note(f"penstock: a short chat failed: {error}")
                return


def demo() -> None:
    """Ask the built-in model about a long document while short chats stream.

    Starts a daemon of its own, marks each answer right or wrong, shows what the long prompts cost
    and what they cost the others, and cleans up. Ends with 1 if an answer was wrong.
    """
    sample = files("engine.starter") / "sample"
    text = (sample / "runbook.txt").read_text("utf-8").strip()
    questions = json.loads((sample / "questions.json").read_text("utf-8"))
    terminal.note("penstock: starting a daemon of the demo's own ...")
    # no cache: the document is computed each time; no guesses: each token has a latency of its own
    with daemon("--prefix-cache", "off", "--speculate", "off") as where:
        client = Client(where, timeout_s=600)
        state = client.get("/v1/penstock/state")
        _write(f"{_opening(state, text)}\n{_made_up(text, questions)}\n\n")
        with DemoChats(client) as chats:
            started_s = time.perf_counter()
            time.sleep(QUIET_S)
            quiet_ms = chats.itls_between(started_s, time.perf_counter())
            _write(f"Two short chats stream all the while. {_itl_text('Alone', quiet_ms)}\n\n")
            loaded_ms: list[float] = []
            num_right = 0
            for question in questions:
                num_right += _ask(client, chats, text, question, loaded_ms)
        totals = client.get("/v1/penstock/state")["totals"]
    loaded = _itl_text("The chats while prompts were computed", loaded_ms)
    _write(f"{num_right} of {len(questions)} answers are right. {loaded}")
    moved = size(totals["handoff_bytes"])
    _write(f"{totals['handoffs']} handoffs from prefill to decode moved {moved}.")
    if num_right < len(questions):
        raise typer.Exit(1)


def _write(text: str) -> None:
    """Write lines, wrapped between words at the terminal's width."""
    for line in text.splitlines():
        text_at = _TEXT_AT if line.startswith(" ") else 0
        terminal.write(folded(line, terminal.room(), text_at) + "\n")


def _opening(state: dict[str, Any], text: str) -> str:
    workers = ", ".join(f"{worker['name']} on {worker['device']}" for worker in state["workers"])
    return (
        f"{state['model']} ({state['dtype']}): {workers}; roles {state['roles']}\n"
        f"The document is a runbook of {len(text.splitlines())} lines. It is sent and computed\n"
        "with each question: the demo's daemon has its prefix cache off."
    )


def _made_up(text: str, questions: list[dict[str, str]]) -> str:
    """Say that the names are made up, and which of them the document lacks."""
    asked = [name for one in questions for name in _MACHINE.findall(one["question"])]
    nowhere = [name for name in asked if name not in text]
    told = "Every name and number in it was made up for the demo."
    if nowhere:
        verb = "is" if len(nowhere) == 1 else "are"
        told += f" {', '.join(nowhere)} {verb} not in it; the right answer says so."
    return told


def _ask(
    client: Client, chats: DemoChats, text: str, question: dict[str, str], loaded_ms: list[float]
) -> bool:
    """Ask one question over the document, and print how it went."""
    asked_s = time.perf_counter()
    first_s, answer = None, ""
    body = _body(f"{text}\n\n{question['question']}")
    with client.stream("/v1/chat/completions", body) as events:
        for piece in _pieces(events):
            first_s = first_s or time.perf_counter()
            answer += piece
        request_id = events.request_id
    first_s = first_s or time.perf_counter()
    itls_ms = chats.itls_between(asked_s, first_s)
    loaded_ms += itls_ms
    row = client.request(str(request_id))
    is_right = answer == question["answer"]
    mark = "right" if is_right else "WRONG"
    _write(f"  {mark}  {question['question']}\n         {answer}")
    if not is_right:
        _write(f"         expected: {question['answer']}")
    figures = [f"{row['prompt_tokens']:,} tokens", f"TTFT {duration((first_s - asked_s) * 1e3)}"]
    if row["handoff_ms"] is not None:
        moved = size(row["handoff_bytes"] or 0)
        figures.append(f"handoff {duration(row['handoff_ms'])} ({row['transport']}, {moved})")
    _write(f"         {' · '.join(figures)}\n         {_itl_text('chats', itls_ms)}")
    return is_right


def _itl_text(whose: str, itls_ms: list[float]) -> str:
    if not itls_ms:
        return f"{whose}: no ITL was seen."
    shown = (f"{name} {duration(quantile(itls_ms, q) or 0.0)}" for name, q in _QUANTILES)
    return f"{whose}: ITL {', '.join(shown)}."


_QUANTILES = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))


def _pieces(events: Stream) -> Iterator[str]:
    """Yield the reply piece by piece."""
    for event in events:
        if event["choices"] and (piece := event["choices"][0]["delta"].get("content")):
            yield piece


def _body(content: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 64,
        "stream": True,
    }
