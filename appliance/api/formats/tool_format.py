"""Describe the formats in which models write tool calls: grammar, marks, reader.

Invariant: what a format's grammar lets a model write, its reader reads.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
import string
from dataclasses import dataclass

from appliance.api.formats.call_readers import (
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
from engine.text.call_syntax import CallSyntax


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
