"""What is taught when: conversations as token ids, and documents that grow as answers come right.

Owns: the starter model's tokenizer and chat template, and how a lesson is laid out; the size of the
lessons of each step.
Invariant: a lesson's ids are what the chat template and the tokenizer give for
the same conversation, so that serving asks what training answered.
Never: leaves the split that it was made for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.starter.documents import FIRST_NAMES, LAST_NAMES, LINES, NOUNS, Document, Turn, Writer

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
