"""Print one reply token by token, and stop it on Ctrl-C.

Invariant: stdout is the exact completion, plus a newline if it does not end with one, before
anything else is printed; on a terminal control characters are removed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from appliance.cli import fact_pages, terminal
from appliance.cli.completion import model_ids
from appliance.cli.connection import ChosenModel, when_loaded
from appliance.cli.loops import LOOP_CHARS, repeats_itself
from appliance.cli.silence import SilenceWatch
from appliance.cli.tables import Range, WordWrap, for_terminal, within
from appliance.cli.terminal import ProgressLine
from appliance.client.calls import Client, ClientError, GenerationFailed, Stream
from appliance.observe.frame.figures import things

System = Annotated[
    str | None, typer.Option("--system", "-s", metavar="TEXT", help="Instructions to the model.")
]
Stats = Annotated[
    bool, typer.Option("--stats", "--verbose", help="Print timings on stderr at the end.")
]


RANGES: Mapping[str, Range] = {
    "max_tokens": Range(1),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, is_open=True),
    "top_k": Range(-1),
    "min_p": Range(0, 1),
    "seed": Range(-(2**63), 2**63 - 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 2, is_open=True),
}
"""Ranges of numbers that the API accepts."""


def _number(name: str, about: str) -> Any:
    return typer.Option(callback=within(*RANGES[name]), help=about)


FIELDS: Mapping[str, Any] = {
    "model": Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="Model to ask. Default: the one served.",
            autocompletion=model_ids,
        ),
    ],
    "max_tokens": Annotated[
        int | None, _number("max_tokens", "Most output tokens. Default: as many as fit.")
    ],
    "temperature": Annotated[
        float | None,
        _number("temperature", "0 (greedy) to 2. Default: the model's own, else 0.6."),
    ],
    "top_p": Annotated[
        float | None,
        _number("top_p", "Nucleus sampling, above 0 to 1. Default: the model's own, else 0.9."),
    ],
    "seed": Annotated[int | None, _number("seed", "Make sampling repeatable.")],
    "stop": Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End the reply before this text. May be repeated."),
    ],
}
"""Fields of a request's body that are options of both verbs."""


@dataclass
class PrintedReply:
    """The progress of a generation, also after an interruption."""

    request_id: str | None = None
    finish_reason: str | None = None
    text: str = ""
    is_endless: bool = False
    """It repeats itself, and was ended here."""


def _with_fields(verb: Callable[..., None]) -> Callable[..., None]:
    return terminal.with_options(verb, FIELDS)


ROOM_LEFT = -1
"""The value of max_tokens for the whole context."""


def given(fields: Mapping[str, object]) -> dict[str, Any]:
    """Return the given FIELDS, without the model."""
    return {n: v for n, v in fields.items() if v not in (None, []) and n != "model"}


def body(model: ChosenModel, settings: Mapping[str, object]) -> dict[str, Any]:
    """Make a request's fields, but for the prompt: the user's settings over run's defaults."""
    named = {} if model.name is None else {"model": model.name}
    return {**named, "max_tokens": ROOM_LEFT, **model.sampling, **settings}


def stream(client: Client, path: str, content: dict[str, Any], reply: PrintedReply) -> None:
    """Print one completion as it comes, and keep `reply` up to date.

    A reply that was cut off is followed by a note. One that repeats itself is ended at a
    terminal, unless the user has set its length. Interrupted, this cancels the request and raises
    the interruption again.

    Raises:
        ClientError: no daemon, a refusal, or an incomplete reply.
    """
    ask = partial(client.stream, path, {**content, "stream": True})
    with when_loaded(client, ask) as events:
        reply.request_id = events.request_id
        watch = SilenceWatch(client, lambda: _is_amid_line(reply))
        try:
            with watch:
                _print(
                    client, events, reply, watch, ends_loops=content.get("max_tokens") == ROOM_LEFT
                )
        except (SystemExit, KeyboardInterrupt) as ending:  # a signal, or stdout is closed
            _cancel_after(client, reply, ending)
            raise
    if reply.is_endless:
        hint = "try --temperature 0 or another --seed; --max-tokens lets it repeat"
        terminal.note(f"penstock: ended, for the reply repeats itself\nhint: {hint}")
        return
    if reply.finish_reason not in ("stop", "length", "tool_calls"):
        raise GenerationFailed(_why_incomplete(client, reply))
    if reply.finish_reason == "length":
        limit = content["max_tokens"]
        why = "the model's context is full" if limit == ROOM_LEFT else f"max_tokens is {limit}"
        terminal.note(f"penstock: the reply was cut off: {why}")


def print_stats(client: Client, reply: PrintedReply) -> None:
    """Print the request's timings on stderr, as the daemon measured them."""
    if reply.request_id is not None:
        frame = client.request(reply.request_id)
        with client.reading():
            terminal.note(fact_pages.stats_line(frame))


def _is_amid_line(reply: PrintedReply) -> bool:
    return sys.stdout.isatty() and bool(reply.text) and not reply.text.endswith("\n")


def _print(
    client: Client, events: Stream, reply: PrintedReply, watch: SilenceWatch, *, ends_loops: bool
) -> None:
    is_terminal, looked_at = sys.stdout.isatty(), 0
    wrap = WordWrap() if terminal.has_screen() else None
    thinking = ProgressLine()
    try:
        for event in events:
            watch.heard()
            with client.reading():
                text, is_thinking = _text(event, reply)
            if is_thinking:
                thinking.wait("thinking")
            if text:
                thinking.end()
            shown = for_terminal(text) if is_terminal else text
            terminal.write(shown if wrap is None else wrap.of(shown, terminal.width()))
            if is_terminal and ends_loops and len(reply.text) - looked_at > LOOP_CHARS // 8:
                looked_at = len(reply.text)
                if reply.finish_reason is None and repeats_itself(reply.text):
                    reply.is_endless = True
                    return  # hanging up cancels the request
    finally:
        thinking.end()
        if (is_terminal or reply.text) and not reply.text.endswith("\n"):
            terminal.write("\n")


def _text(event: dict[str, Any], reply: PrintedReply) -> tuple[str, bool]:
    """Add an event to the reply; return its text, and whether it is a thought."""
    before, is_thinking = len(reply.text), False
    reply.request_id = reply.request_id or event.get("id")
    for choice in event.get("choices", ()):
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        delta = choice.get("delta") or {}
        is_thinking |= bool(delta.get("reasoning_content"))
        reply.text += choice.get("text") or delta.get("content") or ""
    return reply.text[before:], is_thinking


def _why_incomplete(client: Client, reply: PrintedReply) -> str:
    """Say why the reply is incomplete, as far as the daemon knows."""
    frame: dict[str, Any] = {}
    if reply.request_id is not None:
        with suppress(ClientError):
            frame = client.request(reply.request_id)
    if frame.get("cancelled_by"):
        with client.reading():
            after = things(frame.get("output_tokens"), "token")
        return f"the reply was cancelled by {frame['cancelled_by']} after {after}"
    return f"the reply is incomplete (finish reason {reply.finish_reason!r})"


def _cancel_after(client: Client, reply: PrintedReply, ending: BaseException) -> None:
    """Cancel the request at the daemon, and tell the user what was generated."""
    if reply.request_id is None:
        return  # hanging up, which the caller does next, cancels as well
    quick = Client(client.address, timeout_s=1.0)
    try:
        quick.cancel(reply.request_id)
        frame = quick.request(reply.request_id)
    except ClientError:
        frame = {}
    if not (isinstance(ending, SystemExit) and ending.code == terminal.BROKEN_PIPE):
        after = f" after {frame['output_tokens']} tok" if "output_tokens" in frame else ""
        terminal.note(f"cancelled{after}")
