from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.api.core.output_parser import OutputParser
from appliance.api.core.tools import Tools
from appliance.api.formats.format_choice import THOUGHTS, OutputFormat
from appliance.api.formats.text_reading import CallDelta, ReasoningDelta
from appliance.api.formats.tool_format import FORMATS
from appliance.daemon.survival.journal import anew

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "where": {"type": "object"},
        "note": {"type": ["string", "null"]},
    },
}
SCHEMAS = {"f": None, "get.weather": SCHEMA}


def tools_of(is_parallel: bool = True, is_required: bool = False) -> Tools:
    return Tools([], SCHEMAS, is_required, is_parallel, strict=frozenset())


def read(parser: OutputParser, pieces: list[str]):
    """Content, calls with their names and arguments, and reasoning."""
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
    content = "".join(part for part in parts if isinstance(part, str))
    return content, calls, "".join(part.text for part in parts if isinstance(part, ReasoningDelta))


def parsed(name: str, pieces: list[str], is_parallel: bool = True):
    parser = OutputParser(OutputFormat(FORMATS[name]), tools_of(is_parallel), anew)
    return read(parser, pieces)[:2]


@pytest.mark.parametrize("opened", ["[", "{b:"])
@pytest.mark.parametrize("name", ["gemma", "functiongemma"])
def test_a_value_that_is_nested_deeply_is_read_to_its_end(name, opened):
    begin = "<|tool_call>call:f{a:" if name == "gemma" else "<start_function_call>call:f{a:"
    text = begin + opened * 3000 + ("]" if opened == "[" else "}") * 3000 + "}"
    for pieces in ([text], list(text)):
        _content, [[called, arguments]] = parsed(name, pieces)
        assert called == "f"
        assert "a" in json.loads(arguments)


def test_a_call_whose_name_comes_late_is_read_when_it_is_whole():
    call = '{"name":' + " " * 2000 + '"f", "arguments": {}}'
    for pieces in ([call], list(call)):
        assert parsed("hermes", ["<tool_call>", *pieces, "</tool_call>"]) == ("", [["f", "{}"]])


HERMES = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'

QWEN = (
    "<tool_call>\n<function=get.weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
PARIS = ["get.weather", '{"city": "Paris", "days": 3}']
GLM = (
    "<tool_call>get.weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get.weather\n"
    '```json\n{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>'
)
GEMMA = '<|tool_call>call:get.weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
HARMONY = (
    "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get.weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>'
)
NOTATIONS = [
    ("qwen3_coder", "I look.\n\n" + QWEN, "I look.", [PARIS]),
    ("qwen3_coder", QWEN + "\n" + QWEN, "", [PARIS, PARIS]),
    ("qwen3_coder", QWEN.removeprefix("<tool_call>\n"), "", [PARIS]),
    ("qwen3_coder", QWEN.replace("\n</parameter>\n<par", "\n<par"), "", [PARIS]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [["f", "{}"]]),
    (
        "qwen3_coder",
        '<tool_call>\n<function=get.weather>\n<parameter=city>\nif a < b:\n    "x"\n'
        "\n</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>",
        "",
        [["get.weather", '{"city": "if a < b:\\n    \\"x\\"\\n", "note": null}']],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=x>\n[1, 2]\n</parameter>\n"
        "<parameter=y>\nTrue\n</parameter>\n<parameter=z>\nso\n</parameter>\n</function>",
        "",
        [["f", '{"x": [1, 2], "y": true, "z": "so"}']],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get.weather>\n<parameter=city>\nPar",
        "",
        [["get.weather", '{"city": "Par']],
    ),
    ("glm", "So.\n" + GLM, "So.", [PARIS]),
    ("glm", GLM + "\n" + GLM, "", [PARIS, PARIS]),
    ("glm", "<tool_call>f\n</tool_call>", "", [["f", "{}"]]),
    ("glm", GLM.replace("\n", ""), "", [PARIS]),
    ("deepseek_v3", "Well." + DEEPSEEK_V3 + "<｜tool▁calls▁end｜>", "Well.", [PARIS]),
    (
        "deepseek_v3",
        DEEPSEEK_V3 + DEEPSEEK_V3.removeprefix("<｜tool▁calls▁begin｜>"),
        "",
        [PARIS, PARIS],
    ),
    (
        "mistral",
        'Hm.[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]f[ARGS]{}',
        "Hm.",
        [["f", '{"x": 1}'], ["f", "{}"]],
    ),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"x": 1}', "", [["f", '{"x": 1}']]),
    ("mistral", '[TOOL_CALLS]f{"x": 1}', "", [["f", '{"x": 1}']]),
    ("pythonic", '[get.weather(city="Paris", days=3)]', "", [PARIS]),
    (
        "pythonic",
        "[f(x=[1, {'a': 'b,)'}], y=True), f()]",
        "",
        [["f", '{"x": [1, {"a": "b,)"}], "y": true}'], ["f", "{}"]],
    ),
    ("pythonic", "<|python_start|>[f(x=None)]<|python_end|>", "", [["f", '{"x": null}']]),
    (
        "pythonic",
        "[f(x='Jane\\'s', y=some_name)]",
        "",
        [["f", '{"x": "Jane\'s", "y": "some_name"}']],
    ),
    ("pythonic", "[f(x=1, y='cut", "", [["f", '{"x": 1']]),
    ("gemma", "Sure. " + GEMMA, "Sure.", [PARIS]),
    ("gemma", GEMMA + GEMMA, "", [PARIS, PARIS]),
    (
        "gemma",
        '<|tool_call>call:f{a:{b:<|"|>}],"<|"|>},c:[<|"|>x<|"|>,2],<|"|>d<|"|>:true}<tool_call|>',
        "",
        [["f", '{"a": {"b": "}],\\""}, "c": ["x", 2], "d": true}']],
    ),
    ("gemma", "<|tool_call>call:f{}", "", [["f", "{}"]]),
    ("gemma", '<|tool_call>call:f{a:<|"|>cut', "", [["f", '{"a": "cut']]),
    (
        "functiongemma",
        "<start_function_call>call:get.weather{city:<escape>Paris<escape>,days:3}"
        "<end_function_call>",
        "",
        [PARIS],
    ),
    ("harmony", HARMONY, "", [PARIS]),
    ("harmony", HARMONY.removesuffix("<|call|>"), "", [PARIS]),
    (
        "harmony",
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>',
        "",
        [["f", '{"x": 1}']],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|>" + HARMONY,
        "I look.",
        [PARIS],
    ),
    ("harmony", "<|channel|>final<|message|>It rains.<|return|>", "It rains.", []),
    ("harmony", "no marks at all", "no marks at all", []),
    ("harmony", "<|channel|>final<|mess", "", []),
]
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
    *NOTATIONS,
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
    ("qwen3_coder", "<tool_call>\n<function=unknown>\n<parameter=x>\n1\n</parameter>"),
    ("qwen3_coder", "the mark <function= alone"),
    ("glm", "<tool_call>unknown\n<arg_key>a</arg_key>"),
    ("glm", "<tool_call>f and more"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}"),
    ("mistral", "[TOOL_CALLS]g[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]f but no object"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[unknown(x=1)]"),
    ("pythonic", "see [f(x=1)]"),
    ("gemma", "<|tool_call>call:unknown{}<tool_call|>"),
    ("gemma", "<|tool_call>"),
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


MARKS = [
    "<function=f>",
    "<parameter=x>",
    "</parameter>",
    "<arg_key>",
    "[f(",
    ")",
    ",",
    "<tool_call>",
    "</tool_call>",
    "{",
    "}",
    '"name": "f"',
    '"arguments": {',
    "x",
    "\n",
    '"',
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_read_the_same_by_characters(name, text, content, calls):
    assert parsed(name, list(text)) == (content, calls)


REASONING = [
    ("think", "<think>\nLet me see.\n</think>\n\nFour.", False, "Four.", "Let me see."),
    ("think", "Let me see.\n</think>\n\nFour.", True, "Four.", "Let me see."),
    ("think", "cut off in the mid", True, "", "cut off in the mid"),
    ("think", "Four. <think> is a mark", False, "Four. <think> is a mark", ""),
    ("think", "<think></think>Four.", False, "Four.", ""),
    ("mistral", "[THINK]Hm.[/THINK]Four.", False, "Four.", "Hm."),
    ("gemma", "<|channel>thought\nHm.\n<channel|>Four.", False, "Four.", "Hm."),
    (
        "granite",
        "Here's my thought process:\nHm.\n\nHere is my response: Four.",
        False,
        "Four.",
        "Hm.",
    ),
]


@pytest.mark.parametrize(("name", "text", "is_begun", "content", "reasoning"), REASONING)
@pytest.mark.parametrize("has_tools", [False, True])
def test_reasoning_is_split_off(name, text, is_begun, content, reasoning, has_tools):
    output_format = OutputFormat(FORMATS["hermes"], THOUGHTS[name])
    for pieces in ([text], list(text)):
        tools = tools_of() if has_tools else None
        parser = OutputParser(output_format, tools, anew, is_reasoning=is_begun)
        assert read(parser, pieces) == (content, [], reasoning)


def test_a_call_within_the_reasoning_is_a_call():
    output_format = OutputFormat(FORMATS["qwen3_coder"], THOUGHTS["think"])
    before, after = "I need the weather.", " so I think"
    text = f"{before}\n\n{QWEN}\n{after}\n</think>\nDone."
    for pieces in ([text], list(text)):
        parser = OutputParser(output_format, tools_of(), anew, is_reasoning=True)
        assert read(parser, pieces) == ("Done.", [PARIS], f"{before}\n{after}")


def test_the_channels_of_harmony_are_told_apart():
    text = HARMONY.replace("<|call|>", "<|end|><|start|>assistant<|channel|>final<|message|>Done.")
    for pieces in ([text], list(text)):
        parser = OutputParser(OutputFormat(FORMATS["harmony"]), tools_of(), anew)
        assert read(parser, pieces) == ("Done.", [PARIS], "The user asks.")


def test_an_answer_that_must_match_a_grammar_has_no_reasoning():
    output_format = OutputFormat(FORMATS["hermes"], THOUGHTS["think"])
    parser = OutputParser(output_format, None, anew, is_reasoning=True, is_free=False)
    assert read(parser, ['{"a": "<think>"}']) == ('{"a": "<think>"}', [], "")


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_call_that_is_cut_off_leaves_no_markup(name):
    begun = FORMATS[name].syntax.opening + FORMATS[name].syntax.begin
    for size in range(1, len(begun) + 1):
        parser = OutputParser(
            OutputFormat(FORMATS[name]), tools_of(is_required=True), anew, is_free=False
        )
        assert read(parser, [begun[:size]])[:2] == ("", [])


OTHER_MARKS = ["call:f{", *sorted({token for one in FORMATS.values() for token in one.tokens})]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*MARKS, "[", "]", ", ", *OTHER_MARKS]), max_size=14))
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
    parser = OutputParser(OutputFormat(FORMATS["hermes"]), tools_of(), anew)
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
