"""The handoff page: how KV goes from prefill to decode, that it really does, and how fast.

Owns: nothing; pure.
Invariant: a transport is shown with what proves it, or with the word that nothing does.
Never: infers a rate; all are the daemon's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from appliance.frame import figures as fig
from appliance.frame.protocol import (
    Frame,
    HandoffFrame,
    LinkFrame,
    PoolFrame,
    RequestFrame,
    WayFrame,
)
from tui.lines import Line, Run, Tone, clip, facts, pad, rule, sparkline, state_bar, wrap
from tui.panels.lanes import ranked_routes
from tui.view import Samples, View, pool_counts

_LABEL_WIDTH = 16
_COUNT_WIDTH = 8
_ROUTE_WIDTH = 8
_RATE_WIDTH = 14
_RING = "ring"
_MAX_LINKS = 8
REASONS: Mapping[str, str] = MappingProxyType(
    {
        "cheapest": "meets the targets at the least cost",
        "closest": "no way met the targets, and this one missed them least",
        "kept": "as good as the best way, and the one taken before",
        "only": "the other worker was not there",
        "unknown": "steps of its size were not measured yet: as static roles do",
        "wary": "the other way had been far worse than predicted: as static roles do",
        "static": "static roles: prefill and decode always apart",
        "colocated": "one worker does all of it",
    }
)
"""What each reason for a route means; one that is not here is shown as it is."""


def page(view: View, width: int, height: int) -> list[Line]:
    """Path, rates, latency, what is on its way, routes."""
    frame = view.frame
    if frame is None:
        return []
    if frame.transport is None:
        note = "one worker does both: nothing is handed over"
        return [
            rule("PATH", width),
            [Run(note, Tone.MUTED)],
            *_routes(frame, width),
            *_predictions(frame, width),
            *_trials(frame, width),
            *_models(frame, width),
        ]
    return [
        *_path(frame, width),
        *_rates(view, frame, width),
        *_latency(frame, width),
        *_in_flight(frame, width),
        *_routes(frame, width),
        *_predictions(frame, width),
        *_trials(frame, width),
        *_models(frame, width),
    ]


def _models(frame: Frame, width: int) -> list[Line]:
    """The other models that a request may name; nothing where one is all that is known."""
    swaps = frame.swaps
    if swaps is None:
        return []
    items = [
        ("serves too", ", ".join(swaps.others) or fig.ABSENT),
        ("comes next", swaps.next or fig.ABSENT),
        ("requests that wait for it", fig.count(swaps.num_waiting)),
        ("swaps", fig.count(swaps.num_swaps)),
        ("last took", fig.duration(swaps.last_swap_ms)),
    ]
    return [rule("MODELS", width), *facts(width, items)]


def _path(frame: Frame, width: int) -> list[Line]:
    handoff = frame.handoff
    transport = (handoff.transport if handoff else None) or frame.transport or fig.ABSENT
    lines = [rule("PATH", width), [Run(f"{transport}  ", Tone.STRONG), *_proof(frame, handoff)]]
    lines += _links(frame, width)
    ring = next((pool for pool in frame.pools if pool.name == _RING), None)
    return lines if ring is None else [*lines, _ring(ring, width)]


def _links(frame: Frame, width: int) -> list[Line]:
    """A row for each link, those that are down and those that carry most first."""
    links = sorted(frame.links, key=lambda link: (link.down is None, -link.bytes_per_s))
    names = {id(link): f"{link.from_pool} → {link.to_pool}" for link in links}
    name_width = max((len(name) for name in names.values()), default=0) + 2
    lines = [_link(link, pad(names[id(link)], name_width)) for link in links[:_MAX_LINKS]]
    if len(links) > _MAX_LINKS:
        lines.append([Run(f"and {len(links) - _MAX_LINKS} more links", Tone.MUTED)])
    return lines


def _link(link: LinkFrame, name: str) -> Line:
    carried = pad(f"{fig.size(link.bytes_per_s)}/s", _RATE_WIDTH)
    copies = pad(f"copies {_per_s(link.copy_bytes_per_s)}", _RATE_WIDTH + 8)
    probe = f"at start {_per_s(link.probe_bytes_per_s)}"
    down = [] if link.down is None else [Run(f"  ▲ down: {link.down}", Tone.WARN)]
    if link.num_strikes and link.down is None and link.has_detour:
        down = [Run(f"  ▲ {link.num_strikes} copies in a row failed or were slow", Tone.WARN)]
    return [
        Run(name, Tone.MUTED),
        Run(pad(link.transport, 6)),
        Run(carried, Tone.STRONG),
        Run(copies),
        Run(probe, Tone.MUTED),
        *down,
    ]


def _per_s(rate: float | None) -> str:
    return fig.ABSENT if rate is None else f"{fig.size(rate)}/s"


def _proof(frame: Frame, handoff: HandoffFrame | None) -> Line:
    if frame.transport == "alias":
        return [Run("all workers map the same pool: blocks change owner, no byte moves")]
    if handoff is None or handoff.probe_bytes_per_s is None:
        return [Run("▲ not measured at start", Tone.WARN)]
    return [
        Run("● verified ", Tone.GOOD),
        Run(f"by checksum at start, {fig.size(handoff.probe_bytes_per_s)}/s"),
    ]


def _ring(ring: PoolFrame, width: int) -> Line:
    free = f" {fig.count(ring.free)} of {fig.count(ring.num_blocks)} slots free"
    room = width - _LABEL_WIDTH - len(free)
    return [
        Run(pad(_RING, _LABEL_WIDTH), Tone.MUTED),
        Run(state_bar(pool_counts(ring), room), Tone.ACCENT),
        Run(free),
    ]


def _rates(view: View, frame: Frame, width: int) -> list[Line]:
    history, totals, handoff = view.history, frame.totals, frame.handoff
    mean = totals.handoff_bytes / totals.handoffs if totals.handoffs else None
    newest = history.handoff_bytes_per_s[-1] if history.handoff_bytes_per_s else None
    lines = [
        rule("RATES", width, f"last {fig.whole_seconds(view.window_s)}"),
        _graph(view, "handoffs", history.handoffs_per_s, f"{_newest(history.handoffs_per_s)}/s",
               width),
    ]  # fmt: skip
    if frame.transport != "alias":
        rate = f"{fig.size(newest)}/s"
        lines.append(_graph(view, "bytes", history.handoff_bytes_per_s, rate, width))
    counts = [
        ("done", fig.count(totals.handoffs)),
        ("moved", fig.size(totals.handoff_bytes)),
        ("mean", fig.size(mean)),
        ("failed", fig.count(handoff.num_failed if handoff else None)),
        ("stale", fig.count(totals.stale_messages)),
        ("recovered", fig.count(totals.recovered_sequences)),
    ]
    return [*lines, *facts(width, counts)]


def _newest(samples: Samples) -> str:
    return fig.rate(samples[-1] if samples else None)


def _graph(view: View, label: str, samples: Samples, reading: str, width: int) -> Line:
    room = width - _LABEL_WIDTH - 12
    return [
        Run(pad(label, _LABEL_WIDTH), Tone.MUTED),
        Run(pad(reading, 12), Tone.STRONG),
        Run(sparkline(view.recent(samples, room), room), Tone.ACCENT),
    ]


def _latency(frame: Frame, width: int) -> list[Line]:
    now = frame.latency
    quantiles = [
        ("p50", fig.duration(now.handoff_ms_p50)),
        ("p95", fig.duration(now.handoff_ms_p95)),
    ]
    note = f"of requests finished in the last {now.window_s:.0f}s"
    return [rule("LATENCY", width, note), *facts(width, quantiles)]


def _in_flight(frame: Frame, width: int) -> list[Line]:
    num = frame.handoff.num_in_flight if frame.handoff else frame.queue.handing_off
    moving = [request for request in frame.requests if request.phase == "handing_off"]
    lines = [rule(f"IN FLIGHT {fig.count(num)}", width)]
    return [*lines, *(_row(request) for request in moving)] if moving else lines


def _row(request: RequestFrame) -> Line:
    return [
        Run(pad(fig.short_id(request.id), 10), Tone.STRONG),
        Run(pad(request.user or fig.ABSENT, 12)),
        Run(f"{fig.count(request.num_blocks)} blocks", Tone.MUTED),
        Run(f"   {fig.size(request.handoff_bytes)}   age {fig.seconds(request.age_ms / 1000)}"),
    ]


def _routes(frame: Frame, width: int) -> list[Line]:
    """A line for each way that sequences have gone: how many, where, and why so."""
    lines: list[Line] = [rule("ROUTES", width, "since the daemon started")]
    for num, route, reason in ranked_routes(frame):
        why = REASONS.get(reason, reason)
        lines.append(
            [
                Run(pad(fig.count(num), _COUNT_WIDTH, right=True), Tone.STRONG),
                Run(f"  {pad(route, _ROUTE_WIDTH)}"),
                Run(clip(why, max(0, width - _COUNT_WIDTH - _ROUTE_WIDTH - 2)), Tone.MUTED),
            ]
        )
    return lines if len(lines) > 1 else [*lines, [Run("no sequence placed yet", Tone.MUTED)]]


def _trials(frame: Frame, width: int) -> list[Line]:
    """What was chosen for this machine at start, with its figures; nothing where nothing was."""
    lines = [line for trial in frame.trials for line in wrap(trial, width)]
    return [rule("TRIALS", width, "by timing this machine at start"), *lines] if lines else []


def _predictions(frame: Frame, width: int) -> list[Line]:
    """What came of what elastic roles predicted, a line for each way; the worst first."""
    ways = sorted(frame.totals.ways, key=lambda way: (-way.is_closed, -way.num_missed))
    if not ways:
        return []
    return [rule("PREDICTIONS", width, "prompts, by way and size of step"), *map(_way, ways)]


def _way(way: WayFrame) -> Line:
    where = f"{way.worker}, {'all' if way.has_all else 'own'} cores"
    beside = "beside decodes" if way.is_beside else "alone"
    error = "" if way.error_ratio is None else f", off by {way.error_ratio:.1f}x"
    line = [
        Run(pad(fig.count(way.num_judged), _COUNT_WIDTH, right=True), Tone.STRONG),
        Run(f"  {pad(way.route, _ROUTE_WIDTH)}"),
        Run(f"on {where}, {beside}, from {fig.count(way.step_tokens)} tokens a step{error}"),
    ]
    if way.num_missed:
        line.append(Run(f", {fig.count(way.num_missed)} twice as bad or worse", Tone.WARN))
    if way.num_gave_way:
        line.append(Run(f", {fig.count(way.num_gave_way)} gave way"))
    if way.is_closed:
        line.append(Run(", closed until measured anew", Tone.WARN))
    return line
