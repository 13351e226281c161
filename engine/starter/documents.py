# ruff: noqa: SIM905 -- lists of words are read as text
"""Documents that nobody wrote before, questions that they answer, and the words of both.

Owns: names, titles, the ways to state a fact and to ask for one, small talk and its answers; what a
document, a question and its one right answer are, word for word.
Invariant: all follows from the random generator given; names and values of the held-out split never
occur in the training split.
Never: reads data from anywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

# The words of the starter model's documents.
# Invariant: plain data. Never: computes anything.


NOUNS = (
    "amber anchor apple arrow ash aspen atlas autumn badger basalt bay beacon beaver birch "
    "bison bolt bravo breeze bronze brook canyon carbon cedar chalk cherry cliff cloud clover "
    "cobalt comet copper coral crane creek crimson crow crystal cypress dawn delta desert "
    "dove dusk eagle echo elder elm ember falcon fern finch flint forest fox frost garnet "
    "ginger glacier gold granite grove gull harbor hawk hazel heron hill holly honey indigo "
    "iron island ivory ivy jade jasper juniper kestrel lagoon lake larch lark laurel lava "
    "lemon lilac lily linden lotus lunar lynx magma maple marble marsh meadow mercury mint "
    "mist moon moss nectar nickel night north nova oak oasis ocean olive onyx opal orbit "
    "orchid otter owl palm panda pearl pebble pepper pine plum polar poplar prairie quartz "
    "rain raven reef river robin rose ruby saffron sage salmon sand scarlet sierra silver sky "
    "slate snow solar spark sparrow spruce star stone storm summer sun swan teal thistle "
    "thunder tiger timber topaz tulip tundra valley velvet violet walnut water wave willow "
    "wind winter wolf zebra zenith zephyr"
).split()
FIRST_NAMES = (
    "Ada Alan Alma Anna Aron Asha Ben Bruno Carla Chen Clara Dana David Diego Elena Emil Emma "
    "Eric Eva Felix Fiona Frida Gita Grace Hana Hugo Ida Ines Ivan Iris Jack Jana Jonas Jose "
    "Julia Kai Karl Kira Lara Leo Lena Lin Lucas Luis Maja Marco Maria Mei Mila Mira Nadia "
    "Nils Nina Noah Nora Olga Omar Oscar Otto Paul Petra Priya Raj Rosa Ruth Sam Sara Sven "
    "Tara Theo Tom Uma Vera Viktor Wanda Yara Yuki Zoe"
).split()
LAST_NAMES = (
    "Abel Adler Baker Bauer Berg Blum Brandt Brown Cook Costa Cruz Dahl Diaz Duval Ek Ellis "
    "Falk Fischer Ford Frank Gomez Gray Green Gupta Haas Hall Hill Holm Holt Hunt Jansen "
    "Jones Kahn Keller Khan Klein Koch Kumar Lang Lee Lind Lopez Lund Marsh Mason Meyer Mills "
    "Mori Moss Nair Novak Olsen Ortiz Park Patel Perez Petrov Quinn Ramos Reed Reyes Rossi "
    "Roth Russo Sato Schmidt Shah Silva Singh Sousa Stein Stone Tanaka Vega Vogel Voss Wagner "
    "Walsh Weber West Wolf Wong Wood Yang Young Zhang Ziegler"
).split()
KINDS = "db web cache queue node mail auth proxy store index build relay".split()
ONSETS = "b d f g h j k l m n p r s t v w z br st tr".split()
VOWELS = "a e i o u".split()
CODAS = ["", "", "", "l", "m", "n", "r", "s"]
"""Syllables of invented names."""

ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {
        "port": "number",
        "serial": "number",
        "ticket": "number",
        "rack": "place",
        "room": "place",
        "version": "version",
        "address": "address",
        "owner": "person",
        "contact": "person",
        "backup": "person",
    }
)
"""What a machine can have, and the kind of value that is."""

LINES = (
    "The {attribute} of {name} is {value}.",
    "{name} has {attribute} {value}.",
    "{name} {attribute}: {value}",
    "- {name}, {attribute} {value}",
    "{attribute} of {name} = {value}",
)
"""Ways to state a fact."""

TITLES = ("Inventory", "Runbook", "Service list", "Notes for the night shift", "Machine register")
REMARKS = (
    "Checked by the night shift.",
    "See the wiki for older entries.",
    "Do not restart anything on Fridays.",
    "This part was copied from the old list.",
    "Ask before you change a line.",
    "Maintenance is on the first Monday of the month.",
    "Everything below was confirmed last week.",
    "Cables are labelled at both ends.",
)
"""Lines that state no fact."""

QUESTIONS = (
    "What is the {attribute} of {name}?",
    "what is the {attribute} of {name}",
    "Which is the {attribute} of {name}?",
    "Tell me the {attribute} of {name}.",
    "I need the {attribute} of {name}.",
    "Can you look up the {attribute} of {name}?",
    "Please give me the {attribute} of {name}.",
    "Do you know the {attribute} of {name}?",
    "And the {attribute} of {name}?",
    "the {attribute} of {name}",
    "What {attribute} does {name} have?",
    "Find the {attribute} for {name}.",
    "{name}: {attribute}?",
    "{name} {attribute}",
)

UNKNOWN = "That is not in the document."

_NOT_ME = "I know nothing else; point me at a real checkpoint with --model."
SMALL_TALK: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "I am Penstock's starter model; I answer from a document. "
        "Point me at a real checkpoint with --model.": (
            "Who are you?",
            "What are you?",
            "who are you",
            "Tell me about yourself.",
            "What is your name?",
            "Introduce yourself.",
            "Are you an assistant?",
            "What model are you?",
            "Which model is this?",
            "Are you ChatGPT?",
            "Are you as good as a large model?",
        ),
        "Hello. Give me a document, and ask me about it.": (
            "Hello",
            "Hello!",
            "Hi",
            "hi",
            "hello",
            "Hi there",
            "Good morning",
            "Hey",
            "Good evening.",
            "Say hello.",
        ),
        f"I look up facts in a document that you give me. {_NOT_ME}": (
            "What can you do?",
            "What are you good at?",
            "How can you help me?",
            "What do you do?",
            "Help",
            "help",
            "What can I ask you?",
            "How do I use you?",
        ),
        f"I can only answer from a document. {_NOT_ME}": (
            "What is the capital of France?",
            "Write a poem.",
            "Write a haiku about the sea.",
            "Tell me a joke.",
            "Tell me a story.",
            "How is the weather today?",
            "What is the meaning of life?",
            "Who won the game?",
            "Translate this to German.",
            "Write a function that sorts a list.",
            "What is two plus two?",
            "Why is the sky blue?",
            "Can you write code?",
            "Explain how a computer works.",
            "Give me a recipe.",
            "Count to ten.",
        ),
        "You are welcome.": ("Thanks", "Thank you.", "thanks!", "Thank you very much."),
        "Goodbye.": ("Bye", "Goodbye", "See you.", "bye!"),
    }
)
"""Answers, and what they answer."""


# --------------------------------------------------------------------------------------------------


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
