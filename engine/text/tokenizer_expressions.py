"""Name the regular expressions of a tokenizer's file in errors: some take days for some texts."""

from __future__ import annotations

import json
import re
from itertools import islice

from engine.errors import Overran, TooSlow
from engine.printable import printable

MAX_NAMED, MAX_CHARS = 3, 100
_EXPRESSION = re.compile(r'"Regex"\s*:\s*("[^"\\]*(?:\\.[^"\\]*)*")')


def expressions_of(text: str) -> str:
    """List the first expressions, each shortened; empty if there are none.

    Args:
        text: a tokenizer.json that can be read.
    """
    found = [json.loads(each[1]) for each in islice(_EXPRESSION.finditer(text), MAX_NAMED)]
    return ", ".join(f"'{printable(_shortened(each))}'" for each in found)


def with_expressions(error: Overran, expressions: str) -> str:
    """Say what a tokenizer took too much of; if it is time, name the expressions too."""
    if not (expressions and isinstance(error, TooSlow)):
        return error.what
    return f"{error.what}; its regular expressions: {expressions}"


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "..."
