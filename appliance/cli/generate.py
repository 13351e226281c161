"""The verb run: one prompt, one reply token by token, and its interruption.

Owns: the options of generation, and the path from them to a request's body; where the prompt comes
from.
Invariant: one newline at the end of stdin is not part of the prompt; everything else is.
Never: remembers a prompt.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from appliance.cli import listings, terminal
from appliance.cli.short_ids import model_ids
from appliance.cli.tables import for_terminal
from appliance.cli.terminal import Host
from appliance.client import Client, ClientError, GenerationFailed, Stream
from appliance.frame.figures import things

# One reply of the model to stdout, token by token, and what happens when it is interrupted.
# Invariant: stdout is the completion to the byte, and a newline where it does not end with one,
# before anything else is said; on a terminal it is freed of control characters.
# Never: leaves a request running that nobody reads any more.


Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="The one served if left out.", autocompletion=model_ids),
]
System = Annotated[str | None, typer.Option("--system", "-s", help="Instructions to the model.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Output tokens at most.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; repeat.")]
Stats = Annotated[bool, typer.Option("--stats", help="Timings on stderr at the end.")]


@dataclass
class PrintedReply:
    """How far a generation has come; what is known of it when it is interrupted."""

    request_id: str | None = None
    finish_reason: str | None = None
    text: str = ""


def body(**options: object) -> dict[str, Any]:
    """A request's body from options; those that nobody gave are the daemon's to choose."""
    return {name: value for name, value in options.items() if value not in (None, [])}


def stream(client: Client, path: str, content: dict[str, Any], reply: PrintedReply) -> None:
    """Print one completion as it comes, and keep `reply` up to date.

    A reply that the daemon's default length cut short is followed by a note. Interrupted, this
    cancels the request and raises the interruption again.

    Raises:
        ClientError: no daemon, a refusal, or an incomplete reply.
    """
    with client.stream(path, {**content, "stream": True}) as events:
        reply.request_id = events.request_id
        try:
            _print(events, reply)
        except (SystemExit, KeyboardInterrupt) as ending:  # a signal, or nobody reads stdout
            _cancel_after(client, reply, ending)
            raise
    if reply.finish_reason not in ("stop", "length", "tool_calls"):
        raise GenerationFailed(_why_incomplete(client, reply))
    if reply.finish_reason == "length" and "max_tokens" not in content:
        _note_cut(client, reply)


def print_stats(client: Client, reply: PrintedReply) -> None:
    """The request's timings as the daemon measured them, on stderr."""
    if reply.request_id is not None:
        terminal.note(listings.stats_line(client.request(reply.request_id)))


def _print(events: Stream, reply: PrintedReply) -> None:
    is_terminal = sys.stdout.isatty()
    try:
        for event in events:
            reply.request_id = reply.request_id or event.get("id")
            for choice in event.get("choices", ()):
                reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                reply.text += text
                terminal.write(for_terminal(text) if is_terminal else text)
    finally:
        if (is_terminal or reply.text) and not reply.text.endswith("\n"):
            terminal.write("\n")


def _why_incomplete(client: Client, reply: PrintedReply) -> str:
    """Whose doing it was, as far as the daemon says."""
    frame: dict[str, Any] = {}
    if reply.request_id is not None:
        with suppress(ClientError):
            frame = client.request(reply.request_id)
    if frame.get("cancelled_by"):
        after = things(frame.get("output_tokens"), "token")
        return f"the reply was cancelled by {frame['cancelled_by']} after {after}"
    return f"the reply is incomplete (finish reason {reply.finish_reason!r})"


def _note_cut(client: Client, reply: PrintedReply) -> None:
    """Say at which length nobody asked for the reply ended."""
    at = "the default length"
    if reply.request_id is not None:
        with suppress(ClientError):  # the reply is complete as it is
            at = things(client.request(reply.request_id)["output_tokens"], "token")
    terminal.note(f"penstock: cut at {at}; --max-tokens gives more, up to the model's length")


def _cancel_after(client: Client, reply: PrintedReply, ending: BaseException) -> None:
    """Tell the daemon, so that it need not find out, and the person what was generated."""
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


# --------------------------------------------------------------------------------------------------


def run(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]", help="The prompt, in quotes; - or none is stdin."),
    ] = None,
    model: Model = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    stats: Stats = False,
    host: Host = None,
) -> None:
    """Continue a prompt, or with --chat or --system answer it, token by token on stdout.

    Stdout is the completion to the byte, and a newline where it does not end with one; on a
    terminal it is freed of control characters. One newline at the end of stdin is not part of the
    prompt.
    """
    text = _prompt(prompt)
    if not text and not chat and system is None:
        what = "the prompt is empty; give it as an argument or on stdin"
        raise typer.BadParameter(what, param_hint="PROMPT")
    client = terminal.client(host)
    content = body(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop,
    )
    reply = PrintedReply()
    if chat or system is not None:
        instructions = [] if system is None else [{"role": "system", "content": system}]
        content["messages"] = [*instructions, {"role": "user", "content": text}]
        stream(client, "/v1/chat/completions", content, reply)
    else:
        stream(client, "/v1/completions", {**content, "prompt": text}, reply)
    if stats:
        print_stats(client, reply)


def _prompt(words: list[str] | None) -> str:
    if words and len(words) > 1:  # joined they might differ from what was written
        raise typer.BadParameter("give one prompt, in quotes", param_hint="PROMPT")
    argument = words[0] if words else None
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, or pipe one in", param_hint="PROMPT")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"stdin is not UTF-8: {error}", param_hint="PROMPT") from error
