"""Read the items of a response's conversation: messages, reasoning, calls and their outputs.

Invariant: only the newest item is refused; what no model reads is left out and named.
"""

from __future__ import annotations

from typing import Any

from appliance.api.core.chat_messages import Conversation, read_message, speaker, written
from appliance.api.core.message_parts import call_of, thought_in
from appliance.api.core.offered_tools import Offer
from appliance.api.responses import fields as bodies
from appliance.json.fields import Json, check, invalid_type, invalid_value, required, unsupported

_CALLS = ("function_call", "custom_tool_call")
_OWN = ("type", "id", "status", "phase")
"""Fields of messages that say nothing to a model."""


class ItemReader:
    """Collects a conversation out of items.

    Args:
        offer: the tools of the request, by which the model knows earlier calls.
    """

    def __init__(self, offer: Offer) -> None:
        self.conversation = Conversation()
        self._offer = offer
        self._thoughts: list[str] = []
        """Reasoning that belongs to the answer behind it."""

    def ended(self) -> Conversation:
        """Return the conversation, when all items are read."""
        self._say_thought()
        return self.conversation

    def read(self, value: Any, where: str, *, is_newest: bool = False) -> None:
        """Add an item.

        Raises:
            RequestError: it is the newest, and cannot be read.
        """
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(kind, str | None):
            self._refuse(is_newest, invalid_type(where, "an object", value))
            self.conversation.leave_out(where)
        elif kind == "reasoning":
            self._think(value, where)
        elif kind in _CALLS:
            self._call(value, where, is_newest=is_newest)
        elif kind is not None and kind.endswith("_output"):
            self._output(value, where, is_newest=is_newest)
        elif kind == "message" or (kind is None and value.keys() != {"id"}):
            self._message(value, where, is_newest=is_newest)
        else:
            self._other(value, kind or "item_reference", where, is_newest=is_newest)

    @staticmethod
    def _refuse(is_newest: bool, error: Exception) -> None:
        if is_newest:
            raise error

    def _message(self, value: Json, where: str, *, is_newest: bool) -> None:
        if is_newest:
            role = check(value, bodies.Item, where).role
            if role is None:
                raise required(f"{where}.role")
            if value.get("content") is None and role != "assistant":
                raise required(f"{where}.content")
        who = speaker(value)
        if who != "assistant":
            self._say_thought()
        thought = self._taken()
        read_message(
            self.conversation, value, where, is_newest=is_newest, thought=thought, known=_OWN
        )

    def _think(self, value: Json, where: str) -> None:
        """Keep reasoning for the answer behind it; what is encrypted is not read."""
        text = thought_in(value.get("content")) or thought_in(value.get("summary"))
        if not text:
            self.conversation.leave_out(where)
        else:
            self._thoughts.append(text)

    def _taken(self) -> str:
        """Take the reasoning so far."""
        thought, self._thoughts = "\n".join(self._thoughts), []
        return thought

    def _say_thought(self) -> None:
        """Make a message of reasoning that no answer follows, as where a limit cut it off."""
        if thought := self._taken():
            self.conversation.say("assistant", "", "input", reasoning_content=thought)

    def _call(self, value: Json, where: str, *, is_newest: bool) -> None:
        """Add a call to the answer before it."""
        call = call_of({**value, "id": None})
        if call is None:
            self._refuse(is_newest, required(f"{where}.name"))
            self.conversation.leave_out(where)
            return
        told = self._offer.told_name(call.name, value.get("namespace"))
        written_call = written(call._replace(name=told))
        messages = self.conversation.messages
        if not messages or messages[-1]["role"] != "assistant" or self._thoughts:
            self.conversation.say("assistant", None, where, reasoning_content=self._taken())
        messages[-1].setdefault("tool_calls", []).append(written_call)

    def _output(self, value: Json, where: str, *, is_newest: bool) -> None:
        """Add what a tool gave; without a call's id, as Codex tells a goal, the user says it."""
        output, call_id = value.get("output"), value.get("call_id")
        if output is None:
            self._refuse(is_newest, required(f"{where}.output"))
        self._say_thought()
        is_result = isinstance(call_id, str)
        self.conversation.say(
            "tool" if is_result else "user",
            [output] if isinstance(output, dict) else output,
            f"{where}.output",
            tool_call_id=call_id if is_result else None,
        )

    def _other(self, value: Json, kind: str, where: str, *, is_newest: bool) -> None:
        """Keep the words of an item of another server; the rest of it is left out."""
        if is_newest and kind == "item_reference":
            what = f"names no item that is kept: `{str(value.get('id'))[:200]}`"
            raise invalid_value(f"{where}.id", what)
        if is_newest and not kind.endswith(("_call", "_request", "_response", "_list_tools")):
            raise unsupported(f"{where}.type", "is not supported; messages and function calls are")
        self.conversation.keep_readable(value, where)
