"""Choose by a chat template how a model writes reasoning and tool calls.

Invariant: without a setting, the template's text alone decides: the model was trained with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.api.formats.tool_format import FORMATS, ToolFormat
from engine.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What stands around the reasoning of a model."""

    signs: tuple[str, ...]
    """What a template of such a model says; one of them."""
    begins: tuple[str, ...]
    ends: tuple[str, ...]


THOUGHTS = {
    "think": ReasoningMarks(("<think>", "</think>"), ("<think>",), ("</think>",)),
    "mistral": ReasoningMarks(("[THINK]",), ("[THINK]",), ("[/THINK]",)),
    "gemma": ReasoningMarks(
        ("<|channel>",), ("<|channel>thought\n", "<|channel>"), ("<channel|>",)
    ),
    "granite": ReasoningMarks(
        ("Here is my thought process:",),
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
}
"""think: DeepSeek, Qwen, GLM, SmolLM3, most others. Harmony's channels are part of its format."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What is looked for in a model's text."""

    tools: ToolFormat
    thoughts: ReasoningMarks | None = None
    has_preamble: bool = False
    """The template says nothing of tools, so that a preamble must."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Texts that may be special tokens, and have to be seen."""
        thoughts = (*self.thoughts.begins, *self.thoughts.ends) if self.thoughts else ()
        return (*self.tools.tokens, *(one.strip() for one in thoughts))

    def begins_reasoning(self, prompt: str) -> bool:
        """Tell whether a prompt ends where the model is to reason, by its template."""
        begins = self.thoughts.begins if self.thoughts else ()
        return prompt.rstrip().endswith(tuple(one.rstrip() for one in begins))


PLAIN = OutputFormat(FORMATS["hermes"], has_preamble=True)
"""The format of a model whose template marks neither calls nor reasoning."""


def output_format_of(
    tokenizer: Tokenizer, tool_parser: str = AUTO, reasoning_parser: str = AUTO
) -> OutputFormat:
    """Choose a model's format by its template, or as the settings say."""
    template = tokenizer.chat_template
    text = template.tool_source if template else ""
    takes_tools = template is not None and template.takes_tools
    tools: ToolFormat | None = FORMATS.get(tool_parser)
    if tools is None and (takes_tools or _is_harmony(text)):
        found = (one for one in FORMATS.values() if all(sign in text for sign in one.signs))
        tools = next(found, None)
    thoughts = THOUGHTS.get(reasoning_parser)
    if reasoning_parser == AUTO:
        others = (one for one in THOUGHTS.values() if any(sign in text for sign in one.signs))
        thoughts = next(others, None)
    has_preamble = tools is None or not takes_tools
    return OutputFormat(tools or PLAIN.tools, thoughts, has_preamble)


def _is_harmony(text: str) -> bool:
    """Tell whether answers have marks also without tools."""
    return all(sign in text for sign in FORMATS["harmony"].signs)
