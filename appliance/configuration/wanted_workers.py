"""Parse --place: how many workers of each role, and on which devices.

Invariant: no core has two workers unless that is `forced`, which tests on small machines need, or
the machine has one core and one worker of each role.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from engine.errors import ConfigError
from engine.scheduler.cache.topology import COLOCATED, DECODE, PREFILL

_COUNTS = re.compile(r"([1-9]\d?)x([1-9]\d?)")
_CPUS = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
GPU_NAME = re.compile(r"cuda:\d{1,3}|gpu\d{1,3}(?:/mig\d{1,2})?|(?:GPU|MIG)-[0-9A-Za-z/-]{1,80}")
"""Matches a GPU's CUDA number, its name in readings, or its UUID."""
_FORCED = "forced"
_SAY = "2x1, cores by role as 'prefill=0,1 decode=2-3', or GPUs as 'prefill=cuda:0 decode=cuda:1'"
_BETWEEN = "+"
"""What stands between the cores of a group's processes."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The cores of each process of a worker that is a group, as many for each."""

    each: tuple[tuple[int, ...], ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        """The cores of all."""
        return tuple(cpu for cpus in self.each for cpu in cpus)


Spot = tuple[int, ...] | Ranks | str
"""A worker's place: cores, cores of a group's processes, or a GPU by name."""


@dataclass(frozen=True, slots=True)
class WantedWorkers:
    """The configured workers by role; each with its cores or its GPU, or None: an equal share."""

    prefill: tuple[Spot | None, ...] = (None,)
    decode: tuple[Spot | None, ...] = (None,)
    is_forced: bool = False
    """Whether workers may share cores."""
    text: str = field(default="auto", compare=False)
    colocated: tuple[int, ...] | Ranks | None = None
    """The place of the one worker of colocated roles; None: it is not named."""

    def __str__(self) -> str:
        return self.text

    @property
    def is_auto(self) -> bool:
        """Whether --place is not configured."""
        return self.text == "auto"

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """The names of the workers that prefill and that decode; numbered if there are several."""
        return _names(PREFILL, len(self.prefill)), _names(DECODE, len(self.decode))

    @property
    def gpu_names(self) -> list[str]:
        return [spot for spot in self._spots if isinstance(spot, str)]

    @property
    def width(self) -> int:
        """Processes of the worker that has most."""
        return max(self.widths, default=1)

    @property
    def widths(self) -> list[int]:
        """Processes of each worker whose place is named."""
        spots = [spot for spot in self._all_spots if spot is not None]
        return [len(spot.each) if isinstance(spot, Ranks) else 1 for spot in spots]

    def ranks(self, worker: str) -> tuple[tuple[int, ...], ...]:
        """Return the cores of each process of a worker; empty: no worker is a group.

        Beside a group, one process computes all shards, so that both have the same bits.
        """
        names = [name for role in self.names for name in role]
        spot = dict(zip(names, self._spots, strict=True)).get(worker, self.colocated)
        if isinstance(spot, Ranks):
            return spot.each
        return (spot,) if self.width > 1 and isinstance(spot, tuple) else ()

    def of_each(self, num_prefill: int, num_decode: int) -> WantedWorkers:
        """Want this number of workers per role, without fixed places."""
        return replace(self, prefill=(None,) * num_prefill, decode=(None,) * num_decode)

    def cores(self, available: list[int]) -> dict[str, tuple[int, ...]]:
        """Return the cores of each worker that is not on a GPU, by name.

        Raises:
            ConfigError: too few cores for the workers, or some do not exist or are named twice.
        """
        spots = zip((n for role in self.names for n in role), self._spots, strict=True)
        by_name = {name: _cores(spot) for name, spot in spots if not isinstance(spot, str)}
        names, wanted = list(by_name), list(by_name.values())
        named = [cpu for cpus in wanted if cpus is not None for cpu in cpus]
        if not by_name:
            return {}
        if not named:
            return dict(zip(names, self._shares(available, names), strict=True))
        self._check(named, available)
        return {name: cpus or () for name, cpus in by_name.items()}

    def colocated_cores(self, available: list[int]) -> tuple[int, ...]:
        """Return the cores of the one worker of colocated roles.

        Raises:
            ConfigError: some do not exist, or are named twice.
        """
        cpus = _cores(self.colocated)
        self._check(list(cpus or ()), available)
        return tuple(available) if cpus is None else cpus

    def _check(self, named: list[int], available: list[int]) -> None:
        """Refuse cores that do not exist, or have two users.

        Raises:
            ConfigError: naming them.
        """
        missing = sorted(set(named) - set(available))
        if missing:
            raise ConfigError(
                f"core {', '.join(map(str, missing))} cannot be used",
                where="place",
                hint=f"usable cores, one of each physical core: {', '.join(map(str, available))}",
            )
        if len(set(named)) < len(named) and not self.is_forced:
            raise ConfigError(
                "two workers share a core", where="place", hint="give each cores of its own"
            )

    @property
    def _spots(self) -> tuple[Spot | None, ...]:
        return (*self.prefill, *self.decode)

    @property
    def _all_spots(self) -> tuple[Spot | None, ...]:
        return (*self._spots, self.colocated)

    def _shares(self, available: list[int], names: list[str]) -> list[tuple[int, ...]]:
        """Divide the cores evenly; prefill workers, being compute-bound, come first.

        If workers must share cores, workers of one role do: no prompt then slows decode.
        """
        num_cores, num_workers = len(available), len(names)
        if num_cores >= num_workers:
            base, num_larger = divmod(num_cores, num_workers)
            ends = [base * (i + 1) + min(i + 1, num_larger) for i in range(num_workers)]
            starts = [0, *ends]
            return [tuple(available[a:b]) for a, b in zip(starts, ends, strict=False)]
        if not self.is_forced and num_workers > 2:
            raise ConfigError(
                f"{num_workers} workers, but {num_cores} cores",
                where="place",
                hint="each worker needs a core of its own",
            )
        num_firsts = len(set(names) & set(self.names[0]))
        middle = min(max(num_cores * num_firsts // num_workers, 1), num_cores - 1)
        parts = (available[:middle] or available, available[middle:])
        counts = (num_firsts, num_workers - num_firsts)
        return [
            (cpus[i % len(cpus)],)
            for cpus, count in zip(parts, counts, strict=True)
            for i in range(count)
        ]


def parse_place(value: object) -> WantedWorkers:
    """Parse the text of --place; `forced` at its end lets workers share cores."""
    text, _, forced = str(value).strip().partition(f" {_FORCED}")
    if forced or not isinstance(value, str):
        raise ValueError(_SAY)
    is_forced = text != value.strip()
    if text == "auto":
        return WantedWorkers()
    if counts := _COUNTS.fullmatch(text):
        num_prefill, num_decode = map(int, counts.groups())
        return WantedWorkers((None,) * num_prefill, (None,) * num_decode, is_forced, value)
    by_role = _by_role(text)
    if by_role.keys() == {COLOCATED} and len(by_role[COLOCATED]) == 1:
        (spot,) = by_role[COLOCATED]
        if isinstance(spot, str):
            raise ValueError(_SAY)
        return WantedWorkers(is_forced=is_forced, text=value, colocated=spot)
    if by_role.keys() != {PREFILL, DECODE}:
        raise ValueError(_SAY)
    spots = (*by_role[PREFILL], *by_role[DECODE])
    if any(isinstance(x, Ranks) for x in spots) and any(isinstance(x, str) for x in spots):
        raise ValueError("cores for all workers if one has several processes, or GPUs for all")
    return WantedWorkers(by_role[PREFILL], by_role[DECODE], is_forced, value)


def _by_role(text: str) -> dict[str, tuple[Spot, ...]]:
    """Parse the places of each role's workers."""
    by_role: dict[str, tuple[Spot, ...]] = {}
    for part in text.split():
        role, _, items = part.partition("=")
        if role in by_role:
            raise ValueError(_SAY)
        by_role[role] = tuple(_spot(item) for item in items.split(","))
    return by_role


def _cores(spot: tuple[int, ...] | Ranks | None) -> tuple[int, ...] | None:
    return spot.cpus if isinstance(spot, Ranks) else spot


def _spot(text: str) -> Spot:
    if _BETWEEN in text:
        return _ranks(text.split(_BETWEEN))
    return text if GPU_NAME.fullmatch(text) else _cpus(text)


def _ranks(parts: list[str]) -> Ranks:
    """Parse the cores of a group's processes."""
    are_gpus = [GPU_NAME.fullmatch(part) is not None for part in parts]
    if are_gpus[0] and (all(are_gpus) or parts[0].startswith("cuda:")):
        raise ValueError("each GPU a worker of its own: no worker has several yet")
    if any(are_gpus):
        raise ValueError("a worker cores alone, such as 0-3+4-7, or a GPU")
    each = tuple(_cpus(part) for part in parts)
    if len({len(cpus) for cpus in each}) > 1:
        raise ValueError("each process of a worker as many cores, such as 0-3+4-7")
    return Ranks(each)


def _cpus(text: str) -> tuple[int, ...]:
    match = _CPUS.fullmatch(text)
    if match is None:
        raise ValueError(_SAY)
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(_SAY)
    return tuple(range(first, last + 1))


def _names(role: str, count: int) -> list[str]:
    return [role] if count == 1 else [f"{role}{number}" for number in range(count)]


ONE_OF_EACH = WantedWorkers()
