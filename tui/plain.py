"""Print the console as plain text where there is no screen.

It serves pipes, log files, dumb terminals and screen readers: no escape sequence is written.
Invariant: shows the console's panels, from the same functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from appliance.observe.frame import figures as fig
from appliance.observe.frame.protocol import EventFrame, Frame
from tui import feed
from tui.history import has_meter
from tui.lines import Line, Run, clean, folded, text_of, to_ascii
from tui.panels import events, gauges, header, lanes, latencies
from tui.panels import requests as table
from tui.view import View, copies

_POOL_LINES = 5


async def print_once(socket_path: str, width: int, *, is_ascii: bool) -> None:
    """Print one reading; raises FeedLost."""
    frame = await feed.first_frame(socket_path)
    print_page(View().after(frame), width, is_ascii=is_ascii)


def print_page(view: View, width: int, *, is_ascii: bool) -> None:
    """Print one existing reading."""
    _write(page(view, width), is_ascii=is_ascii)


def print_views(views: Iterable[View], *, is_ascii: bool) -> None:
    """Print a line for each view that has a frame, and each event."""
    seen = _Seen()
    for view in views:
        if view.link.why:
            _write([view.link.why], is_ascii=is_ascii)
        elif view.frame is not None:
            lines = [header.summary(view), *seen.new_events(view.frame)]
            _write(lines, is_ascii=is_ascii)


async def print_json(socket_path: str) -> None:
    """Print one frame as the daemon's JSON and nothing else; raises FeedLost."""
    print_frame(await feed.first_frame(socket_path))


def print_frame(frame: Frame) -> None:
    """Print a frame as JSON and nothing else."""
    sys.stdout.write(feed.encoded(frame) + "\n")
    sys.stdout.flush()


def told(loss: feed.FeedLost) -> int:
    """Print the reason and a hint; return the exit code."""
    hint = f"hint: {loss.hint}\n" if loss.hint else ""
    sys.stderr.write(f"penstock: {clean(str(loss))}\n{hint}")
    return loss.exit_code


async def print_lines(socket_path: str, *, is_ascii: bool) -> None:
    """Print a line for each frame, event and loss of the daemon.

    It never ends once there has been a frame, since a daemon may come back; before, it raises
    FeedLost.
    """
    view, seen = View(), _Seen()

    def on_frame(frame: Frame) -> None:
        nonlocal view
        view = view.after(frame)
        _write([header.summary(view), *seen.new_events(frame)], is_ascii=is_ascii)

    def on_lost(loss: feed.FeedLost, retry_in_s: float) -> None:
        nonlocal view
        if view.frame is None:
            raise loss
        view = view.over(loss.link)
        _write([f"{loss.word}: {loss}; retry in {fig.seconds(retry_in_s)}"], is_ascii=is_ascii)

    await feed.follow(socket_path, on_frame, on_lost)


class _Seen:
    """Events already printed, so that each is printed once."""

    def __init__(self) -> None:
        self._events: list[EventFrame] = []

    def new_events(self, frame: Frame) -> list[str]:
        """Lines for events that the last frame did not have."""
        new = [event for event in frame.events if event not in self._events]
        self._events = list(frame.events)
        return [
            f"EVENT {fig.clock(event.at)} {event.severity.upper()} {event.code} {event.message}"
            for event in new
        ]


def page(view: View, width: int) -> list[str]:
    """Write every panel of the overview below each other, as text."""
    frame = view.frame
    kv_height = _POOL_LINES * len(frame.pools) if frame else 0
    columns = table.columns_for(width, has_meter(frame))
    requests = frame.requests if frame else []
    num_live = len(requests)
    sections: Sequence[tuple[str, list[Line]]] = (
        ("", [header.header(view, width), header.alert_line(view, width)]),
        (latencies.title(view, width), latencies.latency(view, width, 6)),
        (lanes.prefill_title(view), lanes.prefill(view, width, 6)),
        (lanes.decode_title(view), lanes.decode(view, width, 6)),
        (
            gauges.kv_title(view, width, kv_height),
            gauges.kv(view, width, kv_height),
        ),
        (lanes.handoff_title(view) if copies(frame) else "", lanes.handoff(view, width, 6)),
        ("MACHINE", gauges.machine(view, width, 12)),
        (
            table.title(view, num_live, 1, num_live),
            [
                table.heading(columns, view.listing),
                *(table.row(request, columns, is_selected=False) for request in requests),
                *([] if requests else [table.placeholder(view)]),
            ],
        ),
        ("EVENTS", events.events(view, width, 10) or [[Run("none in the last 10 min")]]),
    )
    lines: list[str] = []
    for title, body in sections:
        lines += ["", title] if title else []
        lines += [text_of(row).rstrip() for row in folded(body, width)]
    return lines


def _write(lines: Sequence[str], *, is_ascii: bool) -> None:
    for line in lines:
        text = clean(line)
        sys.stdout.write((to_ascii(text) if is_ascii else text) + "\n")
    sys.stdout.flush()
