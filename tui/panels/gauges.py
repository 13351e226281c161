"""Draw KV occupancy, the machine, waiting requests and power.

Owns: nothing; pure.
Invariant: cells of a KV bar add up to its width; a mark at a reading is an alert of the daemon.
Never: shows 0 for an unreported value.
"""

from __future__ import annotations

from appliance.frame import figures as fig
from appliance.frame.protocol import (
    DeviceFrame,
    EnergyFrame,
    Frame,
    LatencyFrame,
    PoolFrame,
    WorkerFrame,
)
from tui.history import Samples, has_meter, total_power_w
from tui.lines import (
    SPARK_LEVELS,
    STATE_CELLS,
    Line,
    Run,
    Tone,
    chart,
    clip,
    facts,
    fold,
    gauge,
    pad,
    pairs,
    rule,
    sparkline,
    state_bar,
    two_a_row,
    width_of,
    wrap,
)
from tui.panels.header import mark_of
from tui.view import View, alert_of, pool_counts

_BLOCK_ROWS = 4
"""Minimum rows per pool for numbers with their states' names."""
_LEGEND_WIDTH = 58
"""Minimum width for the bars' legend in the title."""
_SHORT_STATES = {"reserved": "resvd", "draining": "drain"}
_NAME_WIDTH = 8
_DEVICE_WIDTH = 10
_READING_WIDTH = 13
MIN_REST_SHARE = 0.05
"""Minimum share of the mean TTFT for which the sum shows `other`."""
FOREIGN_PERCENT = 40
"""Minimum percent of a core, beyond its worker's, that counts as other programs' work."""
_MACHINE_ROWS = 4
"""Minimum rows for a line per reading."""


def kv_title(view: View, width: int, height: int) -> str:
    """Return the legend of the bars, or the size of a block if numbers show the legend."""
    pools = view.frame.pools if view.frame else []
    if not pools:
        return "KV"
    if width < _LEGEND_WIDTH or height // len(pools) >= _BLOCK_ROWS:
        return f"KV  {pools[0].block_size} tokens, {fig.size(pools[0].block_bytes)} a block"
    return "KV  " + "  ".join(f"{STATE_CELLS[state]} {state}" for state in STATE_CELLS)


def kv(view: View, width: int, height: int) -> list[Line]:
    """Draw each pool as a bar by state with numbers, in more detail where it fits."""
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
    """Draw `93%▲`: occupancy with the mark and the tone of its alert."""
    mark = mark_of(alert_of(frame, "kv.occupancy", pool.name))
    tone = Tone.STRONG if mark.tone == Tone.PLAIN else mark.tone
    return [Run(pad(fig.ratio(pool.used_ratio), 4, right=True), tone), mark]


def _pool_block(frame: Frame, pool: PoolFrame, width: int, rows: int) -> list[Line]:
    counts = pool_counts(pool)
    cells = [(f"{STATE_CELLS[state]} {state}", fig.count(counts[state])) for state in STATE_CELLS]
    lines: list[Line] = [
        [
            Run(pad(pool.name, _NAME_WIDTH)),
            *used_spans(frame, pool),
            Run(f"of {fig.count(pool.num_blocks)} blocks", Tone.MUTED),
        ],
        [Run(state_bar(counts, width), Tone.ACCENT)],
    ]
    return [*lines, *two_a_row(width, cells)][:rows]


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
    """Draw CPU by core, memory and the daemon; power and J/token with a meter."""
    frame = view.frame
    if frame is None:
        return []
    host, is_metered = frame.host, has_meter(frame)
    memory = fig.part(host.memory_used_bytes, host.memory_total_bytes)
    daemon = [
        Run(pad("daemon", _DEVICE_WIDTH), Tone.MUTED),
        Run(fig.percent(host.daemon_cpu_percent), Tone.STRONG),
        Run(" of a core, ", Tone.MUTED),
        Run(fig.size(host.daemon_rss_bytes), Tone.STRONG),
    ]
    if height < _MACHINE_ROWS:
        cpu = pairs(width, ("cpu", fig.percent(host.cpu_percent)), ("mem", memory))
        others = [_power_line(frame), _energy_line(frame)] if is_metered else []
        return [cpu, *(others or [*_cores(frame, width, 1), daemon])][:height]
    lines = [
        _meter("cpu", fig.percent(host.cpu_percent), _share(host.cpu_percent, 100), "", width),
        _meter(
            "memory", memory, _share(host.memory_used_bytes, host.memory_total_bytes), "", width
        ),
    ]
    metered: list[Line] = []
    if is_metered:
        num_rows = height - len(lines) - 3
        has_room = 0 < len(frame.devices) <= num_rows
        metered = [device_row(each, width) for each in frame.devices] if has_room else []
        metered = [*(metered or [_power_line(frame)]), _energy_line(frame)]
    cores = _cores(frame, width, height - len(lines) - len(metered) - 1)
    return [*lines, *cores, *metered, daemon][:height]


def _cores(frame: Frame, width: int, height: int) -> list[Line]:
    """Draw a bar for each core with its worker, or a cell for each if they do not fit."""
    percents = frame.host.core_percents
    users = {cpu: worker for worker in frame.workers for cpu in worker.cpus_used}
    if 0 < len(percents) <= height:
        return [
            _meter(
                f"cpu {cpu}",
                f"{percent}% {_used_by(percent, users.get(cpu))}",
                percent / 100,
                "",
                width,
            )
            for cpu, percent in enumerate(percents)
        ]
    room = max(1, width - _DEVICE_WIDTH)
    levels = [SPARK_LEVELS[min(7, percent * 8 // 100)] for percent in percents]
    rows = ["".join(levels[start : start + room]) for start in range(0, len(levels), room)]
    return [
        [Run(pad("cores" if not index else "", _DEVICE_WIDTH), Tone.MUTED), Run(row, Tone.ACCENT)]
        for index, row in enumerate(rows[: max(0, height)])
    ]


def _used_by(percent: int, worker: WorkerFrame | None) -> str:
    """Name the worker on a core, or say that other programs use most of it."""
    own = None if worker is None else worker.cpu_percent
    if worker is not None and own is not None:
        own /= max(len(worker.cpus_used), 1)
        return "other" if percent - own > FOREIGN_PERCENT else worker.name
    return "" if worker is None else worker.name


def _share(value: float | None, whole: float | None) -> float | None:
    return None if value is None or not whole else value / whole


def _meter(name: str, reading: str, ratio: float | None, extra: str, width: int) -> Line:
    """Draw a name, a reading, a bar if a maximum is known, and an extra text."""
    room = width - _DEVICE_WIDTH - _READING_WIDTH - (len(extra) + 1 if extra else 0)
    return [
        Run(pad(name, _DEVICE_WIDTH - 1) + " ", Tone.MUTED),
        Run(pad(reading, _READING_WIDTH), Tone.STRONG),
        Run(gauge(ratio, room) if ratio is not None else "", Tone.ACCENT),
        Run(f" {extra}" if extra else ""),
    ]


def _power_line(frame: Frame) -> Line:
    """Sum up all devices in one line: power, and the hottest."""
    devices = [device for device in frame.devices if device.power_w is not None]
    limits_w = [device.power_limit_w for device in devices]
    known_w = [limit_w for limit_w in limits_w if limit_w is not None]
    limit_w = sum(known_w) if known_w and len(known_w) == len(devices) else None
    line = [
        Run(pad("power", _DEVICE_WIDTH), Tone.MUTED),
        Run(fig.watts(total_power_w(frame), limit_w), Tone.STRONG),
    ]
    if len(devices) > 1:
        line.append(Run(f", {len(devices)} devices", Tone.MUTED))
    degrees = [device.temperature_c for device in devices if device.temperature_c is not None]
    return [*line, Run(f" {max(degrees):.0f}C" if degrees else "", Tone.MUTED)]


def _energy_line(frame: Frame) -> Line:
    """Draw the joules per token of each phase."""
    energy = frame.energy
    prefill_j, decode_j = (
        (energy.prefill_j_per_token, energy.decode_j_per_token) if energy else (None, None)
    )
    return [
        Run(pad("J/token", _DEVICE_WIDTH), Tone.MUTED),
        Run(f"in {fig.short_count(prefill_j)}", Tone.STRONG),
        Run(f"  out {fig.short_count(decode_j)}", Tone.STRONG),
    ]


def device_row(device: DeviceFrame, width: int) -> Line:
    """Draw the reported values of a device: `gpu0 512/700 W ████░ 73% 61C`."""
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
"""Minimum width for the maximum, the targets and a graph."""
_TARGET_WIDTH = 10


def title(view: View) -> str:
    """Return the title `LATENCY last 60s, 34 requests`."""
    if view.frame is None:
        return "LATENCY"
    latency = view.frame.latency
    return f"LATENCY  last {latency.window_s:.0f}s, {fig.count(latency.num_requests)} finished"


def latency(view: View, width: int, height: int) -> list[Line]:
    """Draw TTFT, ITL, handoff and end to end, and the stages of the TTFT."""
    frame = view.frame
    if frame is None:
        return []
    now, is_wide = frame.latency, width >= _TREND_FROM
    if now.ttft_ms_p50 is None and now.itl_ms_p50 is None and now.e2e_ms_p50 is None:
        quiet = f"no tokens in the last {now.window_s:.0f} s"
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
    return [*lines, *_made_of(now, width, height - len(lines))][:height]


_Row = tuple[str, list[float | None], float | None, int | None, Samples]


def _rows(view: View, frame: Frame, now: LatencyFrame) -> list[_Row]:
    """List name, quantiles with the maximum, share in time, target, and the graph's samples."""
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


def _made_of(now: LatencyFrame, width: int, height: int) -> list[Line]:
    """Write `ttft mean queue 61.0 + prefill 142`, the stages in which requests spent time.

    If they do not fit into one line, the largest come first, as many as `height` lines hold, with
    the sum of the others unless it is small.
    """
    label = Run("ttft mean ", Tone.MUTED)
    means = [(stage, getattr(now, f"{stage}_ms_mean")) for stage in fig.TTFT_STAGES]
    known = [(stage, mean_ms) for stage, mean_ms in means if mean_ms is not None]
    ranked = sorted(known, key=lambda mean: -mean[1])
    total_ms = sum(mean_ms for _, mean_ms in known)
    shorter = ((ranked[:num], height) for num in range(len(ranked), 0, -1))
    for stages, most_lines in ((known, 1), *shorter, ([], height)):
        text = " + ".join(f"{stage} {fig.millis(mean_ms)}" for stage, mean_ms in stages)
        rest_ms = total_ms - sum(mean_ms for _, mean_ms in stages)
        if stages and rest_ms > MIN_REST_SHARE * total_ms:
            text += f" + other {fig.millis(rest_ms)}"
        if not stages and ranked:
            text = f"{ranked[0][0]} {fig.millis(ranked[0][1])}"
        lines = fold([label, Run(text or fig.ABSENT)], width, len(label.text))
        if len(lines) <= most_lines:
            break
    return lines


# The power page: what each device draws and may draw, and where the joules went.
# Invariant: prefill, decode and the unattributed rest stand together, and add up to the total.
# Never: shows 0 for what is not reported; a MIG slice stands under its GPU, whose power it shares.


_LABEL_WIDTH = 14
_INDENT = 2
_CHART_ROWS = 8


def page(view: View, width: int, height: int) -> list[Line]:
    """Draw devices, power over time, energy."""
    frame = view.frame
    if frame is None:
        return []
    lines: list[Line] = [rule("DEVICES", width, "power/limit, utilisation, temperature, memory")]
    for device in _in_families(frame.devices):
        lines += _device(frame, device, width)
    energy = _energy(frame.energy, width)
    num_rows = max(1, min(_CHART_ROWS, height - len(lines) - len(energy) - 1))
    lines.append(rule("POWER", width, f"all devices, last {fig.whole_seconds(view.window_s)}"))
    samples = view.recent(view.history.power_w, width)
    lines += [[Run(row, Tone.ACCENT)] for row in chart(samples, width, num_rows)]
    return [*lines, *energy]


def _in_families(devices: list[DeviceFrame]) -> list[DeviceFrame]:
    """Order MIG slices after their GPU."""
    parents = [device for device in devices if device.parent is None]
    names = {device.name for device in parents}
    ordered = []
    for parent in parents:
        ordered += [parent, *(d for d in devices if d.parent == parent.name)]
    return ordered + [d for d in devices if d.parent is not None and d.parent not in names]


def _device(frame: Frame, device: DeviceFrame, width: int) -> list[Line]:
    """Draw a device's row with its bar, then its other readings."""
    mark = mark_of(alert_of(frame, "", device.name))
    if device.parent is None:
        head = device_row(device, width - 1)
    else:
        slice_of = f"{device.name}  slice of {device.parent}, which meters power"
        head = [Run(clip(slice_of, width - 1), Tone.STRONG)]
    readings = _readings(device)
    known = [(label, text) for label, text in readings if text != fig.ABSENT]
    unknown = [label for label, text in readings if text == fig.ABSENT]
    lines = [[mark, *head]]
    workers = [w.name for w in frame.workers if w.device.partition(",")[0] == device.name]
    if workers:
        lines.append([Run(" " * _INDENT), Run("runs ", Tone.MUTED), Run(", ".join(workers))])
    lines += facts(width, known, indent=_INDENT)
    if unknown and device.parent is None:
        text = f"not reported: {', '.join(unknown)}"
        lines.append([Run(" " * _INDENT), Run(text, Tone.MUTED)])
    return lines


def _readings(device: DeviceFrame) -> list[tuple[str, str]]:
    """List every other reading, `-` for an unreported one."""
    throttle = device.throttle_reasons
    readings = [
        ("model", device.model or fig.ABSENT),
        ("throttle", fig.ABSENT if throttle is None else ", ".join(throttle) or "none"),
        ("clock", _megahertz(device.clock_mhz)),
        ("energy", fig.joules(device.energy_j)),
        ("source", device.power_source or fig.ABSENT),
    ]
    if device.kind == "gpu":
        readings += [
            ("util", fig.ratio(device.utilization_ratio)),
            ("memory", fig.part(device.memory_used_bytes, device.memory_total_bytes)),
            ("instant", fig.watts(device.power_instant_w)),
            ("memory clock", _megahertz(device.memory_clock_mhz)),
            ("sm", fig.ratio(device.sm_ratio)),
            ("tensor", fig.ratio(device.tensor_ratio)),
            ("memory bandwidth", fig.ratio(device.memory_bandwidth_ratio)),
            ("pcie in/out", _both(device.pcie_rx_bytes_per_s, device.pcie_tx_bytes_per_s)),
            ("nvlink in/out", _both(device.nvlink_rx_bytes_per_s, device.nvlink_tx_bytes_per_s)),
            ("last xid", fig.ABSENT if device.last_xid is None else str(device.last_xid)),
            ("uuid", device.uuid or fig.ABSENT),
        ]
    return readings


def _megahertz(value: float | None) -> str:
    return fig.ABSENT if value is None else f"{value:.0f} MHz"


def _both(rx: float | None, tx: float | None) -> str:
    if rx is None and tx is None:
        return fig.ABSENT
    return f"{fig.size(rx)}/s {fig.size(tx)}/s"


def _energy(energy: EnergyFrame | None, width: int) -> list[Line]:
    """Draw the energy sums since the daemon started, and the joules per token now."""
    if energy is None or energy.total_j is None:
        return []
    shares = (
        ("prefill", energy.prefill_j),
        ("decode", energy.decode_j),
        ("unattributed", energy.unattributed_j),
    )
    lines = [rule("ENERGY", width, "since the daemon started")]
    lines += [_joules_share(label, value_j, energy.total_j, width) for label, value_j in shares]
    now = [
        ("power", fig.watts(energy.power_w)),
        ("J/token in", fig.short_count(energy.prefill_j_per_token)),
        ("J/token out", fig.short_count(energy.decode_j_per_token)),
    ]
    return [
        *lines,
        _joules_share("total", energy.total_j, energy.total_j, width),
        rule("PRICE", width, f"last {energy.window_s:.0f}s"),
        *facts(width, now),
        *facts(width, [("method", energy.method)]),
    ]


def _joules_share(label: str, value_j: float | None, total_j: float, width: int) -> Line:
    ratio = None if value_j is None or total_j <= 0 else value_j / total_j
    return [
        Run(pad(label, _LABEL_WIDTH), Tone.MUTED),
        Run(pad(fig.joules(value_j), 9, right=True), Tone.STRONG),
        Run(pad(fig.ratio(ratio), 6, right=True) + " "),
        Run(gauge(ratio, width - _LABEL_WIDTH - 16), Tone.ACCENT),
    ]
