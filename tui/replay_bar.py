"""Draw the bar under a replay.

Invariant: position, marks and notes have glyphs and words.
"""

from __future__ import annotations

from appliance.observe.frame import figures as fig
from tui.lines import Line, Run, Tone, clean, width_of
from tui.playback import Playback, iso

_TRACK, _PLACE, _MARK = "░", "█", "▲"
_LEAST_TRACK = 8
_FRAME_MS = 2000
"""Maximum time that a frame is shown before the next."""


def bar(playback: Playback, notes: list[str], width: int) -> Line:
    """Draw `PAUSED 1x 14:00:00Z ░░▲░█░░ 14:30:00Z`, then notes about the frame."""
    word = "PLAYING" if playback.is_playing else "PAUSED"
    first_ms, last_ms = playback.moments_ms[0], playback.moments_ms[-1]
    left: Line = [
        Run(f" {word:<7} {playback.speed:g}x".ljust(14), Tone.ACCENT),
        Run(f"{_clock(first_ms)} ", Tone.MUTED),
    ]
    right: Line = [Run(f" {_clock(last_ms)}", Tone.MUTED)]
    room = width - width_of(left) - width_of(right) - 1
    for note in notes:
        span = Run(f"  {clean(note)}", Tone.WARN)
        if room - width_of([span]) >= _LEAST_TRACK:
            right.append(span)
            room -= width_of([span])
    return [*left, *track(playback, room), *right]


def landing(playback: Playback, asked_ms: int) -> str:
    """Describe where a replay has gone for a wanted time, and why if it is elsewhere."""
    at, asked = _clock(playback.at_ms), _clock(asked_ms)
    if asked_ms < playback.moments_ms[0]:
        return f"the recording begins at {at}, after {asked}; showing its first frame"
    if playback.is_at_end and asked_ms - playback.at_ms >= _FRAME_MS:
        return f"the recording ends at {at}, before {asked}; showing its last frame"
    if asked_ms - playback.at_ms >= _FRAME_MS:
        return f"nothing was recorded at {asked}; the last frame before it is of {at}"
    return f"at {at}"


def track(playback: Playback, num_cells: int) -> Line:
    """Draw the recording in `num_cells` cells with its marks and the position."""
    if num_cells < 1:
        return []
    first_ms = playback.moments_ms[0]
    span_ms = max(1, playback.moments_ms[-1] - first_ms)

    def cell(at_ms: float) -> int:
        return int((at_ms - first_ms) / span_ms * (num_cells - 1))

    cells = [Run(_TRACK, Tone.MUTED)] * num_cells
    for mark_ms in playback.marks_ms:
        cells[cell(mark_ms)] = Run(_MARK, Tone.WARN)
    cells[cell(playback.at_ms)] = Run(_PLACE, Tone.ACCENT)
    return cells


def _clock(at_ms: int) -> str:
    return fig.clock(iso(at_ms))
