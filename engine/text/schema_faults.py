"""Find what a JSON schema has that cannot be enforced, and leave it out.

Invariant: what is left can be compiled, or is any object; the number of tries is bounded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engine.text.grammar import ANY_OBJECT, GrammarError, json_grammar, validate

Path = tuple[str | int, ...]

_MOST_TRIES = 200
_MOST_FAULTS = 16
_NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_SINGLE = (
    *("items", "additionalProperties", "unevaluatedProperties", "contains", "propertyNames"),
    *("not", "if", "then", "else"),
)
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")


class Mended(NamedTuple):
    """A schema without its faults."""

    schema: Mapping[str, Any] | None
    """None: any object."""
    faults: list[tuple[Path, str]]
    """The places that were left out, and why."""


def mend(schema: Mapping[str, Any], *, is_lenient: bool) -> Mended:
    """Leave out what cannot be enforced, keyword by keyword; a tenth of a second for each try."""
    search = _Search(is_lenient)
    known: dict[str, Any] = {**ANY_OBJECT, **copy.deepcopy(dict(schema))}
    faults: list[tuple[Path, str]] = []
    while (why := search.fault_of(known)) is not None:
        path = search.place(known, known)
        faults.append((path, why))
        if not path or search.is_used_up or len(faults) > _MOST_FAULTS:
            return Mended(None, faults)
        _remove(known, path)
    return Mended(known, faults)


class _Search:
    def __init__(self, is_lenient: bool) -> None:
        self._is_lenient = is_lenient
        self._num_tries = 0

    @property
    def is_used_up(self) -> bool:
        return self._num_tries >= _MOST_TRIES

    def fault_of(self, schema: Mapping[str, Any] | bool) -> str | None:
        """Say why a schema cannot be compiled; None: it can be."""
        self._num_tries += 1
        try:
            validate(json_grammar(schema, is_lenient=self._is_lenient))
        except GrammarError as error:
            return str(error)
        except RecursionError:
            return "it is nested too deeply"
        return None

    def place(self, part: Mapping[str, Any], whole: Mapping[str, Any]) -> Path:
        """Find the keyword at fault in a part that cannot be compiled; empty: all of it."""
        shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
        for path, child in _children(part):
            if self.is_used_up:
                return ()
            if self.fault_of({**shared, **child}) is not None:
                return (*path, *self.place(child, whole))
        for key in sorted(part, key="type".__eq__):  # without a type the others mean nothing
            if self.is_used_up:
                break
            rest = {name: value for name, value in part.items() if name != key}
            if self.fault_of({**shared, **rest} if key not in shared else rest) is None:
                return (key,)
        return ()


def _children(part: Mapping[str, Any]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for keyword in _NAMED:
        named = part.get(keyword)
        for name, child in named.items() if isinstance(named, Mapping) else ():
            if isinstance(child, Mapping):
                yield (keyword, name), child
    for keyword in _SINGLE:
        if isinstance(part.get(keyword), Mapping):
            yield (keyword,), part[keyword]
    for keyword in _LISTED:
        listed = part.get(keyword)
        for index, child in enumerate(listed if isinstance(listed, Sequence) else ()):
            if isinstance(child, Mapping):
                yield (keyword, index), child


def _remove(schema: Any, path: Path) -> None:
    """Leave out a keyword; a part that is at fault as a whole may be anything."""
    for step in path[:-1]:
        schema = schema[step]
    last = path[-1]
    if isinstance(last, int) or (len(path) > 1 and path[-2] in _NAMED):
        schema[last] = {}
    else:
        del schema[last]
