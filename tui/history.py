"""Keep figures of earlier frames, for the console's rates and sparklines.

Invariant: every run of samples has one entry for each second, oldest first; None is not reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from appliance.observe.frame import figures as fig
from appliance.observe.frame.protocol import Frame

HISTORY_FRAMES = 300
DROPPED_FRAMES = 10
"""A missed frame is reported for this many frames."""
STALL_RATIO = 0.25
"""A stall is decode below this share of its median during a prefill."""
Samples = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class History:
    """Samples of the last HISTORY_FRAMES frames, and rates since the last but one."""

    prefill_tokens_per_s: Samples = ()
    decode_tokens_per_s: Samples = ()
    stalls: Samples = ()
    """1 where decode stalled, otherwise 0."""
    queued: Samples = ()
    handoffs_per_s: Samples = ()
    handoff_bytes_per_s: Samples = ()
    ttft_ms_p95: Samples = ()
    itl_ms_p95: Samples = ()
    power_w: Samples = ()
    kv_used_ratio: Mapping[str, Samples] = field(default_factory=lambda: MappingProxyType({}))
    """Samples by pool."""
    dropped_frames: Samples = ()
    last: Frame | None = None
    """The newest frame."""

    def after(self, frame: Frame) -> History:
        """Add one more frame; after a restart the time between has no samples."""
        last = self.last
        if last is not None and (last.pid != frame.pid or last.seq >= frame.seq):
            older = self if frame.at > last.at else History()  # else a replay was moved back
            return older.then(History().after(frame), frame.at)
        handoffs, handoff_bytes = _handoff_rates(last, frame)
        decode_tokens_per_s = sum(worker.decode_tokens_per_s for worker in frame.workers)
        used = {pool.name: pool.used_ratio for pool in frame.pools}
        kv_used_ratio = {
            name: _push(self.kv_used_ratio.get(name, ()), used_ratio)
            for name, used_ratio in (used or dict.fromkeys(self.kv_used_ratio)).items()
        }
        return History(
            _push(self.prefill_tokens_per_s, sum(w.prefill_tokens_per_s for w in frame.workers)),
            _push(self.decode_tokens_per_s, decode_tokens_per_s),
            _push(self.stalls, float(self._is_stall(frame, decode_tokens_per_s))),
            _push(self.queued, frame.queue.queued),
            _push(self.handoffs_per_s, handoffs),
            _push(self.handoff_bytes_per_s, handoff_bytes),
            _push(self.ttft_ms_p95, frame.latency.ttft_ms_p95),
            _push(self.itl_ms_p95, frame.latency.itl_ms_p95),
            _push(self.power_w, total_power_w(frame)),
            MappingProxyType(kv_used_ratio),
            _push(self.dropped_frames, frame.seq - last.seq - 1 if last else 0),
            frame,
        )

    def then(self, newer: History, begin: str) -> History:
        """Put a newer history behind this one; the time between has no samples.

        Args:
            begin: the time of its first frame.
        """
        if self.last is None:
            return newer
        passed_s = fig.seconds_between(self.last.at, begin) or 0.0
        gap = (None,) * max(0, min(HISTORY_FRAMES, round(passed_s) - 1))

        def joined(old: Samples, new: Samples) -> Samples:
            return (*old, *gap, *new)[-HISTORY_FRAMES:]

        changes: dict[str, Any] = {
            name: joined(getattr(self, name), getattr(newer, name)) for name in _SAMPLES
        }
        changes["kv_used_ratio"] = MappingProxyType(
            {
                name: joined(self.kv_used_ratio.get(name, ()), newer.kv_used_ratio.get(name, ()))
                for name in newer.kv_used_ratio or self.kv_used_ratio
            }
        )
        return replace(newer, **changes)

    @property
    def num_dropped_frames(self) -> int:
        """Missed frames among the last DROPPED_FRAMES."""
        return round(sum(num or 0 for num in self.dropped_frames[-DROPPED_FRAMES:]))

    def _is_stall(self, frame: Frame, decode_tokens_per_s: float) -> bool:
        """Say whether decode stalls while a prompt is computed."""
        seen = [value for value in self.decode_tokens_per_s if value]
        if not seen or not frame.queue.decoding or not frame.queue.prefilling:
            return False
        return decode_tokens_per_s < STALL_RATIO * statistics.median(seen)


_SAMPLES = (
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "stalls",
    "queued",
    "handoffs_per_s",
    "handoff_bytes_per_s",
    "ttft_ms_p95",
    "itl_ms_p95",
    "power_w",
)


def has_meter(frame: Frame | None) -> bool:
    """Say whether any device reports power, energy or utilisation."""
    if frame is None:
        return False
    return bool(frame.devices) or (frame.energy is not None and frame.energy.total_j is not None)


def total_power_w(frame: Frame) -> float | None:
    """Add up the devices' power without MIG slices; None: no device reports any."""
    readings = [device.power_w for device in frame.devices if device.parent is None]
    known = [power_w for power_w in readings if power_w is not None]
    return sum(known) if known else None


def spread(samples: Sequence[float | None], num_samples: int, num_cells: int) -> Samples:
    """Average the newest `num_samples` into `num_cells` of equal time.

    Times before the first sample are None, so that a cell has a constant length from the first
    frame on.
    """
    recent = list(samples[-num_samples:])
    padded = [None] * (num_samples - len(recent)) + recent
    cells: list[float | None] = []
    for cell in range(num_cells):
        start = cell * num_samples // num_cells
        end = max(start + 1, (cell + 1) * num_samples // num_cells)
        known = [value for value in padded[start:end] if value is not None]
        cells.append(sum(known) / len(known) if known else None)
    return tuple(cells)


def _handoff_rates(last: Frame | None, frame: Frame) -> tuple[float | None, float | None]:
    """Return handoffs and bytes per second, as reported or from two frames."""
    if frame.handoff is not None:
        return frame.handoff.handoffs_per_s, frame.handoff.bytes_per_s
    elapsed_s = frame.uptime_s - last.uptime_s if last else 0.0
    if last is None or elapsed_s <= 0:
        return None, None
    return (
        (frame.totals.handoffs - last.totals.handoffs) / elapsed_s,
        (frame.totals.handoff_bytes - last.totals.handoff_bytes) / elapsed_s,
    )


def _push(samples: Samples, value: float | None) -> Samples:
    return (*samples, value)[-HISTORY_FRAMES:]
