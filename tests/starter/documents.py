"""Write documents of made-up facts, and questions that they answer, for the starter model.

Invariant: all follows from the random generator given; names and values of the held-out split
never occur in the training split.
Never: reads data from anywhere.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from random import Random

from tests.starter.words import (
    ATTRIBUTES,
    CODAS,
    FIRST_NAMES,
    KINDS,
    LAST_NAMES,
    LINES,
    NOUNS,
    ONSETS,
    QUESTIONS,
    REMARKS,
    SMALL_TALK,
    TITLES,
    UNKNOWN,
    VOWELS,
)

HELD_OUT_ONE_IN = 5


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and the one right answer."""

    question: str
    answer: str
    skill: str
    """`lookup`, `unknown` or `talk`."""


@dataclass(frozen=True, slots=True)
class Document:
    """Lines of text that state one value for each (name, attribute)."""

    text: str
    facts: list[tuple[str, str, str]]
    """(name, attribute, value), in the order of the text."""


def is_held_out(text: str) -> bool:
    """Which split a name or a value belongs to, for ever."""
    return zlib.crc32(text.encode()) % HELD_OUT_ONE_IN == 0


class Writer:
    """Writes documents and questions of one split.

    Args:
        random: decides everything.
        held_out: write with the names and values that training never sees.
    """

    def __init__(self, random: Random, *, held_out: bool = False) -> None:
        self._random = random
        self._held_out = held_out

    def document(self, num_facts: int, num_styles: int = len(LINES)) -> Document:
        """A document with look-alike names; one style means plain lines and no invented words."""
        random = self._random
        is_plain = num_styles == 1
        invented = 0.0 if is_plain else random.choice((0.0, 0.0, 0.3, 1.0))
        names = self._names(max(1, num_facts * 2 // 3), invented)
        pairs: dict[tuple[str, str], None] = {}
        while len(pairs) < num_facts:
            pairs[random.choice(names), random.choice(list(ATTRIBUTES))] = None
        facts = [(name, attribute, self._value(attribute)) for name, attribute in pairs]
        styles = random.sample(LINES[:num_styles], min(num_styles, random.choice((1, 1, 2, 9))))
        lines = [
            random.choice(styles).format(name=name, attribute=attribute, value=value)
            for name, attribute, value in facts
        ]
        if not is_plain and random.random() < 0.5:
            for _ in range(1 + num_facts // 12):
                lines.insert(random.randrange(len(lines) + 1), random.choice(REMARKS))
        if not is_plain and random.random() < 0.7:
            lines.insert(0, f"{random.choice(TITLES)} {random.choice(NOUNS)}")
        return Document("\n".join(lines), facts)

    def lookup(self, document: Document) -> Turn:
        """A question that the document answers."""
        name, attribute, value = self._random.choice(document.facts)
        return Turn(self._ask(name, attribute), value, "lookup")

    def unknown(self, document: Document) -> Turn:
        """A question that it does not: a name, or an attribute of a name, that is not there."""
        random = self._random
        known = {(name, attribute) for name, attribute, _ in document.facts}
        while True:
            name, attribute = self._name(0.0), random.choice(list(ATTRIBUTES))
            if document.facts and random.random() < 0.65:
                name = random.choice(document.facts)[0]
                if random.random() < 0.5:
                    name = self._look_alike(name, 0.0)
            if (name, attribute) not in known:
                return Turn(self._ask(name, attribute), UNKNOWN, "unknown")

    def talk(self) -> Turn:
        """A question that needs no document, and its answer."""
        answer = self._random.choice(list(SMALL_TALK))
        return Turn(self._random.choice(SMALL_TALK[answer]), answer, "talk")

    def _ask(self, name: str, attribute: str) -> str:
        return self._random.choice(QUESTIONS).format(name=name, attribute=attribute)

    def _names(self, count: int, invented: float) -> list[str]:
        names: list[str] = []
        seen = set()
        while len(names) < count:
            is_alike = names and self._random.random() < 0.5
            name = self._look_alike(names[-1], invented) if is_alike else self._name(invented)
            if name not in seen:
                seen.add(name)
                names.append(name)
        return names

    def _name(self, invented: float) -> str:
        random = self._random
        while True:
            word = self._word(invented)
            name = f"{word}-{random.choice(KINDS)}-{random.randrange(100):02}"
            if is_held_out(name) is self._held_out:
                return name

    def _look_alike(self, name: str, invented: float) -> str:
        """Another name that shares two of the three parts."""
        random = self._random
        while True:
            parts = name.split("-")
            part = random.randrange(3)
            new = (self._word(invented), random.choice(KINDS), f"{random.randrange(100):02}")
            parts[part] = new[part]
            other = "-".join(parts)
            if is_held_out(other) is self._held_out:
                return other

    def _word(self, invented: float) -> str:
        """A noun or, of this share, a word that does not exist."""
        random = self._random
        if random.random() >= invented:
            return random.choice(NOUNS)
        num_syllables = random.choice((2, 2, 2, 3))
        syllables = (random.choice(ONSETS) + random.choice(VOWELS) for _ in range(num_syllables))
        return "".join(syllables) + random.choice(CODAS)

    def _value(self, attribute: str) -> str:
        while True:
            value = self._any_value(ATTRIBUTES[attribute])
            if is_held_out(value) is self._held_out:
                return value

    def _any_value(self, kind: str) -> str:
        random = self._random
        match kind:
            case "number":
                return str(random.randrange(1000, 65536))
            case "place":
                return f"{random.choice('ABCDEFGH')}{random.randrange(10, 1000)}"
            case "version":
                return ".".join(str(random.randrange(30)) for _ in range(3))
            case "address":
                parts = (random.randrange(256), random.randrange(256), random.randrange(1, 255))
                return "10." + ".".join(map(str, parts))
            case _:
                return f"{random.choice(FIRST_NAMES)} {random.choice(LAST_NAMES)}"
