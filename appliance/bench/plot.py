"""Cumulative distributions as SVG: one panel for each kind of time, one line for each arm.

Owns: the drawing. Invariant: pure; text in, text out, and every label is escaped.
Never: needs a library or a font of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

_COLOURS = ("#0b6e99", "#d1495b", "#66a182", "#8d6a9f", "#edae49", "#30343f")
_WIDTH, _PANEL_HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 40, 40
_MAX_POINTS = 400
_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99)

Series = Mapping[str, Sequence[float]]
"""Values in ms by arm."""


def cumulative(panels: Mapping[str, Series]) -> str:
    """A document with the panels below each other, by title; an empty one says so."""
    height = _PANEL_HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
        f' width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for index, (title, series) in enumerate(panels.items()):
        parts.append(f'<g transform="translate(0 {index * _PANEL_HEIGHT})">')
        parts += _panel(title, series)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, series: Series) -> list[str]:
    positive = [value for values in series.values() for value in values if value > 0]
    if not positive:
        return [_text(_LEFT, _TOP - 16, f"{title}: nothing observed")]
    low, high = math.log10(min(positive)), math.log10(max(positive))
    span = max(high - low, 0.01)

    def x(value: float) -> float:
        share = (math.log10(value) - low) / span
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    parts = [_text(_LEFT, _TOP - 16, f"{title}, ms, logarithmic; share of all that is not above")]
    parts += _grid(x, min(positive), max(positive))
    for index, (label, values) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        ranked = sorted(value for value in values if value > 0)
        points = " ".join(f"{x(value):.1f},{_y(share):.1f}" for value, share in _steps(ranked))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(_text(_WIDTH - 200, _y(0) - 12 * (len(series) - index), label, colour))
    return parts


def _grid(x: Callable[[float], float], low: float, high: float) -> list[str]:
    """Lines at shares, and at 1, 2 and 5 of every decade between the extremes."""
    parts = []
    for share in _SHARES:
        parts.append(_line(_LEFT, _y(share), _WIDTH - _RIGHT, _y(share)))
        parts.append(_text(_LEFT - 6, _y(share) + 4, f"{share:g}", anchor="end"))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = (step * 10.0**decade for decade in decades for step in (1, 2, 5))
    for mark in (low, *(mark for mark in marks if low * 1.1 < mark <= high)):
        parts.append(_line(x(mark), _y(0), x(mark), _y(1)))
        parts.append(_text(x(mark), _y(0) + 16, f"{mark:.3g}", anchor="middle"))
    return parts


def _steps(ranked: Sequence[float]) -> list[tuple[float, float]]:
    """Values with the share of all that is not above them; thinned out, with both ends kept."""
    last = len(ranked) - 1
    stride = max(1, last // _MAX_POINTS)
    chosen = sorted({*range(0, last + 1, stride), last})
    return [(ranked[index], (index + 1) / (last + 1)) for index in chosen if index >= 0]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="#ddd"/>'


def _y(share: float) -> float:
    return _PANEL_HEIGHT - _BOTTOM - share * (_PANEL_HEIGHT - _TOP - _BOTTOM)


def _text(x: float, y: float, text: str, colour: str = "black", anchor: str = "start") -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" fill="{colour}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"
