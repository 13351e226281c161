"""Find where other chats may part from one: at its first turn, and at its client's cache marks.

A model with recurrent layers continues a cached prefix only where a record of its states was
kept. It is worth keeping one behind a system prompt with its tools, and behind a document that
several questions are asked about.

Owns: which places these are, in tokens.
Invariant: a place is a number of tokens that another prompt really shares with this one.
Never: decides what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from appliance.api.ask import Chat
from appliance.formats.tool_format import OutputFormat
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
    request, and tokenizing a long chat again for them costs as much as the chat itself.

    Args:
        chat: as it was asked.
        token_ids: its prompt.
        tokenizer: has the template, by which the other chats are rendered as well.
        output_format: of the model.
    """
    messages, last = chat.messages, len(chat.messages) - 1
    first = chat.first_turn
    marks = [mark for mark in chat.marks if mark[0] <= first or mark[0] == last]
    found = []
    for index, num_chars in dict.fromkeys([(first, 0), *marks[-MAX_MARKS:]]):
        content = messages[index]["content"]
        if index == last and num_chars == len(content):
            continue  # the prompt's end, where a record is kept in any case
        other = {**messages[index], "content": content[:num_chars] + _OTHER_WORDS}
        try:
            parted = replace(chat, messages=[*messages[:index], other])
            text = parted.render(tokenizer, output_format, is_real=False).text
        except RequestError:  # the template refuses it
            continue
        num_tokens = _num_common(token_ids, tokenizer.encode(text, add_special_tokens=False))
        if num_tokens >= LEAST_TOKENS:
            found.append(num_tokens)
    return tuple(dict.fromkeys(found))


def _num_common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
