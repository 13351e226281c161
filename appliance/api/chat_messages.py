"""Read a conversation, in the parts of any API, into plain messages for templates.

The past of a conversation is never refused, whichever server wrote it. Its texts are kept; what no
model here reads is left out and named in x-penstock-ignored. Only the newest message is refused, if
a part of it would be lost.

Invariant: every content is a string, every call's arguments are an object; an error names the
place, like `messages[3].content[0].text`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from appliance.api import openai_bodies as chats
from appliance.api.message_parts import (
    Call,
    Media,
    Part,
    Result,
    Text,
    Thought,
    Unread,
    call_of,
    part_of,
    thought_in,
)
from appliance.json_fields import (
    Json,
    check,
    invalid_type,
    invalid_value,
    required,
    undeclared,
    unsupported,
)

Message = dict[str, Any]

_OLDER = {"developer": "system", "function": "tool"}
"""Roles in OpenAI's words, and in the words that open models were trained with."""
LEFT_OUT = " was left out: this model reads text]"
"""The end of a note in the place of an earlier image or file."""
MAX_PARTS = 1024
"""Maximum of parts of the newest message's content."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
"""The names that servers have for what a model thought."""


def named(where: str) -> str:
    """Write a place as x-penstock-ignored names it: `messages.3.content.0`."""
    return where.replace("[", ".").replace("]", "")


class Conversation:
    """Collects messages, and what was left out of them."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.places: list[str] = []
        """Where the client has each message's words."""
        self.marks: list[tuple[int, int]] = []
        """Where other chats may part: a message, and characters of its content up to the mark."""
        self.left_out: list[str] = []

    def say(
        self,
        role: str,
        content: Any,
        place: str,
        *,
        is_newest: bool = False,
        is_error: bool = False,
        **own: Any,
    ) -> Message:
        """Add a message with what its content holds; results of tools get messages of their own.

        Args:
            place: the content's, for errors.
            is_newest: nothing answers it yet; so it may be refused.
            is_error: the text tells a failure.
            own: further fields of the message.

        Raises:
            RequestError: the newest message has something that would be lost.
        """
        role = _OLDER.get(role, role)
        is_answer, num_before = role == "assistant", len(self.messages)
        texts: list[Text] = []
        thoughts: list[str] = []
        calls: list[Json] = []
        for part, at in self._parts(content, place, is_newest=is_newest):
            match part:
                case Text():
                    texts.append(part)
                case Thought() if is_answer:
                    thoughts.append(part.text)
                    if not part.text:
                        self.leave_out(at)
                case Call() if is_answer:
                    calls.append(written(part))
                case Result() if not is_answer and role != "tool":
                    if texts:
                        self._add(role, texts, place)
                        texts = []
                    self._result(part, at)
                case Result():
                    texts += self._texts(part.content, at)
                case _:
                    is_asked = is_newest and role == "user"
                    texts += self._other(part, at, is_asked=is_asked)
        if is_error:
            first = texts[0] if texts else Text("")
            texts[:1] = [first._replace(text=f"Error: {first.text}")]
        own["tool_calls"] = [*calls, *(own.get("tool_calls") or ())]
        if not own.get("reasoning_content"):
            own["reasoning_content"] = "\n".join(filter(None, thoughts))
        fields = {key: value for key, value in own.items() if value}
        if texts or fields or is_answer or len(self.messages) == num_before:
            self._add(role, texts, place, fields)
        return self.messages[-1]

    def leave_out_fields(self, value: Json, names: Iterable[str], where: str) -> None:
        """Note the fields of a message that are not read and are not empty."""
        for name in names:
            if value[name]:
                self.leave_out(f"{where}.{name}")

    def leave_out(self, where: str) -> None:
        """Note that something has no effect, by its place."""
        self.left_out.append(named(where))

    def calls(self, values: Any, where: str) -> list[Json]:
        """Read an answer's calls; one that names no function is left out."""
        found = []
        for index, value in enumerate(values if isinstance(values, list) else [values]):
            call = call_of(value)
            if call is None:
                self.leave_out(f"{where}[{index}]" if isinstance(values, list) else where)
            else:
                found.append(written(call))
        return found

    def thoughts(self, values: Mapping[str, Any], where: str) -> str:
        """Read what a model thought, under the first of its names that has a text."""
        for name in THOUGHTS:
            value = values.get(name)
            if text := thought_in(value):
                return text
            if value:
                self.leave_out(f"{where}.{name}")
        return ""

    def _add(
        self, role: str, texts: list[Text], place: str, fields: Mapping[str, Any] | None = None
    ) -> None:
        # each text with the line break behind it
        ends = accumulate(len(one.text) + 1 for one in texts)
        index = len(self.messages)
        self.marks += [
            (index, end - 1) for one, end in zip(texts, ends, strict=True) if one.is_marked
        ]
        content = "\n".join(one.text for one in texts)
        self.messages.append({"role": role, "content": content, **(fields or {})})
        self.places.append(place)

    def _parts(self, content: Any, where: str, *, is_newest: bool) -> list[tuple[Part, str]]:
        """List a content's parts with their places.

        Raises:
            RequestError: one of the newest message is not what its type says.
        """
        if content is None:
            return []
        if isinstance(content, str):
            return [(Text(content), where)]
        if not isinstance(content, list):
            if is_newest:
                raise invalid_type(where, "a string or a list", content)
            return [(Text(msgspec.json.encode(content).decode()), where)]
        if is_newest and len(content) > MAX_PARTS:
            raise invalid_value(where, f"must have at most {MAX_PARTS} entries")
        found = [(part_of(one), f"{where}[{index}]") for index, one in enumerate(content)]
        for (part, at), value in zip(found, content, strict=True):
            if not is_newest or not isinstance(part, Unread):
                continue
            if not isinstance(value, dict):
                raise invalid_type(at, "an object", value)
            if part.missing and value.get(part.missing) is None:
                raise required(f"{at}.{part.missing}")
            if part.missing:
                raise invalid_type(f"{at}.{part.missing}", "a string", value[part.missing])
        return found

    def _texts(self, content: Any, where: str) -> list[Text]:
        """Read the texts of a result, with notes in the places of images."""
        texts: list[Text] = []
        for part, at in self._parts(content, where, is_newest=False):
            if isinstance(part, Text):
                texts.append(part)
            elif isinstance(part, Result):
                texts += self._texts(part.content, at)
            else:
                texts += self._other(part, at, is_asked=False)
        return texts

    def _result(self, part: Result, where: str) -> None:
        """Add what a tool gave as a message of its own; a failure is said before it."""
        self.say(
            "tool",
            part.content,
            f"{where}.content",
            is_error=part.is_error,
            tool_call_id=part.call_id,
        )
        if part.is_marked:
            mark = (len(self.messages) - 1, len(self.messages[-1]["content"]))
            if mark not in self.marks:
                self.marks.append(mark)

    def _other(self, part: Part, where: str, *, is_asked: bool) -> list[Text]:
        """Write a note in the place of media, keep words of unknown parts, and name both."""
        if isinstance(part, Media):
            if is_asked:  # so that the client hears of it once, and can continue
                kind = f"`{part.kind}` is not supported: this model reads text"
                raise unsupported(f"{where}.type", kind)
            self.leave_out(where)
            return [Text(f"[{part.kind}{LEFT_OUT}")]
        if is_asked:
            raise unsupported(f"{where}.type", "is not supported in the newest message; text is")
        self.leave_out(where)
        kept = part.text if isinstance(part, Unread) else ""
        return [Text(kept)] if kept else []


def written(call: Call) -> Json:
    """Write a call as templates read it."""
    function = {"name": call.name, "arguments": call.arguments}
    told = {"type": "function", "function": function}
    return told if call.call_id is None else {"id": call.call_id, **told}


def read_messages(messages: Sequence[Any]) -> Conversation:
    """Bring a chat into the form that templates read, in the order given."""
    conversation, last = Conversation(), len(messages) - 1
    for index, value in enumerate(messages):
        where = f"messages[{index}]"
        said = check(value, chats.ChatMessage, where)
        _say(conversation, value, said, where, is_newest=index == last)
    return conversation


def _say(
    conversation: Conversation,
    value: Json,
    said: chats.ChatMessage,
    where: str,
    *,
    is_newest: bool,
) -> None:
    is_answer = said.role == "assistant"
    if is_newest and said.content is None and said.role not in ("assistant", "tool", "function"):
        raise required(f"{where}.content")
    called = said.tool_calls or said.function_call  # the second is OpenAI's older form
    name = "tool_calls" if said.tool_calls else "function_call"
    if called and not is_answer:
        if is_newest:
            raise invalid_value(f"{where}.{name}", "is for the role assistant only")
        conversation.leave_out(f"{where}.{name}")
    content = said.content
    if is_answer and said.refusal and not content:
        content = said.refusal
    unread = (*undeclared(value, chats.ChatMessage), *(("audio",) if said.audio else ()))
    conversation.leave_out_fields(value, unread, where)
    conversation.say(
        said.role,
        content,
        f"{where}.content",
        is_newest=is_newest and not is_answer,
        name=said.name,
        tool_call_id=said.tool_call_id,
        tool_calls=conversation.calls(called, f"{where}.{name}") if called and is_answer else [],
        reasoning_content=conversation.thoughts(value, where) if is_answer else "",
    )
