"""What is taught is, to the token, what serving will ask."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.chat_template import ChatTemplate
from tests.starter.lessons import (
    ASSISTANT,
    ATTRIBUTES,
    BEGIN,
    CHAT_TEMPLATE,
    END,
    FIRST_NAMES,
    LAST_NAMES,
    LINES,
    NOUNS,
    SMALL_TALK,
    SPECIAL_TOKENS,
    UNKNOWN,
    Document,
    Teacher,
    Writer,
    is_held_out,
    train_tokenizer,
)

# Documents hold the facts that are asked for, and the two splits have nothing in common.


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


# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


def test_the_tokenizer_is_the_same_every_time(tokenizer):
    assert train_tokenizer().to_str() == tokenizer.to_str()


def test_nouns_names_and_numbers_are_one_token_each(tokenizer):
    words = [*NOUNS, *(f" {name}" for name in (*NOUNS, *FIRST_NAMES, *LAST_NAMES))]
    words += [str(n) for n in range(1000)]
    split = [word for word in words if len(tokenizer.encode(word).ids) != 1]
    assert split == []


@pytest.mark.parametrize("text", ["", "naïve café ☃ 日本\n\n\ttabs", "a-b--c 0x1F 12345678"])
def test_every_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_lesson_is_what_the_chat_template_renders(tokenizer):
    teacher = Teacher(tokenizer, Random(4))
    lessons = [teacher.lesson(6, 3, 5, lookups=False) for _ in range(10)]
    for lesson in [*lessons, teacher.chat(3)]:
        text = tokenizer.decode(lesson.ids, skip_special_tokens=False)
        messages = [part.split("|>", 1) for part in text.split("<|")[1:]]
        chat = [
            {"role": role, "content": content}
            for role, content in messages
            if role not in ("begin", "end")
        ]
        rendered = ChatTemplate(CHAT_TEMPLATE, "here").render(chat, variables={"bos_token": BEGIN})
        assert rendered.removesuffix("<|assistant|>") == text
        assert tokenizer.encode(rendered).ids[: len(lesson.ids)] == lesson.ids


def test_answers_are_where_the_lesson_says(tokenizer):
    teacher = Teacher(tokenizer, Random(5), held_out=True)
    lesson = teacher.lesson(8, 12, 5, lookups=False)
    assert len(lesson.answers) == 12
    end = tokenizer.token_to_id(END)
    for answer in lesson.answers:
        assert lesson.ids[answer.end - 1] == end
        assert lesson.ids[answer.start - 1] == tokenizer.token_to_id(ASSISTANT)
    assert {answer.skill for answer in lesson.answers} <= {"lookup", "unknown", "talk"}


def test_first_lessons_are_lookups_only(tokenizer):
    lesson = Teacher(tokenizer, Random(6)).lesson(3, 40, 1, lookups=True)
    assert {answer.skill for answer in lesson.answers} == {"lookup"}


def test_special_tokens_are_single(tokenizer):
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode(token).tokens == [token]
