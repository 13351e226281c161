"""What a client asks, validated, whichever API it speaks: the model, the prompt, how to sample.

Owns: what a prompt may be: a chat's messages, a completion's texts or ids, both sides of a gap;
which model is meant; how an ask becomes sampling parameters, once its prompt is token ids.
Invariant: an Ask asks for nothing that this daemon does not do.
Never: knows fields' names beyond those that its own refusals name.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from appliance.api import turns
from appliance.api.tool_format import OutputFormat
from appliance.api.tools import Constraint, Tools, in_words, needs_words
from appliance.frame.figures import things
from appliance.json_fields import (
    INT64_MAX,
    Fields,
    integer,
    invalid_type,
    invalid_value,
    unsupported,
)
from appliance.request import ModelInfo
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer
from engine.wire.messages import SamplingParams

# What a prompt is made of: a chat's messages, a completion's texts or ids, both sides of a gap.
# Invariant: token ids are those of the model, and no more than its context.
# Never: tokenizes.


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
LEFT_OUT = " was left out: this model reads text]"
"""The end of what a model reads in the place of an image from an earlier turn."""
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
    last = len(value) - 1
    return [
        _message(Fields.of(one, f"messages[{index}]"), is_last=index == last)
        for index, one in enumerate(value)
    ]


def left_out(param: str, kind: str, *, is_last: bool) -> str:
    """Write in the place of an image that one was there; in the user's newest turn refuse it.

    Raises:
        RequestError: so that whoever sent it hears of it once, and can go on.
    """
    if is_last:
        raise unsupported(param, f"`{kind}` is not supported: this model reads text")
    return f"[{kind}{LEFT_OUT}"


def _message(fields: Fields, *, is_last: bool) -> Message:
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid_value(fields.path("role"), f"must be one of {', '.join(ROLES)}")
    if fields.get("audio"):
        raise unsupported(fields.path("audio"))
    is_asked = is_last and role == "user"
    message: Message = {"role": ROLES[role], "content": _content(fields, role, is_last=is_asked)}
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
    elif function := fields.nested("function_call"):  # OpenAI's older form
        message["tool_calls"] = [_called(function)]
    return message


def _content(fields: Fields, role: str, *, is_last: bool) -> str:
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
    for index, one in enumerate(value):
        part, where = Fields.of(one, f"{param}[{index}]"), f"{param}[{index}]"
        kind = part.get("type")
        if kind == "image_url":
            texts.append(left_out(where, kind, is_last=is_last))
            continue
        if kind not in ("text", "refusal"):
            raise unsupported(where, "is not supported; only parts of type text are")
        text = part.text(kind)
        if text is None:
            raise invalid_type(part.path(kind), "a string", None)
        texts.append(text)
    return "\n".join(texts)


def _call(fields: Fields) -> dict[str, Any]:
    """A call as templates read it: OpenAI writes arguments as text, templates want the object."""
    if fields.get("type") not in (None, "function"):
        raise unsupported(fields.path("type"), "is not supported; only functions are")
    call = _called(Fields.of(fields.required("function"), fields.path("function")))
    call_id = fields.text("id")
    return call if call_id is None else {"id": call_id, **call}


def _called(function: Fields) -> dict[str, Any]:
    name = function.text("name")
    if not name:
        raise invalid_value(function.path("name"), "is empty")
    return {"type": "function", "function": {"name": name, "arguments": _arguments(function)}}


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
            raise PromptTooLong(len(value), model.max_model_len, "prompt")
        return checked_ids(value, "prompt", model.vocab_size)
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


def checked_ids(values: list[Any], param: str, vocab_size: int) -> list[int]:
    """Check that all are token ids; there may be many, and there is one at least."""
    if set(map(type, values)) == {int} and 0 <= min(values) <= max(values) < vocab_size:
        return values
    return [integer(one, param, 0, vocab_size - 1) for one in values]


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


# --------------------------------------------------------------------------------------------------


# Which model a client asks for, and what it is told when that is not here.
# Invariant: a refusal says every name that would have been served.
# Never: swaps a model; a request that generates has waited for its own before it comes here.


_MAX_NAMED = 20


def check_model(asked: object, model: ModelInfo) -> None:
    """Refuse another model than the one that is served; no name is the served one's."""
    if asked in (None, ""):  # clients that must name one may leave it empty
        return
    if not isinstance(asked, str):
        raise invalid_type("model", "a string", asked)
    if model.is_called(asked):
        return
    raise model_not_found(asked, model)


def model_not_found(asked: str, model: ModelInfo) -> RequestError:
    """Another model was asked for than the one that is served."""
    if asked.removesuffix(":latest") in model.others:
        what = f"`{asked}` is not served now, `{model.model_id}` is; a request that generates swaps"
    else:
        what = f"the model `{asked[:200]}` does not exist here; {_named(model)}"
    return RequestError(
        what,
        code="model_not_found",
        param="model",
        status=404,
        kind="not_found_error",
    )


def _named(model: ModelInfo) -> str:
    """The names that there are: `a`, `b` and `c` do."""
    names = [f"`{name}`" for name in (model.model_id, *model.others, *model.aliases)]
    if len(names) == 1:
        return f"{names[0]} does"
    names[_MAX_NAMED:] = [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return f"{', '.join(names[:-1])} and {names[-1]} do"


# --------------------------------------------------------------------------------------------------


MAX_SALT_CHARS = 1024


class PromptTooLong(RequestError):
    """The prompt leaves no room for an output token.

    Args:
        num_prompt_tokens: or fewer than it has, where it was not tokenized.
        max_model_len: prompt and output together.
        param: the field that has the prompt.
        max_tokens: that were asked for; None: no limit was named.
    """

    def __init__(
        self, num_prompt_tokens: int, max_model_len: int, param: str, max_tokens: int | None = None
    ) -> None:
        super().__init__(
            f"this model's maximum context length is {max_model_len} tokens; "
            f"the prompt has {num_prompt_tokens}, and the answer needs at least 1",
            code="context_length_exceeded",
            param=param,
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len
        self.max_tokens = max_tokens or 1


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and how its template is to be rendered."""

    messages: list[Message]
    tools: Tools | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def echo(self) -> str:
        """What an answer begins with that repeats the message it goes on from; empty if none is."""
        last = self.messages[-1]
        is_continued = last["role"] == "assistant" or not self.add_generation_prompt
        return str(last["content"]) if is_continued else ""

    def shortened(self) -> list[Chat]:
        """Leave out more and more of the oldest turns; the instructions and the last turn stay."""
        first = next((i for i, one in enumerate(self.messages) if one["role"] != "system"), 0)
        users = (i for i, one in enumerate(self.messages) if one["role"] == "user" and i > first)
        kept = self.messages[:first]
        return [replace(self, messages=[*kept, *self.messages[start:]]) for start in users]

    def render(self, tokenizer: Tokenizer, output_format: OutputFormat) -> turns.Rendered:
        """Render the prompt; a template may be slow, so call it in a thread.

        Raises:
            RequestError: there is no template, or it refuses.
        """
        messages, tools = self.messages, self.tools.definitions if self.tools else None
        count = sum(one["content"].count(LEFT_OUT) for one in messages)
        changes = (f"{things(count, 'image')} left out",) if count else ()
        if output_format.has_preamble and (tools or needs_words(messages)):
            messages, tools = in_words(messages, tools), None
        options = {
            "tools": tools,
            "variables": self.variables,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
        if tokenizer.chat_template is None:
            return turns.Rendered(tokenizer.render_chat(messages, **options))
        rendered = turns.render(
            messages,
            lambda form: tokenizer.render_chat(form, **options),
            tokenizer.chat_template.known_forms,
            has_tools=bool(tools),
        )
        return rendered._replace(changes=(*changes, *rendered.changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A validated body. Lengths are checked later, when the prompts are token ids."""

    chat: Chat | None
    """None: a completion of prompts."""
    prompts: list[str | list[int]]
    """Of completions; empty for a chat."""
    suffix: str | None = None
    """What is to stand behind the output of a completion."""
    num_choices: int
    """Sequences for each prompt."""
    num_best: int | None = None
    """Only so many of them, the likeliest, are told; None: all are."""
    max_tokens: int | None
    """The client's limit. 0 only for a completion with `is_echo`: the prompt is read and nothing
    written."""
    default_max_tokens: int | None = None
    """The limit where the client names none; None: the room left."""
    seed: int | None
    base: SamplingParams
    """Complete but for max_tokens, seed, bad words and grammar."""
    logprobs: int | None = None
    """How many alternatives to each token of the output are told; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same of the prompt, apart from an echo; None: none."""
    bad_words: tuple[str, ...] = ()
    """Texts that may not be in the output."""
    stop: tuple[str, ...]
    constraint: Constraint | None
    is_echo: bool
    is_stream: bool
    include_usage: bool
    has_running_usage: bool
    """Every chunk of a stream tells the usage so far."""
    return_token_ids: bool
    returns_tokens_as_ids: bool = False
    """Log-probabilities of a completion name tokens by their ids."""
    shows_special: bool = False
    """Special tokens have a text in the output."""
    shows_stop: bool = False
    """A stop string ends the output, instead of standing behind it."""
    truncate: int | None = None
    """Only so many last tokens of the prompt count; -1: as many as leave room for the output."""
    cache_salt: str | None = None
    """Only prompts with the same one share what is cached."""
    drops_oldest: bool = False
    """Where a chat does not fit, its oldest turns are left out until it does."""
    ignored: tuple[str, ...]
    """Names of the fields that have no effect."""

    @property
    def is_chat(self) -> bool:
        """True if there are messages instead of prompts."""
        return self.chat is not None

    @property
    def tools(self) -> Tools | None:
        """The functions that may be called."""
        return self.chat.tools if self.chat else None

    @property
    def is_continuation(self) -> bool:
        """True if the text goes on where the prompt ends, instead of beginning a message."""
        return self.chat is None or self.chat.continue_final_message

    @property
    def wants_tokens(self) -> bool:
        """True if each token is to be reported, also one whose text comes later or never."""
        return self.logprobs is not None or self.return_token_ids

    def check_length(
        self, prompt: str | list[int], max_token_chars: int, max_model_len: int
    ) -> None:
        """Refuse what cannot fit, before it costs the time to tokenize it.

        Raises:
            PromptTooLong: it is longer than the context.
        """
        per_token = max_token_chars if isinstance(prompt, str) else 1
        if len(prompt) > max_model_len * per_token:
            num_tokens = -(-len(prompt) // per_token)
            raise PromptTooLong(num_tokens, max_model_len, self._prompt_param, self.max_tokens)

    def sampling(
        self,
        num_prompt_tokens: int,
        max_model_len: int,
        *,
        choice: int = 0,
        grammar: str | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> SamplingParams:
        """Make the sampling of one choice, with max_tokens cut to the room that the prompt leaves.

        Raises:
            PromptTooLong: there is no room left.
            RequestError: the prompt has no tokens.
        """
        if not num_prompt_tokens:
            raise invalid_value(self._prompt_param, "has no tokens")
        room = max_model_len - num_prompt_tokens
        if room < 1:
            param = self._prompt_param
            raise PromptTooLong(num_prompt_tokens, max_model_len, param, self.max_tokens)
        wanted = self.default_max_tokens if self.max_tokens is None else self.max_tokens
        max_tokens = room if wanted is None else max(min(wanted, room), 1)
        most = self.base.output_offset + max_tokens
        if self.base.min_tokens > most:
            what = "max_tokens and output_offset together" if most > max_tokens else "max_tokens"
            raise invalid_value("min_tokens", f"is more than {what}, which is {most}")
        seed = secrets.randbits(63) if self.seed is None else self.seed + choice
        return msgspec.structs.replace(
            self.base,
            max_tokens=max_tokens,
            seed=seed & INT64_MAX,
            grammar=grammar,
            bad_words=bad_words,
        )

    def cannot_follow(self, why: str) -> RequestError:
        """What was asked cannot be gone on with, as was found while the answer was written."""
        if self.constraint is not None:
            param = self.constraint.param
        elif self.tools:
            param = "tools"
        else:
            param = "bad_words" if self.bad_words else "allowed_token_ids"
        return invalid_value(param, f"cannot be followed to an end: {why}")

    @property
    def _prompt_param(self) -> str:
        return "messages" if self.is_chat else "prompt"


def checked_salt(salt: str | None) -> str | None:
    """A client's secret, which sets its prompts apart in the cache; an empty one would not."""
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARS:
        raise invalid_value("cache_salt", f"must have 1 to {MAX_SALT_CHARS} characters")
    return salt
