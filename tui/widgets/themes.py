"""Colours from the terminal's own palette: for dark and light ones, and for colour-blind eyes.

Owns: the names of the themes; console.tcss says how each looks.
Invariant: a theme changes colours only; words and marks are the same in all.
Never: uses a colour outside the terminal's sixteen, so that NO_COLOR leaves none.
"""

from __future__ import annotations

from typing import NamedTuple


class Theme(NamedTuple):
    """One way to colour the tones."""

    name: str
    base: str
    """Textual's theme, for what is typed into."""
    classes: frozenset[str]
    """Of the app, for console.tcss."""


THEMES = (
    Theme("dark", "ansi-dark", frozenset()),
    Theme("light", "ansi-light", frozenset({"-light"})),
    Theme("dark, colour-blind", "ansi-dark", frozenset({"-colour-blind"})),
    Theme("light, colour-blind", "ansi-light", frozenset({"-light", "-colour-blind"})),
)
ALL_CLASSES = frozenset().union(*(theme.classes for theme in THEMES))
