"""Where other chats may part from one is counted in the tokens that their prompts really share."""

import dataclasses

import pytest

from appliance.api.anthropic.ask import messages_ask
from appliance.api.core import branches as branches_file
from appliance.api.core.branches import LEAST_TOKENS, MAX_MARKS, branches
from appliance.api.core.chat_messages import LEFT_OUT
from appliance.api.core.prepare import prepared
from appliance.api.formats.format_choice import PLAIN, output_format_of
from appliance.api.openai.ask import chat_ask
from appliance.daemon.requests.request import ModelInfo
from appliance.daemon.survival.journal import anew
from engine.scheduler.cache.hashes import PrefixHasher
from engine.text.tokenizer import Tokenizer
from tests.byte_tokenizer import CHAT_TEMPLATE
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance

MODEL = ModelInfo("m", 8192, 300, (), None, 0)
SYSTEM = {"role": "system", "content": "Answer briefly, and name your sources. " * 4}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
MARK = {"cache_control": {"type": "ephemeral"}}
DOCUMENT = {"type": "text", "text": "The cat sat on the mat. " * 9}


def chat_of(*messages, **fields):
    body = {"messages": list(messages), **fields}
    return chat_ask(body, MODEL).chat


def user(content):
    return {"role": "user", "content": content}


def tokenizer_of(template=CHAT_TEMPLATE):
    return Tokenizer(byte_level(), chat_template=template)


def ids_of(chat, tokenizer, output_format=PLAIN):
    text = chat.render(tokenizer, output_format).text
    return tokenizer.encode(text, add_special_tokens=False)


def found(chat, tokenizer, output_format=PLAIN):
    ids = ids_of(chat, tokenizer, output_format)
    return branches(chat, ids, tokenizer, output_format)


def num_common(*chats, tokenizer, output_format=PLAIN):
    ids = (ids_of(chat, tokenizer, output_format) for chat in chats)
    pairs = list(zip(*ids, strict=False))
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


def anthropic(**fields):
    return messages_ask({"max_tokens": 5, **fields}, MODEL).chat


def test_marks_of_results_are_those_of_their_messages_and_change_no_text():
    calls = [{"type": "tool_use", "id": f"call_{n}", "name": "search", "input": {}} for n in (1, 2)]
    failed = {"type": "tool_result", "tool_use_id": "call_1", "content": "Gone.", "is_error": True}
    pages = [{"type": "text", "text": "One."} | MARK, {"type": "image"}]
    found_two = {"type": "tool_result", "tool_use_id": "call_2", "content": pages}
    said = [{"type": "text", "text": "Wait."} | MARK, *calls]
    plain, marked = (
        anthropic(
            messages=[
                user("Search."),
                {"role": "assistant", "content": said},
                user([failed | mark, found_two | mark, {"type": "text", "text": "And?"}]),
            ]
        )
        for mark in ({}, MARK)
    )
    assert [one["content"] for one in marked.messages] == [
        *("Search.", "Wait.", "Error: Gone."),
        *(f"One.\n[image{LEFT_OUT}", "And?"),
    ]
    assert plain.messages == marked.messages
    assert plain.marks == ((1, 5), (3, 4))
    assert marked.marks == ((1, 5), (2, 12), (3, 4), (3, len(marked.messages[3]["content"])))


def test_a_marked_result_of_the_last_turn_is_a_place():
    tokenizer = tokenizer_of()
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": DOCUMENT["text"]}
    call = {"type": "tool_use", "id": "call_1", "name": "search", "input": {}}
    said = [result | MARK, {"type": "text", "text": "About what?"}]
    turns = [user("Search."), {"role": "assistant", "content": [call]}, user(said)]
    chat = anthropic(messages=turns)
    (place,) = found(chat, tokenizer)
    text = chat.render(tokenizer, PLAIN).text
    end = text.index(DOCUMENT["text"]) + len(DOCUMENT["text"])
    assert tokenizer.encode(text[:end], add_special_tokens=False) == ids_of(chat, tokenizer)[:place]


LISTING = (
    "{# <tool_call> #}{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor %}"
    + CHAT_TEMPLATE
)


@pytest.mark.parametrize("api", ["messages", "chats"])
def test_a_marked_tool_is_a_place_and_the_template_does_not_see_the_mark(api):
    about = "Find what was written about a thing, on any page that is known. " * 2
    names = ["search", "open", "close"]
    schema = {"type": "object", "properties": {}}

    def asked(system, names, marked=()):
        marks = [MARK if name in marked else {} for name in names]
        of_system = {"role": "system", "content": system}
        functions = [{"name": name, "description": about} for name in names]
        if api == "chats":
            functions = [{**each, "parameters": schema} for each in functions]
            tools = [{"type": "function", "function": each} for each in functions]
            tools = [tool | mark for tool, mark in zip(tools, marks, strict=True)]
            return chat_of(of_system, user("Why?"), tools=tools)
        tools = [
            {**each, "input_schema": schema} | mark
            for each, mark in zip(functions, marks, strict=True)
        ]
        return anthropic(system=system, messages=[user("Why?")], tools=tools)

    tokenizer = tokenizer_of(LISTING)
    chat = asked(SYSTEM["content"], names, ("open", "close"))
    assert "ephemeral" not in chat.render(tokenizer, output_format_of(tokenizer)).text
    others = [asked("Hi.", names), asked(SYSTEM["content"], ["search", "open"])]
    how = {"tokenizer": tokenizer, "output_format": output_format_of(tokenizer)}
    shared = {num_common(chat, other, **how) for other in others}
    assert len(shared) == 2
    assert shared <= set(found(chat, **how))


@pytest.mark.parametrize("has_records", [True, False])
def test_only_models_with_records_have_a_use_for_them(has_records):
    appliance = FakeAppliance(tokenizer_of(), max_model_len=8192)
    appliance.model = dataclasses.replace(appliance.model, has_records=has_records)
    appliance.hasher = PrefixHasher(bytes(32), b"", 4)
    body = {"messages": [SYSTEM, user("Why?")]}
    made = prepared(appliance, chat_ask(body, MODEL), "ana", anew)
    assert len(made.branches) == has_records


def test_of_many_marks_only_the_last_ones_are_tried(monkeypatch):
    tried, parted = [], branches_file._parted
    monkeypatch.setattr(
        branches_file, "_parted", lambda *place: tried.append(place) or parted(*place)
    )
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "Found."} | MARK
    call = {"type": "tool_use", "id": "call_1", "name": "search", "input": {}}
    said = [*[result] * 50, {"type": "text", "text": "About what?"}]
    turns = [user("Search."), {"role": "assistant", "content": [call]}, user(said)]
    chat = anthropic(messages=turns)
    assert len(chat.marks) == 50
    found(chat, tokenizer_of())
    assert len(tried) == 1 + MAX_MARKS
