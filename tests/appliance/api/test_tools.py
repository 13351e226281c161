from __future__ import annotations

import pytest

from appliance.api.tool_format import FORMATS, OutputFormat
from appliance.api.tools import read_tools
from appliance.json_fields import Fields
from engine.errors import RequestError
from engine.text.grammar import validate
from engine.text.tokenizer import Tokenizer
from tests.tiny_tokenizers import byte_level

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name="f", **fields):
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


def tools(*functions, **fields):
    return read_tools(Fields({"tools": list(functions or (function(),)), **fields}))


def named(name):
    return {"type": "function", "function": {"name": name}}


def test_without_tools_or_with_choice_none_there_are_none():
    assert read_tools(Fields({})) is None
    assert read_tools(Fields({"tools": [], "tool_choice": "auto"})) is None
    assert tools(tool_choice="none") is None


@pytest.mark.parametrize("choice", [None, "auto"])
def test_by_default_the_model_chooses(choice):
    found = tools(function("f"), function("g", parameters=None), tool_choice=choice)
    assert found.schemas == {"f": SCHEMA, "g": None}
    assert (found.is_required, found.is_parallel, found.is_strict) == (False, True, False)


def test_a_choice_requires_a_call_of_any_or_of_one():
    assert tools(tool_choice="required", parallel_tool_calls=False).is_required
    one = tools(function("f"), function("g", strict=True), tool_choice=named("g"))
    assert (list(one.schemas), one.is_required, one.is_parallel) == (["g"], True, False)
    assert one.is_strict
    assert len(one.definitions) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [function()] * 2}, "tools"),
        ({"tools": [function(str(i)) for i in range(129)]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [function("a b")]}, "tools[0].function.name"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [function(strict=1)]}, "tools[0].function.strict"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe", "tools": [function()]}, "tool_choice"),
        ({"tool_choice": named("h"), "tools": [function()]}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}, "tools": [function()]}, "tool_choice.type"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_a_refusal_names_the_place(fields, param):
    with pytest.raises(RequestError) as error:
        read_tools(Fields(fields))
    assert (error.value.param, error.value.status) == (param, 400)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_every_format_has_a_grammar_that_compiles(name, choice):
    found = tools(function("f"), function("g", parameters=None), tool_choice=choice)
    grammar = found.grammar(OutputFormat(FORMATS[name]), Tokenizer(byte_level()))
    is_free = FORMATS[name].is_bare or FORMATS[name].is_harmony
    assert (grammar is None) == (is_free and choice == "auto")
    if grammar:
        validate(grammar)
