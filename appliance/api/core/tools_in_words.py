"""Describe tools in words to a model whose chat template knows none.

A first message of the role system describes the functions and how to write a call; a client's own
system message comes before these words. A call that the assistant made stands behind its text; a
result is a message of the role user. docs/api.md has the same rule.

Invariant: earlier calls and results are written as the model must write its own calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any

Message = dict[str, Any]

_WORDS = """\
You can call functions. These are there, each with the JSON schema of its arguments:
<tools>
{definitions}
</tools>
To call one, write its name and arguments as JSON. Put them between these marks, nothing behind:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
The result comes in the next message between <tool_response> and </tool_response>. Call a function \
only if you need it; otherwise answer in words."""


def in_words(messages: list[Message], tools: list[dict[str, Any]] | None) -> list[Message]:
    """Write the conversation with its tools, calls and results as text."""
    plain: list[Message] = []
    for are_results, group in groupby(messages, key=lambda one: one["role"] == "tool"):
        spelled = [_spelled(one) for one in group]
        if are_results:
            spelled = [{**spelled[0], "content": "\n".join(one["content"] for one in spelled)}]
        plain += spelled
    if not tools:
        return plain
    words = _WORDS.format(definitions="\n".join(map(_written, tools)))
    if plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{words}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": words}, *plain]


def needs_words(messages: Iterable[Message]) -> bool:
    """Tell whether a conversation has calls or results in it."""
    return any(one["role"] == "tool" or one.get("tool_calls") for one in messages)


def _spelled(message: Message) -> Message:
    if message["role"] == "tool":
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"<tool_call>\n{_call(one)}\n</tool_call>" for one in calls]
    content = "\n".join([message["content"], *written] if message["content"] else written)
    return {k: v for k, v in message.items() if k != "tool_calls"} | {"content": content}


def _call(call: dict[str, Any]) -> str:
    function = call["function"]
    return _written({"name": function["name"], "arguments": function["arguments"]})


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
