"""The `penstock` command: parse, ask the daemon, print.

Owns: verbs, flags, exit codes. Called by: the console script. The only file that prints.
Invariant: stdout carries the answer alone; progress, notes and errors go to stderr as
`penstock: ...` and `hint: ...`.
Never: imports torch, textual or the daemon before a verb needs it.

Exit codes: 0 done · 1 unexpected · 2 usage · 3 no daemon · 4 permission · 5 not found · 6 busy ·
7 generation failed or cut short · 78 bad configuration · 130, 143 signalled · 141 broken pipe.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any, NoReturn
from urllib.parse import quote

import typer

from appliance import cli_output, config
from appliance.client import (
    Client,
    ClientError,
    DaemonUnreachable,
    GenerationFailed,
    ReplyError,
    Stream,
)
from engine.errors import PenstockError

_BROKEN_PIPE = 141

app = typer.Typer(
    help="Penstock: serve a language model with prefill and decode on separate devices.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Socket = Annotated[str | None, typer.Option("--socket", help="The daemon's Unix socket.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def main() -> None:
    """Run one verb; the process's entry point."""
    signal.signal(signal.SIGINT, _exit_on_signal)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # no locale may end a run
    try:
        app(prog_name="penstock")
    except PenstockError as error:
        sys.exit(_report(error))


@app.command()
def serve(
    model: Annotated[str | None, typer.Option(help="Checkpoint folder.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    transport: Annotated[str | None, typer.Option(help="auto, alias or shm.")] = None,
    roles: Annotated[str | None, typer.Option(help="static or colocated.")] = None,
    socket: Socket = None,
    state_dir: Annotated[str | None, typer.Option(help="For the request log.")] = None,
    max_model_len: Annotated[str | None, typer.Option(help="Tokens of prompt and reply.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="For the KV pool, as 2GiB.")] = None,
) -> None:
    """Run the daemon in the foreground; SIGTERM drains it."""
    flags = {
        "model": model,
        "dtype": dtype,
        "transport": transport,
        "roles": roles,
        "socket": socket,
        "state_dir": state_dir,
        "max_model_len": max_model_len,
        "kv_memory": kv_memory,
    }
    settings = config.load(flags)
    config.prepare_directories(settings)
    from appliance import daemon

    raise typer.Exit(daemon.serve(settings))


@app.command()
def run(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or none is stdin.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Output tokens at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeat.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Timings on stderr at the end.")] = False,
    model: Annotated[str | None, typer.Option(help="Model id; the one served if left out.")] = None,
    socket: Socket = None,
) -> None:
    """Continue a prompt, or with --chat answer it, token by token on stdout.

    Stdout is the completion to the byte; on a terminal it is freed of control characters and ends
    with a newline. One newline at the end of stdin is not part of the prompt.
    """
    text = _prompt(prompt)
    client = _client(socket)
    options = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or None,
        "stream": True,
    }
    body: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if chat:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
    else:
        path, body["prompt"] = "/v1/completions", text
    request_id = _generate(client, path, body)
    if stats and request_id is not None:
        frame = client.get(f"/v1/requests/{quote(request_id, safe='')}")
        _note(cli_output.stats_line(frame))


@app.command()
def status(socket: Socket = None, as_json: AsJson = False) -> None:
    """Show what the daemon is doing: state, queue, workers, KV, latency."""
    frame = _client(socket).get("/v1/penstock/state")
    if as_json:
        _print(cli_output.document("status", frame))
    else:
        _print(cli_output.status_page(frame, colour=_has_colour()))


@app.command()
def ps(
    socket: Socket = None,
    show_all: Annotated[bool, typer.Option("-a", "--all", help="Also the last finished.")] = False,
    as_json: AsJson = False,
) -> None:
    """List live requests with their phase."""
    frames = _client(socket).get("/v1/requests").get("data", [])
    if not show_all:
        frames = [frame for frame in frames if frame.get("phase") != "finished"]
    if as_json:
        _print(cli_output.document("ps", {"data": frames}))
    else:
        _print(cli_output.requests_table(frames, colour=_has_colour()))


@app.command()
def cancel(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Request ids, from ps.")],
    socket: Socket = None,
) -> None:
    """End requests; exits 5 if one of them is not live."""
    client = _client(socket)
    exit_code = 0
    for request_id in ids:
        try:
            client.cancel(request_id)
        except ReplyError as error:
            _note(f"penstock: {cli_output.printable(request_id)}: {error}")
            exit_code = error.exit_code
        else:
            _print(f"cancelled {cli_output.printable(request_id)}")
    raise typer.Exit(exit_code)


@app.command()
def log(
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="Newest requests.")] = 20,
    socket: Socket = None,
    state_dir: Annotated[str | None, typer.Option(help="Where to look with no daemon.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show finished requests: newest last as a table, newest first as JSON.

    Without a daemon the log's file is read.
    """
    try:
        rows = _client(socket).get(f"/v1/penstock/log?limit={limit}").get("data", [])
    except DaemonUnreachable as error:
        rows = _rows_from_file(state_dir, limit, error)
    if as_json:
        _print(cli_output.document("log", {"data": rows}))
    else:
        _print(cli_output.log_table(reversed(rows), colour=_has_colour()))


@app.command()
def top(
    socket: Socket = None,
    once: Annotated[bool, typer.Option("--once", help="Print one reading as text.")] = False,
    as_ascii: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII only.")] = False,
) -> None:
    """Open the live console; into a pipe it prints lines."""
    path = str(config.socket_path(socket))
    flags = [*(["--once"] if once else []), *(["--ascii"] if as_ascii else [])]
    command = [sys.executable, "-P", "-m", "tui", "--socket", path, *flags]
    os.execv(sys.executable, command)


@app.command()
def version(socket: Socket = None, as_json: AsJson = False) -> None:
    """Show the version of this command, and of the daemon if one answers."""
    from importlib import metadata  # 20 ms that only this verb needs

    try:
        ours: str | None = metadata.version("penstock")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        ours = None
    try:
        theirs = _client(socket).get("/version").get("version")
    except ClientError:
        theirs = None
    if as_json:
        _print(cli_output.document("version", {"version": ours, "daemon_version": theirs}))
    else:
        about = f" (daemon {cli_output.printable(theirs)})" if theirs is not None else ""
        _print(f"penstock {ours or '(not installed)'}{about}")


@dataclass
class _Progress:
    """How far a generation has come; what is known of it when it is interrupted."""

    request_id: str | None
    finish_reason: str | None = None


def _generate(client: Client, path: str, body: dict[str, Any]) -> str | None:
    """Stream one completion to stdout; returns the request's id."""
    with client.stream(path, body) as reply:
        progress = _Progress(reply.request_id)
        try:
            _print_text(reply, progress)
        except SystemExit as ending:  # a signal, or nobody reads stdout any more
            _cancel_after(client, progress.request_id, ending)
            raise
    if progress.finish_reason not in ("stop", "length"):
        raise GenerationFailed(
            f"the reply is incomplete (finish reason {progress.finish_reason!r})"
        )
    return progress.request_id


def _print_text(reply: Stream, progress: _Progress) -> None:
    is_terminal = sys.stdout.isatty()
    last = "\n"
    try:
        for event in reply:
            progress.request_id = progress.request_id or event.get("id")
            for choice in event.get("choices", ()):
                progress.finish_reason = choice.get("finish_reason")
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                text = cli_output.for_terminal(text) if is_terminal else text
                _write(text)
                last = text[-1:] or last
    finally:
        if is_terminal and last != "\n":
            _write("\n")


def _cancel_after(client: Client, request_id: str | None, ending: SystemExit) -> None:
    """Tell the daemon, so that it need not find out, and the person what was generated."""
    if request_id is None:
        return  # hanging up, which the caller does next, cancels as well
    quick = Client(client.socket_path, timeout_s=1.0)
    try:
        quick.cancel(request_id)
        frame = quick.get(f"/v1/requests/{quote(request_id, safe='')}")
    except ClientError:
        frame = {}
    if ending.code != _BROKEN_PIPE:
        after = f" after {frame['output_tokens']} tok" if "output_tokens" in frame else ""
        _note(f"cancelled{after}")


def _prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, or pipe one in", param_hint="PROMPT")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"stdin is not UTF-8: {error}", param_hint="PROMPT") from error


def _rows_from_file(
    state_dir: str | None, limit: int, error: DaemonUnreachable
) -> list[dict[str, object]]:
    path = config.log_path(config.state_dir(state_dir))
    if not os.path.exists(path):
        raise error
    from appliance.log_query import RowQuery
    from appliance.log_reader import read_rows

    _note(f"penstock: no daemon at {error.where}; reading {path}")
    return read_rows(path, RowQuery(limit=limit))


def _client(socket: str | None) -> Client:
    return Client(config.socket_path(socket))


def _has_colour() -> bool:
    return (
        sys.stdout.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "dumb") != "dumb"
    )


def _print(text: str) -> None:
    _write(text + "\n")


def _write(text: str) -> None:
    """Write to stdout and flush: a reader sees each token. Ends quietly if there is none left."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_BROKEN_PIPE)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _report(error: PenstockError) -> int:
    _note(f"penstock: {cli_output.printable(error)}")
    if error.hint:
        _note(f"hint: {cli_output.printable(error.hint)}")
    return error.exit_code


def _exit_on_signal(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)


if __name__ == "__main__":
    main()
