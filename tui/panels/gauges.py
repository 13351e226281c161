"""Draw KV occupancy, the machine and waiting requests.

Invariant: cells of a KV bar add up to its width; a mark at a reading is an alert of the daemon.
Never: shows 0 for an unreported value.
"""

from __future__ import annotations

from appliance.observe.frame import figures as fig
from appliance.observe.frame.protocol import AlertFrame, DeviceFrame, Frame, PoolFrame, WorkerFrame
from tui.history import has_meter, total_power_w
from tui.lines import (
    SPARK_LEVELS,
    STATE_CELLS,
    Line,
    Run,
    Tone,
    gauge,
    pad,
    pairs,
    state_bar,
    two_a_row,
    width_of,
)
from tui.panels.header import mark_of, tone_of
from tui.view import View, alert_of, pool_counts

_BLOCK_ROWS = 4
"""Minimum rows per pool for numbers with their states' names."""
_LEGEND_WIDTH = 58
"""Minimum width for the bars' legend in the title."""
_SHORT_STATES = {"reserved": "resvd", "draining": "drain"}
NAME_WIDTH = 8
_DEVICE_WIDTH = 10
_READING_WIDTH = 13
MIN_REST_SHARE = 0.05
"""Minimum share of the mean TTFT for which the sum shows `rest`."""
FOREIGN_PERCENT = 40
"""Minimum percent of a core, beyond its worker's, that counts as other programs' work."""
_OTHERS = "others"
"""The name of programs that keep a worker's core busy."""
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
    alert = _fullness(frame, pool)
    return [Run(pad(fig.ratio(pool.used_ratio), 4, right=True), tone_of(alert)), mark_of(alert)]


def _fullness(frame: Frame, pool: PoolFrame) -> AlertFrame | None:
    return alert_of(frame, "kv.occupancy", pool.name)


def _bar(frame: Frame, pool: PoolFrame, width: int) -> Run:
    """Draw a pool by the states of its blocks, in the tone of its alert."""
    alert = _fullness(frame, pool)
    tone = Tone.ACCENT if alert is None else tone_of(alert)
    return Run(state_bar(pool_counts(pool), width), tone)


def _pool_block(frame: Frame, pool: PoolFrame, width: int, rows: int) -> list[Line]:
    counts = pool_counts(pool)
    cells = [(f"{STATE_CELLS[state]} {state}", fig.count(counts[state])) for state in STATE_CELLS]
    lines: list[Line] = [
        [
            Run(pad(pool.name, NAME_WIDTH)),
            *used_spans(frame, pool),
            Run(f"of {fig.count(pool.num_blocks)} blocks", Tone.MUTED),
        ],
        [_bar(frame, pool, width)],
    ]
    return [*lines, *two_a_row(width, cells)][:rows]


def _pool_pair(frame: Frame, pool: PoolFrame, width: int) -> list[Line]:
    head = [Run(pad(pool.name, NAME_WIDTH)), *used_spans(frame, pool)]
    return [[*head, *_numbers(pool, width - width_of(head))], [_bar(frame, pool, width)]]


def _pool_row(frame: Frame, pool: PoolFrame, width: int) -> Line:
    head = [Run(pad(pool.name, NAME_WIDTH)), *used_spans(frame, pool)]
    numbers = _numbers(pool, width // 2)
    room = width - width_of(head) - width_of(numbers) - 1
    return [*head, _bar(frame, pool, room), Run(" "), *numbers]


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
                f"{percent}% {(user := _used_by(percent, users.get(cpu)))}",
                percent / 100,
                "",
                width,
                Tone.WARN if user == _OTHERS else Tone.STRONG,
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
        return _OTHERS if percent - own > FOREIGN_PERCENT else worker.name
    return "" if worker is None else worker.name


def _share(value: float | None, whole: float | None) -> float | None:
    return None if value is None or not whole else value / whole


def _meter(
    name: str, reading: str, ratio: float | None, extra: str, width: int, tone: Tone = Tone.STRONG
) -> Line:
    """Draw a name, a reading, a bar if a maximum is known, and an extra text."""
    read_width = max(_READING_WIDTH, len(reading) + 1)
    room = width - _DEVICE_WIDTH - read_width - (len(extra) + 1 if extra else 0)
    return [
        Run(pad(name, _DEVICE_WIDTH - 1) + " ", Tone.MUTED),
        Run(pad(reading, read_width), tone),
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
