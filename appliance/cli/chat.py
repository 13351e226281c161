"""Define chat: a conversation with the model, with commands.

Invariant: Ctrl-C ends a reply or a line, never the chat; Ctrl-D leaves it. From a pipe every line
is a turn and never a command.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import typer

from appliance.cli import terminal
from appliance.cli.connection import ChosenModel, Connection, load, model_entries
from appliance.cli.conversation import SETTINGS, UNSET, Conversation, Refused
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
from appliance.client.calls import Client, ClientError
from appliance.configuration.setting_kinds import nearest
from appliance.hub.names import STARTER_FOLDER
from appliance.observe.frame.figures import things
from engine.printable import printable

HISTORY_LINES = 1000
STARTER_HINT = (
    "This built-in model only answers from a document in your message. "
    "For another one stop the daemon, and start it with --model NAME."
)
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
    from appliance.configuration.client_settings import (
        own_state_dir,  # which no chat through a pipe needs
    )

    with _history(own_state_dir(warn=terminal.passed_over) / "chat_history"):
        _converse(session)


class Command(NamedTuple):
    """A command after a slash."""

    takes: str
    does: str
    """Its description; empty for a synonym."""
    act: Callable[[str], str]


class Session:
    """A conversation with the daemon, with typed commands in between."""

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
            "load": Command("FILE", "continue a saved conversation", self._load),
            "model": Command("[NAME]", "show the models, or talk with another", self._use),
            "stats": Command("", "show the timings of the last reply", self._stats),
            "retry": Command("", "have the last question answered again", self._retry),
            "exit": Command("", "leave, as Ctrl-D does; quit and bye, too", self._exit),
            "?": Command("", "", self._help),
            "clear": Command("", "", self._reset),
            "quit": Command("", "", self._exit),
            "bye": Command("", "", self._exit),
        }

    @property
    def has_answered(self) -> bool:
        """Whether the last turn has brought a word."""
        return bool(self._last.text)

    def greet(self) -> None:
        """Print the model's name, the sampling settings and hints."""
        shown = ", ".join(self._setting(name) for name in ("temperature", "top_p"))
        model = printable(self._model.about["id"])
        terminal.note(f"{model}: {shown}; /set changes settings, /help lists all")
        if model == STARTER_FOLDER.name:
            terminal.note(STARTER_HINT)

    def turn(self, text: str) -> None:
        """Say something, and print the answer as it comes.

        Raises:
            ClientError: no answer, or only a part; that part stays in the conversation.
            KeyboardInterrupt: the user interrupted it; the part stays, too.
        """
        self._conversation.say(text)
        self._answer()

    def command(self, line: str) -> None:
        """Carry out `/name argument`.

        Raises:
            Refused: it is impossible.
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
        """Describe a setting's value in force, and its source."""
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

    def _use(self, argument: str) -> str:
        known = model_entries(self._client, self._client.rows("/v1/models"))
        listed = [model for model in known if "kind" not in model]  # which write no text
        names = [model["id"] for model in listed]
        if not argument:
            used = self._model.name or next(iter(names), "")
            return "\n".join(f"{'*' if name == used else ' '} {printable(name)}" for name in names)
        if argument not in names:
            raise Refused(f"no model {argument!r}", hint="/model shows their names")
        about = listed[names.index(argument)]
        if about.get("is_loaded") is False:
            about = load(self._client, argument, names[0])
        self._model = ChosenModel(argument, about)
        return f"talking with {printable(argument)}"

    def _save(self, argument: str) -> str:
        if not argument:
            raise Refused("say where: /save FILE")
        return f"saved to {printable(self._conversation.save(argument))}"

    def _load(self, argument: str) -> str:
        if not argument:
            raise Refused("name the file: /load FILE")
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
    """Run turns and commands until Ctrl-D or /exit; print errors and continue."""
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
            if getattr(error, "code", "") == "context_length_exceeded":
                error.hint = "/reset begins a new conversation"
            terminal.report(error)


def _read_text() -> str:
    """Read a line, or the text between two marks of three quotes.

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
    is_terminal = sys.stdout.isatty()
    if not is_terminal:
        sys.stderr.write(prompt)  # stdout is the model's alone
        sys.stderr.flush()
    try:
        return input(prompt if is_terminal else "")
    except EOFError:
        terminal.note("")  # Ctrl-D leaves the cursor behind the prompt
        raise


def _lines() -> Iterator[str]:
    """Yield the turns on stdin, without empty lines."""
    for line in sys.stdin.buffer:
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"stdin is not UTF-8: {error}") from error
        if text.strip():
            yield text


@contextmanager
def _history(path: Path) -> Iterator[None]:
    """Load the history of typed lines, and save it at the end, readable only by its owner."""
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
