"""The verb run: one prompt, one reply.

Owns: where the prompt comes from.
Invariant: one newline at the end of stdin is not part of the prompt; everything else is.
Never: remembers a prompt.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from appliance.cli import terminal
from appliance.cli.reply import (
    MaxTokens,
    Model,
    PrintedReply,
    Seed,
    Stats,
    Stop,
    System,
    Temperature,
    TopP,
    body,
    print_stats,
    stream,
)
from appliance.cli.terminal import Host


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
