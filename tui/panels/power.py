"""Draw the power page: what each device draws and may draw, and where the joules went.

A MIG slice stands under its GPU, whose power it shares.

Invariant: prefill, decode and the unattributed rest stand together, and add up to the total.
"""

from __future__ import annotations

from appliance.observe.frame import figures as fig
from appliance.observe.frame.protocol import DeviceFrame, EnergyFrame, Frame
from tui.lines import Line, Run, Tone, chart, clip, facts, gauge, pad, peak, rule
from tui.panels.gauges import device_row
from tui.panels.header import mark_of
from tui.view import View, alert_of

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
    samples = view.recent(view.history.power_w, width)
    about = f"all devices, last {fig.whole_seconds(view.window_s)}, 0 to {fig.watts(peak(samples))}"
    lines.append(rule("POWER", width, about))
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
