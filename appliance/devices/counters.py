"""Turn growing counters into rates and energy.

Invariant: a failed reading loses nothing, the next one covers its time too; a counter that restarts
is None for one interval, never a huge or a negative figure.
"""

from __future__ import annotations

from typing import NamedTuple


class CounterGain(NamedTuple):
    """The growth of a counter between two readings."""

    amount: int
    seconds: float

    @property
    def per_s(self) -> float:
        """The growth per second."""
        return self.amount / self.seconds


class Counter:
    """A device's counter that only grows, except for wraps and resets."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None

    def growth(self, now_ns: int, value: int | None, size: int | None = None) -> CounterGain | None:
        """Return the growth since the last reading; None without one.

        Args:
            now_ns: CLOCK_MONOTONIC.
            value: as read; None: the reading failed.
            size: where it wraps to 0; larger growth between two readings is not seen. None: it
                does not wrap, so a smaller value means a restart.
        """
        if value is None:
            return None
        last, self._last = self._last, (now_ns, value)
        if last is None or now_ns <= last[0]:
            return None
        amount = value - last[1]
        if amount < 0:
            if size is None:
                return None
            amount += size
        return CounterGain(amount, (now_ns - last[0]) / 1e9)


class EnergyReading(NamedTuple):
    """One device's energy and power."""

    energy_j: float | None = None
    """Joules since its first reading."""
    power_w: float | None = None
    """Mean power since the previous reading."""


class EnergyMeter:
    """Add up the joules of one device since the first reading."""

    def __init__(self) -> None:
        self._counter = Counter()
        self._energy_j = 0.0
        self._last_power: tuple[int, float] | None = None

    def count(
        self, now_ns: int, value: int | None, *, unit_j: float, size: int | None = None
    ) -> EnergyReading:
        """Read an energy counter; value and size as in Counter.growth()."""
        if value is None:
            return EnergyReading()
        growth = self._counter.growth(now_ns, value, size)
        if growth is None:
            return EnergyReading(self._energy_j)
        self._energy_j += growth.amount * unit_j
        return EnergyReading(self._energy_j, growth.per_s * unit_j)

    def integrate(self, now_ns: int, power_w: float | None) -> EnergyReading:
        """Add the present power, assumed to change evenly between two readings."""
        if power_w is None:
            return EnergyReading()
        last, self._last_power = self._last_power, (now_ns, power_w)
        if last is not None:
            self._energy_j += (power_w + last[1]) / 2 * (now_ns - last[0]) / 1e9
        return EnergyReading(self._energy_j, power_w)
