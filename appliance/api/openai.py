"""Read the fields of OpenAI's completions and chats.

Owns: which fields there are, their types, ranges, defaults, and what is refused by name.
Invariant: any object at all gives an Ask or a RequestError that names the field.
Never: tokenizes, or keeps state. Fields that nobody knows are ignored, and told; fields that are
known and not supported are refused unless they ask for nothing.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from appliance.api.ask import Ask, Chat, checked_salt
from appliance.api.chat_messages import read_messages
from appliance.api.model_choice import check_model
from appliance.api.prompts import checked_ids, read_output_offset, read_prompts
from appliance.api.tools import read_constraint, read_tools
from appliance.json_fields import (
    INT64_MAX,
    Fields,
    integer,
    invalid_type,
    invalid_value,
    number,
    unsupported,
)
from appliance.request import ModelInfo
from engine.wire.sampling import SamplingParams

COMPLETION_MAX_TOKENS = 16
"""Of a completion that names no limit, as OpenAI's and vLLM's; a chat has the room left."""
MIN_TOP_P = 1e-6
"""What `top_p` 0 means: the likeliest token alone."""
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 128
MAX_BIASES = 300
MAX_LOGPROBS = 20
MAX_DOCUMENTS = 256
MAX_BAD_WORDS = 128
MAX_ALLOWED_IDS = 4096
"""They are kept for each request that waits, and cross to the worker."""

Neutral = dict[str, tuple[object, ...]]

NEUTRAL: Neutral = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "priority": (0,),
    "typical_p": (1,),
    "mirostat": (0,),
    "tfs_z": (1,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "top_n_sigma": (-1,),
    "truncation_side": ("left",),
}
"""Known, not supported: the values that ask for nothing. null asks for nothing everywhere."""

COMPLETION_NEUTRAL: Neutral = NEUTRAL | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
}

CHAT_NEUTRAL: Neutral = NEUTRAL | {
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "output_offset": (0,),
}

_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")


def completion_ask(fields: Fields, model: ModelInfo, max_prompts: int) -> Ask:
    """Validate a body of /v1/completions.

    Args:
        fields: the body.
        model: for the id, and the range of token ids.
        max_prompts: the queue would never take more from one request.
    """
    refuse_unsupported(fields, COMPLETION_NEUTRAL)
    is_echo = fields.boolean("echo")
    num_logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    prompts = read_prompts(fields.required("prompt"), model, max_prompts)
    return _ask(
        fields,
        model,
        num_logprobs,
        num_echo_logprobs=num_logprobs if is_echo else None,
        output_offset=read_output_offset(fields, prompts),
        returns_tokens_as_ids=fields.boolean("return_tokens_as_token_ids"),
        chat=None,
        prompts=prompts,
        suffix=fields.text("suffix") or None,
        **_max_tokens(fields, ("max_tokens", "n_predict"), COMPLETION_MAX_TOKENS, is_echo=is_echo),
        is_echo=is_echo,
    )


def chat_ask(fields: Fields, model: ModelInfo) -> Ask:
    """Validate a body of /v1/chat/completions, or one that was brought into its form."""
    refuse_unsupported(fields, CHAT_NEUTRAL)
    wants_logprobs = fields.boolean("logprobs")
    top_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top_logprobs and not wants_logprobs:
        raise invalid_value("top_logprobs", "needs `logprobs` to be true")
    return _ask(
        fields,
        model,
        (top_logprobs or 0) if wants_logprobs else None,
        chat=read_chat(fields),
        prompts=[],
        **_max_tokens(
            fields, ("max_completion_tokens", "max_tokens", "n_predict"), model.default_max_tokens
        ),
        is_echo=fields.boolean("echo"),
    )


def read_chat(fields: Fields) -> Chat:
    """The conversation, and how its template is to be rendered."""
    messages = read_messages(fields.required("messages"))
    continues = fields.boolean("continue_final_message")
    begins = fields.boolean("add_generation_prompt", default=not continues)
    if continues and begins:
        raise invalid_value(
            "continue_final_message", "cannot be together with `add_generation_prompt`"
        )
    variables = fields.get("chat_template_kwargs")
    if not isinstance(variables, dict | None):
        raise invalid_type("chat_template_kwargs", "an object", variables)
    for name in _OWN_VARIABLES:
        if name in (variables or {}):
            raise invalid_value(f"chat_template_kwargs.{name}", "has a field of its own")
    return Chat(
        messages=messages,
        tools=read_tools(fields),
        variables={**_documents(fields), **_effort(fields), **(variables or {})},
        add_generation_prompt=begins,
        continue_final_message=continues,
    )


def _effort(fields: Fields) -> dict[str, Any]:
    """What a template is told of `reasoning_effort`; `none` is not to think at all."""
    effort = fields.text("reasoning_effort")
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _documents(fields: Fields) -> dict[str, Any]:
    """What a template that knows documents gets of them."""
    documents = fields.items("documents", MAX_DOCUMENTS)
    return {"documents": documents} if documents else {}


def _max_tokens(
    fields: Fields, names: tuple[str, ...], default: int | None, *, is_echo: bool = False
) -> dict[str, Any]:
    """Read the limit by the first of its names that is there; -1 is the room left."""
    low, found = 0 if is_echo else 1, [fields.integer(name, -1) for name in names]
    for name, limit in zip(names, found, strict=True):
        if limit == 0 < low and name != "n_predict":
            raise invalid_value(fields.path(name), "must be 1 or more, or -1: the room left")
    limit = next((limit for limit in found if limit is not None), None)
    if limit == -1:
        return {"max_tokens": None, "default_max_tokens": None}
    return {
        "max_tokens": None if limit is None else max(limit, low),
        "default_max_tokens": default,
    }


def _ask(
    fields: Fields,
    model: ModelInfo,
    num_logprobs: int | None,
    *,
    num_echo_logprobs: int | None = None,
    output_offset: int = 0,
    **own: Any,
) -> Ask:
    """The fields that both endpoints have, checked, together with an endpoint's `own`."""
    check_model(fields.get("model"), model)
    is_stream = fields.boolean("stream")
    include_usage, has_running_usage = _stream_options(fields, is_stream)
    num_choices, num_best = _num_choices(fields, is_stream)
    prompt_logprobs = _prompt_logprobs(fields, is_stream)
    # the likeliest are found by their tokens' probabilities
    sampled = 0 if num_logprobs is None and num_best is not None else num_logprobs
    of_prompt = [n for n in (prompt_logprobs, num_echo_logprobs) if n is not None]
    common: dict[str, Any] = {
        "num_choices": num_choices,
        "num_best": num_best,
        "seed": fields.integer("seed", -INT64_MAX - 1),
        "base": msgspec.structs.replace(
            _base(fields, model, sampled, max(of_prompt, default=None)),
            output_offset=output_offset,
        ),
        "logprobs": num_logprobs,
        "prompt_logprobs": prompt_logprobs,
        "bad_words": _bad_words(fields),
        "stop": _stops(fields.get("stop")),
        "constraint": read_constraint(fields),
        "is_stream": is_stream,
        "include_usage": include_usage,
        "has_running_usage": has_running_usage,
        "return_token_ids": fields.boolean("return_token_ids"),
        "shows_special": not fields.boolean("skip_special_tokens", default=True),
        "shows_stop": fields.boolean("include_stop_str_in_output"),
        "truncate": fields.integer("truncate_prompt_tokens", -1),
        "cache_salt": checked_salt(fields.text("cache_salt")),
    }
    return Ask(**common, **own, ignored=fields.ignored)


def _base(
    fields: Fields, model: ModelInfo, num_logprobs: int | None, num_prompt_logprobs: int | None
) -> SamplingParams:
    """The sampling parameters that are known before the prompt's length is."""
    own = model.sampling_in_force
    top_k = fields.integer("top_k", -1)
    is_older = fields.get("repetition_penalty") is None  # llama.cpp and Ollama call it so
    repeat_penalty = fields.number("repeat_penalty", 0, 2, default=own["repetition_penalty"])
    repetition_penalty = (
        repeat_penalty
        if is_older
        else fields.number("repetition_penalty", 0, 2, default=own["repetition_penalty"])
    )
    if repetition_penalty == 0:
        raise invalid_value("repetition_penalty", "must be greater than 0")
    return SamplingParams(
        max_tokens=1,
        seed=0,
        temperature=fields.number("temperature", 0, 2, default=own["temperature"]),
        top_p=max(fields.number("top_p", 0, 1, default=own["top_p"]), MIN_TOP_P),
        top_k=max(int(own["top_k"] if top_k is None else top_k), 0),
        min_p=fields.number("min_p", 0, 1, default=own["min_p"]),
        presence_penalty=fields.number("presence_penalty", -2, 2, default=0.0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, default=0.0),
        repetition_penalty=repetition_penalty,
        logit_bias=_logit_bias(fields.nested("logit_bias"), model.vocab_size),
        stop_token_ids=_stop_token_ids(fields, model.vocab_size),
        ignore_eos=fields.boolean("ignore_eos"),
        min_tokens=fields.integer("min_tokens", 0) or 0,
        allowed_token_ids=_allowed_token_ids(fields.get("allowed_token_ids"), model.vocab_size),
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
    )


def refuse_unsupported(fields: Fields, neutral: Neutral) -> None:
    """Refuse fields that ask for something, unless it is one of their neutral values."""
    for name, accepted in neutral.items():
        value = fields.get(name)
        if value is None or any(_is_same(value, one) for one in accepted):
            continue
        but = " or ".join(json.dumps(one) for one in accepted)
        raise unsupported(name, "is not supported" + (f", but for {but}" if but else ""))


def _is_same(value: object, neutral: object) -> bool:
    """Equal, but true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _num_choices(fields: Fields, is_stream: bool) -> tuple[int, int | None]:
    """How many answers are written to each prompt, and how many of them are told if not all are."""
    num_told = fields.integer("n", 1, MAX_CHOICES) or 1
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    if best_of is None or best_of == num_told:
        return num_told, None
    if best_of < num_told:
        raise invalid_value("best_of", f"is less than `n`, which is {num_told}")
    if is_stream:
        raise invalid_value("best_of", "cannot be streamed: which are best is known at the end")
    return best_of, num_told


def _prompt_logprobs(fields: Fields, is_stream: bool) -> int | None:
    wanted = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if wanted and is_stream:
        raise invalid_value("prompt_logprobs", "cannot be streamed")
    return None if is_stream else wanted


def _bad_words(fields: Fields) -> tuple[str, ...]:
    words = fields.items("bad_words", MAX_BAD_WORDS)
    for word in words:
        if not isinstance(word, str):
            raise invalid_type("bad_words", "a list of strings", word)
        if not word.strip():
            what = "has a word of nothing but space; `logit_bias` can keep a token out"
            raise invalid_value("bad_words", what)
        if len(word) > MAX_STOP_CHARS:
            raise invalid_value("bad_words", f"has a word of more than {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(words))


def _allowed_token_ids(value: object, vocab_size: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise invalid_type("allowed_token_ids", "a list of token ids", value)
    if not value:
        raise invalid_value("allowed_token_ids", "is empty: no token could be sampled")
    if len(value) > MAX_ALLOWED_IDS:
        what = f"has {len(value)} entries, at most {MAX_ALLOWED_IDS} may be"
        raise invalid_value("allowed_token_ids", f"{what}; `structured_outputs.regex` says more")
    return tuple(sorted(set(checked_ids(value, "allowed_token_ids", vocab_size))))


def _stream_options(fields: Fields, is_stream: bool) -> tuple[bool, bool]:
    """Whether a stream ends with its usage, and whether each chunk has it."""
    options = fields.nested("stream_options")
    if options is None:
        return False, False
    if not is_stream:
        raise invalid_value("stream_options", "is only allowed when `stream` is true")
    include_usage = options.boolean("include_usage")
    return include_usage, options.boolean("continuous_usage_stats") and include_usage


def _logit_bias(biases: Fields | None, vocab_size: int) -> dict[int, float]:
    """Token ids, which are strings in JSON, and what is added to their logits."""
    if biases is None:
        return {}
    keys = biases.ignored
    if len(keys) > MAX_BIASES:
        raise invalid_value("logit_bias", f"has more than {MAX_BIASES} tokens")
    for key in keys:
        # isdecimal alone lets other scripts' digits through, and int() long ones
        is_id = key.isascii() and key.isdecimal() and len(key) < 10
        if not is_id or int(key) >= vocab_size:
            where = f"logit_bias.{key[:40]}"
            raise invalid_value(where, f"is no token id; they are numbers below {vocab_size}")
    return {int(key): number(biases.get(key), f"logit_bias.{key}", -100, 100) for key in keys}


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


def _stop_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    ids = fields.items("stop_token_ids", MAX_STOP_IDS)
    return tuple(integer(one, "stop_token_ids", 0, vocab_size - 1) for one in ids)
