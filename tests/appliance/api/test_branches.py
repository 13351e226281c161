"""Where other chats may part from one is counted in the tokens that their prompts really share."""

import dataclasses

import pytest

from appliance.api.branches import LEAST_TOKENS, branches
from appliance.api.messages_api import messages_ask
from appliance.api.openai import ask_of_chat
from appliance.api.openai_bodies import ChatRequest
from appliance.api.prepare import prepare
from appliance.formats.tool_format import PLAIN
from appliance.json_fields import check
from appliance.request import ModelInfo
from engine.cache.hashes import PrefixHasher
from engine.text.tokenizer import Tokenizer
from tests.byte_tokenizer import CHAT_TEMPLATE
from tests.fakes import FakeAppliance
from tests.tiny_tokenizers import byte_level

MODEL = ModelInfo("m", 8192, 300, (), None, 0)
SYSTEM = {"role": "system", "content": "Answer briefly, and name your sources. " * 4}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
MARK = {"cache_control": {"type": "ephemeral"}}
DOCUMENT = {"type": "text", "text": "The cat sat on the mat. " * 9}


def chat_of(*messages, **fields):
    body = {"messages": list(messages), **fields}
    return ask_of_chat(check(body, ChatRequest), MODEL).chat


def user(content):
    return {"role": "user", "content": content}


def tokenizer_of(template=CHAT_TEMPLATE):
    return Tokenizer(byte_level(), chat_template=template)


def ids_of(chat, tokenizer):
    text = chat.render(tokenizer, PLAIN).text
    return tokenizer.encode(text, add_special_tokens=False)


def found(chat, tokenizer):
    return branches(chat, ids_of(chat, tokenizer), tokenizer, PLAIN)


def num_common(*chats, tokenizer):
    pairs = list(zip(*(ids_of(chat, tokenizer) for chat in chats), strict=False))
    return next(i for i, pair in enumerate(pairs) if len(set(pair)) > 1)


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}])
def test_chats_with_one_system_prompt_part_at_the_first_turn(tools):
    tokenizer = tokenizer_of()
    one, other = (chat_of(SYSTEM, user(text), **tools) for text in ("Rain?", "Why?"))
    shared = num_common(one, other, tokenizer=tokenizer)
    assert shared > LEAST_TOKENS
    assert found(one, tokenizer) == (shared,)
    later = chat_of(SYSTEM, user("Rain?"), {"role": "assistant", "content": "Water."}, user("And?"))
    if not tools:
        assert found(later, tokenizer) == found(one, tokenizer)


def test_a_marked_document_is_a_place_and_the_prompts_end_is_none():
    tokenizer = tokenizer_of()
    one, other = (
        chat_of(user([DOCUMENT | MARK, {"type": "text", "text": text} | MARK]))
        for text in ("About what?", "Who sat there?")
    )
    assert len(one.marks) == 2
    shared = num_common(one, other, tokenizer=tokenizer)
    assert found(one, tokenizer) == (shared - 1,)  # they share the line break behind it, too


def test_marks_of_earlier_turns_are_none():
    tokenizer = tokenizer_of()
    marked = [user("Hi."), {"role": "assistant", "content": "Hi."}, user([DOCUMENT | MARK])]
    chat = chat_of(SYSTEM, *marked, {"role": "assistant", "content": "Yes."}, user("Why?"))
    assert len(chat.marks) == 1
    assert found(chat, tokenizer) == found(chat_of(SYSTEM, user("Hi.")), tokenizer)


def test_a_short_system_prompt_is_none():
    assert (
        found(chat_of({"role": "system", "content": "Be kind."}, user("hi")), tokenizer_of()) == ()
    )


def test_a_template_that_takes_no_other_chat_leaves_the_rest():
    picky = (
        "{% if messages[-1].content == '~' %}{{ raise_exception('no') }}{% endif %}" + CHAT_TEMPLATE
    )
    chat = chat_of(SYSTEM, user([DOCUMENT | MARK, {"type": "text", "text": "Why?"}]))
    assert len(found(chat, tokenizer_of())) == 2
    tokenizer = tokenizer_of(picky)
    assert len(found(chat, tokenizer)) == 1
    assert set(tokenizer.chat_template.known_forms.values()) == {0}


def test_marks_of_messages_are_those_of_a_chat():
    question = {"type": "text", "text": "Why?"}
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "Be brief."} | MARK,
    ]
    body = {"system": system, "messages": [user([DOCUMENT | MARK, question])], "max_tokens": 5}
    chat = messages_ask(body, MODEL).chat
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        user(f"{DOCUMENT['text']}\nWhy?"),
    ]
    assert chat.marks == ((0, len("Be brief.")), (1, len(DOCUMENT["text"])))


@pytest.mark.parametrize("has_records", [True, False])
def test_only_models_with_records_have_a_use_for_them(has_records):
    appliance = FakeAppliance(tokenizer_of(), max_model_len=8192)
    appliance.model = dataclasses.replace(appliance.model, has_records=has_records)
    appliance.hasher = PrefixHasher(bytes(32), b"", 4)
    body = {"messages": [SYSTEM, user("Why?")]}
    prepared = prepare(appliance, ask_of_chat(check(body, ChatRequest), MODEL), "ana")
    assert len(prepared.branches) == has_records
