from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.api.tool_calls import CallDelta, CallParser
from appliance.api.tool_format import FORMATS

NAMES = {"f", "get.weather"}


def parsed(name: str, pieces: list[str], is_parallel: bool = True):
    """Content, and the calls with their names and arguments."""
    parser = CallParser(FORMATS[name], NAMES, is_parallel=is_parallel)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallDelta) and part.name is not None:
            assert part.index == len(calls)
            assert part.call_id
            calls.append([part.name, part.arguments])
        elif isinstance(part, CallDelta):
            assert part.index == len(calls) - 1
            calls[-1][1] += part.arguments
    return "".join(part for part in parts if isinstance(part, str)), calls


HERMES = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'

CASES = [
    ("hermes", HERMES % "{}", "", [["f", "{}"]]),
    ("hermes", "Let me see.\n\n" + HERMES % '{"a": 1}', "Let me see.", [["f", '{"a": 1}']]),
    ("hermes", HERMES % "{}" + "\n" + HERMES % '{"b": 2}', "", [["f", "{}"], ["f", '{"b": 2}']]),
    ("hermes", HERMES % "{}" + "\n That was it. ", "\n That was it. ", [["f", "{}"]]),
    (
        "hermes",
        HERMES % r'{"text": "}]<tool_call>{\"", "deep": [{"x": "\\"}]}',
        "",
        [["f", r'{"text": "}]<tool_call>{\"", "deep": [{"x": "\\"}]}']],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": "ü"}, "name": "get.weather"}</tool_call>',
        "",
        [["get.weather", '{"a": "ü"}']],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [["f", "{}"]]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "}"}</tool_call>',
        "",
        [["f", '{"a": 1}']],
    ),
    ("hermes", HERMES % '{"a": [1, ', "", [["f", '{"a": [1, }\n</tool_call>']]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]',
        "",
        [["f", '{"a": 1}'], ["f", "{}"]],
    ),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}]', "", [["f", "{}"]]),
    ("llama", '{"name": "f", "parameters": {"a": 1}}', "", [["f", '{"a": 1}']]),
    ("llama", '<|python_tag|>{"name": "f", "parameters": {}}', "", [["f", "{}"]]),
    (
        "llama",
        '\n{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"b": 0}}',
        "",
        [["f", "{}"], ["f", '{"b": 0}']],
    ),
]

NO_CALLS = [
    ("hermes", "plain text, with { and [ and <"),
    ("hermes", "  spaces around \n"),
    ("hermes", ""),
    ("hermes", " \n"),
    ("hermes", "a <tool_call> is a mark"),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> and more'),
    ("hermes", '<tool_call>{"name": "f", "arguments": 3}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", oh no}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argu'),
    ("hermes", "one\n<tool_call>\ntwo"),
    ("mistral", "[TOOL_CALLS] none"),
    ("mistral", '[{"name": "f", "arguments": {}}]'),
    ("llama", '{"answer": 42}'),
    ("llama", 'So: {"name": "f", "parameters": {}}'),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_read_in_the_models_own_format(name, text, content, calls):
    assert parsed(name, [text]) == (content, calls)


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_text_that_is_no_call_stays_text(name, text):
    assert parsed(name, [text]) == (text, [])


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_calls_do_not_depend_on_how_the_text_was_cut(data):
    cases = [(name, text) for name, text, *_ in CASES] + NO_CALLS
    name, text = data.draw(st.sampled_from(cases))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)) | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
    assert parsed(name, pieces) == parsed(name, [text])
    assert parsed(name, list(text)) == parsed(name, [text])


MARKS = ["<tool_call>", "</tool_call>", "{", "}", '"name": "f"', '"arguments": {', "x", "\n", '"']


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*MARKS, "[", "]", ", ", "[TOOL_CALLS]"]), max_size=14))
@pytest.mark.parametrize("name", FORMATS)
def test_any_text_at_all_is_read_the_same_at_once_and_by_characters(name, pieces):
    assert parsed(name, list("".join(pieces))) == parsed(name, ["".join(pieces)])


ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(st.none() | st.integers() | st.text(max_size=6), st.lists, max_leaves=4),
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ARGUMENTS, min_size=1, max_size=3), st.booleans())
def test_arguments_come_through_as_they_were_written(calls, is_ascii):
    written = [json.dumps(one, ensure_ascii=is_ascii) for one in calls]
    text = "\n".join(HERMES % one for one in written)
    assert parsed("hermes", [text]) == ("", [["f", one] for one in written])


def test_arguments_are_passed_on_before_they_are_complete():
    parser = CallParser(FORMATS["hermes"], NAMES, is_parallel=True)
    (begun, *_) = parser.push('<tool_call>\n{"name": "f", "arguments": {')
    assert (begun.name, begun.index) == ("f", 0)
    assert [part.arguments for part in parser.push('"city": "Par')] == ['"city": "Par']


def test_all_ends_with_the_first_call_if_there_may_be_only_one():
    text = HERMES % "{}" + HERMES % "{}"
    assert parsed("hermes", list(text), is_parallel=False) == ("", [["f", "{}"]])


def test_ids_have_the_form_that_clients_and_templates_expect():
    assert FORMATS["hermes"].new_call_id().startswith("call_")
    short = FORMATS["mistral"].new_call_id()
    assert (len(short), short.isalnum()) == (9, True)
