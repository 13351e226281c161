"""The three lanes in the order of the data: prefill, handoff, decode.

A lane is a phase; several workers of it have a row each.
Owns: nothing; pure.
Invariant: the lines come in order of importance, so a lower panel shows the first of them.
Never: shows a number that the frame does not report.
"""

from __future__ import annotations

from appliance.frame import figures as fig
from appliance.frame.protocol import Frame, WorkerFrame
from tui.lines import Line, Run, Tone, clean, gauge, marked, pad, pairs, sparkline, width_of
from tui.view import Samples, View, workers_for

_LABEL_WIDTH = 13
_PLACE_WIDTH = 44
"""From which on a worker's row also says where it is."""
_SHORT_REASONS = {"unknown": "not measured"}
"""Reasons for a route whose own word says nothing to who did not ask."""


def prefill_title(view: View) -> str:
    """`PREFILL  cpu 0`, or `PREFILL  2 workers`."""
    return _lane_title(view, "prefill")


def decode_title(view: View) -> str:
    """The title of the decode lane, as `DECODE  cpu 1`."""
    return _lane_title(view, "decode")


def handoff_title(view: View) -> str:
    """The title between the lanes, with the transport, as `HANDOFF  alias`."""
    transport = view.frame.transport if view.frame else None
    return f"HANDOFF  {transport}" if transport else "HANDOFF"


def _lane_title(view: View, role: str) -> str:
    workers = workers_for(view.frame, role)
    if not workers:
        return role.upper()
    return f"{role.upper()}  {where(*workers) if len(workers) == 1 else f'{len(workers)} workers'}"


def where(worker: WorkerFrame) -> str:
    """`cpu 1`; `cpu 0,1` while it has others' cores, `parked` while others have its own."""
    if worker.state != "ready" or worker.cpus_used == worker.cpus:
        return worker.device
    if not worker.cpus_used:
        return "parked, cores lent" if worker.cpus else worker.device
    return f"cpu {','.join(map(str, worker.cpus_used))}"


def prefill(view: View, width: int, height: int) -> list[Line]:
    """Prompts: how many run and wait, how fast they are computed."""
    frame = view.frame
    if frame is None:
        return []
    workers = workers_for(frame, "prefill")
    queue = frame.queue
    waiting = f"{queue.queued}/{queue.max_queued}" if queue.max_queued else str(queue.queued)
    oldest_s = None if queue.oldest_queued_ms is None else queue.oldest_queued_ms / 1000
    tokens = f"{fig.short_count(queue.queued_tokens)}/{fig.short_count(queue.max_queued_tokens)}"
    return [
        _not_ready(workers, width)
        or pairs(width, ("running", fig.count(queue.prefilling)), ("queued", waiting)),
        _trend(view, view.history.prefill_tokens_per_s, "tok/s", width),
        *_steps(workers, width),
        [
            Run(pad("queue", _LABEL_WIDTH), Tone.MUTED),
            Run(_graph(view, view.history.queued, width - _LABEL_WIDTH), Tone.ACCENT),
        ],
        pairs(
            width,
            ("oldest", fig.seconds(oldest_s)),
            ("owners", fig.count(queue.num_owners)),
        ),
        pairs(
            width,
            ("in", f"{fig.short_count(frame.totals.prompt_tokens)} tok"),
            ("waiting", tokens if queue.max_queued_tokens else fig.ABSENT),
        ),
        *_processes(workers, width),
    ][:height]


def handoff(view: View, width: int, height: int) -> list[Line]:
    """Sequences on their way from the prefill worker to the decode worker."""
    frame = view.frame
    if frame is None:
        return []
    if frame.transport is None:
        return [[Run("one worker does both", Tone.MUTED)]][:height]
    totals, latency, history = frame.totals, frame.latency, view.history
    moved = fig.size(history.handoff_bytes_per_s[-1] if history.handoff_bytes_per_s else None)
    num_failed = frame.handoff.num_failed if frame.handoff else None
    return [
        pairs(
            width,
            ("moving", fig.count(frame.queue.handing_off)),
            ("done", fig.count(totals.handoffs)),
        ),
        _trend(view, history.handoffs_per_s, "/s", width),
        pairs(
            width,
            ("p50", fig.duration(latency.handoff_ms_p50)),
            ("p95", fig.duration(latency.handoff_ms_p95)),
        ),
        [Run("KV blocks are shared, no bytes move", Tone.MUTED)]
        if frame.transport == "alias"
        else pairs(width, ("copied", f"{moved}/s")),
        pairs(
            width,
            ("moved", fig.size(totals.handoff_bytes)),
            ("stale", fig.count(totals.stale_messages)),
        ),
        pairs(
            width,
            ("recovered", fig.count(totals.recovered_sequences)),
            ("failed", fig.count(num_failed)),
        ),
        [],
        *([Run(line, Tone.MUTED)] for line in routes(frame)),
    ][:height]


def ranked_routes(frame: Frame) -> list[tuple[int, str, str]]:
    """How many sequences went which way for which reason, the commonest first."""
    ranked = sorted(frame.totals.routes.items(), key=lambda item: -item[1])
    ways = ((num, *way.partition(" ")) for way, num in ranked)
    return [(num, clean(route), clean(reason)) for num, route, _, reason in ways]


def routes(frame: Frame) -> list[str]:
    """`1,204 move cheapest` for each way that sequences have gone."""
    return [
        f"{fig.count(num)} {route} {_SHORT_REASONS.get(reason, reason)}"
        for num, route, reason in ranked_routes(frame)
    ]


def decode(view: View, width: int, height: int) -> list[Line]:
    """Outputs: how many run, how fast tokens come; a tick where they stalled behind a prompt."""
    frame = view.frame
    if frame is None:
        return []
    workers = workers_for(frame, "decode")
    history = view.history
    graph = _trend(view, history.decode_tokens_per_s, "tok/s", width)
    stalls = view.recent(history.stalls, len(graph[-1].text))
    batches = [w.batch_size_mean for w in workers if w.batch_size_mean is not None]
    longest_ms = max((w.step_ms_max for w in workers if w.step_ms_max is not None), default=None)
    backends = dict.fromkeys(w.attention for w in workers if w.attention)
    return [
        _not_ready(workers, width)
        or pairs(
            width,
            ("running", fig.count(frame.queue.decoding)),
            (
                "steps",
                f"{fig.rate(sum(w.steps_per_s for w in workers) if workers else None)}/s",
            ),
        ),
        [*graph[:-1], *marked(graph[-1].text, stalls)],
        *_steps(workers, width),
        pairs(
            width,
            ("max", fig.duration(longest_ms)),
            ("batch", f"{sum(batches) / len(batches):.1f}" if batches else fig.ABSENT),
        ),
        pairs(
            width,
            ("attn", ", ".join(backends) or fig.ABSENT),
            ("restarts", fig.count(sum(w.num_restarts for w in workers) if workers else None)),
        ),
        pairs(
            width,
            ("out", f"{fig.short_count(frame.totals.output_tokens)} tok"),
            ("stalls", fig.count(frame.latency.num_stalls)),
        ),
        pairs(
            width,
            ("paused", fig.count(frame.queue.paused)),
            ("preempted", fig.count(frame.totals.preemptions)),
        ),
        *_processes(workers, width),
    ][:height]


def _processes(workers: list[WorkerFrame], width: int) -> list[Line]:
    """What each is to the machine."""
    lines = []
    for worker in workers:
        lines += [[Run(worker.name, Tone.ACCENT)]] if len(workers) > 1 else []
        lines += _process(worker, width)
    return lines


def _process(worker: WorkerFrame, width: int) -> list[Line]:
    own, used = (",".join(map(str, cpus)) for cpus in (worker.cpus, worker.cpus_used))
    return [
        pairs(
            width,
            ("cpu", fig.percent(worker.cpu_percent)),
            ("rss", fig.size(worker.rss_bytes)),
        ),
        pairs(width, ("cores", own or fig.ABSENT), ("used", used or fig.ABSENT)),
        pairs(
            width,
            ("pid", fig.ABSENT if worker.pid is None else str(worker.pid)),
            ("last step", fig.duration(worker.last_step_age_ms)),
        ),
        pairs(
            width,
            ("admitted", fig.count(worker.num_sequences)),
            ("weights", fig.part(worker.loaded_bytes, worker.total_bytes)),
        ),
    ]


def _steps(workers: list[WorkerFrame], width: int) -> list[Line]:
    """How long steps take: of one worker, or a row for each; those that are not ready first."""
    if len(workers) < 2:
        return [pairs(width, *(_step(*workers) if workers else _step(None)))]
    lines, label_width = [], max(len(worker.name) for worker in workers) + 2
    for worker in sorted(workers, key=lambda worker: worker.state == "ready"):
        room = width - label_width
        place = [("", where(worker))] if width >= _PLACE_WIDTH else []
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
    """The window's run of samples; one alone is no trend."""
    return sparkline(view.recent(samples, width) if len(samples) > 1 else (), width)


def _trend(view: View, samples: Samples, unit: str, width: int) -> Line:
    """The newest value and the run up to it."""
    value = fig.rate(samples[-1] if samples else None)
    label = [Run(value, Tone.STRONG), Run(f" {unit} ", Tone.MUTED)]
    room = max(_LABEL_WIDTH, width_of(label))
    return [
        *label,
        Run(" " * (room - width_of(label))),
        Run(_graph(view, samples, width - room), Tone.ACCENT),
    ]


def _not_ready(workers: list[WorkerFrame], width: int) -> Line | None:
    """The line that stands first while there is no worker, or the only one cannot work."""
    if not workers:
        return [Run("▲ no worker", Tone.WARN)]
    return _trouble(workers[0], width) if len(workers) == 1 else None


def _trouble(worker: WorkerFrame, width: int) -> Line | None:
    """Why a worker cannot work; None: it can."""
    if worker.state == "ready":
        return None
    if worker.state != "loading" or not worker.total_bytes:
        tone = Tone.BAD if worker.state == "restarting" else Tone.WARN
        return [Run(f"▲ {worker.state}", tone)]
    share = worker.loaded_bytes / worker.total_bytes
    text = f"▲ loading {fig.ratio(share)} "
    return [Run(text, Tone.WARN), Run(gauge(share, width - len(text)), Tone.ACCENT)]
