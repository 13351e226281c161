"""How models write tool calls: a table.

Owns: the formats. Called by: output_format (chooses), tools, output_parser.
Invariant: what a format's grammar lets a model write, its reader reads.
Never: reads; call_readers does.
"""

from __future__ import annotations

import functools
import secrets
import string
from dataclasses import dataclass

from appliance.api.call_readers import (
    CallReader,
    read_deepseek,
    read_gemma,
    read_json,
    read_json_list,
    read_mistral,
    read_pythonic,
)
from appliance.api.element_calls import (
    DSML_ELEMENTS,
    GLM_ELEMENTS,
    QWEN_ELEMENTS,
    read_elements,
)
from engine.call_grammar import CallSyntax


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls."""

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
    """Tokens besides marks and closers without whose text a call cannot be read."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Texts that may be special tokens, and have to be seen."""
        return (*self.marks, *self.closers, *self.specials)

    def new_call_id(self) -> str:
        """An id for a call that the model has made."""
        if self.has_short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


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
    "deepseek_v31": ToolFormat(
        signs=("<｜tool▁sep｜>",),
        marks=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        read=read_deepseek,
        syntax=CallSyntax(
            opening="<｜tool▁calls▁begin｜>",
            begin="<｜tool▁call▁begin｜>",
            head="{name}<｜tool▁sep｜>",
            tail="",
            end="<｜tool▁call▁end｜>",
            closing="<｜tool▁calls▁end｜>",
        ),
        closers=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        specials=("<｜tool▁sep｜>",),
    ),
    "deepseek_v32": ToolFormat(
        signs=("DSML",),
        marks=("<｜DSML｜function_calls>", '<｜DSML｜invoke name="'),
        read=functools.partial(read_elements, syntax=DSML_ELEMENTS),
        syntax=CallSyntax(
            style="elements",
            opening="<｜DSML｜function_calls>\n",
            begin='<｜DSML｜invoke name="',
            head='{name}">\n',
            key='<｜DSML｜parameter name="{name}" string="{is_text}">',
            value_end="</｜DSML｜parameter>",
            key_separator="\n",
            tail="\n</｜DSML｜invoke>",
            separator="\n",
            closing="\n</｜DSML｜function_calls>",
        ),
        closers=("</｜DSML｜function_calls>",),
        specials=("｜DSML｜",),
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
    "mistral": ToolFormat(
        signs=("[TOOL_CALLS]", "[ARGS]"),
        marks=("[TOOL_CALLS]",),
        read=read_mistral,
        syntax=CallSyntax(begin="[TOOL_CALLS]", head="{name}[ARGS]", tail=""),
        closers=("]", ","),
        loose="{",
        is_list=True,
        has_short_ids=True,
        specials=("[ARGS]", "[CALL_ID]"),
    ),
    "mistral_list": ToolFormat(
        signs=("[TOOL_CALLS]",),
        marks=("[TOOL_CALLS]",),
        read=read_mistral,
        syntax=CallSyntax(opening="[TOOL_CALLS][", separator=", ", closing="]"),
        closers=("]", ","),
        loose="{",
        is_list=True,
        has_short_ids=True,
        specials=("[ARGS]", "[CALL_ID]"),
    ),
    "granite": ToolFormat(
        signs=("<|tool_call|>",),
        marks=("<|tool_call|>",),
        read=read_json_list,
        syntax=CallSyntax(opening="<|tool_call|>[", separator=", ", closing="]"),
        closers=("]", ","),
        loose="{",
        is_list=True,
    ),
    "gemma": ToolFormat(
        signs=("<|tool_call>",),
        marks=("<|tool_call>",),
        read=functools.partial(read_gemma, quote='<|"|>'),
        syntax=CallSyntax(
            style="gemma",
            begin="<|tool_call>call:",
            head="{name}{{",
            tail="}",
            end="<tool_call|>",
            quote='<|"|>',
        ),
        closers=("<tool_call|>",),
        specials=('<|"|>',),
    ),
    "functiongemma": ToolFormat(
        signs=("<start_function_call>",),
        marks=("<start_function_call>",),
        read=functools.partial(read_gemma, quote="<escape>"),
        syntax=CallSyntax(
            style="gemma",
            begin="<start_function_call>call:",
            head="{name}{{",
            tail="}",
            end="<end_function_call>",
            quote="<escape>",
        ),
        closers=("<end_function_call>",),
        specials=("<escape>",),
    ),
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
"""The first whose signs are all in the template is the model's.

harmony: gpt-oss. deepseek_v3: also R1. glm: 4.5 to 4.7. qwen3_coder: also Qwen 3.5 and 3.6.
hermes: Qwen 2.5 and 3, SmolLM3, Granite 4, and the preamble for templates that know no tools.
mistral: from version 11 of their tokenizer on. gemma: 4. pythonic: Llama 3.2 and 4.
llama: 3.1 and later.
"""
