"""Escape what could move a cursor, reorder a line or begin another one."""

from __future__ import annotations


def printable(value: object) -> str:
    """Escape all characters that are not for showing, line breaks included."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
