"""Translate requests of Anthropic's /v1/messages and count_tokens to chats.

Claude Code puts a line `x-anthropic-billing-header: ...` first into its system prompt. It changes
with every request, so that no two prompts would begin alike. The rule: a first line of the system
prompt that begins with this name is left out. It says nothing to a model.

Invariant: what is answered is the chat that a client of /v1/chat/completions would have asked for.
Never: keeps anything between two requests.
"""

from __future__ import annotations

import dataclasses
import re
from itertools import zip_longest
from typing import Any

from appliance.api import message_bodies as bodies
from appliance.api import openai_bodies as chats
from appliance.api.ask import Ask, PromptTooLong
from appliance.api.chat_messages import left_out
from appliance.api.openai import ask_of_chat
from appliance.json_fields import Json, check, renamed, required, undeclared, unsupported
from appliance.request import ModelInfo
from engine.errors import RequestError

BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*", re.IGNORECASE)
_FILE_EDITOR: Json = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
        "path": {"type": "string"},
        **{name: {"type": "string"} for name in ("file_text", "old_str", "new_str", "insert_text")},
        "insert_line": {"type": "integer"},
        "view_range": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["command", "path"],
}
_CLIENT_SIDE: dict[str, Json] = {
    "bash_": {
        "description": "Run a command in a shell that stays open; `restart` begins a new one.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "restart": {"type": "boolean"}},
        },
    },
    "text_editor_": {
        "description": "View a file, create one, replace a text in one, or insert lines.",
        "parameters": _FILE_EDITOR,
    },
}
"""Anthropic's tools that a client runs itself, by the beginning of their type: their models know
the arguments, others are told."""
_REFUSED = ("container", "mcp_servers")
_OUR_WORDS = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
}
"""The names here of a chat's fields."""


def messages_ask(values: Json, model: ModelInfo) -> Ask:
    """Validate a body of /v1/messages."""
    body = check(values, bodies.MessagesRequest)
    ask = _chat_ask(values, body, model, max_completion_tokens=body.max_tokens)
    ignored = (*ask.ignored, *undeclared(values, bodies.MessagesRequest, _REFUSED))
    return dataclasses.replace(ask, include_usage=True, ignored=ignored)


def count_ask(values: Json, model: ModelInfo) -> Ask:
    """Validate a body of /v1/messages/count_tokens, which generates nothing."""
    return _chat_ask(values, check(values, bodies.CountTokensRequest), model)


def _chat_ask(values: Json, body: bodies.CountTokensRequest, model: ModelInfo, **own: Any) -> Ask:
    for name in _REFUSED:
        if values.get(name):
            raise unsupported(name)
    messages = _messages(body)
    continues = messages[-1].role == "assistant"  # the answer begins where it ends
    tools, others = _tools(body.tools or [])
    choice, thinking = body.tool_choice, body.thinking
    is_single = choice.disable_parallel_tool_use if choice else None
    chat = chats.ChatRequest(
        **body.shared(),
        **own,
        messages=messages,
        continue_final_message=continues,
        add_generation_prompt=not continues,
        stop=body.stop_sequences,
        tools=tools,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=None if is_single is None else not is_single,
        response_format=_output_format(body),
        chat_template_kwargs={"enable_thinking": thinking.type != "disabled"} if thinking else None,
    )
    return ask_of_chat(chat, model, tuple(f"tools.{index}" for index in others))


def _messages(body: bodies.CountTokensRequest) -> list[chats.ChatMessage]:
    """Write the conversation as a chat: results of tools are messages of their own."""
    messages: list[chats.ChatMessage] = []
    if system := _system(body.system or ""):
        messages.append(chats.ChatMessage(role="system", content=system))
    for index, turn in enumerate(body.messages):
        if isinstance(turn, bodies.AssistantTurn):
            messages.append(_assistant(turn))
        else:
            is_last = index == len(body.messages) - 1
            messages += _said(turn, f"messages[{index}]", is_last=is_last)
    return messages


def _system(said: str | list[bodies.TextBlock]) -> chats.Content:
    """Leave out the line that changes with every request."""
    if isinstance(said, str):
        return BILLING_LINE.sub("", said)
    parts = [_part(block) for block in said]
    if parts:
        parts[0].text = BILLING_LINE.sub("", parts[0].text)
    return [*parts] if not parts or parts[0].text else [*parts[1:]]


def _part(block: bodies.TextBlock) -> chats.TextPart:
    return chats.TextPart(block.text, block.cache_control)


def _said(
    turn: bodies.UserTurn | bodies.SystemTurn, where: str, *, is_last: bool
) -> list[chats.ChatMessage]:
    """Put texts between results together, as parts of one message."""
    role: chats.Role = "user" if isinstance(turn, bodies.UserTurn) else "system"
    if isinstance(turn.content, str):
        return [chats.ChatMessage(role=role, content=turn.content)]
    messages: list[chats.ChatMessage] = []
    for index, block in enumerate(turn.content):
        if isinstance(block, bodies.ToolResult):
            result, call_id = _result(block), block.tool_use_id
            messages.append(chats.ChatMessage(role="tool", content=result, tool_call_id=call_id))
            continue
        text = _text(block, f"{where}.content[{index}]", is_last=is_last)
        part = _part(block) if isinstance(block, bodies.TextBlock) else chats.TextPart(text)
        before = messages[-1].content if messages and messages[-1].role == role else None
        if isinstance(before, list):
            before.append(part)
        else:
            messages.append(chats.ChatMessage(role=role, content=[part]))
    return messages or [chats.ChatMessage(role=role, content="")]


def _assistant(turn: bodies.AssistantTurn) -> chats.ChatMessage:
    if isinstance(turn.content, str):
        return chats.ChatMessage(role="assistant", content=turn.content)
    blocks = turn.content
    thoughts = [block.thinking for block in blocks if isinstance(block, bodies.ThinkingBlock)]
    calls = [
        chats.ToolCall(chats.CalledFunction(block.name, block.input), id=block.id)
        for block in blocks
        if isinstance(block, bodies.ToolUse)
    ]
    return chats.ChatMessage(
        role="assistant",
        content=[_part(block) for block in blocks if isinstance(block, bodies.TextBlock)],
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _result(block: bodies.ToolResult) -> chats.Content:
    """Read what a tool returned; a failure is said before it."""
    said = block.content or ""
    blocks = [bodies.TextBlock(said)] if isinstance(said, str) else said
    texts = [_text(one, "", is_last=False) for one in blocks]
    if block.is_error:
        texts = [f"Error: {''.join(texts[:1])}", *texts[1:]]
    marks = [one.cache_control if isinstance(one, bodies.TextBlock) else None for one in blocks]
    if block.cache_control is not None:
        marks[-1:] = [block.cache_control]
    return [chats.TextPart(text, mark) for text, mark in zip_longest(texts, marks)]


def _text(
    block: bodies.TextBlock | bodies.ImageBlock | bodies.DocumentBlock, where: str, *, is_last: bool
) -> str:
    if isinstance(block, bodies.TextBlock):
        return block.text
    kind = "image" if isinstance(block, bodies.ImageBlock) else "document"
    return left_out(f"{where}.type", kind, is_last=is_last)


def _tools(values: list[Any]) -> tuple[list[Json], list[int]]:
    """Write tools as in a chat; list the indexes of tools that Anthropic's servers would run."""
    tools: list[Json] = []
    others: list[int] = []
    for index, value in enumerate(values):
        where = f"tools[{index}]"
        kind = check(value, bodies.AnyTool, where).type or "custom"
        known = next((one for begin, one in _CLIENT_SIDE.items() if kind.startswith(begin)), {})
        if kind != "custom" and not known:
            others.append(index)
            continue
        tool = check(value, bodies.ClientTool, where)
        function: Json = {"name": tool.name, "parameters": tool.input_schema}
        function |= {"description": tool.description, "strict": tool.strict} | known
        tools.append({"type": "function", "function": function})
        if tool.cache_control is not None:
            tools[-1]["cache_control"] = tool.cache_control
    return tools, others


def _tool_choice(choice: bodies.ToolChoice | None) -> chats.ToolMode | chats.ChosenTool | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise required("tool_choice.name")
        return chats.ChosenTool(chats.ChosenFunction(choice.name))
    return "required" if choice.type == "any" else choice.type


def _output_format(body: bodies.CountTokensRequest) -> chats.SchemaFormat | None:
    """Read `output_config.format`, or `output_format` as it was called before."""
    form = (body.output_config.format if body.output_config else None) or body.output_format
    return chats.SchemaFormat(chats.NamedSchema(form.schema)) if form else None


def in_anthropics_words(error: RequestError) -> RequestError:
    """Say a chat's refusal as Anthropic does: Claude Code reads these sentences, and compacts."""
    if isinstance(error, PromptTooLong):
        has, most = error.num_prompt_tokens, error.max_model_len
        what = f"prompt is too long: {has} tokens > {most} maximum"
        if has == most:
            what = (
                f"input length and `max_tokens` exceed context limit: {has} + {error.max_tokens} "
                f"> {most}, decrease input length or `max_tokens` and try again"
            )
        return RequestError(what, code=error.code, param=error.param)
    return renamed(error, _OUR_WORDS)
