"""The prompts of a completion: texts or token ids, and which of the ids are output already.

Owns: what a prompt may be, and what an answer may go on with.
Invariant: token ids are those of the model, and no more than its context.
Never: tokenizes.
"""

from __future__ import annotations

from typing import Any

from appliance.json_fields import Fields, integer, invalid_type, invalid_value
from appliance.request import ModelInfo
from engine.errors import RequestError


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
