"""Render messages into a prompt with the model's chat template, in the process for strangers' text.

Invariant: renders like transformers for equal templates and messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import CheckpointError, Overran, RequestError, Unreadable
from engine.text.reading import READER

Shape = frozenset[tuple[str, str]]
"""The kinds of messages that follow each other in a conversation."""

TOO_COSTLY = "too_costly"
"""The code of a refusal of what takes too much time or memory to read."""
_CONTINUE = "CONTINUE_FROM_HERE_TAG "
"""Marks the end of a message to continue; its space shows whether the template keeps spaces."""


class ChatTemplate:
    """Hold a model's Jinja chat template.

    Args:
        tool_source: the template for conversations with tools, if it differs.

    Raises:
        CheckpointError: it is broken.
        Unavailable: nothing reads it.
    """

    def __init__(self, source: str, where: str, tool_source: str | None = None) -> None:
        self.where = where
        """The file that it was read from."""
        self.tool_source = source if tool_source is None else tool_source
        """The template for conversations with tools."""
        self._source = source
        try:
            takes_tools = READER.read("takes_tools", source, self.tool_source)
        except Unreadable as error:
            what = f"the chat template is broken: {error.what}"
            hint = "correct it there, or report it to the model's publisher"
            raise CheckpointError(what, where=where, hint=hint) from error
        self.takes_tools = bool(takes_tools)
        """False: it ignores tools."""
        self.known_forms: dict[Shape, int] = {}
        """The accepted form of conversations by shape, where several were offered."""

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt of a conversation, up to the beginning or continuation of the answer.

        Args:
            messages: with strings as contents, or lists of parts of the type `text`.
            tools: OpenAI's definitions of functions.
            add_generation_prompt: end with the header of an assistant's message.
            continue_final_message: end within the last message instead of after it.
            variables: other variables of the template: special tokens, a client's switches.

        Raises:
            RequestError: the template refuses the messages, or takes too much for them.
        """
        if continue_final_message:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": _continued(last["content"])}]
        known = {
            "documents": None,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        source = self.tool_source if tools else self._source
        try:
            text = READER.read("render", source, known)
        except Overran as error:
            about = f"the model's chat template cannot be used with these messages: {error.what}"
            hint = "send less text, fewer messages or fewer tools, or ask another model"
            raise RequestError(about, code=TOO_COSTLY, param="messages", hint=hint) from error
        except Unreadable as error:
            raise _refusal(error.what) from error
        return _cut(text) if continue_final_message else text


def _continued(content: Any) -> Any:
    """Put the mark behind the text of a message, or of its last part."""
    if isinstance(content, str):
        return content + _CONTINUE
    return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE}]


def _cut(text: str) -> str:
    """Cut the text at the mark, trimming it if the template trims contents."""
    end = text.rfind(_CONTINUE.rstrip())
    if end < 0:
        raise _refusal("it leaves out the final message, which the reply continues")
    return text[:end] if text.startswith(_CONTINUE, end) else text[:end].rstrip()


def _refusal(why: str) -> RequestError:
    return RequestError(
        f"the model's chat template refuses these messages: {why}",
        code="invalid_value",
        param="messages",
    )
