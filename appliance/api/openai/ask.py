"""Turn the fields of OpenAI's completions and chats into what is asked of the model.

Unknown fields are ignored, and reported. Fields that are known and not supported are refused,
except for values that ask for nothing.

Invariant: any object at all gives an Ask or a RequestError that names the field.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from appliance.api.core.answer_forms import read_constraint
from appliance.api.core.ask import Ask, Chat
from appliance.api.core.chat_messages import Conversation, read_messages
from appliance.api.core.fields import (
    OWN_VARIABLES,
    ChatReasoning,
    ChatRequest,
    ChatSettings,
    CompletionRequest,
    Generated,
    ThinkingSwitch,
)
from appliance.api.core.model_choice import check_model
from appliance.api.core.prompts import checked_ids, read_output_offset, read_prompts
from appliance.api.core.tools import read_tools
from appliance.daemon.requests.request import ModelInfo
from appliance.json.fields import Json, check, invalid_value, undeclared, unsupported
from engine.wire.sampling import SamplingParams

COMPLETION_MAX_TOKENS = 16
"""The default of completions, as OpenAI's and vLLM's; a chat has the room left."""
MIN_TOP_P = 1e-6
"""What `top_p` 0 means: the likeliest token alone."""

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
"""Fields that are known and not supported, with the values that ask for nothing."""

COMPLETION_NEUTRAL: Neutral = NEUTRAL | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
}

CHAT_NEUTRAL: Neutral = NEUTRAL | {
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
    "output_offset": (0,),
}


def completion_ask(values: Json, model: ModelInfo, max_prompts: int) -> Ask:
    """Validate a body of /v1/completions.

    Args:
        model: for the id, and the range of token ids.
        max_prompts: the most that the queue takes from one request.
    """
    refuse_unsupported(values, COMPLETION_NEUTRAL)
    body = check(values, CompletionRequest)
    ignored = undeclared(values, CompletionRequest, COMPLETION_NEUTRAL)
    return ask_of_completion(body, model, max_prompts, ignored)


def ask_of_completion(
    body: CompletionRequest, model: ModelInfo, max_prompts: int, ignored: tuple[str, ...]
) -> Ask:
    """Check how a completion's fields go together."""
    prompts = read_prompts(body.prompt, model, max_prompts)
    is_echo = bool(body.echo)
    return _ask(
        body,
        model,
        body.logprobs,
        num_echo_logprobs=body.logprobs if is_echo else None,
        output_offset=read_output_offset(body, prompts),
        returns_tokens_as_ids=bool(body.return_tokens_as_token_ids),
        chat=None,
        prompts=prompts,
        suffix=body.suffix or None,
        **_max_tokens(body, COMPLETION_MAX_TOKENS, is_echo=is_echo),
        is_echo=is_echo,
        ignored=ignored,
    )


def chat_ask(values: Json, model: ModelInfo) -> Ask:
    """Validate a body of /v1/chat/completions."""
    refuse_unsupported(values, CHAT_NEUTRAL)
    body = check(values, ChatRequest)
    ignored = undeclared(values, ChatRequest, CHAT_NEUTRAL)
    return ask_of_chat(body, model, read_messages(body.messages), ignored)


def ask_of_chat(
    body: ChatSettings,
    model: ModelInfo,
    conversation: Conversation,
    ignored: tuple[str, ...] = (),
) -> Ask:
    """Check how a chat's fields go together; other APIs bring their bodies into this form."""
    if body.top_logprobs and not body.logprobs:
        raise invalid_value("top_logprobs", "needs `logprobs` to be true")
    chat = read_chat(body, conversation)
    return _ask(
        body,
        model,
        (body.top_logprobs or 0) if body.logprobs else None,
        chat=chat,
        prompts=[],
        prediction=None if body.prediction is None else body.prediction.text,
        **_max_tokens(body, model.default_max_tokens),
        is_echo=bool(body.echo),
        ignored=(*ignored, *chat.ignored),
    )


_AS_TEXT = {"true": True, "false": False}
"""Switches by what clients write whose fields hold texts; templates would not know the texts."""


def read_chat(body: ChatSettings, conversation: Conversation) -> Chat:
    """Read how the template of a conversation is to be rendered."""
    continues = bool(body.continue_final_message)
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and begins:
        raise invalid_value(
            "continue_final_message", "cannot be together with `add_generation_prompt`"
        )
    variables = {
        name: _AS_TEXT.get(value, value) if isinstance(value, str) else value
        for name, value in (body.chat_template_kwargs or {}).items()
    }
    for name in OWN_VARIABLES:
        if name in variables:
            raise invalid_value(f"chat_template_kwargs.{name}", "has a field of its own")
    documents = {"documents": body.documents} if body.documents else {}
    tools, left_out = read_tools(body)
    return Chat(
        messages=conversation.messages,
        tools=tools,
        variables={**documents, **_effort(body), **variables},
        add_generation_prompt=begins,
        continue_final_message=continues,
        marks=tuple(conversation.marks),
        places=tuple(conversation.places),
        ignored=(*left_out, *conversation.left_out),
    )


def _effort(body: ChatSettings) -> dict[str, Any]:
    """Tell a template how much to think, by the first that says it; `none` turns reasoning off."""
    reasoning, thinking = body.reasoning, body.thinking
    if isinstance(reasoning, ChatReasoning):
        reasoning = reasoning.enabled if reasoning.effort is None else reasoning.effort
    if isinstance(thinking, ThinkingSwitch):
        thinking = thinking.type != "disabled"
    asked = (body.reasoning_effort, reasoning, body.think, body.enable_thinking, thinking)
    effort = next((one for one in asked if one is not None), None)
    if effort is None:
        return {}
    if isinstance(effort, bool):
        return {"enable_thinking": effort}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _max_tokens(body: Generated, default: int | None, *, is_echo: bool = False) -> dict[str, Any]:
    """Read the limit by the first of its names that is there; -1 is the room left."""
    low, limits = 0 if is_echo else 1, {"max_tokens": body.max_tokens}
    if isinstance(body, ChatSettings):
        limits = {"max_completion_tokens": body.max_completion_tokens, **limits}
    for name, limit in limits.items():
        if limit == 0 < low:
            raise invalid_value(name, "must be 1 or more, or -1: the room left")
    limits["n_predict"] = body.n_predict
    limit = next((limit for limit in limits.values() if limit is not None), None)
    if limit == -1:
        return {"max_tokens": None, "default_max_tokens": None}
    return {
        "max_tokens": None if limit is None else max(limit, low),
        "default_max_tokens": default,
    }


def _ask(
    body: Generated,
    model: ModelInfo,
    num_logprobs: int | None,
    *,
    num_echo_logprobs: int | None = None,
    output_offset: int = 0,
    **own: Any,
) -> Ask:
    """Put the fields that both endpoints have together with an endpoint's `own`."""
    check_model(body.model, model)
    is_stream = bool(body.stream)
    include_usage, has_running_usage = _stream_options(body, is_stream)
    num_choices, num_best = _num_choices(body, is_stream)
    if body.prompt_logprobs and is_stream:
        raise invalid_value("prompt_logprobs", "cannot be streamed")
    prompt_logprobs = None if is_stream else body.prompt_logprobs
    # the likeliest are found by their tokens' probabilities
    sampled = 0 if num_logprobs is None and num_best is not None else num_logprobs
    of_prompt = [n for n in (prompt_logprobs, num_echo_logprobs) if n is not None]
    base = _base(body, model, sampled, max(of_prompt, default=None))
    common: dict[str, Any] = {
        "num_choices": num_choices,
        "num_best": num_best,
        "seed": body.seed,
        "base": msgspec.structs.replace(
            base,
            output_offset=output_offset,
            allowed_token_ids=_allowed_token_ids(body.allowed_token_ids, model.vocab_size),
        ),
        "logprobs": num_logprobs,
        "prompt_logprobs": prompt_logprobs,
        "bad_words": _bad_words(body.bad_words or []),
        "stop": tuple(filter(None, [body.stop] if isinstance(body.stop, str) else body.stop or ())),
        "constraint": read_constraint(body),
        "is_stream": is_stream,
        "include_usage": include_usage,
        "has_running_usage": has_running_usage,
        "return_token_ids": bool(body.return_token_ids),
        "shows_special": body.skip_special_tokens is False,
        "shows_stop": bool(body.include_stop_str_in_output),
        "truncate": body.truncate_prompt_tokens,
        "cache_salt": body.cache_salt,
    }
    return Ask(**common, **own)


def _base(
    body: Generated, model: ModelInfo, num_logprobs: int | None, num_prompt_logprobs: int | None
) -> SamplingParams:
    """Make the sampling parameters that are known before the prompt's length is."""
    defaults = model.sampling_in_force

    def value(name: str) -> float:
        asked = getattr(body, name)
        return defaults[name] if asked is None else asked

    penalty = body.repetition_penalty
    if penalty is None:
        penalty = body.repeat_penalty  # as llama.cpp and Ollama call it
    return SamplingParams(
        max_tokens=1,
        seed=0,
        temperature=value("temperature"),
        top_p=max(value("top_p"), MIN_TOP_P),
        top_k=max(int(value("top_k")), 0),
        min_p=value("min_p"),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=value("repetition_penalty") if penalty is None else penalty,
        logit_bias=_logit_bias(body.logit_bias or {}, model.vocab_size),
        stop_token_ids=_token_ids(body.stop_token_ids, "stop_token_ids", model.vocab_size),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
    )


def refuse_unsupported(values: Json, neutral: Neutral) -> None:
    """Refuse fields that ask for something, unless it is one of their neutral values."""
    for name in values.keys() & neutral.keys():
        value, accepted = values[name], neutral[name]
        if value is None or any(_is_same(value, one) for one in accepted):
            continue
        but = " or ".join(json.dumps(one) for one in accepted)
        raise unsupported(name, "is not supported" + (f", but for {but}" if but else ""))


def _is_same(value: object, neutral: object) -> bool:
    """Compare values; true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _num_choices(body: Generated, is_stream: bool) -> tuple[int, int | None]:
    """Count the answers to write per prompt, and how many of them to return if not all."""
    num_told, best_of = body.n or 1, body.best_of
    if best_of is None or best_of == num_told:
        return num_told, None
    if best_of < num_told:
        raise invalid_value("best_of", f"is less than `n`, which is {num_told}")
    if is_stream:
        raise invalid_value("best_of", "cannot be streamed: which are best is known at the end")
    return best_of, num_told


def _bad_words(words: list[str]) -> tuple[str, ...]:
    if any(not word.strip() for word in words):
        what = "has a word of nothing but space; `logit_bias` can keep a token out"
        raise invalid_value("bad_words", what)
    return tuple(dict.fromkeys(words))


def _allowed_token_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if ids is None:
        return None
    return tuple(sorted(set(_token_ids(ids, "allowed_token_ids", vocab_size))))


def _token_ids(ids: list[int] | None, param: str, vocab_size: int) -> tuple[int, ...]:
    return tuple(checked_ids(ids, param, vocab_size)) if ids else ()


def _stream_options(body: Generated, is_stream: bool) -> tuple[bool, bool]:
    """Decide whether a stream ends with its usage, and whether each chunk has it."""
    options = body.stream_options
    if options is None:
        return False, False
    if not is_stream:
        raise invalid_value("stream_options", "is only allowed when `stream` is true")
    include_usage = bool(options.include_usage)
    return include_usage, bool(options.continuous_usage_stats) and include_usage


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    """Read token ids, which are strings in JSON, and what is added to their logits."""
    for key in biases:
        # isdecimal alone lets other scripts' digits through, and int() long ones
        is_id = key.isascii() and key.isdecimal() and len(key) < 10
        if not is_id or int(key) >= vocab_size:
            where = f"logit_bias.{key[:40]}"
            raise invalid_value(where, f"is no token id; they are numbers below {vocab_size}")
    return {int(key): bias for key, bias in biases.items()}
