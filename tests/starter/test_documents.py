"""Documents hold the facts that are asked for, and the two splits have nothing in common."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.starter.documents import Document, Writer, is_held_out
from tests.starter.words import ATTRIBUTES, LINES, SMALL_TALK, UNKNOWN

seeds = st.integers(0, 2**32)


@given(seeds, st.integers(1, 60), st.integers(1, len(LINES)), st.booleans())
def test_every_fact_is_stated_once_and_belongs_to_the_split(seed, num_facts, num_styles, held_out):
    document = Writer(Random(seed), held_out=held_out).document(num_facts, num_styles)
    assert len(document.facts) == num_facts
    assert len({(name, attribute) for name, attribute, _ in document.facts}) == num_facts
    lines = document.text.splitlines()
    for name, attribute, value in document.facts:
        assert is_held_out(name) is is_held_out(value) is held_out
        stated = {line.format(name=name, attribute=attribute, value=value) for line in LINES}
        assert sum(line in stated for line in lines) == 1


@given(seeds, st.integers(1, 40))
def test_a_lookup_is_answered_by_the_document(seed, num_facts):
    writer = Writer(Random(seed))
    document = writer.document(num_facts)
    turn = writer.lookup(document)
    asked = [fact for fact in document.facts if fact[0] in turn.question]
    (fact,) = [fact for fact in asked if fact[1] in turn.question.replace(fact[0], "")]
    assert turn.answer == fact[2]


@given(seeds, st.integers(0, 40))
def test_what_is_unknown_is_not_in_the_document(seed, num_facts):
    writer = Writer(Random(seed))
    document = writer.document(num_facts) if num_facts else Document("", [])
    turn = writer.unknown(document)
    assert turn.answer == UNKNOWN
    for name, attribute, _ in document.facts:
        assert name not in turn.question or attribute not in turn.question.replace(name, "")


@pytest.mark.parametrize("held_out", [False, True])
def test_the_same_seed_writes_the_same(held_out):
    texts = {Writer(Random(3), held_out=held_out).document(20).text for _ in range(2)}
    assert len(texts) == 1


def test_a_document_has_names_that_look_alike():
    document = Writer(Random(0)).document(60)
    names = {tuple(name.split("-")) for name, _, _ in document.facts}
    shared = [sum(a == b for a, b in zip(x, y, strict=True)) for x in names for y in names if x < y]
    assert shared.count(2) > len(names) / 4


def test_every_kind_of_value_is_written():
    attributes = {attribute for _, attribute, _ in Writer(Random(1)).document(200).facts}
    assert attributes == set(ATTRIBUTES)


def test_small_talk_has_one_answer_to_each_question():
    questions = [question for asked in SMALL_TALK.values() for question in asked]
    assert len(questions) == len(set(questions))
    turn = Writer(Random(0)).talk()
    assert turn.question in SMALL_TALK[turn.answer]
