"""Parse --place: how many workers of each role, and on which devices.

Owns: the language of --place.
Invariant: no core has two workers unless that is `forced`, which tests on small machines need,
or there is one core only and one worker of each role.
Never: looks at the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from engine.cache.topology import DECODE, PREFILL
from engine.errors import ConfigError

_COUNTS = re.compile(r"([1-9]\d?)x([1-9]\d?)")
_CPUS = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
GPU_NAME = re.compile(r"cuda:\d{1,3}|gpu\d{1,3}(?:/mig\d{1,2})?|(?:GPU|MIG)-[0-9A-Za-z/-]{1,80}")
"""How a GPU can be named: by CUDA's number, as readings have it, or by its UUID."""
_FORCED = "forced"
_SAY = "2x1, cores by role as 'prefill=0,1 decode=2-3', or GPUs as 'prefill=cuda:0 decode=cuda:1'"

Spot = tuple[int, ...] | str
"""Where a worker is to be: cores, or a GPU by name."""


@dataclass(frozen=True, slots=True)
class WantedWorkers:
    """Workers by role; each with its cores or its GPU, or None: a share of what there is."""

    prefill: tuple[Spot | None, ...] = (None,)
    decode: tuple[Spot | None, ...] = (None,)
    is_forced: bool = False
    """Workers may have cores in common."""
    text: str = field(default="auto", compare=False)

    def __str__(self) -> str:
        return self.text

    @property
    def is_auto(self) -> bool:
        """True if nobody has said anything."""
        return self.text == "auto"

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """Names of the workers that prefill and that decode; numbered where there are several."""
        return _names(PREFILL, len(self.prefill)), _names(DECODE, len(self.decode))

    @property
    def gpu_names(self) -> list[str]:
        return [spot for spot in self._spots if isinstance(spot, str)]

    def of_each(self, num_prefill: int, num_decode: int) -> WantedWorkers:
        """So many workers of each role, whose places are left open."""
        return replace(self, prefill=(None,) * num_prefill, decode=(None,) * num_decode)

    def cores(self, available: list[int]) -> dict[str, tuple[int, ...]]:
        """The cores of each worker that is not on a GPU, by name.

        Raises:
            ConfigError: there are fewer cores than workers, or some are not there or named twice.
        """
        spots = zip((n for role in self.names for n in role), self._spots, strict=True)
        by_name = {name: spot for name, spot in spots if not isinstance(spot, str)}
        names, wanted = list(by_name), list(by_name.values())
        named = [cpu for cpus in wanted if cpus is not None for cpu in cpus]
        if not by_name:
            return {}
        if not named:
            return dict(zip(names, self._shares(available, names), strict=True))
        missing = sorted(set(named) - set(available))
        if missing:
            raise ConfigError(
                f"core {', '.join(map(str, missing))} cannot be used",
                where="place",
                hint=f"those that can, one of each physical core: {', '.join(map(str, available))}",
            )
        if len(set(named)) < len(named) and not self.is_forced:
            raise ConfigError(
                "a core is given to two workers", where="place", hint="give each cores of its own"
            )
        return {name: cpus or () for name, cpus in by_name.items()}

    @property
    def _spots(self) -> tuple[Spot | None, ...]:
        return (*self.prefill, *self.decode)

    def _shares(self, available: list[int], names: list[str]) -> list[tuple[int, ...]]:
        """As even as they can be; those that prefill, which computes, come first.

        Where workers have to share, those of one role do: no prompt disturbs who decodes.
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
    """The text of --place; `forced` at its end lets workers share cores."""
    text, _, forced = str(value).strip().partition(f" {_FORCED}")
    if forced or not isinstance(value, str):
        raise ValueError(_SAY)
    is_forced = text != value.strip()
    if text == "auto":
        return WantedWorkers()
    if counts := _COUNTS.fullmatch(text):
        num_prefill, num_decode = map(int, counts.groups())
        return WantedWorkers((None,) * num_prefill, (None,) * num_decode, is_forced, value)
    by_role: dict[str, tuple[Spot, ...]] = {}
    for part in text.split():
        role, _, items = part.partition("=")
        if role in by_role:
            raise ValueError(_SAY)
        by_role[role] = tuple(_spot(item) for item in items.split(","))
    if by_role.keys() != {PREFILL, DECODE}:
        raise ValueError(_SAY)
    return WantedWorkers(by_role[PREFILL], by_role[DECODE], is_forced, value)


def _spot(text: str) -> Spot:
    return text if GPU_NAME.fullmatch(text) else _cpus(text)


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
