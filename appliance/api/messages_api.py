"""Translate Anthropic's /v1/messages and count_tokens to chats and back.

Claude Code puts a line `x-anthropic-billing-header: ...` first into its system prompt. It changes
with every request, so that no two prompts would begin alike. The rule: a first line of the system
prompt that begins with this name is left out. It says nothing to a model.

Owns: which fields and blocks there are, and what is refused by name; blocks of content, and the
order of events.
Invariant: what is answered is the chat that a client of /v1/chat/completions would have asked for.
Never: keeps anything between two requests.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from appliance.api.ask import Ask, PromptTooLong
from appliance.api.chat_messages import left_out
from appliance.api.dialects import Dialect, error_body
from appliance.api.openai import chat_ask
from appliance.api.openai_bodies import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from appliance.api.replies import EVENTS, event
from appliance.api.stream import Delta
from appliance.formats.text_reading import CallDelta
from appliance.json_fields import Fields, invalid_type, invalid_value, renamed, unsupported
from appliance.request import ModelInfo, Request
from engine.errors import RequestError
from engine.schedule.sequence import FinishReason

Json = dict[str, Any]

BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*", re.IGNORECASE)
PASSED = (
    *("model", "temperature", "top_p", "top_k", "stream", "min_p", "seed", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids"),
    *("ignore_eos", "min_tokens"),
)
"""The same in a chat; those that are not Anthropic's are vLLM's additions to both."""
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
_NO_EFFECT = ("metadata", "service_tier", "betas", "context_management", "cache_control")
_OUR_WORDS = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
}
"""What a chat's fields are called here."""


def messages_ask(fields: Fields, model: ModelInfo) -> Ask:
    """Validate a body of /v1/messages."""
    max_tokens = fields.required("max_tokens")
    ask = _chat_ask(fields, model, max_tokens)
    return dataclasses.replace(ask, include_usage=True)


def count_ask(fields: Fields, model: ModelInfo) -> Ask:
    """Validate a body of /v1/messages/count_tokens, which generates nothing."""
    return _chat_ask(fields, model, None)


def _chat_ask(fields: Fields, model: ModelInfo, max_tokens: object) -> Ask:
    chat: Json = {name: fields.get(name) for name in PASSED}
    ignored: list[str] = [name for name in _NO_EFFECT if fields.get(name) is not None]
    chat["max_completion_tokens"] = max_tokens
    chat["stop"] = fields.items("stop_sequences", MAX_PARTS) or None
    chat["messages"] = _messages(fields)
    if chat["messages"][-1]["role"] == "assistant":
        # the answer goes on where the client's last message ends
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    chat |= _tools(fields, ignored)
    chat["response_format"] = _output_format(fields)
    thinking = fields.nested("thinking")
    if thinking is not None:
        kind = thinking.required("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise invalid_value("thinking.type", "must be enabled, adaptive or disabled")
        chat["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"}
    for name in ("container", "mcp_servers"):
        if fields.get(name):
            raise unsupported(name)
    ask = chat_ask(chat, model)
    return dataclasses.replace(ask, ignored=(*ignored, *fields.ignored))


def _messages(fields: Fields) -> list[Json]:
    """The conversation as a chat has it: results of tools are messages of their own."""
    asked = fields.required("messages")
    if not isinstance(asked, list):
        raise invalid_type("messages", "a list of messages", asked)
    if not asked:
        raise invalid_value("messages", "is empty")
    if len(asked) > MAX_MESSAGES:
        raise invalid_value("messages", f"has {len(asked)} messages, at most {MAX_MESSAGES} may be")
    messages: list[Json] = []
    if system := _system(fields):
        messages.append({"role": "system", "content": system})
    for index, one in enumerate(asked):
        is_last = index == len(asked) - 1
        messages += _message(Fields.of(one, f"messages[{index}]"), is_last=is_last)
    return messages


def _system(fields: Fields) -> str:
    value = fields.get("system")
    blocks = _blocks(value, "system") if value is not None else []
    texts = [_text(block) for block in blocks]
    return BILLING_LINE.sub("", "\n".join(texts))


def _message(fields: Fields, *, is_last: bool) -> list[Json]:
    role = fields.get("role")
    if role not in ("user", "assistant", "system"):
        raise invalid_value(fields.path("role"), "must be user or assistant")
    blocks = _blocks(fields.required("content"), fields.path("content"))
    return _assistant(blocks) if role == "assistant" else _user(blocks, role, is_last=is_last)


def _user(blocks: list[Fields], role: str, *, is_last: bool) -> list[Json]:
    """Texts between results are joined by line breaks, as in a chat."""
    messages: list[Json] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = _result(block)
            call_id = _string(block, "tool_use_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            continue
        text = _text(block, is_last=is_last)
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n{text}"
        else:
            messages.append({"role": role, "content": text})
    return messages or [{"role": role, "content": ""}]


def _assistant(blocks: list[Fields]) -> list[Json]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_string(block, "thinking"))
        elif kind == "tool_use":
            arguments = block.required("input")
            if not isinstance(arguments, dict):
                raise invalid_type(block.path("input"), "an object", arguments)
            function = {"name": _string(block, "name"), "arguments": arguments}
            calls.append({"type": "function", "id": _string(block, "id"), "function": function})
        elif kind != "redacted_thinking":  # which says nothing that a model could read
            texts.append(_text(block))
    message: Json = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _result(block: Fields) -> str:
    """What a function gave; that it failed is said before it."""
    value = block.get("content")
    parts = _blocks(value, block.path("content")) if value is not None else []
    text = "\n".join(_text(part, is_last=False) for part in parts)
    return f"Error: {text}" if block.boolean("is_error") else text


def _blocks(value: object, param: str) -> list[Fields]:
    """A string is one block of text."""
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, f"{param}[0]")]
    if not isinstance(value, list):
        raise invalid_type(param, "a string or a list of blocks", value)
    if len(value) > MAX_PARTS:
        raise invalid_value(param, f"has {len(value)} blocks, at most {MAX_PARTS} may be")
    return [Fields.of(one, f"{param}[{index}]") for index, one in enumerate(value)]


def _text(block: Fields, *, is_last: bool = True) -> str:
    kind = block.get("type")
    if kind in ("image", "document"):
        return left_out(block.path("type"), kind, is_last=is_last)
    if kind != "text":
        named = kind if isinstance(kind, str) else "without a type"
        raise unsupported(
            block.path("type"), f"`{named[:40]}` is not supported: this model reads text"
        )
    return _string(block, "text")


def _string(fields: Fields, name: str) -> str:
    fields.required(name)
    return fields.text(name) or ""


def _tools(fields: Fields, ignored: list[str]) -> Json:
    """Functions; tools that Anthropic's own servers run are left out, and told as ignored."""
    tools: list[Json] = []
    for index, one in enumerate(fields.items("tools", MAX_TOOLS)):
        tool = Fields.of(one, f"tools[{index}]")
        kind = tool.text("type") or "custom"
        known = next((one for begin, one in _CLIENT_SIDE.items() if kind.startswith(begin)), {})
        if kind != "custom" and not known:
            ignored.append(f"tools.{index}")
            continue
        schema = known.get("parameters", tool.get("input_schema"))
        function: Json = {"name": tool.required("name"), "parameters": schema}
        function |= {name: tool.get(name) for name in ("description", "strict")} | known
        tools.append({"type": "function", "function": function})
    choice = fields.nested("tool_choice")
    found: Json = {"tools": tools}
    if choice is None:
        return found
    kind = choice.required("type")
    if kind == "tool":
        name = _string(choice, "name")
        found["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind in ("auto", "any", "none"):
        found["tool_choice"] = "required" if kind == "any" else kind
    else:
        raise invalid_value("tool_choice.type", "must be auto, any, tool or none")
    if choice.get("disable_parallel_tool_use") is not None:
        found["parallel_tool_calls"] = not choice.boolean("disable_parallel_tool_use")
    return found


def _output_format(fields: Fields) -> Json | None:
    """`output_config.format`, or `output_format` as it was called before."""
    config = fields.nested("output_config")
    form = config.nested("format") if config else None
    form = form or fields.nested("output_format")
    if form is None:
        return None
    if form.required("type") != "json_schema":
        raise unsupported(form.path("type"), "must be json_schema")
    return {"type": "json_schema", "json_schema": {"schema": form.required("schema")}}


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


# What clients of Anthropic's /v1/messages read: one message, or the events that it is made of.
# Invariant: the whole message is what the events build up; a block that is begun is ended.
# Never: waits, or knows HTTP.


class MessageShape:
    """The shape of one message.

    Args:
        request: whose reply it is; it has one sequence.
    """

    media_type = EVENTS

    def __init__(self, request: Request) -> None:
        self._request = request
        self._content: list[Json] = []
        """Blocks; only the last one may be open. A call's input is text until it ends."""
        self._is_open = False
        self._call_index: int | None = None
        self._last: Delta | None = None

    def whole(self, deltas: Iterable[Delta]) -> Json:
        """The message in one piece."""
        for delta in deltas:
            self.events(delta)
        self._end_block()
        return self._message(is_ended=True)

    def opening(self) -> bytes:
        """What a stream begins with."""
        return _event("message_start", message=self._message(is_ended=False))

    def events(self, delta: Delta) -> bytes:
        """What a stream tells of a delta."""
        self._last = delta
        told = b""
        if delta.reasoning:
            told += self._add("thinking", delta.reasoning)
        if delta.text:
            told += self._add("text", delta.text)
        return told + b"".join(map(self._add_call, delta.calls))

    def closing(self) -> bytes:
        """What a stream ends with."""
        ended = self._end_block()
        message = self._message(is_ended=True)
        change = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        return (
            ended
            + _event("message_delta", delta=change, usage=message["usage"])
            + _event("message_stop")
        )

    def failure(self, error: RequestError) -> bytes:
        """What a stream ends with if it fails."""
        body = error_body(Dialect.ANTHROPIC, error, self._request.request_id)
        return event(body, "error")

    def alive(self, place: int | None) -> bytes:
        """What is told while nothing comes."""
        return _event("ping")

    def _add(self, kind: str, text: str) -> bytes:
        """Text or reasoning, in the block that is open or in a new one."""
        begun = b""
        if not self._is_open or self._content[-1]["type"] != kind:
            block: Json = {"type": kind, kind: ""} | (
                {"signature": ""} if kind == "thinking" else {}
            )
            begun = self._begin_block(block, None)
        self._content[-1][kind] += text
        return begun + self._delta({"type": f"{kind}_delta", kind: text})

    def _add_call(self, call: CallDelta) -> bytes:
        begun = b""
        if not self._is_open or self._call_index != call.index:
            block: Json = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
            begun = self._begin_block(block, call.index)
            self._content[-1]["input"] = ""
        if not call.arguments:
            return begun
        self._content[-1]["input"] += call.arguments
        return begun + self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _begin_block(self, block: Json, call_index: int | None) -> bytes:
        ended = self._end_block()
        self._content.append(block)
        self._is_open, self._call_index = True, call_index
        return ended + _event("content_block_start", index=self._index, content_block=block)

    def _end_block(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        block, signed = self._content[-1], b""
        if block["type"] == "tool_use":
            block["input"] = _parsed(block["input"])
        elif block["type"] == "thinking":
            # Reasoning is not signed here; clients wait for a signature before they keep it.
            signed = self._delta({"type": "signature_delta", "signature": ""})
        return signed + _event("content_block_stop", index=self._index)

    @property
    def _index(self) -> int:
        return len(self._content) - 1

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _message(self, *, is_ended: bool) -> Json:
        (sequence,) = self._request.sequences
        stop_text = self._last.stop_text if self._last else None
        # at the beginning of a stream nobody knows yet, so all of it counts as input
        num_cached = (self._request.cached_tokens or 0) if is_ended else 0
        return {
            "id": self._request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": list(self._content) if is_ended else [],
            "stop_reason": self._stop_reason() if is_ended else None,
            "stop_sequence": stop_text if is_ended else None,
            "usage": {
                # in Anthropic's words what was read from the cache is no input
                "input_tokens": sequence.num_prompt_tokens - num_cached,
                "output_tokens": sequence.num_output_tokens if is_ended else 0,
                # what is kept is kept without being asked, so nothing is written on request
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": num_cached,
                **self._request.cut_usage,
            },
        }

    def _stop_reason(self) -> str:
        delta = self._last
        if delta is None or delta.finish_reason is FinishReason.ABORT:
            return "end_turn"
        if delta.finish_reason is FinishReason.LENGTH:
            return "max_tokens"
        if delta.has_called:
            return "tool_use"
        return "stop_sequence" if delta.stop_text is not None else "end_turn"


def _parsed(text: str) -> Json:
    """A call's input; what a limit has cut off is told as text, for it is no object."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {"_incomplete": text}
    return value if isinstance(value, dict) else {"_incomplete": text}


def _event(name: str, /, **told: Any) -> bytes:
    return event({"type": name, **told}, name)
