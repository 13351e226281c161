"""What is taught when: documents grow as answers come right.

Owns: the size of the lessons of each step.
Invariant: sizes only grow. Never: looks at the held-out split.
"""

from __future__ import annotations

from collections import deque
from random import Random

from engine.starter.lessons import Lesson, Teacher
from engine.starter.words import LINES

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
