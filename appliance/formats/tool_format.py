"""Recognise by its chat template how a model writes reasoning and tool calls.

Owns: the formats; the table of reasoning formats, and the choice; settings may name formats
instead.
Invariant: what a format's grammar lets a model write, its reader reads.
Never: reads; call_readers does.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
import string
from dataclasses import dataclass

from appliance.formats.call_readers import (
    GLM_ELEMENTS,
    QWEN_ELEMENTS,
    CallReader,
    read_deepseek,
    read_elements,
    read_gemma,
    read_json,
    read_json_list,
    read_mistral,
    read_pythonic,
)
from engine.text.grammar import CallSyntax
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One of the ways in which models write tool calls."""

    signs: tuple[str, ...]
    """What a template that uses it says."""
    marks: tuple[str, ...]
    """Behind any of them comes a call, or a list of them."""
    read: CallReader
    syntax: CallSyntax
    """How a call is written that must come."""
    closers: tuple[str, ...] = ()
    """What ends or parts calls, and is no content."""
    loose: str = ""
    """The character with which a call begins where it has no mark."""
    is_bare: bool = False
    """An answer may begin with a call that has no mark."""
    is_list: bool = False
    """Behind a call there may be another without a mark."""
    is_harmony: bool = False
    """Calls are messages in a channel of their own, and answers are, too."""
    has_short_ids: bool = False
    """The template takes call ids of nine letters and digits only."""
    specials: tuple[str, ...] = ()
    """Further tokens that must be shown as text for a call to be read."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Texts that may be special tokens, and have to be seen."""
        return (*self.marks, *self.closers, *self.specials)

    def new_call_id(self) -> str:
        """Make an id for a call of the model."""
        if self.has_short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def _gemma(mark: str, end: str, quote: str) -> ToolFormat:
    """Describe `call:name{...}` between two marks, with texts between quotes that are tokens."""
    return ToolFormat(
        signs=(mark,),
        marks=(mark,),
        read=functools.partial(read_gemma, quote=quote),
        syntax=CallSyntax(
            style="gemma", begin=f"{mark}call:", head="{name}{{", tail="}", end=end, quote=quote
        ),
        closers=(end,),
        specials=(quote,),
    )


def _json_list(mark: str, read: CallReader) -> ToolFormat:
    """Describe a JSON list of calls behind one mark."""
    return ToolFormat(
        signs=(mark,),
        marks=(mark,),
        read=read,
        syntax=CallSyntax(opening=f"{mark}[", separator=", ", closing="]"),
        closers=("]", ","),
        loose="{",
        is_list=True,
    )


_MISTRAL_LIST = dataclasses.replace(
    _json_list("[TOOL_CALLS]", read_mistral),
    has_short_ids=True,
    specials=("[ARGS]", "[CALL_ID]"),
)

FORMATS = {
    "harmony": ToolFormat(
        signs=("<|channel|>", "<|message|>"),
        marks=(),
        read=read_json,
        syntax=CallSyntax(
            begin="<|channel|>commentary to=functions.",
            head="{name} <|constrain|>json<|message|>",
            tail="",
            separator="<|call|><|start|>assistant",
        ),
        is_harmony=True,
        specials=(
            *("<|start|>", "<|channel|>", "<|message|>"),
            *("<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
        ),
    ),
    "deepseek_v3": ToolFormat(
        signs=("<｜tool▁sep｜>", "```json"),
        marks=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        read=read_deepseek,
        syntax=CallSyntax(
            opening="<｜tool▁calls▁begin｜>",
            begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            head="{name}\n```json\n",
            tail="\n```",
            end="<｜tool▁call▁end｜>",
            separator="\n",
            closing="<｜tool▁calls▁end｜>",
        ),
        closers=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        specials=("<｜tool▁sep｜>",),
    ),
    "glm": ToolFormat(
        signs=("<arg_key>",),
        marks=("<tool_call>",),
        read=functools.partial(read_elements, syntax=GLM_ELEMENTS),
        syntax=CallSyntax(
            style="elements",
            begin="<tool_call>",
            head="{name}\n",
            key="<arg_key>{name}</arg_key>\n<arg_value>",
            value_end="</arg_value>",
            key_separator="\n",
            tail="\n</tool_call>",
            separator="\n",
        ),
        closers=("</tool_call>",),
        specials=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "qwen3_coder": ToolFormat(
        signs=("<function=", "<parameter="),
        marks=("<tool_call>", "<function="),
        read=functools.partial(read_elements, syntax=QWEN_ELEMENTS),
        syntax=CallSyntax(
            style="elements",
            begin="<tool_call>\n<function=",
            head="{name}>\n",
            key="<parameter={name}>\n",
            value_end="\n</parameter>",
            key_separator="\n",
            tail="\n</function>",
            end="\n</tool_call>",
            separator="\n",
        ),
        closers=("</function>", "</tool_call>"),
    ),
    "hermes": ToolFormat(
        signs=("<tool_call>",),
        marks=("<tool_call>",),
        read=read_json,
        syntax=CallSyntax(begin="<tool_call>\n", end="\n</tool_call>", separator="\n"),
        closers=("</tool_call>",),
    ),
    "mistral": dataclasses.replace(
        _MISTRAL_LIST,
        signs=("[TOOL_CALLS]", "[ARGS]"),
        syntax=CallSyntax(begin="[TOOL_CALLS]", head="{name}[ARGS]", tail=""),
    ),
    "mistral_list": _MISTRAL_LIST,
    "granite": _json_list("<|tool_call|>", read_json_list),
    "gemma": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "pythonic": ToolFormat(
        signs=("func_name1(",),
        marks=("<|python_start|>", "<|python_tag|>"),
        read=read_pythonic,
        syntax=CallSyntax(
            style="python",
            opening="[",
            head="{name}(",
            tail=")",
            separator=", ",
            closing="]",
        ),
        closers=("<|python_end|>", ";"),
        loose="[",
        is_bare=True,
    ),
    "llama": ToolFormat(
        signs=("<|start_header_id|>", '"parameters"'),
        marks=("<|python_tag|>",),
        read=read_json,
        syntax=CallSyntax(head='{{"name": "{name}", "parameters": ', separator="; "),
        closers=(";",),
        loose="{",
        is_bare=True,
    ),
}
"""The first with all its signs in the template is the model's.

harmony: gpt-oss. deepseek_v3: R1's distilled models. glm: 4.5 to 4.7. qwen3_coder: also Qwen 3.5.
hermes: Qwen 2.5 and 3, SmolLM3, Granite 4, and templates without tools.
mistral: from version 11 of their tokenizer on. gemma: 4. pythonic: Llama 3.2 and 4.
llama: 3.1 and later.
"""


# How a model writes what is not its answer: calls and reasoning, chosen by its chat template.
# Invariant: without a setting, a format is found by the template's text alone, so that it is the
# one that the model was trained with.
# Never: parses.


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
