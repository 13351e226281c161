"""Filter requests by a text such as `user:ana state:queued in>4096 !bench`.

Invariant: a request with an unreported number matches no comparison with it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from appliance.observe.frame.protocol import RequestFrame
from appliance.observe.frame.request_facts import energy_j

GRAMMAR = "user:ana  state:queued  in>4096  ttft>500  !bench"
_TERM = re.compile(r"(?P<name>[a-z0-9_]+)(?P<sign>:|<=|>=|<|>|=)(?P<value>.*)", re.S)
_NUMBER = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[kM]?)")
_UNITS = MappingProxyType({"": 1.0, "k": 1e3, "M": 1e6})
_SIGNS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}
)
WORDS: Mapping[str, Callable[[RequestFrame], str | None]] = MappingProxyType(
    {
        "id": lambda r: r.id,
        "user": lambda r: r.user,
        "client": lambda r: r.client,
        "state": lambda r: r.phase,
        "finish": lambda r: r.finish_reason,
        "endpoint": lambda r: r.endpoint,
        "model": lambda r: r.model,
        "worker": lambda r: r.worker,
        "route": lambda r: r.route,
    }
)
"""Columns matched with a colon; a bare word is searched in all of them."""
NUMBERS: Mapping[str, Callable[[RequestFrame], float | None]] = MappingProxyType(
    {
        "in": lambda r: r.prompt_tokens,
        "out": lambda r: r.output_tokens,
        "max": lambda r: r.max_tokens,
        "blocks": lambda r: r.num_blocks,
        "time": lambda r: r.age_ms,
        "queue": lambda r: r.queue_ms,
        "restore": lambda r: r.restore_ms,
        "prefill": lambda r: r.prefill_ms,
        "ttft": lambda r: r.ttft_ms,
        "handoff": lambda r: r.handoff_ms,
        "wait": lambda r: r.decode_wait_ms,
        "decode": lambda r: r.decode_ms,
        "paused": lambda r: r.paused_ms,
        "tpot": lambda r: r.tpot_ms,
        "e2e": lambda r: r.e2e_ms,
        "j": lambda r: energy_j(r.prefill_j, r.decode_j),
    }
)
"""Columns compared with a number; times are in milliseconds."""


class FilterError(ValueError):
    """The text is not a filter; the message says why."""


@dataclass(frozen=True, slots=True)
class Term:
    """One condition of a filter, such as `user:ana` or `in>4096`."""

    name: str
    """A key of WORDS or NUMBERS; empty for a bare word."""
    sign: str
    value: str
    is_negated: bool

    def admits(self, request: RequestFrame) -> bool:
        return self._holds(request) is not self.is_negated

    def _holds(self, request: RequestFrame) -> bool:
        if self.sign != ":":
            reading = NUMBERS[self.name](request)
            return reading is not None and _SIGNS[self.sign](reading, _number(self.value))
        texts = [WORDS[self.name](request)] if self.name else [t(request) for t in WORDS.values()]
        return any(self.value.lower() in text.lower() for text in texts if text is not None)


@dataclass(frozen=True, slots=True)
class Filter:
    """All conditions of a text; without conditions every request passes."""

    text: str = ""
    terms: tuple[Term, ...] = ()

    def admits(self, request: RequestFrame) -> bool:
        return all(term.admits(request) for term in self.terms)


def parse(text: str) -> Filter:
    """Read a filter.

    Raises:
        FilterError: a condition cannot be read.
    """
    return Filter(" ".join(text.split()), tuple(_term(word) for word in text.split()))


def _term(word: str) -> Term:
    is_negated = word.startswith("!")
    condition = word.removeprefix("!")
    if not condition:
        raise FilterError("! needs a condition after it")
    parts = _TERM.fullmatch(condition)
    if parts is None:
        return Term("", ":", condition, is_negated)
    name, sign, value = parts["name"], parts["sign"], parts["value"]
    if sign == ":" and name in NUMBERS:
        raise FilterError(f"{name} is a number: {name}>500, {name}<=4k, {name}=1")
    if sign != ":" and name in WORDS:
        raise FilterError(f"{name} is a text: {name}:part")
    if sign == ":" and name not in WORDS:
        raise FilterError(f"no {name}: to look in; known: {', '.join(WORDS)}")
    if sign != ":" and name not in NUMBERS:
        raise FilterError(f"{name} is not a number column; known: {', '.join(NUMBERS)}")
    if sign != ":" and not _NUMBER.fullmatch(value):
        raise FilterError(f"{name}{sign} needs a number, e.g. 500 or 4k")
    if not value:
        raise FilterError(f"{name}: needs a text after it")
    return Term(name, sign, value, is_negated)


def _number(text: str) -> float:
    parts = _NUMBER.fullmatch(text)
    assert parts is not None, "checked when it was parsed"
    return float(parts["number"]) * _UNITS[parts["unit"]]
