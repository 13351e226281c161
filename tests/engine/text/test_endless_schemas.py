"""Schemas of which a part refers only to itself are found without following every path."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Unavailable
from engine.text import grammar as grammar_module
from engine.text.endless_schemas import endless_reference
from engine.text.grammar import (
    json_grammar,
    validate,
)

HERE = {"$ref": "#"}


def defs(**parts: object) -> dict[str, object]:
    return {"$defs": parts}


@pytest.mark.parametrize(
    ("schema", "reference"),
    [
        (HERE, "#"),
        ({"allOf": [{"type": "object"}, HERE]}, "#"),
        ({"anyOf": [HERE, {"oneOf": [HERE]}]}, "#"),
        ({"$ref": "#/$defs/a", **defs(a={"$ref": "#/$defs/a"})}, "#/$defs/a"),
        (defs(a={"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/a"}), "#/$defs/a"),
        ({"properties": {"x": {"$ref": "#/properties/x"}}}, "#/properties/x"),
        ({"items": [{"$ref": "#/items/0"}]}, "#/items/0"),
        (defs(**{"a/b c~": {"$ref": "#/$defs/a~1b%20c~0"}}), "#/$defs/a~1b%20c~0"),
    ],
)
def test_a_part_that_refers_only_to_itself_is_found(schema: object, reference: str) -> None:
    assert endless_reference(schema) == reference


@pytest.mark.parametrize(
    "schema",
    [
        True,
        None,
        {"type": "object", "properties": {"next": HERE}, "required": ["next"]},
        {"type": "array", "items": HERE},
        {"anyOf": [HERE, {"type": "null"}]},
        {"anyOf": [HERE, True]},
        {"$ref": "#/$defs/nobody"},
        {"$ref": "https://example.com/schema"},
        {"const": HERE, "enum": [HERE]},
        {"const": {"$ref": "#/const"}, "enum": [{"$ref": "#/enum/0"}]},
        {"properties": {"$ref": {"type": "string"}}},
        {"$ref": "#/$defs/a", **defs(a={"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}]})},
    ],
)
def test_what_says_something_on_the_way_is_not(schema: object) -> None:
    assert endless_reference(schema) is None


@given(st.data())
def test_it_agrees_with_following_every_way(data: st.DataObject) -> None:
    names = "abcd"
    refs = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in names])
    leaf = refs | st.just({"type": "null"})
    alternatives = st.builds(
        lambda keyword, parts: {keyword: parts},
        st.sampled_from(["anyOf", "allOf"]),
        st.lists(leaf, min_size=1, max_size=3),
    )
    schema = defs(**{name: data.draw(leaf | alternatives) for name in names})

    def can_be_said(part: dict[str, list[object]], above: tuple[str, ...] = ()) -> bool:
        if name := str(part.get("$ref", "")).removeprefix("#/$defs/"):
            return name not in above and can_be_said(schema["$defs"][name], (*above, name))
        return all(can_be_said(one, above) for one in part.get("allOf", ())) and (
            "anyOf" not in part or any(can_be_said(one, above) for one in part["anyOf"])
        )

    every_one = all(can_be_said(part, (name,)) for name, part in schema["$defs"].items())
    assert (endless_reference(schema) is None) == every_one


def test_ways_that_double_at_every_turn_take_no_time() -> None:
    doubling = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(500)}
    assert endless_reference(defs(**doubling, d500={"type": "null"})) is None
    assert endless_reference(defs(**doubling, d500={"$ref": "#/$defs/d0"})) is not None


def refuses(_, __):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("start", [refuses, lambda _, __: None], ids=["refused", "never begun"])
def test_a_grammar_can_be_sent_again_where_no_thread_can_be_started(start, monkeypatch):
    """Without memory for its first lines a thread is started and never runs."""
    monkeypatch.setattr(grammar_module, "start_new_thread", start)
    monkeypatch.setattr(grammar_module, "_LONGEST_S", 0.01)
    with pytest.raises(Unavailable) as refusal:
        validate(json_grammar())
    assert refusal.value.code == "busy"
