"""Fill-in-the-middle: a prompt with a suffix, for models trained to write what is between.

Owns: the table of marks.
Invariant: the marks are special tokens of the model; a model without them refuses a suffix.
Never: tokenizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.text.tokenizer import Tokenizer


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
