"""What is taught is, to the token, what serving will ask."""

from random import Random

import pytest

from engine.starter.lessons import (
    ASSISTANT,
    BEGIN,
    CHAT_TEMPLATE,
    END,
    FIRST_NAMES,
    LAST_NAMES,
    NOUNS,
    SPECIAL_TOKENS,
    Teacher,
    train_tokenizer,
)
from engine.text.chat_template import ChatTemplate


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
