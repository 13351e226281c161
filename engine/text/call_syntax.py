"""Describe how a model writes tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """A model's syntax of tool calls: `opening (begin head arguments tail end)+ closing`."""

    opening: str = ""
    """The text before the first call, such as `[TOOL_CALLS][`."""
    begin: str = ""
    """The text before each call, such as `<tool_call>` and a line break."""
    head: str = '{{"name": "{name}", "arguments": '
    """The text from a function's name to its arguments; names need no escaping in JSON."""
    tail: str = "}"
    end: str = ""
    separator: str = ""
    closing: str = ""
    style: str = "json"
    """The form of arguments: one `json` object; `elements`; `python` or `gemma`, a list with
    commas."""
    key: str = ""
    """The text before a value in `elements`, with its `name`."""
    value_end: str = ""
    key_separator: str = ", "
    quote: str = ""
    """The quote of texts in the style `gemma`."""
