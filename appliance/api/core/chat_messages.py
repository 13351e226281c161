"""Read a conversation, in the parts of any API, into plain messages for templates.

The past of a conversation is never refused, whichever server wrote it. Its texts are kept; what no
model here reads is left out and named in x-penstock-ignored. Only the newest message is refused, if
a part of it would be lost.

Invariant: every content is a string, every call's arguments are an object; an error names the
place, like `messages[3].content[0].text`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import msgspec

from appliance.api.core import fields as chats
from appliance.api.core.message_parts import (
    Call,
    Media,
    Part,
    Result,
    Text,
    Thought,
    Unread,
    call_of,
    id_of,
    part_of,
    thought_in,
)
from appliance.json.fields import Json, check, invalid_type, invalid_value, required, unsupported

Message = dict[str, Any]


class Newest(Protocol):
    """The newest message, as each API declares it."""

    @property
    def role(self) -> str:
        """Name the speaker."""

    @property
    def content(self) -> Any:
        """Return its text or parts; None: it has none."""


SPEAKERS = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "model", "ai"), "assistant"),
    **dict.fromkeys(("tool", "function", "ipython"), "tool"),
}
"""Roles of any API, in the words that open models were trained with."""
LEFT_OUT = " was left out: this model reads text]"
"""The end of a note in the place of an earlier image or file."""
MAX_PARTS = 1024
"""Maximum of parts of the newest message's content."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")
"""The names that servers have for what a model thought."""
_FIELDS = {"role", "content", "parts", "name", "tool_name", "tool_call_id", "images", "is_error"}
_FIELDS_OF_ANSWERS = _FIELDS | {"tool_calls", "function_call", "refusal", *THOUGHTS}
"""What is read of a message, whichever API it was written for."""


def named(where: str) -> str:
    """Write a place as x-penstock-ignored names it: `messages.3.content.0`."""
    return where.replace("[", ".").replace("]", "")


class Conversation:
    """Collects messages, and what was left out of them."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.places: list[str] = []
        """Where the client has each message's words."""
        self.marks: dict[tuple[int, int], None] = {}
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
        role = SPEAKERS.get(role, role)
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

    def keep_readable(self, value: Any, where: str) -> None:
        """Keep what can be read of a value that is no message; the rest is named."""
        part = part_of(value)
        match part:
            case Call():
                self.say("assistant", None, where, tool_calls=[written(part)])
            case Result():
                self._result(part, where)
            case _:
                self.leave_out(where)
                if isinstance(part, Text | Unread) and part.text:
                    is_said = isinstance(value, dict) and "role" in value
                    self.say("user" if is_said else "assistant", part.text, where)

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
        places = ((index, end - 1) for one, end in zip(texts, ends, strict=True) if one.is_marked)
        self.marks |= dict.fromkeys(places)
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
            self.marks[len(self.messages) - 1, len(self.messages[-1]["content"])] = None

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


def read_messages(
    messages: Sequence[Any],
    kind: type[Newest] = chats.ChatMessage,
    *,
    begun: Conversation | None = None,
    may_be_empty: bool = False,
) -> Conversation:
    """Bring a chat into the form that templates read, in the order given.

    Args:
        kind: what the newest message must be.
        begun: what the messages come behind.
        may_be_empty: the newest message needs no content.

    Raises:
        RequestError: the newest message is not of that kind, or something of it would be lost.
    """
    conversation, last = begun or Conversation(), len(messages) - 1
    for index, value in enumerate(messages):
        where = f"messages[{index}]"
        if index == last:
            _check_newest(value, check(value, kind, where), where, may_be_empty=may_be_empty)
        read_message(conversation, value, where, is_newest=index == last)
    return conversation


def _check_newest(value: Json, said: Newest, where: str, *, may_be_empty: bool) -> None:
    """Refuse a message that has nothing to say, or what only others may have."""
    if said.role in ("assistant", "tool", "function"):
        may_be_empty = True
    if said.content is None and not may_be_empty:
        raise required(f"{where}.content")
    for name in ("tool_calls", "function_call"):
        if value.get(name) and said.role != "assistant":
            raise invalid_value(f"{where}.{name}", "is for the role assistant only")
    if value.get("images") and said.role == "user":
        raise unsupported(f"{where}.images", "are not supported: this model reads text")


def speaker(value: Any) -> str | None:
    """Tell the role of a message in the words of templates; None: it has none of them."""
    role = value.get("role") if isinstance(value, dict) else None
    return SPEAKERS.get(role.lower()) if isinstance(role, str) else None


def read_message(
    conversation: Conversation,
    value: Any,
    where: str,
    *,
    is_newest: bool = False,
    thought: str = "",
    known: Container[str] = (),
) -> None:
    """Add a message as any API writes it; of what is no message, what can be read.

    Args:
        thought: what was thought before it.
        known: further fields that have no effect and need no note.

    Raises:
        RequestError: it is the newest, and something of it would be lost.
    """
    role = speaker(value)
    if role is None:
        conversation.keep_readable(value, where)
        return
    is_answer = role == "assistant"
    content, place = value.get("content"), f"{where}.content"
    if content is None and value.get("parts"):
        content, place = value["parts"], f"{where}.parts"
    if is_answer and not content:
        content = value.get("refusal") or _transcript(value.get("audio"))
    if images := value.get("images"):
        texts = content if isinstance(content, list) else [content]
        images = images if isinstance(images, list) else [images]
        content = [*({"type": "image"} for _ in images), *filter(None, texts)]
    name = "tool_calls" if value.get("tool_calls") else "function_call"  # OpenAI's older form
    calls = (
        conversation.calls(value[name], f"{where}.{name}") if is_answer and value.get(name) else []
    )
    read = _FIELDS_OF_ANSWERS if is_answer else _FIELDS
    for field, one in value.items():
        if one and field not in read and field not in known:
            conversation.leave_out(f"{where}.{field}")
    conversation.say(
        role,
        content,
        place,
        is_newest=is_newest and not is_answer,
        is_error=role == "tool" and bool(value.get("is_error")),
        name=_text_of(value.get("tool_name") or value.get("name")),
        tool_call_id=id_of(value.get("tool_call_id")),
        tool_calls=calls,
        reasoning_content=thought or (conversation.thoughts(value, where) if is_answer else ""),
    )


def _transcript(audio: Any) -> Any:
    """Read the words of a spoken answer."""
    return audio.get("transcript") if isinstance(audio, dict) else None


def _text_of(value: Any) -> str | None:
    return value if isinstance(value, str) else None
