"""Hold a chat's messages and settings.

Invariant: messages alternate between user and model, after at most one system message; a refused
command changes nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from appliance.cli.reply import RANGES
from appliance.configuration.setting_kinds import is_meant
from engine.errors import PenstockError

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
"""The settings of `/set`, as the API's fields."""
UNSET: Mapping[str, str] = {
    "max_tokens": "until the context is full",
    "seed": "another for each reply; the log keeps it",
    "stop": "none",
    "presence_penalty": "0 (default)",
    "frequency_penalty": "0 (default)",
}
"""The meaning of a setting without a value of the chat or the model."""


class Refused(PenstockError):
    """A command cannot be carried out."""


class Conversation:
    """Hold a chat up to now.

    Args:
        settings: fields of the request's body, beside the messages.
        system: instructions to the model.
    """

    def __init__(self, settings: dict[str, Any], system: str | None = None) -> None:
        self.settings = settings
        self.system = system
        self.turns: list[Message] = []
        self._files: set[Path] = set()
        """Files of this conversation, which save() may replace."""

    @property
    def messages(self) -> list[Message]:
        """Return the messages that the model reads for its next turn."""
        instructions = [{"role": "system", "content": self.system}] if self.system else []
        return [*instructions, *self.turns]

    def say(self, text: str) -> None:
        """Add the user's turn."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add the model's turn; an empty one removes the user's."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def reset(self) -> None:
        """Forget what was said; settings and instructions stay."""
        self.turns.clear()

    def retry(self) -> None:
        """Remove the last answer.

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
            Refused: it cannot be written, or belongs to something else.
        """
        path = Path(name).expanduser()
        content = {"settings": self.settings, "system": self.system, "messages": self.turns}
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if path in self._files else os.O_EXCL)
        try:
            with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
                json.dump({"schema": "penstock.chat/1", **content}, file, indent=2)
        except (OSError, ValueError) as error:
            raise Refused(f"cannot write it: {_why(error)}", where=str(path)) from error
        self._files.add(path)
        return path

    def load(self, name: str) -> None:
        """Continue a saved conversation.

        Raises:
            Refused: it cannot be read, or is not a conversation.
        """
        path = Path(name).expanduser()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise Refused(f"cannot read it: {_why(error)}", where=str(path)) from error
        if not _is_conversation(content):
            raise Refused("not a saved chat", where=str(path))
        self.settings = {k: v for k, v in content["settings"].items() if k in SETTINGS}
        self.system = content["system"]
        self.turns = [
            {"role": role, "content": message["content"]}
            for role, message in _in_turns(content["messages"])
        ]
        self._files.add(path)


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
    """Pair each message with the role that must have written it."""
    return [("user" if i % 2 == 0 else "assistant", msg) for i, msg in enumerate(messages)]


def _why(error: Exception) -> object:
    """Leave out the path of a system's error: the message names it already."""
    return getattr(error, "strerror", None) or error
