from __future__ import annotations

import json

import pytest

from appliance.api.core.answer_forms import read_constraint
from appliance.api.core.fields import ChatRequest
from appliance.json.fields import check
from engine.errors import RequestError

SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}}


def body_of(fields):
    return check({"messages": [{"role": "user", "content": "hi"}], **fields}, ChatRequest)


def json_schema(schema=SCHEMA, **fields):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


def test_answers_are_free_unless_a_form_is_asked_for():
    for fields in ({}, {"response_format": {"type": "text"}}, {"response_format": None}):
        assert read_constraint(body_of(fields)) is None
    assert read_constraint(body_of({"structured_outputs": {"json_object": False}})) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object", "schema": {"const": "42"}}},
        {"response_format": json_schema()},
        {"response_format": json_schema(strict=True)},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"regex": "[a-c]+"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
        {"guided_json": SCHEMA},
        {"guided_regex": "a*"},
        {"guided_choice": ["a"]},
        {"guided_grammar": 'root ::= "a" | "b"'},
    ],
)
def test_each_form_has_a_grammar_that_compiles(fields):
    constraint = read_constraint(body_of(fields))
    assert constraint.param.startswith(next(iter(fields)))
    constraint.grammar()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": json_schema({"type": "nothing"})},
        {"response_format": json_schema({"$ref": "#/nowhere"})},
        {"structured_outputs": {"grammar": "start: start"}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"grammar": "start: nowhere"}},
    ],
)
def test_a_form_that_does_not_compile_is_refused_with_the_reason(fields):
    constraint = read_constraint(body_of(fields))
    with pytest.raises(RequestError, match=r"cannot be compiled: \S") as error:
        constraint.grammar()
    assert error.value.param == constraint.param


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_schema_that_only_refers_to_itself_is_refused(is_strict):
    fields = {"response_format": json_schema({"$ref": "#"}, strict=is_strict)}
    with pytest.raises(RequestError, match="reference #") as error:
        read_constraint(body_of(fields)).grammar()
    assert (error.value.param, error.value.status) == ("response_format.json_schema.schema", 400)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "not": {"required": ["a"]}}, '"not"'),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '"if"'),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, '"dependentRequired"'),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "(a)\\1"}, "backreferences"),
        ({"properties": {"a": {"items": {"not": {}}}}}, '"not"'),
    ],
)
def test_what_strict_schemas_say_and_cannot_be_enforced_is_named(schema, named):
    fields = {"response_format": json_schema(schema, strict=True)}
    with pytest.raises(RequestError, match="cannot be compiled") as error:
        read_constraint(body_of(fields)).grammar()
    assert named in error.value.what
    assert error.value.param == "response_format.json_schema.schema"
    if "pattern" not in schema:
        read_constraint(body_of({"response_format": json_schema(schema)})).grammar()


def test_a_schema_as_deep_as_json_can_be_is_refused_or_compiled():
    deep: dict = {}
    for _ in range(900):
        deep = {"items": deep}
    with pytest.raises(RequestError):
        read_constraint(body_of({"response_format": json_schema(deep)})).grammar()
