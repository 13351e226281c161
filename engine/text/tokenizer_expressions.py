"""Name the regular expressions of a tokenizer's file in errors: some take days for some texts."""

from __future__ import annotations

import json
import re
from itertools import islice

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


def is_about_time(why: str) -> bool:
    """Tell whether a tokenizer took too much time, of what it may take too much of."""
    return why.endswith("takes too much time")


def with_expressions(why: str, expressions: str) -> str:
    """Add to what a tokenizer took too much of the expressions that may have taken it."""
    if not (expressions and is_about_time(why)):
        return why
    return f"{why}; its regular expressions: {expressions}"


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "..."
