"""What a prompt is made of: a chat's messages, a completion's texts or ids, both sides of a gap.

Owns: roles, contents, and the calls that an assistant made earlier in the conversation; what a
prompt may be, and what an answer may go on with; the table of marks.
Invariant: token ids are those of the model, and no more than its context.
Never: tokenizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from appliance.json_fields import Fields, integer, invalid_type, invalid_value, unsupported
from appliance.request import ModelInfo
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer

# The messages of a chat, checked and brought into the form that chat templates read.
# Invariant: every content is a string, every call's arguments are an object; what cannot be is
# refused by its place, like `messages[3].content[0].text`.
# Never: knows a template, or which tools there are.


Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer word; open models were trained with `system`
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # OpenAI's older word
}
MAX_MESSAGES = 4096
MAX_PARTS = 1024
"""Of one message: parts of its content, and calls."""
MAX_NESTING = 64
"""Of a call's arguments; templates write them out by recursion."""


def read_messages(value: object) -> list[Message]:
    """The conversation, in the order given."""
    if not isinstance(value, list):
        raise invalid_type("messages", "a list of messages", value)
    if not value:
        raise invalid_value("messages", "is empty")
    if len(value) > MAX_MESSAGES:
        raise invalid_value("messages", f"has {len(value)} messages, at most {MAX_MESSAGES} may be")
    places = [f"messages[{index}]" for index in range(len(value))]
    return [_message(Fields.of(one, at)) for one, at in zip(value, places, strict=True)]


def _message(fields: Fields) -> Message:
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid_value(fields.path("role"), f"must be one of {', '.join(ROLES)}")
    for name in ("function_call", "audio"):
        if fields.get(name):
            raise unsupported(fields.path(name))
    message: Message = {"role": ROLES[role], "content": _content(fields, role)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (text := fields.text(name)) is not None:
            message[name] = text
    if calls := fields.items("tool_calls", MAX_PARTS):
        if role != "assistant":
            raise invalid_value(fields.path("tool_calls"), "is for the role assistant only")
        places = [f"{fields.path('tool_calls')}[{index}]" for index in range(len(calls))]
        message["tool_calls"] = [
            _call(Fields.of(one, at)) for one, at in zip(calls, places, strict=True)
        ]
    return message


def _content(fields: Fields, role: str) -> str:
    """A string; parts are joined by line breaks."""
    value, param = fields.get("content"), fields.path("content")
    if value is None and role == "assistant":
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid_type(param, "a string or a list of text parts", value)
    if len(value) > MAX_PARTS:
        raise invalid_value(param, f"has {len(value)} parts, at most {MAX_PARTS} may be")
    texts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise unsupported(f"{param}[{index}]", "is not supported; only parts of type text are")
        texts.append(Fields.of(part, f"{param}[{index}]").text("text") or "")
        if part.get("text") is None:
            raise invalid_type(f"{param}[{index}].text", "a string", None)
    return "\n".join(texts)


def _call(fields: Fields) -> dict[str, Any]:
    """A call as templates read it: OpenAI writes arguments as text, templates want the object."""
    if fields.get("type") not in (None, "function"):
        raise unsupported(fields.path("type"), "is not supported; only functions are")
    function = Fields.of(fields.required("function"), fields.path("function"))
    name = function.text("name")
    if not name:
        raise invalid_value(function.path("name"), "is empty")
    call = {"type": "function", "function": {"name": name, "arguments": _arguments(function)}}
    call_id = fields.text("id")
    return call if call_id is None else {"id": call_id, **call}


def _arguments(function: Fields) -> dict[str, Any]:
    value, param = function.get("arguments"), function.path("arguments")
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value) if value.strip() else {}
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise invalid_value(param, f"is not JSON: {error}") from error
    if not isinstance(value, dict | None):
        raise invalid_type(param, "an object, written as a string", value)
    if nesting(value) > MAX_NESTING:
        raise invalid_value(param, f"is nested more than {MAX_NESTING} deep")
    return value or {}


def nesting(value: object) -> int:
    """How deep lists and objects lie in each other; counted to a little over the limit."""
    depth, level = 0, [value]
    while level and depth <= MAX_NESTING:
        level = [
            inner
            for one in level
            if isinstance(one, list | dict)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        depth += 1
    return depth


# --------------------------------------------------------------------------------------------------


def read_prompts(value: object, model: ModelInfo, max_prompts: int) -> list[str | list[int]]:
    """One prompt or many, as text or token ids, told apart by the first element."""
    if isinstance(value, str):
        prompts: list[Any] = [value]
    elif not isinstance(value, list):
        raise invalid_type("prompt", "a string, token ids, or a list of either", value)
    elif value and isinstance(value[0], str | list):
        prompts = value
    else:
        prompts = [value]
    if len(prompts) > max_prompts:
        what = f"has {len(prompts)} prompts; the queue takes {max_prompts} from one request"
        raise invalid_value("prompt", what)
    return [_prompt(prompt, model) for prompt in prompts]


def _prompt(value: object, model: ModelInfo) -> str | list[int]:
    if not isinstance(value, str | list):
        raise invalid_type("prompt", "a string, token ids, or a list of either", value)
    if not value:
        raise invalid_value("prompt", "is empty")
    if isinstance(value, list):
        if len(value) > model.max_model_len:  # before each of them is looked at
            raise RequestError(
                f"the model's context is {model.max_model_len} tokens; the prompt has {len(value)}",
                code="context_length_exceeded",
                param="prompt",
            )
        check_ids(value, "prompt", model.vocab_size)
    return value


def read_output_offset(fields: Fields, prompts: list[str | list[int]]) -> int:
    """How many of a prompt's last tokens are output that the answer goes on with."""
    offset = fields.integer("output_offset", 0) or 0
    if not offset:
        return 0
    for name in ("n", "best_of", "echo", "suffix", "truncate_prompt_tokens"):
        value = fields.get(name)
        if value and not (name in ("n", "best_of") and value == 1):
            raise invalid_value("output_offset", f"cannot be together with `{name}`")
    (prompt, *others) = prompts
    if isinstance(prompt, str) or others:
        raise invalid_value("output_offset", "needs one prompt, of token ids")
    if offset >= len(prompt):
        what = f"leaves nothing of the prompt, which has {len(prompt)} tokens with the output"
        raise invalid_value("output_offset", what)
    return offset


def check_ids(values: list[Any], param: str, vocab_size: int) -> None:
    """Refuse what is no list of token ids; it may be long, and is not empty."""
    if set(map(type, values)) != {int} or not 0 <= min(values) <= max(values) < vocab_size:
        for one in values:  # to say what is wrong
            integer(one, param, 0, vocab_size - 1)


# Fill-in-the-middle: a prompt with a suffix, for models trained to write what is between.
# Invariant: the marks are special tokens of the model; a model without them refuses a suffix.
# Never: tokenizes.


@dataclass(frozen=True, slots=True)
class Infill:
    """The marks of one family: what comes before, what comes behind, and where to write."""

    prefix: str
    suffix: str
    middle: str
    is_suffix_first: bool = False

    def prompt(self, before: str, behind: str) -> str:
        """The text that asks for what is between."""
        if self.is_suffix_first:
            return f"{self.suffix}{behind}{self.prefix}{before}{self.middle}"
        return f"{self.prefix}{before}{self.suffix}{behind}{self.middle}"


MARKS = (
    Infill("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    Infill("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite 3
    Infill("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    Infill("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    Infill("[PREFIX]", "[SUFFIX]", "", is_suffix_first=True),  # Codestral
    Infill("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """The marks that a model has; None if it has none."""
    for marks in MARKS:
        texts = filter(None, (marks.prefix, marks.suffix, marks.middle))
        if all(map(tokenizer.has_token, texts)):
            return marks
    return None
