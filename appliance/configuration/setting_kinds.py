"""The kinds of values that settings have: text, or TOML's own types, to a value.

Owns: what is allowed, in words, and what was probably meant; the language of --place: how many
workers of each role, and on which cores, GPUs or MIG instances.
Invariant: a value of the right type, or a ValueError whose text says what is allowed.
Never: knows which settings there are.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.cache.places import DECODE, PREFILL
from engine.errors import ConfigError

# What --place says: how many workers of each role, and on which cores, GPUs or MIG instances.
# `2x1` is two workers that prefill and one that decodes, with the devices or cores divided evenly.
# `prefill=0,1 decode=2-3` names them: a worker for each item, on one core or on a range of cores;
# `prefill=cuda:0 decode=cuda:1` on GPUs, by CUDA's number, the name of their readings or their
# UUID.
# Invariant: no core has two workers unless that is `forced`, which tests on small machines need, or
# there is one core only and one worker of each role.
# Never: looks at the machine.


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
        """Those that are named, in order."""
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


# --------------------------------------------------------------------------------------------------


_BYTES = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([KMGT])(iB|B)?|B)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(ms|s|m|h)?", re.ASCII)
_SECONDS_BY_UNIT = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")
_WEIGHT = re.compile(r"\d{1,3}(?:\.\d{1,3})?", re.ASCII)
MIN_BYTES = 1 << 20
_NEAR = 0.75
"""How alike names are of which one may be meant: kv_memroy and kv_memory, not any two words."""
_OF_REQUESTS = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens")
_GONE = {
    "cache_dir": "cache_dir is gone, for nothing is made at first start any more: leave it out",
}
"""Settings of earlier releases, and what to write in their place."""


def parse_bytes(text: object) -> int:
    """`2GiB`, `512MiB`, `4G` and plain bytes; K M G T are powers of 1024, KB MB GB TB of 1000."""
    match = _BYTES.fullmatch(str(text).strip())
    if match is None or isinstance(text, bool):
        raise ValueError("a size such as 2GiB, 512MiB or 4G")
    number, unit, suffix = match.groups()
    base = 1000 if (suffix or "").lower() == "b" else 1024
    num_bytes = int(float(number) * base ** (" KMGT".index(unit.upper()) if unit else 0))
    if num_bytes < MIN_BYTES:
        raise ValueError("a size of 1MiB or more")
    return num_bytes


def size_setting(num_bytes: int) -> str:
    """A size as parse_bytes() reads it, rounded up so that it is enough: 1.25GiB, 300MiB."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{math.ceil(100 * num_bytes / factor) / 100:g}{unit}"
    return f"{num_bytes}B"


def a_size_or(*words: str) -> Callable[[object], int | str]:
    """A size, or one of some words."""

    def parse(value: object) -> int | str:
        if value in words:
            return str(value)
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{error}, or {' or '.join(words)}") from error

    return parse


def a_duration(value: object) -> float:
    """`90s`, `2m`, `1h`, `500ms` or plain seconds, in seconds."""
    match = _DURATION.fullmatch(str(value).strip())
    if match is None or isinstance(value, bool):
        raise ValueError("a time such as 90s, 2m or 1h")
    return float(match[1]) * _SECONDS_BY_UNIT[match[2] or "s"]


def one_of(*allowed: str) -> Callable[[object], str]:
    """A setting that is one of these words."""

    def parse(value: object) -> str:
        if value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return str(value)

    return parse


def at_least(low: int, what: str) -> Callable[[object], int]:
    """A whole number; `what` names the things that it counts."""

    def parse(value: object) -> int:
        text = str(value)
        is_number = not isinstance(value, bool) and text.isascii() and text.isdigit()
        if not is_number or len(text) > 12 or int(text) < low:
            raise ValueError(f"a whole number of {what}, {low} or more")
        return int(text)

    return parse


def a_path(value: object) -> Path:
    """A path, made absolute; ~ is home."""
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise ValueError("a path")
    return Path(value).expanduser().absolute()


def an_address(value: object) -> tuple[str, int]:
    """An address of this machine and a port."""
    host, colon, port = str(value).rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not is_port or not (host == "localhost" or _is_address(bare, host != bare)):
        raise ValueError("an IP address and a port up to 65535, such as 127.0.0.1:8000")
    return bare, int(port)


def _is_address(text: str, is_in_brackets: bool) -> bool:
    try:
        return (ipaddress.ip_address(text).version == 6) == is_in_brackets
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it; `host` as an_address() has it."""
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def names(value: object) -> tuple[str, ...]:
    """User names and @groups: a list, or text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(name, str) for name in parts):
        raise ValueError("a list of user names and @groups")
    return tuple(name.strip() for name in parts if name.strip())


def aliases(value: object) -> tuple[str, ...]:
    """Names of a model, in which * is any text, and nothing else stands for what it is not."""
    try:
        found = names(value)
    except ValueError:
        found = ("[",)
    if any(not name.isprintable() or set(name) & set("[]?") for name in found):
        raise ValueError("names of models with commas, without [ ] and ?, such as claude-*")
    return found


def origins(value: object) -> tuple[str, ...]:
    """Whose pages may ask, as browsers name them: no path, not even a / at the end."""
    try:
        found = names(value)
    except ValueError:
        found = ("",)
    if not all(name in ("*", "null") or _ORIGIN.fullmatch(name) for name in found):
        raise ValueError("origins with commas, without a path, such as https://app.example; or *")
    return found


def some_devices(value: object) -> str:
    """auto, cpu, or GPUs by their names."""
    text = str(value).replace(" ", "")
    if text not in {"auto", "cpu"} and not all(map(GPU_NAME.fullmatch, text.split(","))):
        raise ValueError("auto, cpu, or GPUs by name, such as gpu0, cuda:1 or MIG-...")
    return text


def a_flag(value: object) -> bool:
    """A setting that is true or false, also as 1, yes, 0, no."""
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if str(value).lower() not in words:
        raise ValueError("true or false")
    return words[str(value).lower()]


def some_weights(value: object) -> tuple[tuple[str, float], ...]:
    """Users and keys with their share of the turns: `ann=4,key:batch=0.5`, or a list of such."""
    parts = value.split(",") if isinstance(value, str) else value
    found: dict[str, float] = {}
    for part in parts if isinstance(parts, list) else [None]:
        name, _, weight = str(part).strip().rpartition("=")
        is_number = bool(name.strip()) and _WEIGHT.fullmatch(weight.strip())
        if not is_number or not 0.01 <= float(weight) <= 100:
            raise ValueError("users and keys with weights of 0.01 to 100, as ann=4,key:batch=0.5")
        found[name.strip()] = float(weight)
    return tuple(found.items())


def on_or_off(value: object) -> bool:
    """A flag that reads better so; TOML's own booleans go, too."""
    words = {"on": True, "true": True, "off": False, "false": False}
    if str(value).lower() not in words:
        raise ValueError("on or off")
    return words[str(value).lower()]


def nearest(name: str, names: Iterable[str]) -> str:
    """The one that was probably meant; empty if none is near."""
    from difflib import get_close_matches  # for mistakes only

    by_lower = {each.lower().removeprefix("penstock_"): each for each in names}
    wanted = name.lower().removeprefix("penstock_")  # which would make any two alike
    found = get_close_matches(wanted, list(by_lower), n=1, cutoff=_NEAR)
    return by_lower[found[0]] if found else ""


def is_meant(name: str, names: Iterable[str]) -> str:
    """`is kv_memory meant? `, to stand before all the names; empty if none is near.

    Of a setting of an earlier release: what there is in its place.
    """
    gone = _GONE.get(name.lower().removeprefix("penstock_"))
    if gone is not None:
        return f"{gone}; "
    known = list(names)
    near = nearest(name, [*_OF_REQUESTS, *known])
    if near in _OF_REQUESTS and near not in known:
        return f"{near} is said by a request, or by the model's generation_config.json; "
    return f"is {near} meant? " if near else ""
