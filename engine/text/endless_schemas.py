"""Find JSON schemas that refer only to themselves, which no value can match.

Invariant: time and memory are linear in the schema's size, for any references.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

_DATA = ("const", "enum", "default", "examples")
"""Keywords that contain data, not schemas."""
_ALTERNATIVES = ("anyOf", "oneOf")

Part = Mapping[str, Any]


def endless_reference(schema: object) -> str | None:
    """Find a `$ref` that leads back to itself before any other keyword; None: no such reference.

    `{"$ref": "#"}` is one. A property that refers to its own object is not: the object's other
    keywords come before the reference.
    """
    parts = {id(part): part for part in _parts(schema)}
    # As for grammars: a part can be said once each of its needs is met by a part that can be.
    waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)
    unmet: dict[int, set[int]] = {}
    sayable = []
    for key, part in parts.items():
        needs = list(_needs(part, schema, parts))
        unmet[key] = set(range(len(needs)))
        for index, alternatives in enumerate(needs):
            for other in alternatives:
                waiting[id(other)].append((key, index))
        if not needs:
            sayable.append(key)
    while sayable:
        for key, index in waiting.pop(sayable.pop(), ()):
            if index in unmet[key]:
                unmet[key].remove(index)
                if not unmet[key]:
                    sayable.append(key)
    endless = (parts[key].get("$ref") for key, needs in unmet.items() if needs)
    return next((reference for reference in endless if isinstance(reference, str)), None)


def _parts(schema: object) -> Iterator[Part]:
    """Yield every object in the schema, the whole first."""
    unseen = [schema]
    while unseen:
        one = unseen.pop()
        if isinstance(one, Mapping):
            yield one
            unseen += [value for name, value in one.items() if name not in _DATA]
        elif isinstance(one, Sequence) and not isinstance(one, str):
            unseen += one


def _needs(part: Part, schema: object, parts: Mapping[int, Part]) -> Iterator[list[Part]]:
    """Yield lists of parts about one value; of each list one must be satisfiable."""
    target = _target(part.get("$ref"), schema)
    if isinstance(target, Mapping) and id(target) in parts:
        yield [target]
    every = part.get("allOf")
    if isinstance(every, list):
        yield from ([one] for one in every if isinstance(one, Mapping))
    for keyword in _ALTERNATIVES:
        some = part.get(keyword)
        if isinstance(some, list) and some and all(isinstance(one, Mapping) for one in some):
            yield some  # any that is `true` could always be said


def _target(reference: object, schema: object) -> object:
    """Resolve a reference within the schema; None: it leads nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = schema
    for name in unquote(reference[1:]).split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found
