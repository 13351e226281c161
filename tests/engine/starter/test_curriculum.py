"""Lessons grow when answers come right, and only then."""

from random import Random

import pytest

from engine.starter import lessons as taught
from engine.starter.lessons import MAX_FACTS, MIN_LESSONS, Curriculum, Teacher, train_tokenizer
from engine.starter.network import MAX_POSITIONS


@pytest.fixture(scope="module")
def teacher():
    return Teacher(train_tokenizer(), Random(0))


def test_wrong_answers_never_make_documents_grow():
    curriculum = Curriculum()
    size = curriculum.num_facts
    curriculum.note([False] * 10_000)
    assert curriculum.num_facts == size


def test_right_answers_make_them_grow_up_to_a_limit():
    curriculum = Curriculum()
    sizes = [curriculum.num_facts]
    for _ in range(40):
        curriculum.note([True] * 300)
        sizes.append(curriculum.num_facts)
    assert sizes == sorted(sizes)
    assert sizes[1] > sizes[0]
    assert sizes[-1] == MAX_FACTS


def test_answers_before_a_growth_do_not_count_after_it():
    curriculum = Curriculum()
    curriculum.note([True] * 300)
    size = curriculum.num_facts
    curriculum.note([True] * 299)
    assert curriculum.num_facts == size


def test_a_step_about_documents_has_about_the_tokens_asked_for(teacher, monkeypatch):
    monkeypatch.setattr(taught, "_CHAT_SHARE", 0.0)
    lessons, _ = Curriculum().lessons(teacher, Random(1), 4096)
    assert 4096 <= sum(len(lesson.ids) for lesson in lessons) < 4096 + 500


def test_the_largest_lessons_fit_the_model(teacher):
    curriculum = Curriculum()
    curriculum.num_facts = MAX_FACTS
    random = Random(2)
    for _ in range(12):
        lessons, _ = curriculum.lessons(teacher, random, 4096)
        assert len(lessons) >= MIN_LESSONS
        assert max(len(lesson.ids) for lesson in lessons) <= MAX_POSITIONS
