"""How models write tool calls: a table, chosen by what a chat template says.

Owns: the formats. Called by: tools, tool_calls, admission, stream, cli.model_folders.
Invariant: a format is found by the template's text alone, so that it is the one that the model
was trained with.
Never: parses; one parser reads all formats.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass

from engine.grammar import CallSyntax
from engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls: marks around JSON objects that have a name and arguments."""

    signs: tuple[str, ...]
    """What a template that uses it says."""
    mark: str
    """Behind it comes a call, or a list of them."""
    syntax: CallSyntax
    is_bare: bool = False
    """An answer may also begin with a call itself, without the mark."""
    has_short_ids: bool = False
    """The template takes call ids of nine letters and digits only."""

    @property
    def is_list(self) -> bool:
        """True if calls stand in one list, behind one mark."""
        return self.syntax.closing == "]"

    @property
    def end(self) -> str:
        """What ends a call; empty where the call ends by itself."""
        return self.syntax.end.strip()

    def new_call_id(self) -> str:
        """An id for a call that the model has made."""
        if self.has_short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


FORMATS = {
    "hermes": ToolFormat(
        signs=("<tool_call>",),
        mark="<tool_call>",
        syntax=CallSyntax(begin="<tool_call>\n", end="\n</tool_call>", separator="\n"),
    ),
    "mistral": ToolFormat(
        signs=("[TOOL_CALLS]",),
        mark="[TOOL_CALLS]",
        syntax=CallSyntax(opening="[TOOL_CALLS][", separator=", ", closing="]"),
        has_short_ids=True,
    ),
    "granite": ToolFormat(
        signs=("<|tool_call|>",),
        mark="<|tool_call|>",
        syntax=CallSyntax(opening="<|tool_call|>[", separator=", ", closing="]"),
    ),
    "llama": ToolFormat(
        signs=("<|start_header_id|>", '"parameters"'),
        mark="<|python_tag|>",
        syntax=CallSyntax(separator="; ", arguments_key="parameters"),
        is_bare=True,
    ),
}
"""hermes: also Qwen 2.5 and 3, SmolLM3, Granite 4. llama: 3.1 and later."""

_OTHER_SIGNS = ("<function=", "<arg_key>", "[ARGS]")
"""Of formats that are no JSON objects, though their marks are those of one above."""


def tool_format_of(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format that a model's template speaks of; None if it takes no tools, or in another."""
    template = tokenizer.chat_template
    if template is None or not template.takes_tools:
        return None
    text = template.tool_source
    if any(sign in text for sign in _OTHER_SIGNS):
        return None
    found = (one for one in FORMATS.values() if all(sign in text for sign in one.signs))
    return next(found, None)
