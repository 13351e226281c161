"""What clients ask, in OpenAI's words: bodies of /v1/completions and /v1/chat/completions.

Owns: which fields there are, their types, ranges, defaults, and what is refused by name.
Called by: api, before anything is tokenized, and again when the prompt's length is known.
Invariant: any bytes at all give an Ask or a RequestError that names the field.
Never: tokenizes, or keeps state. Fields that nobody knows are ignored; fields that are known and
not supported are refused unless they ask for nothing.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from appliance.fields import Fields, integer, invalid_type, invalid_value
from appliance.request import ModelInfo
from engine.errors import RequestError
from engine.sequence import SamplingParams

COMPLETION_MAX_TOKENS = 16
CHAT_MAX_TOKENS = 2048
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 128
MAX_LOGPROBS = 20
INT64_MAX = 2**63 - 1

ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer word; open models were trained with `system`
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "audio": (),
    "prediction": (),
    "structured_outputs": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
"""Known, not supported: the values that ask for nothing. null asks for nothing everywhere."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A validated body. Lengths are checked later, when the prompts are token ids."""

    is_chat: bool
    prompts: list[str | list[int]]
    """Of completions; empty for a chat."""
    messages: list[dict[str, str]]
    """Of a chat, contents joined to strings; empty for completions."""
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    num_logprobs: int | None
    is_stream: bool
    include_usage: bool
    return_token_ids: bool

    @property
    def num_chars(self) -> int:
        """Characters to tokenize; token ids count as none."""
        texts = [prompt for prompt in self.prompts if isinstance(prompt, str)]
        return sum(map(len, texts)) + sum(len(message["content"]) for message in self.messages)

    @property
    def wants_tokens(self) -> bool:
        """True if each token is to be reported, also one whose text comes later or never."""
        return self.num_logprobs is not None or self.return_token_ids

    def check_length(
        self, prompt: str | list[int], max_token_chars: int, max_model_len: int
    ) -> None:
        """Refuse what cannot fit, before it costs the time to tokenize it.

        Raises:
            RequestError: `context_length_exceeded`.
        """
        per_token = max_token_chars if isinstance(prompt, str) else 1
        if len(prompt) > max_model_len * per_token:
            raise self._too_long(max_model_len, f"at least {len(prompt) // per_token}")

    def sampling(self, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
        """Sampling for one prompt; max_tokens fitted to what its length leaves.

        Raises:
            RequestError: `context_length_exceeded`, or a prompt without tokens.
        """
        if not num_prompt_tokens:
            raise invalid_value(self._prompt_param, "has no tokens")
        room = max_model_len - num_prompt_tokens
        if room < 1 or (self.max_tokens is not None and self.max_tokens > room):
            raise self._too_long(max_model_len, str(num_prompt_tokens))
        default = CHAT_MAX_TOKENS if self.is_chat else COMPLETION_MAX_TOKENS
        return SamplingParams(
            max_tokens=self.max_tokens or min(room, default),
            seed=secrets.randbits(63) if self.seed is None else self.seed & INT64_MAX,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs,
        )

    @property
    def _prompt_param(self) -> str:
        return "messages" if self.is_chat else "prompt"

    def _too_long(self, max_model_len: int, prompt_tokens: str) -> RequestError:
        output_tokens = "at least 1" if self.max_tokens is None else str(self.max_tokens)
        return RequestError(
            f"the model's context is {max_model_len} tokens; this request needs more: "
            f"{prompt_tokens} for the prompt and {output_tokens} for the completion",
            code="context_length_exceeded",
            param=self._prompt_param,
        )


def parse_completion(body: bytes, model: ModelInfo, max_prompts: int) -> Ask:
    """Validate a body of /v1/completions.

    Args:
        body: as it came over the wire.
        model: for the id, and the range of token ids.
        max_prompts: more prompts than the queue holds could never be accepted.
    """
    fields = Fields.of_body(body)
    return _ask(
        fields,
        model,
        prompts=_prompts(fields.required("prompt"), model, max_prompts),
        messages=[],
        max_tokens=fields.integer("max_tokens", 1, INT64_MAX),
        num_logprobs=fields.integer("logprobs", 0, MAX_LOGPROBS),
    )


def parse_chat(body: bytes, model: ModelInfo) -> Ask:
    """Validate a body of /v1/chat/completions."""
    fields = Fields.of_body(body)
    max_tokens = fields.integer("max_tokens", 1, INT64_MAX)
    newer = fields.integer("max_completion_tokens", 1, INT64_MAX)
    wants_logprobs = fields.boolean("logprobs")
    top_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top_logprobs is not None and not wants_logprobs:
        raise invalid_value("top_logprobs", "needs `logprobs` to be true")
    return _ask(
        fields,
        model,
        prompts=[],
        messages=_messages(fields.required("messages")),
        max_tokens=max_tokens if newer is None else newer,
        num_logprobs=(top_logprobs or 0) if wants_logprobs else None,
    )


def _ask(fields: Fields, model: ModelInfo, **own: Any) -> Ask:
    """The fields that both endpoints have, checked, together with an endpoint's `own`."""
    check_model(fields.get("model"), model)
    _refuse_unsupported(fields)
    is_stream = fields.boolean("stream")
    top_p = fields.number("top_p", 0, 1, default=1.0)
    if top_p == 0:
        raise invalid_value("top_p", "must be greater than 0")
    return Ask(
        is_chat=bool(own["messages"]),
        temperature=fields.number("temperature", 0, 2, default=1.0),
        top_p=top_p,
        top_k=max(fields.integer("top_k", -1, INT64_MAX) or 0, 0),
        min_p=fields.number("min_p", 0, 1, default=0.0),
        seed=fields.integer("seed", -INT64_MAX - 1, INT64_MAX),
        stop=_stops(fields.get("stop")),
        stop_token_ids=_stop_token_ids(fields.get("stop_token_ids"), model.vocab_size),
        ignore_eos=fields.boolean("ignore_eos"),
        is_stream=is_stream,
        include_usage=_include_usage(fields.get("stream_options"), is_stream),
        return_token_ids=fields.boolean("return_token_ids"),
        **own,
    )


def check_model(asked: object, model: ModelInfo) -> None:
    """Refuse another model than the one that is served; no name is the served one's."""
    if asked in (None, "", model.model_id):  # clients that must name one may leave it empty
        return
    if not isinstance(asked, str):
        raise invalid_type("model", "a string", asked)
    raise model_not_found(asked, model.model_id)


def _refuse_unsupported(fields: Fields) -> None:
    for name, neutral in NEUTRAL.items():
        value = fields.get(name)
        if value is None or any(_is_same(value, one) for one in neutral):
            continue
        raise RequestError(
            f"`{name}` is not supported" + (" with this value" if neutral else ""),
            code="unsupported_parameter",
            param=name,
        )


def _is_same(value: object, neutral: object) -> bool:
    """Equal, but true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _include_usage(options: object, is_stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise invalid_type("stream_options", "an object", options)
    if not is_stream:
        raise invalid_value("stream_options", "is only allowed when `stream` is true")
    value = options.get("include_usage")
    if not isinstance(value, bool | None):
        raise invalid_type("stream_options.include_usage", "a boolean", value)
    return bool(value)


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise invalid_type("stop", "a string or a list of strings", value)
    if len(stops) > MAX_STOPS:
        raise invalid_value("stop", f"has more than {MAX_STOPS} strings")
    for stop in stops:
        if not isinstance(stop, str):
            raise invalid_type("stop", "a string or a list of strings", stop)
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise invalid_value("stop", f"must be strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _stop_token_ids(value: object, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise invalid_type("stop_token_ids", "a list of token ids", value)
    if len(value) > MAX_STOP_IDS:
        raise invalid_value("stop_token_ids", f"has more than {MAX_STOP_IDS} ids")
    return tuple(integer(one, "stop_token_ids", 0, vocab_size - 1) for one in value)


def _prompts(value: object, model: ModelInfo, max_prompts: int) -> list[str | list[int]]:
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
        raise invalid_value("prompt", f"has {len(prompts)} prompts; the queue holds {max_prompts}")
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
        return [integer(token_id, "prompt", 0, model.vocab_size - 1) for token_id in value]
    return value


def _messages(value: object) -> list[dict[str, str]]:
    if not isinstance(value, list):
        raise invalid_type("messages", "a list of messages", value)
    if not value:
        raise invalid_value("messages", "is empty")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid_type(where, "an object", value)
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid_value(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    for name in ("tool_calls", "function_call"):
        if value.get(name):
            param = f"{where}.{name}"
            raise RequestError(
                f"`{param}` is not supported", code="unsupported_parameter", param=param
            )
    message = {"role": ROLES[role], "content": _content(value.get("content"), role, where)}
    for name in ("name", "tool_call_id"):
        if isinstance(value.get(name), str):
            message[name] = value[name]
    return message


def _content(value: object, role: str, where: str) -> str:
    param = f"{where}.content"
    if value is None and role == "assistant":
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid_type(param, "a string or a list of text parts", value)
    texts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise RequestError(
                "only parts of type `text` are supported",
                code="unsupported_parameter",
                param=f"{param}[{index}]",
            )
        if not isinstance(part.get("text"), str):
            raise invalid_type(f"{param}[{index}].text", "a string", part.get("text"))
        texts.append(part["text"])
    return "\n".join(texts)


def model_not_found(asked: str, served: str) -> RequestError:
    """Another model was asked for than the one that is served."""
    return RequestError(
        f"the model `{asked[:200]}` does not exist here; `{served}` does",
        code="model_not_found",
        param="model",
        status=404,
        kind="not_found_error",
    )
