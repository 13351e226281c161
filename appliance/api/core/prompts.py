"""Read a completion's prompts: texts, token ids, or a prefix with a suffix.

Invariant: the marks are special tokens of the model; a model without them refuses a suffix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from appliance.api.core.ask import PromptTooLong
from appliance.api.core.fields import CompletionRequest
from appliance.daemon.requests.request import ModelInfo
from appliance.json.fields import integer, invalid_type, invalid_value
from engine.text.tokenizer import Tokenizer


def read_prompts(
    asked: str | list[Any], model: ModelInfo, max_prompts: int
) -> list[str | list[int]]:
    """Read one prompt or many, as text or token ids, told apart by the first element."""
    is_many = isinstance(asked, list) and isinstance(asked[0], str | list)
    prompts: list[Any] = list(asked) if is_many else [asked]
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


def read_output_offset(body: CompletionRequest, prompts: list[str | list[int]]) -> int:
    """Count the prompt's last tokens that are output of an earlier answer."""
    offset = body.output_offset or 0
    if not offset:
        return 0
    for name in ("n", "best_of", "echo", "suffix", "truncate_prompt_tokens"):
        value = getattr(body, name)
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


@dataclass(frozen=True, slots=True)
class Infill:
    """The marks of one family: what comes before, what comes behind, and where to write."""

    prefix: str
    suffix: str
    middle: str
    is_suffix_first: bool = False

    def prompt(self, before: str, behind: str) -> str:
        """Write the text that asks for what is between."""
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
    """Find the marks that a model has; None if it has none."""
    for marks in MARKS:
        texts = filter(None, (marks.prefix, marks.suffix, marks.middle))
        if all(map(tokenizer.has_token, texts)):
            return marks
    return None
