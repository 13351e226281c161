"""Draw the prefill, decode and handoff lanes.

A lane is a phase; several workers of it have a row each. Handoffs have one where they copy KV.

Invariant: the lines come in order of importance, so a lower panel shows the first of them.
"""

from __future__ import annotations

from appliance.observe.frame import figures as fig
from appliance.observe.frame.protocol import Frame, WorkerFrame
from tui.history import Samples
from tui.lines import (
    Line,
    Run,
    Tone,
    chart,
    clean,
    gauge,
    marked,
    nonzero,
    pad,
    pairs,
    peak,
    sparkline,
    two_a_row,
    width_of,
)
from tui.panels.header import tone_of
from tui.view import View, alert_of, copies, workers_for

_LABEL_WIDTH = 13
_ROOMY = 7
"""Minimum rows for a graph of two."""
_PLACE_WIDTH = 44
"""Minimum width for a worker's device in its row."""
_SHORT_REASONS = {
    "alone": "machine idle",
    "closest": "no route met the target",
    "kept": "as before",
    "only": "other not ready",
    "unknown": "no timings yet",
    "wary": "slower than predicted",
}
"""Words for route reasons that are unclear without context."""


def prefill_title(view: View) -> str:
    """Return the title `PREFILL cpu 0`, or `PREFILL 2 workers`."""
    return _lane_title(view, "prefill")


def decode_title(view: View) -> str:
    """Return the title of the decode lane, such as `DECODE cpu 1`."""
    return _lane_title(view, "decode")


def handoff_title(view: View) -> str:
    """Return the title between the lanes, with the transport, such as `HANDOFF alias`."""
    transport = view.frame.transport if view.frame else None
    return f"HANDOFF  {transport}" if transport else "HANDOFF"


def _lane_title(view: View, role: str) -> str:
    workers = workers_for(view.frame, role)
    if not workers:
        return role.upper()
    if len(workers) > 1:
        return f"{role.upper()}  {len(workers)} workers"
    return f"{role.upper()}  {where(workers[0], view.frame)}"


def where(worker: WorkerFrame, frame: Frame | None) -> str:
    """Name a worker's cores: `cpu 1`; `cpu 1 + cpu 0` with a lent core; `lent: decode`."""
    if worker.state != "ready" or worker.cpus_used == worker.cpus:
        return worker.device
    if worker.cpus_used:
        lent = sorted(set(worker.cpus_used) - set(worker.cpus))
        return f"{worker.device} + cpu {','.join(map(str, lent))}" if lent else worker.device
    others = frame.workers if frame else []
    by = next((each.name for each in others if set(worker.cpus) & set(each.cpus_used)), "")
    return f"lent: {by}" if by else worker.device


def prefill(view: View, width: int, height: int) -> list[Line]:
    """Draw the prompts: how many run and wait, and the prefill rate."""
    frame = view.frame
    if frame is None:
        return []
    workers = workers_for(frame, "prefill")
    queue = frame.queue
    waiting = str(queue.queued)
    if queue.max_queued and len(f"queued {waiting}/{queue.max_queued}") <= (width + 1) // 2:
        waiting += f"/{queue.max_queued}"
    oldest_ms = queue.oldest_queued_ms if queue.first_token is None else queue.first_token.waited_ms
    oldest_s = None if oldest_ms is None else oldest_ms / 1000
    tokens = fig.of_most(queue.queued_tokens, queue.max_queued_tokens, (width + 1) // 2 - 8)
    late = tone_of(alert_of(frame, "queue.wait"))
    lines = [
        _not_ready(workers, width)
        or pairs(width, ("running", fig.count(queue.prefilling)), ("queued", waiting)),
        *_trend(view, view.history.prefill_tokens_per_s, "tok/s", width, height),
        *_steps(frame, workers, width),
        [
            Run(pad("queue", _LABEL_WIDTH), Tone.MUTED),
            Run(_graph(view, view.history.queued, width - _LABEL_WIDTH), Tone.ACCENT),
        ],
        pairs(
            width,
            ("oldest", fig.seconds(oldest_s), late),
            ("callers", fig.count(queue.num_owners)),
        ),
        pairs(
            width,
            ("in", f"{fig.short_count(frame.totals.prompt_tokens)} tok"),
            ("waiting", tokens if queue.max_queued_tokens else fig.ABSENT),
        ),
    ]
    return [*lines, *_processes(workers, width, height - len(lines))][:height]


def handoff(view: View, width: int, height: int) -> list[Line]:
    """Draw the KV that is copied from the prefill worker to the decode worker."""
    frame = view.frame
    if frame is None or not copies(frame):
        return []
    totals, latency, history = frame.totals, frame.latency, view.history
    rate = f"{newest_size(history.handoff_bytes_per_s)}/s"
    return [
        pairs(
            width,
            ("moving", fig.count(frame.queue.handing_off)),
            ("done", fig.count(totals.handoffs)),
        ),
        *_trend(view, history.handoffs_per_s, "/s", width, height),
        pairs(
            width,
            ("p50", fig.duration(latency.handoff_ms_p50)),
            ("p95", fig.duration(latency.handoff_ms_p95)),
        ),
        pairs(width, ("copied", rate), ("moved", fig.size(totals.handoff_bytes))),
        *([Run(line, Tone.MUTED)] for line in routes(frame)),
    ][:height]


def newest_size(samples: Samples) -> str:
    return fig.size(samples[-1] if samples else None)


def ranked_routes(frame: Frame) -> list[tuple[int, str, str]]:
    """Count sequences by route and reason, the most frequent first."""
    ranked = sorted(frame.totals.routes.items(), key=lambda item: -item[1])
    ways = ((num, *way.partition(" ")) for way, num in ranked)
    return [(num, clean(route), clean(reason)) for num, route, _, reason in ways]


def route_text(route: str) -> str:
    """Describe a route: `handed off`, or `on decode`."""
    return "handed off" if route == "move" else f"on {route}"


def routes(frame: Frame) -> list[str]:
    """List `1,204 handed off: cheapest` for each route taken."""
    return [
        f"{fig.count(num)} {route_text(route)}: {_SHORT_REASONS.get(reason, reason)}"
        for num, route, reason in ranked_routes(frame)
    ]


def decode(view: View, width: int, height: int) -> list[Line]:
    """Draw the outputs: how many run, the decode rate, and ticks at stalls."""
    frame = view.frame
    if frame is None:
        return []
    workers = workers_for(frame, "decode")
    history = view.history
    batches = [w.batch_size_mean for w in workers if w.batch_size_mean is not None]
    longest_ms = max((w.step_ms_max for w in workers if w.step_ms_max is not None), default=None)
    troubles = nonzero(
        ("stalls", frame.latency.num_stalls),
        ("restarts", sum(worker.num_restarts for worker in workers)),
        ("paused", frame.queue.paused),
        ("preempted", frame.totals.preemptions),
        ("failed handoffs", frame.handoff.num_failed if frame.handoff else None),
        ("recovered", frame.totals.recovered_sequences),
        ("stale", frame.totals.stale_messages),
    )
    handed = [("handed off", fig.short_count(frame.totals.handoffs))] if frame.transport else []
    lines = [
        _not_ready(workers, width)
        or pairs(
            width,
            ("running", fig.count(frame.queue.decoding)),
            (
                "steps",
                f"{fig.rate(sum(w.steps_per_s for w in workers) if workers else None)}/s",
            ),
        ),
        *_trend(view, history.decode_tokens_per_s, "tok/s", width, height, history.stalls),
        *_steps(frame, workers, width),
        pairs(
            width,
            ("max", fig.duration(longest_ms)),
            ("batch", f"{sum(batches) / len(batches):.1f}" if batches else fig.ABSENT),
        ),
        pairs(width, ("out", f"{fig.short_count(frame.totals.output_tokens)} tok"), *handed),
        *two_a_row(width, troubles),
    ]
    return [*lines, *_processes(workers, width, height - len(lines))][:height]


def _processes(workers: list[WorkerFrame], width: int, room: int) -> list[Line]:
    """Draw each process's use of the machine; several are shown as far as they fit."""
    if len(workers) == 1:
        return _process(workers[0], width)
    blocks = [[[Run(each.name, Tone.ACCENT)], *_process(each, width)] for each in workers]
    num_blocks = max(0, room) // len(blocks[0]) if blocks else 0
    return [line for block in blocks[:num_blocks] for line in block]


def _process(worker: WorkerFrame, width: int) -> list[Line]:
    loaded = fig.part(worker.loaded_bytes, worker.total_bytes)
    return two_a_row(
        width,
        [
            ("cpu", fig.percent(worker.cpu_percent)),
            ("rss", fig.size(worker.rss_bytes)),
            ("admitted", fig.count(worker.num_sequences)),
            ("weights", loaded),
            *_ranks(worker),
        ],
    )


def _ranks(worker: WorkerFrame) -> list[tuple[str, str]]:
    """List what each process of a group holds and waits, and what bounds its steps."""
    each = [
        (f"rank {number}", f"{fig.size(rank.rss_bytes)} waits {fig.ratio(rank.wait_ratio)}")
        for number, rank in enumerate(worker.ranks)
    ]
    return [*each, ("bound by", worker.bound_by or fig.ABSENT)] if each else []


def _steps(frame: Frame, workers: list[WorkerFrame], width: int) -> list[Line]:
    """Draw step times of one worker, or a row for each; workers that are not ready come first."""
    if len(workers) < 2:
        return [pairs(width, *(_step(*workers) if workers else _step(None)))]
    lines, label_width = [], max(len(worker.name) for worker in workers) + 2
    for worker in sorted(workers, key=lambda worker: worker.state == "ready"):
        room = width - label_width
        place = [("", where(worker, frame))] if width >= _PLACE_WIDTH else []
        (_, step), busy = _step(worker)
        about = _trouble(worker, room) or pairs(room, *place, ("", step), busy)
        lines.append([Run(pad(worker.name, label_width), Tone.MUTED), *about])
    return lines


def _step(worker: WorkerFrame | None) -> list[tuple[str, str]]:
    return [
        ("step", fig.duration(worker.step_ms_p50 if worker else None)),
        ("busy", fig.ratio(worker.busy_ratio if worker else None)),
    ]


def _graph(view: View, samples: Samples, width: int) -> str:
    """Draw the window's samples; a single one is left out."""
    return sparkline(view.recent(samples, width) if len(samples) > 1 else (), width)


def _trend(
    view: View, samples: Samples, unit: str, width: int, height: int, stalls: Samples = ()
) -> list[Line]:
    """Draw the newest value and the graph up to it; in a high lane with its highest value.

    A stall is marked above its value, or in its place if the graph has one row.
    """
    value = fig.rate(samples[-1] if samples else None)
    label = [Run(value, Tone.STRONG), Run(f" {unit} ", Tone.MUTED)]
    indent = max(_LABEL_WIDTH, width_of(label))
    label.append(Run(" " * (indent - width_of(label))))
    room = max(0, width - indent)
    marks = view.recent(stalls, room)
    if height < _ROOMY:
        return [[*label, *marked(_graph(view, samples, room), marks)]]
    shown = view.recent(samples if len(samples) > 1 else (), room)
    upper, lower = chart(shown, room, 2)
    most = pad(f"of {fig.rate(peak(shown))}", indent)
    return [
        [*label, *marked(upper, marks)],
        [Run(most, Tone.MUTED), Run(lower, Tone.ACCENT)],
    ]


def _not_ready(workers: list[WorkerFrame], width: int) -> Line | None:
    """Draw the first line while no worker is ready."""
    if not workers:
        return [Run("▲ no worker", Tone.WARN)]
    return _trouble(workers[0], width) if len(workers) == 1 else None


def _trouble(worker: WorkerFrame, width: int) -> Line | None:
    """Explain why a worker cannot work; None: it can."""
    if worker.state == "ready":
        return None
    if worker.state != "loading" or not worker.total_bytes:
        tone = Tone.BAD if worker.state == "restarting" else Tone.WARN
        return [Run(f"▲ {worker.state}", tone)]
    share = worker.loaded_bytes / worker.total_bytes
    text = f"▲ loading {fig.ratio(share)} "
    return [Run(text, Tone.WARN), Run(gauge(share, width - len(text)), Tone.ACCENT)]
