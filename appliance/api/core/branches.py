"""Find where other chats may part from one: at its first turn, and at its client's cache marks.

A model with recurrent layers continues a cached prefix only where a record of its states was
kept. It is worth keeping one behind a system prompt with its tools, and behind a document that
several questions are asked about.

Invariant: a place is a number of tokens that another prompt really shares with this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from appliance.api.core.ask import Chat
from appliance.api.formats.format_choice import OutputFormat
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer

MAX_MARKS = 4
"""The maximum of Anthropic's API; of more marks the last ones count."""
LEAST_TOKENS = 64
"""Computing fewer takes about as long as the step that a record there adds."""
_OTHER_WORDS = "~"


def branches(
    chat: Chat, token_ids: Sequence[int], tokenizer: Tokenizer, output_format: OutputFormat
) -> tuple[int, ...]:
    """Count the tokens that a chat's prompt shares with chats that part from it at each place.

    Marks between the first turn and the last do not count: each was in the last turn of an earlier
    request, and tokenizing a long chat again for them costs as much as the chat itself. A turn that
    brings results of tools is several messages.

    Args:
        tokenizer: has the template, by which the other chats are rendered as well.
    """
    found = []
    for parted in [_parted(chat, chat.first_turn, 0), *_at_marks(chat)[-MAX_MARKS:]]:
        try:
            text = parted.render(tokenizer, output_format, is_real=False).text
        except RequestError as error:
            if error.code == "invalid_value":  # the template refuses it
                continue
            break
        num_tokens = _num_common(token_ids, tokenizer.encode(text, add_special_tokens=False))
        if num_tokens >= LEAST_TOKENS:
            found.append(num_tokens)
    return tuple(dict.fromkeys(found))


def _at_marks(chat: Chat) -> list[Chat]:
    """Make chats that part from one at its cache marks: of tools, then of messages."""
    messages, first, tools = chat.messages, chat.first_turn, chat.tools
    parted = []
    for count in () if tools is None else tools.marked:
        other = _parted(chat, first, 0)
        if tools is not None and count < len(tools.definitions):
            fewer = replace(tools, definitions=tools.definitions[:count])
            parted.append(replace(other, tools=fewer))
        elif first:  # behind the last one other instructions come
            instructed = _parted(chat, 0, 0).messages
            parted.append(replace(other, messages=[*instructed, *other.messages[first:]]))
    answers = (i for i, one in enumerate(messages) if one["role"] == "assistant")
    last_turn = max(answers, default=-1) + 1
    end = (len(messages) - 1, len(messages[-1]["content"]))
    places = [mark for mark in chat.marks if not first < mark[0] < last_turn and mark != end]
    return parted + [_parted(chat, *place) for place in places[-MAX_MARKS:]]


def _parted(chat: Chat, index: int, num_chars: int) -> Chat:
    """Make a chat that has other words behind a place in a message."""
    message = chat.messages[index]
    other = {**message, "content": message["content"][:num_chars] + _OTHER_WORDS}
    return replace(chat, messages=[*chat.messages[:index], other])


def _num_common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
