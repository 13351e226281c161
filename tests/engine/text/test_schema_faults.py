"""What cannot be enforced of a schema is left out alone, and its place is told."""

from __future__ import annotations

import pytest

from engine.text.grammar import json_grammar, validate
from engine.text.schema_faults import mend


def schema_of(**value):
    known = {"a": {"type": "string"}, "x": value}
    return {"type": "object", "properties": known, "required": ["x"]}


X = ("properties", "x")
FAULTS = {
    "look-ahead": (schema_of(type="string", pattern="^(?!x)a"), (*X, "pattern")),
    "back-reference": (schema_of(type="string", pattern=r"(a)\1"), (*X, "pattern")),
    "broken pattern": (schema_of(type="string", pattern="(["), (*X, "pattern")),
    "remote reference": (schema_of(**{"$ref": "http://x/y.json"}), (*X, "$ref")),
    "reference to nothing": (schema_of(**{"$ref": "#/$defs/no"}), (*X, "$ref")),
    "reference to itself": ({"$ref": "#"}, ("$ref",)),
    "type any": (schema_of(type="any"), (*X, "type")),
    "enum of nothing": (schema_of(enum=None), (*X, "enum")),
    "empty enum": (schema_of(enum=[]), (*X, "enum")),
    "required as a word": ({"type": "object", "required": "a"}, ("required",)),
    "properties of nothing": ({"type": "object", "properties": None}, ("properties",)),
    "crossed lengths": (schema_of(type="string", minLength=5, maxLength=2), (*X, "minLength")),
    "deep": (
        schema_of(type="array", items={"type": "object", "properties": {"d": {"type": "any"}}}),
        (*X, "items", "properties", "d", "type"),
    ),
    "in a list": (schema_of(anyOf=[{"type": "string"}, {"type": "x"}]), (*X, "anyOf", 1, "type")),
    "in a definition": (
        {**schema_of(**{"$ref": "#/$defs/q"}), "$defs": {"q": {"type": "float"}}},
        ("$defs", "q", "type"),
    ),
}


@pytest.mark.parametrize(("schema", "place"), FAULTS.values(), ids=FAULTS)
def test_the_keyword_at_fault_is_found_and_the_rest_is_enforced(schema, place):
    before = repr(schema)
    mended = mend(schema, is_lenient=True)
    assert [path for path, _ in mended.faults] == [place]
    validate(json_grammar(mended.schema, is_lenient=True))
    assert repr(schema) == before


def test_several_faults_are_all_found():
    schema = {"type": "object", "properties": {"a": {"type": "any"}, "b": {"pattern": "(?=a)"}}}
    assert [path[1] for path, _ in mend(schema, is_lenient=True).faults] == ["a", "b"]


def test_a_schema_without_faults_stays():
    schema = schema_of(type="integer")
    assert mend(schema, is_lenient=False) == (schema, [])


def test_unsupported_keywords_are_faults_of_strict_schemas_alone():
    schema = schema_of(type="array", uniqueItems=True)
    assert mend(schema, is_lenient=True).faults == []
    assert [path for path, _ in mend(schema, is_lenient=False).faults] == [(*X, "uniqueItems")]
