# ruff: noqa: SIM905 -- lists of words are read as text
"""What the starter model is taught: documents, questions, answers, their words, and in which order.

Owns: names, titles, the ways to state a fact and to ask for one, small talk; the tokenizer and the
chat template; how a lesson is laid out as token ids, and how long documents are at each step.
Invariant: all follows from the random generator given; a lesson's ids are what the chat template
and the tokenizer give for the same conversation, so that serving asks what training answered.
Never: leaves the split that it was made for, training or held out; reads data from anywhere.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# Documents that nobody wrote before, questions that they answer, and the words of both.
# Invariant: all follows from the random generator given; names and values of the held-out split
# never occur in the training split.
# Never: reads data from anywhere.


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


# --------------------------------------------------------------------------------------------------


VOCAB_SIZE = 3072
BEGIN, END, USER, ASSISTANT, SYSTEM = SPECIAL_TOKENS = (
    "<|begin|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
)
CHAT_TEMPLATE = """{{ bos_token }}{% if tools %}<|system|>You may call these functions:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
To call one, write its name and its arguments:
<tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|end|>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""Tools are rendered so that the API takes them; the model was not taught to call any by itself."""
# A word with the space or hyphen before it, up to three digits, or one other character.
_PIECES = r"\.\n|[ -]?\p{L}+|-?\p{N}{1,3}|[^\s\p{L}\p{N}]|\s"
_TALK_SHARE, _UNKNOWN_SHARE, _SYSTEM_SHARE = 0.05, 0.2, 0.2


@dataclass(frozen=True, slots=True)
class Answer:
    """Where in a lesson's ids an answer stands, its end token included: [start, end)."""

    start: int
    end: int
    skill: str


@dataclass(frozen=True, slots=True)
class Lesson:
    """One conversation over one document, or over none."""

    ids: list[int]
    answers: list[Answer]


def train_tokenizer(seed: int = 0) -> Tokenizer:
    """A byte-level BPE in which each noun, name and number below 1,000 is one token."""
    random = Random(seed)
    writer = Writer(random)
    texts = []
    for _ in range(400):
        document = writer.document(40)
        turns = [writer.lookup(document), writer.unknown(document), writer.talk()]
        texts += [document.text, *(f"{turn.question}\n{turn.answer}" for turn in turns)]
    numbers = [form.format(n) for form in ("{}", "{:02}", "{:03}") for n in range(1000)]
    numbers += [f"-{n:02}" for n in range(100)]
    words = [*NOUNS, *FIRST_NAMES, *LAST_NAMES]
    texts += 60 * [" ".join(numbers), "\n".join(f"{word} {word}" for word in words)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Teacher:
    """Lays out lessons of one split.

    Args:
        tokenizer: as train_tokenizer() makes it.
        random: decides everything.
        held_out: teach with what training never sees, in order to measure.
    """

    def __init__(self, tokenizer: Tokenizer, random: Random, *, held_out: bool = False) -> None:
        self._tokenizer = tokenizer
        self._random = random
        self._writer = Writer(random, held_out=held_out)
        vocabulary = tokenizer.get_vocab()
        self._special = {token: vocabulary[token] for token in SPECIAL_TOKENS}

    def lesson(self, num_facts: int, num_turns: int, num_styles: int, *, lookups: bool) -> Lesson:
        """A document and questions about it, turn by turn; with `lookups` no other questions."""
        document = self._writer.document(num_facts, num_styles)
        turns = [
            self._writer.lookup(document) if lookups else self._turn(document)
            for _ in range(num_turns)
        ]
        if self._random.random() < _SYSTEM_SHARE:
            return self._laid_out(turns, system=document.text)
        return self._laid_out(turns, opening=f"{document.text}\n\n")

    def chat(self, num_turns: int) -> Lesson:
        """Small talk, and questions about a document that is not there."""
        nothing = Document("", [])
        return self._laid_out(
            [
                self._writer.talk()
                if self._random.random() < 0.8
                else self._writer.unknown(nothing)
                for _ in range(num_turns)
            ]
        )

    def _laid_out(self, turns: list[Turn], *, system: str = "", opening: str = "") -> Lesson:
        ids, answers = [self._special[BEGIN]], []
        if system:
            ids += self._message(SYSTEM, system)
        for turn in turns:
            ids += [*self._message(USER, opening + turn.question), self._special[ASSISTANT]]
            opening = ""
            start = len(ids)
            ids += [*self._encode(turn.answer), self._special[END]]
            answers.append(Answer(start, len(ids), turn.skill))
        return Lesson(ids, answers)

    def _turn(self, document: Document) -> Turn:
        chance = self._random.random()
        if chance < _TALK_SHARE:
            return self._writer.talk()
        if chance < _TALK_SHARE + _UNKNOWN_SHARE:
            return self._writer.unknown(document)
        return self._writer.lookup(document)

    def _message(self, role: str, content: str) -> list[int]:
        return [self._special[role], *self._encode(content), self._special[END]]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


# What is taught when: documents grow as answers come right.
# Invariant: sizes only grow. Never: looks at the held-out split.


MAX_FACTS = 600
"""About 6,200 tokens."""
MIN_LESSONS = 2
"""Of a step, so that two cores share it."""
GROW_AT = 0.8
GROWTH = 1.5
_PLAIN_BELOW = 8
_CHAT_SHARE = 0.3
_LARGEST_SHARE = 0.2
_NUM_RECENT = 300


class Curriculum:
    """Starts with eight facts to a document and one way to state them."""

    def __init__(self) -> None:
        self.num_facts = 8.0
        self._recent: deque[bool] = deque(maxlen=_NUM_RECENT)

    @property
    def accuracy(self) -> float:
        """Share of right answers among the last ones over the largest documents."""
        return sum(self._recent) / max(1, len(self._recent))

    def lessons(
        self, teacher: Teacher, random: Random, num_tokens: int
    ) -> tuple[list[Lesson], bool]:
        """About so many tokens of lessons of one size, and whether that is the largest size."""
        largest = round(self.num_facts)
        if random.random() < _CHAT_SHARE:
            return [teacher.chat(random.randint(1, 4)) for _ in range(24)], False
        is_largest = random.random() < _LARGEST_SHARE
        # mostly far smaller ones: they cost little, and the way to look up is the same
        num_facts = largest if is_largest else max(1, round(largest * random.random() ** 2))
        num_turns = 4 if num_facts < 3 else 6 if num_facts < 16 else 12 if num_facts < 100 else 16
        num_styles = max(1, min(len(LINES), largest - _PLAIN_BELOW + 1))
        lessons: list[Lesson] = []
        while num_tokens > 0 or len(lessons) < MIN_LESSONS:
            lesson = teacher.lesson(num_facts, num_turns, num_styles, lookups=False)
            lessons.append(lesson)
            num_tokens -= len(lesson.ids)
        return lessons, is_largest

    def note(self, is_right: list[bool]) -> None:
        """Answers over the largest documents, right or wrong; enough right ones make them grow."""
        self._recent.extend(is_right)
        if len(self._recent) == _NUM_RECENT and self.accuracy > GROW_AT:
            self.num_facts = min(MAX_FACTS, max(self.num_facts + 1, self.num_facts * GROWTH))
            self._recent.clear()
