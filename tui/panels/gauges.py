"""KV occupancy, latency and the machine.

Owns: nothing; pure. Called by: app and plain.
Invariant: cells of a KV bar add up to its width; every quantile stands under its window.
Never: shows 0 for what is not reported.
"""

from __future__ import annotations

from appliance.protocol import DeviceFrame, PoolFrame
from tui import format as fmt
from tui.lines import STATE_CELLS, Line, Span, Tone, gauge, pairs, sparkline, state_bar, width_of
from tui.panels.header import KV_CRIT_RATIO, KV_WARN_RATIO
from tui.view import View, pool_counts, pool_used_ratio

_BLOCK_ROWS = 4
"""From here on a pool has its numbers with their states' names."""
_LEGEND_WIDTH = 58
"""From here on the title has room for the legend of the bars."""
_SHORT_STATES = {"reserved": "resvd", "draining": "drain", "quarantined": "quar"}
_NAME_WIDTH = 8
_DEVICE_WIDTH = 10
_READING_WIDTH = 13
_QUANTILE_WIDTH = 8


def kv_title(view: View, width: int, height: int) -> str:
    """The legend of the bars, or, where that stands beside the numbers, the size of a block."""
    pools = view.frame.pools if view.frame else []
    if not pools:
        return "KV"
    if width < _LEGEND_WIDTH or height // len(pools) >= _BLOCK_ROWS:
        return f"KV  {pools[0].block_size} tokens, {fmt.size(pools[0].block_bytes)} a block"
    return "KV  " + "  ".join(f"{STATE_CELLS[state]} {state}" for state in _shown_states(view))


def _shown_states(view: View) -> list[str]:
    pools = view.frame.pools if view.frame else []
    return [s for s in STATE_CELLS if s != "quarantined" or any(p.quarantined for p in pools)]


def kv(view: View, width: int, height: int) -> list[Line]:
    """Each pool as a bar by state with its numbers; more detail where there is room."""
    pools = view.frame.pools if view.frame else []
    if not pools:
        return [[Span("no pool yet", Tone.MUTED)]] if view.frame else []
    rows = height // len(pools)
    if rows >= _BLOCK_ROWS:
        return [line for pool in pools for line in _pool_block(pool, width, rows)]
    if rows >= 2:
        lines = [line for pool in pools for line in _pool_pair(pool, width)]
    else:
        lines = [_pool_row(pool, width) for pool in pools]
    if width < _LEGEND_WIDTH:
        legend = " ".join(
            STATE_CELLS[state] + _SHORT_STATES.get(state, state) for state in _shown_states(view)
        )
        lines.append([Span(legend, Tone.MUTED)])
    return lines[:height]


def _used_span(pool: PoolFrame) -> Span:
    used = pool_used_ratio(pool)
    tone = Tone.STRONG
    if used is not None and used >= KV_WARN_RATIO:
        tone = Tone.BAD if used >= KV_CRIT_RATIO else Tone.WARN
    return Span(fmt.pad(fmt.ratio(used), 4, right=True) + " ", tone)


def _pool_block(pool: PoolFrame, width: int, rows: int) -> list[Line]:
    counts = pool_counts(pool)
    shown = [state for state in STATE_CELLS if state != "quarantined" or counts[state]]
    cells = [(f"{STATE_CELLS[state]} {state}", fmt.count(counts[state])) for state in shown]
    cells += [("", "")] if len(cells) % 2 else []
    lines: list[Line] = [
        [
            Span(fmt.pad(pool.name, _NAME_WIDTH)),
            _used_span(pool),
            Span(f"of {fmt.count(pool.num_blocks)} blocks", Tone.MUTED),
        ],
        [Span(state_bar(counts, width), Tone.ACCENT)],
    ]
    lines += [pairs(width, *cells[index : index + 2]) for index in range(0, len(cells), 2)]
    return lines[:rows]


def _pool_pair(pool: PoolFrame, width: int) -> list[Line]:
    counts = pool_counts(pool)
    head = [Span(fmt.pad(pool.name, _NAME_WIDTH)), _used_span(pool)]
    return [
        [*head, *_numbers(pool, width - width_of(head))],
        [Span(state_bar(counts, width), Tone.ACCENT)],
    ]


def _pool_row(pool: PoolFrame, width: int) -> Line:
    head = [Span(fmt.pad(pool.name, _NAME_WIDTH)), _used_span(pool)]
    numbers = _numbers(pool, width // 2)
    room = width - width_of(head) - width_of(numbers) - 1
    bar = Span(state_bar(pool_counts(pool), room) + " ", Tone.ACCENT)
    return [*head, bar, *numbers]


def _numbers(pool: PoolFrame, room: int) -> Line:
    """`█300 ▓20 ▒100 ▚4 ░600`, as many as there is room for."""
    line: Line = []
    for state, num in pool_counts(pool).items():
        item = [
            Span((" " if line else "") + STATE_CELLS[state], Tone.ACCENT),
            Span(fmt.short_count(num)),
        ]
        if (num or state == "free") and width_of(line) + width_of(item) <= room:
            line += item
    return line


def latency_title(view: View) -> str:
    """`LATENCY  last 60s, 34 requests`."""
    if view.frame is None:
        return "LATENCY"
    latency = view.frame.latency
    word = "request" if latency.num_requests == 1 else "requests"
    return f"LATENCY  last {latency.window_s:.0f}s, {fmt.count(latency.num_requests)} {word}"


def latency(view: View, width: int, height: int) -> list[Line]:
    """Quantiles of the first token, the gaps and the handoff, in milliseconds."""
    if view.frame is None:
        return []
    now = view.frame.latency
    rows = [
        ("ttft", now.ttft_ms_p50, now.ttft_ms_p95, now.ttft_ms_max, view.history.ttft_ms_p95),
        ("gap", now.itl_ms_p50, now.itl_ms_p95, now.itl_ms_max, view.history.itl_ms_p95),
        ("handoff", now.handoff_ms_p50, now.handoff_ms_p95, None, ()),
    ]
    numbers_width = _NAME_WIDTH + 3 * _QUANTILE_WIDTH
    trend_width = width - numbers_width - 2 if width >= 60 else 0
    head = fmt.pad("ms", _NAME_WIDTH) + "".join(
        fmt.pad(name, _QUANTILE_WIDTH, right=True) for name in ("p50", "p95", "max")
    )
    lines: list[Line] = [[Span(head + ("  p95 over time" if trend_width else ""), Tone.MUTED)]]
    for name, *quantiles, samples in rows:
        line = [Span(fmt.pad(name, _NAME_WIDTH), Tone.MUTED)]
        line += [
            Span(fmt.pad(fmt.millis(value), _QUANTILE_WIDTH, right=True), Tone.STRONG)
            for value in quantiles
        ]
        if trend_width and samples:
            line.append(Span("  " + sparkline(samples, trend_width), Tone.ACCENT))
        lines.append(line)
    if not trend_width:
        graph = sparkline(view.history.ttft_ms_p95, width - _NAME_WIDTH - 5)
        lines.append(
            [Span(fmt.pad("ttft p95", _NAME_WIDTH + 5), Tone.MUTED), Span(graph, Tone.ACCENT)]
        )
    return lines[:height]


def machine(view: View, width: int, height: int) -> list[Line]:
    """CPU, memory, power and the daemon itself."""
    if view.frame is None:
        return []
    host, devices = view.frame.host, view.frame.devices
    memory = fmt.part(host.memory_used_bytes, host.memory_total_bytes)
    lines = [
        _meter("cpu", fmt.percent(host.cpu_percent), _share(host.cpu_percent, 100), "", width),
        _meter(
            "memory", memory, _share(host.memory_used_bytes, host.memory_total_bytes), "", width
        ),
    ]
    if devices and len(devices) <= max(1, height - len(lines) - 1):
        lines += [_device_row(device, width) for device in devices]
    else:
        lines.append(_power_total(devices))
    daemon = [
        Span(fmt.pad("daemon", _DEVICE_WIDTH), Tone.MUTED),
        Span(fmt.percent(host.daemon_cpu_percent), Tone.STRONG),
        Span(" of a core, ", Tone.MUTED),
        Span(fmt.size(host.daemon_rss_bytes), Tone.STRONG),
    ]
    return [*lines, daemon][:height]


def _share(value: float | None, whole: float | None) -> float | None:
    return None if value is None or not whole else value / whole


def _meter(name: str, reading: str, ratio: float | None, extra: str, width: int) -> Line:
    """A name, a reading, a bar if there is a whole to compare with, and what else there is."""
    room = width - _DEVICE_WIDTH - _READING_WIDTH - (len(extra) + 1 if extra else 0)
    return [
        Span(fmt.pad(name, _DEVICE_WIDTH - 1) + " ", Tone.MUTED),
        Span(fmt.pad(reading, _READING_WIDTH), Tone.STRONG),
        Span(gauge(ratio, room) if ratio is not None else "", Tone.ACCENT),
        Span(f" {extra}" if extra else ""),
    ]


def _power_total(devices: list[DeviceFrame]) -> Line:
    readings = [device.power_w for device in devices if device.power_w is not None]
    name = Span(fmt.pad("power", _DEVICE_WIDTH), Tone.MUTED)
    if not readings:
        return [name, Span("not reported", Tone.MUTED)]
    over = "" if len(readings) == 1 else f" over {len(readings)} devices"
    return [name, Span(f"{sum(readings):.0f} W", Tone.STRONG), Span(over, Tone.MUTED)]


def _device_row(device: DeviceFrame, width: int) -> Line:
    """`gpu0  512/700 W  ████░  73% 61C`, what it reports of it."""
    if device.power_w is None:
        power = "no power" if width < 60 else "power not reported"
    elif device.power_limit_w is None:
        power = f"{device.power_w:.0f} W"
    else:
        power = f"{device.power_w:.0f}/{device.power_limit_w:.0f} W"
    extras = [
        "" if device.utilization_ratio is None else fmt.ratio(device.utilization_ratio),
        "" if device.temperature_c is None else f"{device.temperature_c:.0f}C",
    ]
    if width >= 60:
        extras.append(fmt.part(device.memory_used_bytes, device.memory_total_bytes))
    extra = " ".join(filter(lambda text: text not in ("", fmt.ABSENT), extras))
    return _meter(device.name, power, _share(device.power_w, device.power_limit_w), extra, width)
