"""Translate requests of Anthropic's /v1/messages and count_tokens to chats.

Claude Code puts a line `x-anthropic-billing-header: ...` first into its system prompt. It changes
with every request, so that no two prompts would begin alike. The rule: a first line of the system
prompt that begins with this name is left out. It says nothing to a model.

Invariant: what is answered is the chat that a client of /v1/chat/completions would have asked for.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from appliance.api.anthropic import fields as bodies
from appliance.api.core import fields as chats
from appliance.api.core.ask import Ask, PromptTooLong
from appliance.api.core.chat_messages import Conversation, read_messages
from appliance.api.openai.ask import ask_of_chat
from appliance.daemon.requests.request import ModelInfo
from appliance.json.fields import Json, check, renamed, undeclared
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
_MEMORY: Json = {
    "type": "object",
    "properties": {
        "command": {
            "type": "string",
            "enum": ["view", "create", "str_replace", "insert", "delete", "rename"],
        },
        **{name: {"type": "string"} for name in ("path", "old_path", "new_path", "file_text")},
        **{name: {"type": "string"} for name in ("old_str", "new_str", "insert_text")},
        "insert_line": {"type": "integer"},
        "view_range": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["command"],
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
    "memory_": {
        "description": "View, create, change, delete or rename files below /memories.",
        "parameters": _MEMORY,
    },
}
"""Anthropic's tools that a client runs itself, by the beginning of their type: their models know
the arguments, others are told."""
_OUR_WORDS = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
    "reasoning_effort": "output_config.effort",
}
"""The names here of a chat's fields."""


def messages_ask(values: Json, model: ModelInfo) -> Ask:
    """Validate a body of /v1/messages."""
    body = check(values, bodies.MessagesRequest)
    ask = _chat_ask(body, model, max_completion_tokens=body.max_tokens)
    ignored = (*ask.ignored, *undeclared(values, bodies.MessagesRequest))
    return dataclasses.replace(ask, include_usage=True, ignored=ignored)


def count_ask(values: Json, model: ModelInfo) -> Ask:
    """Validate a body of /v1/messages/count_tokens, which generates nothing."""
    return _chat_ask(check(values, bodies.CountTokensRequest), model)


def _chat_ask(body: bodies.CountTokensRequest, model: ModelInfo, **own: Any) -> Ask:
    conversation = _conversation(body)
    continues = conversation.messages[-1]["role"] == "assistant"  # the answer begins where it ends
    choice, thinking = body.tool_choice, body.thinking
    is_single = choice.disable_parallel_tool_use if choice else None
    chat = chats.ChatSettings(
        **body.shared(),
        **own,
        continue_final_message=continues,
        add_generation_prompt=not continues,
        stop=body.stop_sequences,
        tools=_tools(body.tools or []),
        tool_choice={"type": choice.type, "name": choice.name} if choice else None,
        parallel_tool_calls=None if is_single is None else not is_single,
        response_format=_output_format(body),
        reasoning_effort=body.output_config.effort if body.output_config else None,
        chat_template_kwargs={"enable_thinking": thinking.type != "disabled"} if thinking else None,
    )
    return ask_of_chat(chat, model, conversation)


def _conversation(body: bodies.CountTokensRequest) -> Conversation:
    """Read the conversation as a chat: results of tools are messages of their own."""
    conversation = Conversation()
    if system := _system(body.system or ""):
        conversation.say("system", system, "system")
    return read_messages(body.messages, bodies.Turn, begun=conversation)


def _system(said: str | list[bodies.TextBlock]) -> list[Json]:
    """Leave out the line that changes with every request."""
    blocks = [bodies.TextBlock(said)] if isinstance(said, str) else said
    if blocks:
        blocks[0].text = BILLING_LINE.sub("", blocks[0].text)
    told = [
        {"type": "text", "text": one.text, "cache_control": one.cache_control} for one in blocks
    ]
    return told if told and told[0]["text"] else told[1:]


def _tools(values: list[Any]) -> list[Json]:
    """Write tools as in a chat; tools that Anthropic's servers would run stay as they are."""
    tools: list[Json] = []
    for index, value in enumerate(values):
        where = f"tools[{index}]"
        kind = check(value, bodies.AnyTool, where).type or "custom"
        known = next((one for begin, one in _CLIENT_SIDE.items() if kind.startswith(begin)), {})
        if kind != "custom" and not known:
            tools.append(value)
            continue
        tool = check(value, bodies.ClientTool, where)
        function: Json = {"name": tool.name, "parameters": tool.input_schema}
        function |= {"description": tool.description, "strict": tool.strict} | known
        tools.append({"type": "function", "function": function})
        if tool.cache_control is not None:
            tools[-1]["cache_control"] = tool.cache_control
    return tools


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
