"""What --place says: how many workers of each role, and on which cores.

`2x1` is two workers that prefill and one that decodes, with the cores divided evenly.
`prefill=0,1 decode=2-3` names them: a worker for each item, on one core or on a range of cores.
Owns: that language, and who gets which cores. Pure.
Invariant: no core has two workers unless that is `forced`, which tests on small machines need, or
there is one core only and one worker of each role.
Never: looks at the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from engine.errors import ConfigError
from engine.places import DECODE, PREFILL

_COUNTS = re.compile(r"([1-9]\d?)x([1-9]\d?)")
_CPUS = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
_FORCED = "forced"
_SAY = "2x1, or cores by role as 'prefill=0,1 decode=2-3'"


@dataclass(frozen=True, slots=True)
class WantedWorkers:
    """Workers by role; each with its cores, or None: a share of what there is."""

    prefill: tuple[tuple[int, ...] | None, ...] = (None,)
    decode: tuple[tuple[int, ...] | None, ...] = (None,)
    is_forced: bool = False
    """Workers may have cores in common."""
    text: str = field(default="auto", compare=False)

    def __str__(self) -> str:
        return self.text

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """Of those that prefill and of those that decode; numbered where there are several."""
        return _names(PREFILL, len(self.prefill)), _names(DECODE, len(self.decode))

    def cores(self, available: list[int]) -> dict[str, tuple[int, ...]]:
        """Each worker's cores, by name.

        Raises:
            ConfigError: there are fewer cores than workers, or some are not there or named twice.
        """
        names = [name for role in self.names for name in role]
        wanted = (*self.prefill, *self.decode)
        named = [cpu for cpus in wanted if cpus is not None for cpu in cpus]
        if not named:
            return dict(zip(names, self._shares(available, len(names)), strict=True))
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
        return {name: cpus or () for name, cpus in zip(names, wanted, strict=True)}

    def _shares(self, available: list[int], num_workers: int) -> list[tuple[int, ...]]:
        """As even as they can be; those that prefill, which computes, come first."""
        if len(available) >= num_workers:
            base, num_larger = divmod(len(available), num_workers)
            ends = [base * (i + 1) + min(i + 1, num_larger) for i in range(num_workers)]
            starts = [0, *ends]
            return [tuple(available[a:b]) for a, b in zip(starts, ends, strict=False)]
        if not self.is_forced and num_workers > 2:
            raise ConfigError(
                f"{num_workers} workers, but {len(available)} cores",
                where="place",
                hint="each worker needs a core of its own",
            )
        return [(available[i % len(available)],) for i in range(num_workers)]


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
    by_role: dict[str, tuple[tuple[int, ...], ...]] = {}
    for part in text.split():
        role, _, items = part.partition("=")
        if role in by_role:
            raise ValueError(_SAY)
        by_role[role] = tuple(_cpus(item) for item in items.split(","))
    if by_role.keys() != {PREFILL, DECODE}:
        raise ValueError(_SAY)
    return WantedWorkers(by_role[PREFILL], by_role[DECODE], is_forced, value)


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
