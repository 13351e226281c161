"""Parse setting values from text or TOML types.

Invariant: returns a value of the right type, or raises a ValueError that names the allowed values.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from appliance.configuration.wanted_workers import GPU_NAME

_BYTES = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([KMGT])(iB|B)?|B)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(ms|s|m|h)?", re.ASCII)
_SECONDS_BY_UNIT = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")
_WEIGHT = re.compile(r"\d{1,3}(?:\.\d{1,3})?", re.ASCII)
MIN_BYTES = 1 << 20
_NEAR = 0.75
"""Minimum similarity of a name suggested for a misspelt one, as kv_memory for kv_memroy."""
_OF_REQUESTS = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens")
_GONE = {
    "cache_dir": "cache_dir no longer exists; remove it",
}
"""Settings of earlier releases, and their replacements."""


def parse_bytes(text: object) -> int:
    """Parse `2GiB`, `512MiB`, `4G` or bytes; K M G T are powers of 1024, KB MB GB TB of 1000."""
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
    """Format a size for parse_bytes(), rounded up: 1.25GiB, 300MiB."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{math.ceil(100 * num_bytes / factor) / 100:g}{unit}"
    return f"{num_bytes}B"


def a_size_or(*words: str) -> Callable[[object], int | str]:

    def parse(value: object) -> int | str:
        if value in words:
            return str(value)
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{error}, or {' or '.join(words)}") from error

    return parse


def a_duration(value: object) -> float:
    """Parse `90s`, `2m`, `1h`, `500ms` or seconds, into seconds."""
    match = _DURATION.fullmatch(str(value).strip())
    if match is None or isinstance(value, bool):
        raise ValueError("a time such as 90s, 2m or 1h")
    return float(match[1]) * _SECONDS_BY_UNIT[match[2] or "s"]


def a_stay(value: object) -> float:
    """Parse a duration, or `forever`, into seconds."""
    if value in ("forever", -1, "-1"):
        return math.inf
    try:
        return a_duration(value)
    except ValueError as error:
        raise ValueError(f"{error}, or forever") from error


def one_of(*allowed: str) -> Callable[[object], str]:
    """Return the parser of one of these words."""

    def parse(value: object) -> str:
        if value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return str(value)

    return parse


def a_number_or(low: int, high: int, *words: str) -> Callable[[object], int | str]:
    """Return the parser of one of these words, or of a whole number from `low` to `high`."""

    def parse(value: object) -> int | str:
        text = str(value)
        if text in words:
            return text
        if isinstance(value, bool) or not text.isdecimal() or not low <= int(text) <= high:
            raise ValueError(f"{', '.join(words)}, or a number from {low} to {high}")
        return int(text)

    return parse


def at_least(low: int, what: str) -> Callable[[object], int]:
    """Return the parser of a whole number; `what` names the things that it counts."""

    def parse(value: object) -> int:
        text = str(value)
        is_number = not isinstance(value, bool) and text.isascii() and text.isdigit()
        if not is_number or len(text) > 12 or int(text) < low:
            raise ValueError(f"a whole number of {what}, {low} or more")
        return int(text)

    return parse


def a_path(value: object) -> Path:
    """Parse a path and make it absolute; ~ is the home folder."""
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise ValueError("a path")
    return Path(value).expanduser().absolute()


def an_address(value: object) -> tuple[str, int]:
    """Parse an address of this machine with a port."""
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
    """Say whether only this machine reaches the address `host`; IPv4 may be written as IPv6."""
    if host == "localhost":
        return True
    address = ipaddress.ip_address(host.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def names(value: object) -> tuple[str, ...]:
    """Parse user names and @groups: a list, or text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(name, str) for name in parts):
        raise ValueError("a list of user names and @groups")
    return tuple(name.strip() for name in parts if name.strip())


def aliases(value: object) -> tuple[str, ...]:
    """Parse names of a model; * in them matches any text, other wildcards are refused."""
    try:
        found = names(value)
    except ValueError:
        found = ("[",)
    if any(not name.isprintable() or set(name) & set("[]?") for name in found):
        raise ValueError("names of models with commas, without [ ] and ?, such as claude-*")
    return found


def origins(value: object) -> tuple[str, ...]:
    """Parse web origins as browsers send them: no path, not even a trailing /."""
    try:
        found = names(value)
    except ValueError:
        found = ("",)
    if not all(name in ("*", "null") or _ORIGIN.fullmatch(name) for name in found):
        raise ValueError("origins with commas, without a path, such as https://app.example; or *")
    return found


def some_devices(value: object) -> str:
    """Parse auto, cpu, or GPU names."""
    text = str(value).replace(" ", "")
    if text not in {"auto", "cpu"} and not all(map(GPU_NAME.fullmatch, text.split(","))):
        raise ValueError("auto, cpu, or GPUs by name, such as gpu0, cuda:1 or MIG-...")
    return text


def a_flag(value: object) -> bool:
    """Parse true or false, 1 or 0, yes or no."""
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if str(value).lower() not in words:
        raise ValueError("true or false")
    return words[str(value).lower()]


def some_weights(value: object) -> tuple[tuple[str, float], ...]:
    """Parse users' and keys' shares of the queue: `ann=4,key:batch=0.5`, or a list of them."""
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
    """Parse on or off; TOML's booleans are accepted."""
    words = {"on": True, "true": True, "off": False, "false": False}
    if str(value).lower() not in words:
        raise ValueError("on or off")
    return words[str(value).lower()]


def nearest(name: str, names: Iterable[str]) -> str:
    """Find the name that was probably meant; empty: no name is similar."""
    from difflib import get_close_matches  # for mistakes only

    by_lower = {each.lower().removeprefix("penstock_"): each for each in names}
    wanted = name.lower().removeprefix("penstock_")  # which would make any two alike
    found = get_close_matches(wanted, list(by_lower), n=1, cutoff=_NEAR)
    return by_lower[found[0]] if found else ""


def is_meant(name: str, names: Iterable[str]) -> str:
    """Suggest a misspelt name, `is kv_memory meant? `; empty: no name is similar.

    For a setting of an earlier release, name its replacement.
    """
    gone = _GONE.get(name.lower().removeprefix("penstock_"))
    if gone is not None:
        return f"{gone}; "
    known = list(names)
    near = nearest(name, [*_OF_REQUESTS, *known])
    if near in _OF_REQUESTS and near not in known:
        return f"{near} is set by a request or the model's generation_config.json; "
    return f"is {near} meant? " if near else ""
