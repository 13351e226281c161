"""Draw the handoff page: how KV moves from prefill to decode, and how fast.

Invariant: a transport is shown with its measurement at start, or as unmeasured.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from appliance.observe.frame import figures as fig
from appliance.observe.frame.protocol import (
    Frame,
    HandoffFrame,
    LinkFrame,
    PoolFrame,
    RequestFrame,
    WayFrame,
)
from appliance.observe.frame.request_facts import guesses
from appliance.observe.frame.tier_frames import fields
from tui.history import Samples
from tui.lines import (
    Line,
    Run,
    Tone,
    beside_chart,
    clean,
    facts,
    nonzero,
    pad,
    rule,
    state_bar,
    wrap,
)
from tui.panels.lanes import newest_size, ranked_routes, route_text
from tui.view import View, pool_counts

_WIDE_LABEL = 16
_COUNT_WIDTH = 8
_ROUTE_WIDTH = 11
_RATE_WIDTH = 12
_STAGING = "ring"
_MAX_LINKS = 8
_MAX_CHART_ROWS = 5
_LEAST_RECENT = 6
"""Minimum rows of newest handoffs, with their heading."""
REASONS: Mapping[str, str] = MappingProxyType(
    {
        "alone": "machine idle; all cores computed it",
        "cheapest": "meets the targets at the lowest cost",
        "closest": "no route met the targets; least bad chosen",
        "kept": "as good as the best route, and used before",
        "only": "the other worker was not ready",
        "unknown": "step size not measured yet; default route",
        "wary": "the other route was far slower than predicted; default route",
        "static": "static roles: prefill and decode always separate",
        "colocated": "one worker for both phases",
    }
)
"""The meaning of each route's reason; others are shown unchanged."""


def page(view: View, width: int, height: int) -> list[Line]:
    """Draw path, latency, routes; rates and the newest handoffs fill the rest."""
    frame = view.frame
    if frame is None:
        return []
    below = [
        *_routes(frame, width),
        *_predictions(frame, width),
        *_tuning(frame, width),
        *_guesses(frame, width),
        *_models(frame, width),
    ]
    if frame.transport is None:
        note = "one worker for both phases: no handoff"
        return [rule("PATH", width), [Run(note, Tone.MUTED)], *below]
    path = _path(frame, width)
    now = [*_latency(frame, width), *_in_flight(frame, width)]
    recent = _recent(view, width)
    room = height - len(path) - len(now) - len(below)
    num_rows = max(1, min(_MAX_CHART_ROWS, (room - len(recent[:_LEAST_RECENT])) // 2 - 1))
    rates = _rates(view, frame, width, num_rows)
    return [*path, *rates, *now, *below, *recent[: max(_LEAST_RECENT, room - len(rates))]]


def _recent(view: View, width: int) -> list[Line]:
    """Draw a line for each ended request with a handoff, the newest first."""
    handed = [request for request in view.finished if request.handoff_ms is not None]
    rows: list[Line] = [
        [
            Run(pad(fig.short_id(request.id), 10), Tone.STRONG),
            Run(pad(request.user or fig.ABSENT, 12)),
            Run(f"{fig.duration(request.handoff_ms):>8}, wait"),
            Run(f"{fig.duration(request.decode_wait_ms):>8}"),
            Run(f", {fig.size(request.handoff_bytes)}" if request.handoff_bytes else ""),
            Run(f"  {_reason(request.route_reason or '')}", Tone.MUTED),
        ]
        for request in handed
    ]
    return [rule("RECENT HANDOFFS", width, "newest first"), *rows] if rows else []


def _reason(told: str) -> str:
    """Return a route's reason without its figures."""
    code = clean(told).partition(":")[0]
    return REASONS.get(code, code)


def _models(frame: Frame, width: int) -> list[Line]:
    """List the other models that a request may name; nothing with a single model."""
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
    if swaps.expires_at:
        items.append(("makes room at", fig.clock(swaps.expires_at)))
    for one in swaps.resident:
        until = f" until {fig.clock(one.expires_at)}" if one.expires_at else ""
        items.append((f"loaded: {clean(one.model)}", f"{fig.size(one.num_bytes)}{until}"))
    for each in swaps.failed:
        until = f"not tried until {fig.clock(each.retry_at)}: {clean(each.reason)}"
        items.append((f"failed: {clean(each.model)}", until))
    return [rule("MODELS", width), *facts(width, items)]


def _path(frame: Frame, width: int) -> list[Line]:
    handoff = frame.handoff
    transport = (handoff.transport if handoff else None) or frame.transport or fig.ABSENT
    lines = [rule("PATH", width), [Run(f"{transport}  ", Tone.STRONG), *_proof(frame, handoff)]]
    lines += _links(frame, width)
    staging = next((pool for pool in frame.pools if pool.name == _STAGING), None)
    return lines if staging is None else [*lines, _staging(staging, width)]


def _links(frame: Frame, width: int) -> list[Line]:
    """Draw a row for each link; links that are down or busiest come first."""
    links = sorted(frame.links, key=lambda link: (link.down is None, -link.bytes_per_s))
    names = {id(link): f"{link.from_pool} → {link.to_pool}" for link in links}
    name_width = max((len(name) for name in names.values()), default=0) + 2
    lines = [_link(link, pad(names[id(link)], name_width)) for link in links[:_MAX_LINKS]]
    if len(links) > _MAX_LINKS:
        lines.append([Run(f"and {len(links) - _MAX_LINKS} more links", Tone.MUTED)])
    return lines


def _link(link: LinkFrame, name: str) -> Line:
    carried = pad(f"{fig.size(link.bytes_per_s)}/s", _RATE_WIDTH)
    copies = pad(f"copies {_per_s(link.copy_bytes_per_s)}", _RATE_WIDTH + 6)
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
        return [Run("zero-copy: workers share one KV pool")]
    if handoff is None or handoff.probe_bytes_per_s is None:
        return [Run("▲ not measured at start", Tone.WARN)]
    return [
        Run("● verified ", Tone.GOOD),
        Run(f"by checksum at start, {fig.size(handoff.probe_bytes_per_s)}/s"),
    ]


def _staging(staging: PoolFrame, width: int) -> Line:
    free = f" {fig.count(staging.free)} of {fig.count(staging.num_blocks)} slots free"
    room = width - _WIDE_LABEL - len(free)
    return [
        Run(pad(_STAGING, _WIDE_LABEL), Tone.MUTED),
        Run(state_bar(pool_counts(staging), room), Tone.ACCENT),
        Run(free),
    ]


def _rates(view: View, frame: Frame, width: int, num_rows: int) -> list[Line]:
    history, totals, handoff = view.history, frame.totals, frame.handoff
    mean = totals.handoff_bytes / totals.handoffs if totals.handoffs else None
    graphs = [("handoffs", history.handoffs_per_s, _newest(history.handoffs_per_s))]
    if frame.transport != "alias":
        copied = history.handoff_bytes_per_s
        graphs.append(("bytes", copied, newest_size(copied)))
    lines = [rule("RATES", width, f"last {fig.whole_seconds(view.window_s)}")]
    for label, samples, reading in graphs:
        head = [
            Run(pad(label, _WIDE_LABEL), Tone.MUTED),
            Run(pad(f"{reading}/s", _RATE_WIDTH), Tone.STRONG),
        ]
        figure = fig.size if label == "bytes" else fig.rate
        lines += beside_chart(head, partial(view.recent, samples), width, num_rows, figure)
    counts = [("done", fig.count(totals.handoffs))]
    if totals.handoff_bytes:
        counts += [("moved", fig.size(totals.handoff_bytes)), ("mean", fig.size(mean))]
    counts += nonzero(
        ("failed", handoff.num_failed if handoff else None),
        ("stale", totals.stale_messages),
        ("recovered", totals.recovered_sequences),
    )
    return [*lines, *facts(width, counts)]


def _newest(samples: Samples) -> str:
    return fig.rate(samples[-1] if samples else None)


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
    """Draw a line for each route taken: how many, where, and why."""
    lines: list[Line] = [rule("ROUTES", width, "since the daemon started")]
    for num, route, reason in ranked_routes(frame):
        why = REASONS.get(reason, reason)
        lines.append(
            [
                Run(pad(fig.count(num), _COUNT_WIDTH, right=True), Tone.STRONG),
                Run(f"  {pad(route_text(route), _ROUTE_WIDTH)}"),
                Run(why, Tone.MUTED),
            ]
        )
    return lines if len(lines) > 1 else [*lines, [Run("no sequence placed yet", Tone.MUTED)]]


def _tuning(frame: Frame, width: int) -> list[Line]:
    """List what was chosen from measurements of this machine, with the figures."""
    lines = [line for trial in frame.trials for line in wrap(trial, width)]
    return [rule("TUNING", width, "from measurements of this machine"), *lines] if lines else []


def _guesses(frame: Frame, width: int) -> list[Line]:
    """List the sources of guessed tokens, with the share that was right."""
    totals = fields(frame.totals) | {"drafts": list(map(fields, frame.totals.drafts))}
    per_step, *sources = guesses(totals)
    lines = [line for source in sources for line in wrap(source, width)]
    return [rule("GUESSES", width, per_step), *lines] if lines else []


def _predictions(frame: Frame, width: int) -> list[Line]:
    """Draw the outcomes of elastic roles' predictions, a line per route; the worst first."""
    ways = sorted(frame.totals.ways, key=lambda way: (-way.is_closed, -way.num_missed))
    if not ways:
        return []
    return [rule("PREDICTIONS", width, "of prompts, by route and step size"), *map(_way, ways)]


def _way(way: WayFrame) -> Line:
    where = f"{way.worker}, {'all' if way.has_all else 'own'} cores"
    beside = "beside decode steps" if way.is_beside else "no decode steps beside"
    error = "" if way.error_ratio is None else f", predictions off {way.error_ratio:.1f}x"
    line = [
        Run(pad(fig.count(way.num_judged), _COUNT_WIDTH, right=True), Tone.STRONG),
        Run(f"  {pad(route_text(way.route), _ROUTE_WIDTH)}"),
        Run(f"on {where}, {beside}, steps of {fig.count(way.step_tokens)} tokens{error}"),
    ]
    if way.num_missed:
        line.append(Run(f", {fig.count(way.num_missed)} took twice as long or more", Tone.WARN))
    if way.num_gave_way:
        line.append(Run(f", {fig.count(way.num_gave_way)} moved away"))
    if way.is_closed:
        line.append(Run(", not used until measured again", Tone.WARN))
    return line
