"""The verbs run and chat: one reply, or turns with commands and settings; each can be interrupted.

Owns: the options of generation, and the path from them to a request's body; which of run's words
is the model and which the prompt; chat's loop, its messages, settings and commands, the history of
what was typed, and the file of `/save` and `/load`.
Invariant: Ctrl-C ends a reply or a line, never the chat; Ctrl-D leaves it. From a
pipe every line is one turn and none is a command.
Never: writes the model's words anywhere but to stdout and to the file of /save. What was typed on a
terminal goes to `chat_history` in the state folder, which is for its owner alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from appliance.cli import listings, terminal
from appliance.cli.connection import ChosenModel, Connection, when_loaded
from appliance.cli.short_ids import model_ids
from appliance.cli.terminal import (
    Host,
    ProgressLine,
    Range,
    WordWrap,
    for_terminal,
    printable,
    within,
)
from appliance.client import Client, ClientError, GenerationFailed, ReplyError, Stream
from appliance.configuration.setting_kinds import is_meant, nearest
from appliance.frame.figures import things
from appliance.models.names import NoSuchModel
from engine.errors import PenstockError

# One reply of the model to stdout, token by token, and what happens when it is interrupted.
# Invariant: stdout is the completion to the byte, and a newline where it does not end with one,
# before anything else is said; on a terminal it is freed of control characters.
# Never: leaves a request running that nobody reads any more.


System = Annotated[str | None, typer.Option("--system", "-s", help="Instructions to the model.")]
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
"""What the API takes of each number."""


def _number(name: str, about: str) -> Any:
    return typer.Option(callback=within(*RANGES[name]), help=about)


FIELDS: Mapping[str, Any] = {
    "model": Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Model to ask. Default: the one served.", autocompletion=model_ids
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
        list[str] | None, typer.Option(help="End the reply before this text. May be repeated.")
    ],
}
"""Of a request's body: each is an option of both verbs."""


@dataclass
class PrintedReply:
    """How far a generation has come; what is known of it when it is interrupted."""

    request_id: str | None = None
    finish_reason: str | None = None
    text: str = ""


def _with_fields(verb: Callable[..., None]) -> Callable[..., None]:
    return terminal.with_options(verb, FIELDS)


ROOM_LEFT = -1
"""In place of max_tokens: until the model's context is full."""


def given(fields: Mapping[str, object]) -> dict[str, Any]:
    """What the user gave of FIELDS, but for the model."""
    return {n: v for n, v in fields.items() if v not in (None, []) and n != "model"}


def body(model: ChosenModel, settings: Mapping[str, object]) -> dict[str, Any]:
    """Make a request's fields, but for the prompt: the user's settings over run's defaults."""
    named = {} if model.name is None else {"model": model.name}
    return {**named, "max_tokens": ROOM_LEFT, **model.sampling, **settings}


def stream(client: Client, path: str, content: dict[str, Any], reply: PrintedReply) -> None:
    """Print one completion as it comes, and keep `reply` up to date.

    A reply that filled the model's context is followed by a note. Interrupted, this cancels the
    request and raises the interruption again.

    Raises:
        ClientError: no daemon, a refusal, or an incomplete reply.
    """
    ask = partial(client.stream, path, {**content, "stream": True})
    with when_loaded(client, ask) as events:
        reply.request_id = events.request_id
        try:
            _print(events, reply)
        except (SystemExit, KeyboardInterrupt) as ending:  # a signal, or nobody reads stdout
            _cancel_after(client, reply, ending)
            raise
    if reply.finish_reason not in ("stop", "length", "tool_calls"):
        raise GenerationFailed(_why_incomplete(client, reply))
    if reply.finish_reason == "length" and content["max_tokens"] == ROOM_LEFT:
        terminal.note("penstock: the model's context is full; the reply ends here")


def print_stats(client: Client, reply: PrintedReply) -> None:
    """The request's timings as the daemon measured them, on stderr."""
    if reply.request_id is not None:
        terminal.note(listings.stats_line(client.request(reply.request_id)))


def _print(events: Stream, reply: PrintedReply) -> None:
    is_terminal = sys.stdout.isatty()
    wrap = WordWrap() if terminal.has_screen() else None
    thinking = ProgressLine()
    try:
        for event in events:
            reply.request_id = reply.request_id or event.get("id")
            for choice in event.get("choices", ()):
                reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
                delta = choice.get("delta") or {}
                if delta.get("reasoning_content"):
                    thinking.wait("thinking")
                text = choice.get("text") or delta.get("content") or ""
                if text:
                    thinking.end()
                reply.text += text
                shown = for_terminal(text) if is_terminal else text
                terminal.write(shown if wrap is None else wrap.of(shown, terminal.width()))
    finally:
        thinking.end()
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
    as_chat: Annotated[bool, typer.Option("--chat", hidden=True)] = False,
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
    """Which word is the model and which the prompt; None for what is not there.

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
    """All of it; one newline at its end is no part of the prompt."""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"stdin is not UTF-8: {error}", param_hint="PROMPT") from error


# --------------------------------------------------------------------------------------------------


# What is said in a chat, and the settings it is said with.
# Invariant: messages take turns, a user's and the model's, after at most one system message; a
# command that is refused changes nothing.
# Never: talks to the daemon or the terminal.


Message = dict[str, str]

SETTINGS: Mapping[str, Callable[[str], object]] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "stop": str,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}
"""What `/set` knows, as the API's fields."""
UNSET: Mapping[str, str] = {
    "max_tokens": "as many as fit into the model's context",
    "seed": "another for each reply; the log keeps it",
    "stop": "none",
    "presence_penalty": "0 (default)",
    "frequency_penalty": "0 (default)",
}
"""What holds for a setting that neither the chat nor the model has a value of."""


class Refused(PenstockError):
    """A command cannot be carried out."""


class Conversation:
    """A chat as far as it has come.

    Args:
        settings: fields of the request's body, beside the messages.
        system: instructions to the model.
    """

    def __init__(self, settings: dict[str, Any], system: str | None = None) -> None:
        self.settings = settings
        self.system = system
        self.turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """What the model reads for its next turn."""
        instructions = [{"role": "system", "content": self.system}] if self.system else []
        return [*instructions, *self.turns]

    def say(self, text: str) -> None:
        """Add a turn of the user's."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """The model's turn; one without a word takes the user's back."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def reset(self) -> None:
        """Forget what was said; settings and instructions stay."""
        self.turns.clear()

    def retry(self) -> None:
        """Take the last answer back.

        Raises:
            Refused: nothing has been answered yet.
        """
        if not self.turns:
            raise Refused("nothing has been said yet")
        self.turns.pop()

    def set(self, name: str, text: str) -> None:
        """Change a setting; an empty text leaves it to the daemon.

        Raises:
            Refused: there is no such setting, or it cannot have this value.
        """
        if name not in SETTINGS:
            hint = f"{is_meant(name, SETTINGS)}the settings are {', '.join(SETTINGS)}"
            raise Refused(f"no setting {name!r}", hint=hint)
        if not text:
            self.settings.pop(name, None)
            return
        try:
            value = SETTINGS[name](text)
        except ValueError as error:
            raise Refused(f"{text!r} is not a number", where=name) from error
        if isinstance(value, int | float) and (why := RANGES[name].refusal(value)):
            raise Refused(why, where=name)
        self.settings[name] = value

    def save(self, name: str) -> Path:
        """Write the conversation to a file that only its owner can read; returns its path.

        Raises:
            Refused: it cannot be written.
        """
        path = Path(name).expanduser()
        content = {"settings": self.settings, "system": self.system, "messages": self.turns}
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
                json.dump({"schema": "penstock.chat/1", **content}, file, indent=2)
        except (OSError, ValueError) as error:
            raise Refused(f"cannot write it: {error}", where=str(path)) from error
        return path

    def load(self, name: str) -> None:
        """Go on with a conversation that was saved.

        Raises:
            Refused: it cannot be read, or is none.
        """
        path = Path(name).expanduser()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise Refused(f"cannot read it: {error}", where=str(path)) from error
        if not _is_conversation(content):
            raise Refused("not a saved chat", where=str(path))
        self.settings = {k: v for k, v in content["settings"].items() if k in SETTINGS}
        self.system = content["system"]
        self.turns = [
            {"role": role, "content": message["content"]}
            for role, message in _in_turns(content["messages"])
        ]


def _is_conversation(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and isinstance(content.get("settings"), dict)
        and isinstance(content.get("system", ""), str | None)
        and isinstance(content.get("messages"), list)
        and len(content["messages"]) % 2 == 0
        and all(
            isinstance(message, dict)
            and message.get("role") == role
            and isinstance(message.get("content"), str)
            for role, message in _in_turns(content["messages"])
        )
    )


def _in_turns(messages: list[Any]) -> list[tuple[str, Any]]:
    """Each message with the role whose turn it is."""
    return [("user" if i % 2 == 0 else "assistant", msg) for i, msg in enumerate(messages)]


# --------------------------------------------------------------------------------------------------


HISTORY_LINES = 1000
PROMPT, PROMPT_INSIDE = ">>> ", "... "
QUOTES = '"""'


@_with_fields
def chat(system: System = None, stats: Stats = False, host: Host = None, **fields: Any) -> None:
    """Talk with the model; /help lists the commands. From a pipe every line is a turn.

    Commands are for terminals: from a pipe a line that begins with a slash goes to the model.
    """
    connection, conversation = Connection(host), Conversation(given(fields), system)
    with connection.with_model(fields["model"]) as model:
        if sys.stdin.isatty():
            _chat_at_terminal(connection.client, model, conversation, stats)
            return
        session = Session(connection.client, model, conversation, has_stats=stats)
        for line in _lines():
            session.turn(line)
            if not (session.has_answered or sys.stdout.isatty()):
                terminal.write("\n")  # a line for each turn


def _chat_at_terminal(
    client: Client, model: ChosenModel, conversation: Conversation, has_stats: bool
) -> None:
    """Hold a conversation with a person until Ctrl-D."""
    session = Session(client, model, conversation, has_stats=has_stats)
    session.greet()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from appliance.configuration.config import own_state_dir  # which no chat through a pipe needs

    with _history(own_state_dir(warn=terminal.passed_over) / "chat_history"):
        _converse(session)


class Command(NamedTuple):
    """What can be typed after a slash."""

    takes: str
    does: str
    """Empty for another word for the same."""
    act: Callable[[str], str]


class Session:
    """A conversation with the daemon, and the commands that are typed in between."""

    def __init__(
        self, client: Client, model: ChosenModel, conversation: Conversation, *, has_stats: bool
    ) -> None:
        self._client = client
        self._model = model
        self._conversation = conversation
        self._has_stats = has_stats
        self._last = PrintedReply()
        self._commands: dict[str, Command] = {
            "help": Command("", "show this list", self._help),
            "reset": Command("", "forget what was said; settings stay", self._reset),
            "system": Command("[TEXT]", "give instructions to the model, or none", self._system),
            "set": Command("[NAME [VALUE]]", "show settings, change one, or unset it", self._set),
            "save": Command("FILE", "write the conversation to a file", self._save),
            "load": Command("FILE", "go on with a conversation that was saved", self._load),
            "stats": Command("", "show the timings of the last reply", self._stats),
            "retry": Command("", "have the last question answered again", self._retry),
            "exit": Command("", "leave, as Ctrl-D does; quit and bye, too", self._exit),
            "quit": Command("", "", self._exit),
            "bye": Command("", "", self._exit),
        }

    @property
    def has_answered(self) -> bool:
        """Whether the last turn has brought a word."""
        return bool(self._last.text)

    def greet(self) -> None:
        """Say who answers, how replies are sampled, and what else there is to know."""
        shown = ", ".join(self._setting(name) for name in ("temperature", "top_p"))
        model = printable(self._model.about["id"])
        terminal.note(f"{model}: {shown}; /set changes settings, /help lists all")

    def turn(self, text: str) -> None:
        """Say something, and print the answer as far as it comes.

        Raises:
            ClientError: there is no answer, or only a part; that part stays in the conversation.
            KeyboardInterrupt: likewise, by the person.
        """
        self._conversation.say(text)
        self._answer()

    def command(self, line: str) -> None:
        """Carry out `/name argument`.

        Raises:
            Refused: it cannot be.
            EOFError: it was /exit.
        """
        name, _, argument = line.removeprefix("/").partition(" ")
        if name not in self._commands:
            meant = nearest(name, self._commands)
            hint = f"/{meant} is near; /help lists all" if meant else "/help lists them"
            raise Refused(f"no command /{name}", hint=hint)
        if answer := self._commands[name].act(argument.strip()):
            terminal.note(answer)

    def _answer(self) -> None:
        self._last = PrintedReply()
        try:
            content = body(self._model, self._conversation.settings)
            content["messages"] = self._conversation.messages
            stream(self._client, "/v1/chat/completions", content, self._last)
        finally:
            self._conversation.answer(self._last.text)
        if self._has_stats:
            print_stats(self._client, self._last)

    def _help(self, argument: str) -> str:
        shown = [
            (f"/{name} {command.takes}".rstrip(), command.does)
            for name, command in self._commands.items()
            if command.does
        ]
        shown += [(QUOTES, "begins and ends a text of several lines")]
        shown += [("Ctrl-C", "ends a reply or a line, and never the chat")]
        width = max(len(word) for word, _ in shown)
        return "\n".join(f"{word:<{width}}  {does}" for word, does in shown)

    def _reset(self, argument: str) -> str:
        self._conversation.reset()
        return "forgotten"

    def _system(self, argument: str) -> str:
        self._conversation.system = argument or None
        return "system message set" if argument else "no system message"

    def _set(self, argument: str) -> str:
        name, _, value = argument.partition(" ")
        if name:
            self._conversation.set(name, value.strip())
        return "\n".join(self._setting(each) for each in ([name] if name else SETTINGS))

    def _setting(self, name: str) -> str:
        """A setting's value in force, and where that comes from."""
        chosen = self._conversation.settings.get(name)
        if chosen is not None:
            return f"{name} {printable(chosen)} (set here)"
        if name in UNSET:
            return f"{name} {UNSET[name]}"
        if name in self._model.sampling:
            return f"{name} {self._model.sampling[name]:g} (default)"
        own = (self._model.about.get("sampling") or {}).get(name)
        if own is None:
            return f"{name} (the daemon does not say)"
        return f"{name} {own['value']:g} ({'model' if own['source'] == 'model' else 'default'})"

    def _save(self, argument: str) -> str:
        if not argument:
            raise Refused("say where: /save FILE")
        return f"saved to {printable(self._conversation.save(argument))}"

    def _load(self, argument: str) -> str:
        if not argument:
            raise Refused("say from where: /load FILE")
        self._conversation.load(argument)
        return things(len(self._conversation.turns), "message")

    def _stats(self, argument: str) -> str:
        if self._last.request_id is None:
            raise Refused("there is no reply yet")
        print_stats(self._client, self._last)
        return ""

    def _retry(self, argument: str) -> str:
        self._conversation.retry()
        self._answer()
        return ""

    def _exit(self, argument: str) -> str:
        raise EOFError


def _converse(session: Session) -> None:
    """Turns and commands until Ctrl-D or /exit; what goes wrong is said, and the chat goes on."""
    while True:
        try:
            text = _read_text()
            if text.startswith("/"):
                session.command(text)
            elif text.strip():
                session.turn(text)
        except EOFError:
            return
        except KeyboardInterrupt:
            terminal.note("" if sys.stdout.isatty() else "interrupted")
        except (ClientError, Refused) as error:
            terminal.report(error)


def _read_text() -> str:
    """A line, or what stands between two marks of three quotes.

    Raises:
        Refused: it is not UTF-8.
    """
    text = _read_line(PROMPT)
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + _read_line(PROMPT_INSIDE)
        text = text.rstrip().removesuffix(QUOTES).strip("\n")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused("that was not UTF-8") from error
    return text


def _read_line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)  # stdout is the model's alone
    sys.stderr.flush()
    return input()


def _lines() -> Iterator[str]:
    """The turns on stdin; empty lines are none."""
    for line in sys.stdin.buffer:
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"stdin is not UTF-8: {error}") from error
        if text.strip():
            yield text


@contextmanager
def _history(path: Path) -> Iterator[None]:
    """Lines typed before are at hand, and those typed now will be; for their owner alone."""
    import readline  # gives input() its line editing

    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        readline.read_history_file(path)
    except OSError as error:
        terminal.note(f"penstock: no history: {printable(error)}")
        yield
        return
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        readline.write_history_file(path)
        path.chmod(0o600)
