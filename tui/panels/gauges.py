"""KV occupancy, the machine, and what clients wait for.

Owns: nothing; pure.
Invariant: cells of a KV bar add up to its width; a mark at a reading is an alert of the daemon.
Never: shows 0 for what is not reported.
"""

from __future__ import annotations

from appliance.frame import figures as fig
from appliance.frame.protocol import DeviceFrame, Frame, LatencyFrame, PoolFrame
from tui.lines import (
    STATE_CELLS,
    Line,
    Run,
    Tone,
    gauge,
    pad,
    pairs,
    sparkline,
    state_bar,
    width_of,
    wrap,
)
from tui.panels.header import mark_of
from tui.view import Samples, View, alert_of, pool_counts, total_power_w

_BLOCK_ROWS = 4
"""From here on a pool has its numbers with their states' names."""
_LEGEND_WIDTH = 58
"""From here on the title has room for the legend of the bars."""
_SHORT_STATES = {"reserved": "resvd", "draining": "drain"}
_NAME_WIDTH = 8
_DEVICE_WIDTH = 10
_READING_WIDTH = 13
_MACHINE_ROWS = 4
"""From here on everything has a line of its own."""


def kv_title(view: View, width: int, height: int) -> str:
    """The legend of the bars, or, where that stands beside the numbers, the size of a block."""
    pools = view.frame.pools if view.frame else []
    if not pools:
        return "KV"
    if width < _LEGEND_WIDTH or height // len(pools) >= _BLOCK_ROWS:
        return f"KV  {pools[0].block_size} tokens, {fig.size(pools[0].block_bytes)} a block"
    return "KV  " + "  ".join(f"{STATE_CELLS[state]} {state}" for state in STATE_CELLS)


def kv(view: View, width: int, height: int) -> list[Line]:
    """Each pool as a bar by state with its numbers; more detail where there is room."""
    frame = view.frame
    if frame is None:
        return []
    pools = frame.pools
    if not pools:
        return [[Run("no pool yet", Tone.MUTED)]]
    rows = height // len(pools)
    if rows >= _BLOCK_ROWS:
        return [line for pool in pools for line in _pool_block(frame, pool, width, rows)]
    if rows >= 2:
        lines = [line for pool in pools for line in _pool_pair(frame, pool, width)]
    else:
        lines = [_pool_row(frame, pool, width) for pool in pools]
    if width < _LEGEND_WIDTH:
        legend = " ".join(
            STATE_CELLS[state] + _SHORT_STATES.get(state, state) for state in STATE_CELLS
        )
        lines.append([Run(legend, Tone.MUTED)])
    return lines[:height]


def used_spans(frame: Frame, pool: PoolFrame) -> Line:
    """`93%▲`: occupancy with the mark and the tone of its alert."""
    mark = mark_of(alert_of(frame, "kv.occupancy", pool.name))
    tone = Tone.STRONG if mark.tone == Tone.PLAIN else mark.tone
    return [Run(pad(fig.ratio(pool.used_ratio), 4, right=True), tone), mark]


def _pool_block(frame: Frame, pool: PoolFrame, width: int, rows: int) -> list[Line]:
    counts = pool_counts(pool)
    cells = [(f"{STATE_CELLS[state]} {state}", fig.count(counts[state])) for state in STATE_CELLS]
    cells += [("", "")] if len(cells) % 2 else []
    lines: list[Line] = [
        [
            Run(pad(pool.name, _NAME_WIDTH)),
            *used_spans(frame, pool),
            Run(f"of {fig.count(pool.num_blocks)} blocks", Tone.MUTED),
        ],
        [Run(state_bar(counts, width), Tone.ACCENT)],
    ]
    lines += [pairs(width, *cells[index : index + 2]) for index in range(0, len(cells), 2)]
    return lines[:rows]


def _pool_pair(frame: Frame, pool: PoolFrame, width: int) -> list[Line]:
    counts = pool_counts(pool)
    head = [Run(pad(pool.name, _NAME_WIDTH)), *used_spans(frame, pool)]
    return [
        [*head, *_numbers(pool, width - width_of(head))],
        [Run(state_bar(counts, width), Tone.ACCENT)],
    ]


def _pool_row(frame: Frame, pool: PoolFrame, width: int) -> Line:
    head = [Run(pad(pool.name, _NAME_WIDTH)), *used_spans(frame, pool)]
    numbers = _numbers(pool, width // 2)
    room = width - width_of(head) - width_of(numbers) - 1
    bar = Run(state_bar(pool_counts(pool), room) + " ", Tone.ACCENT)
    return [*head, bar, *numbers]


def _numbers(pool: PoolFrame, room: int) -> Line:
    """`█300 ▓20 ▒100 ▚4 ░600`, as many as there is room for."""
    line: Line = []
    for state, num in pool_counts(pool).items():
        item = [
            Run((" " if line else "") + STATE_CELLS[state], Tone.ACCENT),
            Run(fig.short_count(num)),
        ]
        if (num or state == "free") and width_of(line) + width_of(item) <= room:
            line += item
    return line


def machine(view: View, width: int, height: int) -> list[Line]:
    """CPU, memory, power, J/token and the daemon itself."""
    if view.frame is None:
        return []
    host, devices = view.frame.host, view.frame.devices
    memory = fig.part(host.memory_used_bytes, host.memory_total_bytes)
    energy = _energy_line(view.frame)
    if height < _MACHINE_ROWS:
        cpu = fig.percent(host.cpu_percent)
        return [pairs(width, ("cpu", cpu), ("mem", memory)), _power_line(view.frame), energy][
            :height
        ]
    lines = [
        _meter("cpu", fig.percent(host.cpu_percent), _share(host.cpu_percent, 100), "", width),
        _meter(
            "memory", memory, _share(host.memory_used_bytes, host.memory_total_bytes), "", width
        ),
    ]
    if devices and len(devices) <= height - len(lines) - 2:
        lines += [device_row(device, width) for device in devices]
    else:
        lines.append(_power_line(view.frame))
    daemon = [
        Run(pad("daemon", _DEVICE_WIDTH), Tone.MUTED),
        Run(fig.percent(host.daemon_cpu_percent), Tone.STRONG),
        Run(" of a core, ", Tone.MUTED),
        Run(fig.size(host.daemon_rss_bytes), Tone.STRONG),
    ]
    return [*lines, energy, daemon][:height]


def _share(value: float | None, whole: float | None) -> float | None:
    return None if value is None or not whole else value / whole


def _meter(name: str, reading: str, ratio: float | None, extra: str, width: int) -> Line:
    """A name, a reading, a bar if there is a whole to compare with, and what else there is."""
    room = width - _DEVICE_WIDTH - _READING_WIDTH - (len(extra) + 1 if extra else 0)
    return [
        Run(pad(name, _DEVICE_WIDTH - 1) + " ", Tone.MUTED),
        Run(pad(reading, _READING_WIDTH), Tone.STRONG),
        Run(gauge(ratio, room) if ratio is not None else "", Tone.ACCENT),
        Run(f" {extra}" if extra else ""),
    ]


def _power_line(frame: Frame) -> Line:
    """All devices in one line: power, and the hottest."""
    power_w = total_power_w(frame)
    line = [Run(pad("power", _DEVICE_WIDTH), Tone.MUTED)]
    if power_w is None:
        return [*line, Run("not reported", Tone.MUTED)]
    devices = [device for device in frame.devices if device.power_w is not None]
    limits_w = [device.power_limit_w for device in devices]
    known_w = [limit_w for limit_w in limits_w if limit_w is not None]
    limit_w = sum(known_w) if len(known_w) == len(devices) else None
    line.append(Run(fig.watts(power_w, limit_w), Tone.STRONG))
    if len(devices) > 1:
        line.append(Run(f" over {len(devices)} devices", Tone.MUTED))
    degrees = [device.temperature_c for device in devices if device.temperature_c is not None]
    return [*line, Run(f" {max(degrees):.0f}C" if degrees else "", Tone.MUTED)]


def _energy_line(frame: Frame) -> Line:
    """Joules a token costs in each phase."""
    line = [Run(pad("J/token", _DEVICE_WIDTH), Tone.MUTED)]
    energy = frame.energy
    if energy is None or energy.total_j is None:
        return [*line, Run("not reported", Tone.MUTED)]
    return [
        *line,
        Run(f"in {fig.short_count(energy.prefill_j_per_token)}", Tone.STRONG),
        Run(f"  out {fig.short_count(energy.decode_j_per_token)}", Tone.STRONG),
    ]


def device_row(device: DeviceFrame, width: int) -> Line:
    """`gpu0  512/700 W  ████░  73% 61C`, what it reports of it."""
    if device.power_w is None:
        power = "no power" if width < 60 else "power not reported"
    else:
        power = fig.watts(device.power_w, device.power_limit_w)
    extras = [
        "" if device.utilization_ratio is None else fig.ratio(device.utilization_ratio),
        "" if device.temperature_c is None else f"{device.temperature_c:.0f}C",
    ]
    if width >= 60:
        extras.append(fig.part(device.memory_used_bytes, device.memory_total_bytes))
    extra = " ".join(filter(lambda text: text not in ("", fig.ABSENT), extras))
    return _meter(device.name, power, _share(device.power_w, device.power_limit_w), extra, width)


# What clients wait for: quantiles of the last minute, and how often the targets are met (ok).
# Invariant: every quantile stands under its window; a share stands beside its target.
# Never: computes a quantile; the daemon's are exact.


_NUMBER_WIDTH = 7
_TREND_FROM = 60
"""From this width on the maximum, the targets and a graph have room, too."""
_TARGET_WIDTH = 10


def title(view: View) -> str:
    """`LATENCY  last 60s, 34 requests`."""
    if view.frame is None:
        return "LATENCY"
    latency = view.frame.latency
    return f"LATENCY  last {latency.window_s:.0f}s, {fig.count(latency.num_requests)} finished"


def latency(view: View, width: int, height: int) -> list[Line]:
    """First token, gaps, handoff and the whole; what the first token's time was made of."""
    frame = view.frame
    if frame is None:
        return []
    now, is_wide = frame.latency, width >= _TREND_FROM
    if now.ttft_ms_p50 is None and now.itl_ms_p50 is None and now.e2e_ms_p50 is None:
        quiet = f"nothing to measure: no token came in the last {now.window_s:.0f} s"
        return wrap(quiet, width, 0, Tone.MUTED)[:height]
    names = ["p50", "p95", "p99", *(["max"] if is_wide else []), "ok"]
    head = pad("ms", _NAME_WIDTH)
    head += "".join(pad(name, _NUMBER_WIDTH, right=True) for name in names)
    lines: list[Line] = [[Run(head + ("   target    p95" if is_wide else ""), Tone.MUTED)]]
    for name, quantiles, share, target_ms, samples in _rows(view, frame, now):
        line = [Run(pad(name, _NAME_WIDTH), Tone.MUTED)]
        shown = quantiles if is_wide else quantiles[:3]
        line += [
            Run(pad(fig.millis(value), _NUMBER_WIDTH, right=True), Tone.STRONG) for value in shown
        ]
        mark = mark_of(alert_of(frame, "slo", name))
        tone = Tone.STRONG if mark.tone == Tone.PLAIN else mark.tone
        line += [Run(pad(fig.fine_ratio(share), _NUMBER_WIDTH, right=True), tone), mark]
        if is_wide:
            target = fig.ABSENT if target_ms is None else f"<={fig.count(target_ms)}"
            line.append(Run("  " + pad(target, _TARGET_WIDTH), Tone.MUTED))
            room = width - _NAME_WIDTH - 5 * _NUMBER_WIDTH - _TARGET_WIDTH - 3
            line.append(Run(sparkline(view.recent(samples, room), room), Tone.ACCENT))
        lines.append(line)
    return [*lines, _made_of(now)][:height]


_Row = tuple[str, list[float | None], float | None, int | None, Samples]


def _rows(view: View, frame: Frame, now: LatencyFrame) -> list[_Row]:
    """Name, quantiles with the maximum, share in time, target, and what the graph shows."""
    ttft = [now.ttft_ms_p50, now.ttft_ms_p95, now.ttft_ms_p99, now.ttft_ms_max]
    itl = [now.itl_ms_p50, now.itl_ms_p95, now.itl_ms_p99, now.itl_ms_max]
    handoff = [now.handoff_ms_p50, now.handoff_ms_p95, None, None]
    whole = [now.e2e_ms_p50, now.e2e_ms_p95, now.e2e_ms_p99, None]
    history = view.history
    return [
        ("ttft", ttft, now.ttft_slo_ratio, frame.slo_ttft_ms, history.ttft_ms_p95),
        ("itl", itl, now.itl_slo_ratio, frame.slo_itl_ms, history.itl_ms_p95),
        ("handoff", handoff, None, None, ()),
        ("e2e", whole, None, None, ()),
    ]


def _made_of(now: LatencyFrame) -> Line:
    """`ttft mean: queue 61 + prefill 156`."""
    return [
        Run("ttft mean ", Tone.MUTED),
        Run(f"queue {fig.millis(now.queue_ms_mean)} + prefill {fig.millis(now.prefill_ms_mean)}"),
    ]
