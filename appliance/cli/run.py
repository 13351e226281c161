"""Define the verb run: one prompt, one reply."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from appliance.cli import terminal
from appliance.cli.chat import _chat_at_terminal
from appliance.cli.connection import Connection
from appliance.cli.conversation import Conversation
from appliance.cli.reply import (
    PrintedReply,
    Stats,
    System,
    _with_fields,
    body,
    given,
    print_stats,
    stream,
)
from appliance.cli.terminal import Host
from appliance.client.calls import Client, ReplyError
from appliance.hub.names import NoSuchModel
from engine.units import size_text

MAX_STDIN_BYTES = 64 << 20
"""More than any prompt has: the daemon refuses bodies of 8 MiB by default."""


@_with_fields
def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]",
            help="The prompt in quotes, or - for stdin; before it a model, if not the one served.",
        ),
    ] = None,
    system: System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text: no chat template.")
    ] = False,
    stats: Stats = False,
    host: Host = None,
    **fields: Any,
) -> None:
    """Answer a prompt, or open a chat where none is given.

    A first word is taken for a model if it is one that is served, a short name (qwen3:0.6b), an
    owner/name of the hub, or the path of a model. Without a prompt stdin is read; at a terminal a
    chat opens. Where no daemon runs, and a person is at the terminal, one is started until the
    command ends. Stdout is the reply to the byte, and a newline where it does not end with one; on
    a terminal it is freed of control characters.
    """
    if len(words or ()) > 2:  # joined they might differ from what was written
        raise typer.BadParameter("put the prompt in quotes", param_hint="PROMPT")
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, which --raw leaves out")
    connection = Connection(host)
    asked, text = _model_and_prompt(words or [], fields["model"], connection)
    connection.check(asked)
    if text is None and not sys.stdin.isatty():
        text = _from_stdin()
    if text is None and raw:
        raise typer.BadParameter("give a prompt, or pipe one in", param_hint="PROMPT")
    if text == "" and system is None:
        what = "the prompt is empty; give it as an argument or on stdin"
        raise typer.BadParameter(what, param_hint="PROMPT")
    with connection.with_model(asked) as model:
        if text is None:
            _chat_at_terminal(connection.client, model, Conversation(given(fields), system), stats)
        else:
            _reply(connection.client, body(model, given(fields)), text, system, raw, stats)


def _model_and_prompt(
    words: list[str], model: str | None, connection: Connection
) -> tuple[str | None, str | None]:
    """Tell the model from the prompt; None: not given.

    Raises:
        NoSuchModel: two words, and the first is no model.
    """
    if model is None and words and (len(words) > 1 or connection.names_model(words[0])):
        model, *words = words
        if words and not connection.names_model(model):
            hint = "put the prompt in quotes; `penstock list` shows the models that are here"
            raise NoSuchModel(f"no model {model!r}", hint=hint)
    if len(words) > 1:
        raise typer.BadParameter("put the prompt in quotes", param_hint="PROMPT")
    prompt = words[0] if words else None
    return model, _from_stdin() if prompt == "-" else prompt


def _reply(
    client: Client,
    content: dict[str, Any],
    text: str,
    system: str | None,
    is_raw: bool,
    has_stats: bool,
) -> None:
    """Print the reply to one prompt, through the chat template if the model has one."""
    reply = PrintedReply()
    instructions = [] if system is None else [{"role": "system", "content": system}]
    messages = [*instructions, {"role": "user", "content": text}]
    try:
        if not is_raw:
            stream(client, "/v1/chat/completions", {**content, "messages": messages}, reply)
    except ReplyError as error:
        if error.code != "no_chat_template" or instructions:
            raise
        terminal.note("penstock: the model has no chat template; continuing the text (--raw)")
        is_raw = True
    if is_raw:
        stream(client, "/v1/completions", {**content, "prompt": text}, reply)
    if has_stats:
        print_stats(client, reply)


def _from_stdin() -> str:
    """Read stdin without one newline at its end.

    Raises:
        BadParameter: it is no text, or longer than any prompt.
    """
    data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(data) > MAX_STDIN_BYTES:
        about = f"stdin is longer than {size_text(MAX_STDIN_BYTES)}"
        raise typer.BadParameter(about, param_hint="PROMPT")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"stdin is not UTF-8: {error}", param_hint="PROMPT") from error
