"""The bar under a replay: where in the recording the screen is, and how time passes.

Owns: nothing; pure. Called by: replay_console.
Invariant: place, marks and notes are told by glyph and word, never by colour alone.
Never: wider than asked for; the track gives way, then the notes.
"""

from __future__ import annotations

from tui import format as fmt
from tui.lines import Line, Span, Tone, width_of
from tui.timeline import Playback, iso

_TRACK, _PLACE, _MARK = "░", "█", "▲"
_LEAST_TRACK = 8


def bar(playback: Playback, notes: list[str], width: int) -> Line:
    """`PAUSED 1x  14:00:00Z ░░▲░█░░ 14:30:00Z`, and what is to be known of the frame."""
    word = "PLAYING" if playback.is_playing else "PAUSED"
    first_ms, last_ms = playback.moments_ms[0], playback.moments_ms[-1]
    left: Line = [
        Span(f" {word:<7} {playback.speed:g}x".ljust(14), Tone.ACCENT),
        Span(f"{_clock(first_ms)} ", Tone.MUTED),
    ]
    right: Line = [Span(f" {_clock(last_ms)}", Tone.MUTED)]
    room = width - width_of(left) - width_of(right) - 1
    for note in notes:
        span = Span(f"  {fmt.clean(note)}", Tone.WARN)
        if room - width_of([span]) >= _LEAST_TRACK:
            right.append(span)
            room -= width_of([span])
    return [*left, *track(playback, room), *right]


def track(playback: Playback, num_cells: int) -> Line:
    """The whole recording in so many cells: its marks, and over them the place."""
    if num_cells < 1:
        return []
    first_ms = playback.moments_ms[0]
    span_ms = max(1, playback.moments_ms[-1] - first_ms)

    def cell(at_ms: float) -> int:
        return int((at_ms - first_ms) / span_ms * (num_cells - 1))

    cells = [Span(_TRACK, Tone.MUTED)] * num_cells
    for mark_ms in playback.marks_ms:
        cells[cell(mark_ms)] = Span(_MARK, Tone.WARN)
    cells[cell(playback.at_ms)] = Span(_PLACE, Tone.ACCENT)
    return cells


def _clock(at_ms: int) -> str:
    return fmt.clock(iso(at_ms))
