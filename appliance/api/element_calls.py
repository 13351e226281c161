"""Calls whose parameters are elements: Qwen's coders, GLM, DeepSeek's DSML.

Owns: these notations.
Invariant: as that of call_readers. A parameter that can only be a string is passed on while it
comes; another is read when it is complete.
Never: decides what is content.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.api.call_values import as_json, inner, quoted, types_of
from appliance.api.reading import Step, TextReading, drop


@dataclass(frozen=True, slots=True)
class ElementSyntax:
    """Calls whose parameters are elements; a text stands for itself, without quotes."""

    name_begin: str
    """Before the function's name; empty where the mark is just before it."""
    name_end: str
    key_begin: str
    key_ends: tuple[str, ...]
    """One of them ends a key, whatever stands in it after the key, up to `value_begin`."""
    value_begin: str
    value_ends: tuple[str, ...]
    """The first is right; models forget it, so that the others end a value, too."""
    end: str
    """Of the call."""
    is_on_lines: bool = False
    """A value begins and ends with a line break that is not its own."""


QWEN_ELEMENTS = ElementSyntax(
    name_begin="<function=",
    name_end=">",
    key_begin="<parameter=",
    key_ends=(">",),
    value_begin=">",
    value_ends=("</parameter>", "<parameter=", "</function>", "</tool_call>"),
    end="</function>",
    is_on_lines=True,
)
GLM_ELEMENTS = ElementSyntax(
    name_begin="",
    name_end="",
    key_begin="<arg_key>",
    key_ends=("</arg_key>",),
    value_begin="<arg_value>",
    value_ends=("</arg_value>", "<arg_key>", "</tool_call>"),
    end="</tool_call>",
)
DSML_ELEMENTS = ElementSyntax(
    name_begin='<｜DSML｜invoke name="',
    name_end='">',
    key_begin='<｜DSML｜parameter name="',
    key_ends=('"',),
    value_begin=">",
    value_ends=("</｜DSML｜parameter>", "</｜DSML｜invoke>"),
    end="</｜DSML｜invoke>",
)


def read_elements(reading: TextReading, at: int, *, syntax: ElementSyntax) -> Step[int | None]:
    """Parameters as elements; their types are those of the function's schema."""
    begin = yield from reading.skip_space(at)
    if syntax.name_begin:
        # where this is itself the mark, it stands just before
        is_read = reading.text[:begin].endswith(syntax.name_begin)
        if not is_read and not (yield from reading.starts(begin, syntax.name_begin)):
            return begin
        begin += 0 if is_read else len(syntax.name_begin)
    end = yield from reading.name(begin)
    name = reading.text[begin:end]
    if name not in reading.schemas:
        return end
    if syntax.name_end and not (yield from reading.starts(end, syntax.name_end)):
        return end
    if not syntax.name_end:
        after = yield from reading.skip_space(end)
        if not (yield from reading.starts(after, syntax.key_begin, syntax.end)):
            return end
    reading.begin_call(name, end + len(syntax.name_end))
    yield from _element_arguments(reading, name, syntax)
    return None


def _element_arguments(reading: TextReading, name: str, syntax: ElementSyntax) -> Step[None]:
    schema = reading.schemas[name] or {}
    types = schema.get("properties")
    separator = "{"
    while (yield from reading.pass_until((syntax.key_begin, syntax.end), drop)) is not None:
        is_key = reading.text.startswith(syntax.key_begin)
        reading.take(len(syntax.key_begin if is_key else syntax.end))
        if not is_key:
            break
        key: list[str] = []
        if (yield from reading.pass_until(syntax.key_ends, key.append)) is None:
            return
        if (yield from reading.pass_until((syntax.value_begin,), drop)) is None:
            return
        reading.take(len(syntax.value_begin))
        text = "".join(key).strip()
        reading.argue(f"{separator}{quoted(text)}: ")
        separator = ", "
        own = types.get(text) if isinstance(types, dict) else None
        if not (yield from _element_value(reading, syntax, types_of(own))):
            return
    reading.argue("{}" if separator == "{" else "}")


def _element_value(reading: TextReading, syntax: ElementSyntax, types: set[str]) -> Step[bool]:
    """One value, up to its end, which is consumed if it is its own; false if cut off."""
    ends = syntax.value_ends
    if syntax.is_on_lines:
        if (yield from reading.starts(0, "\n")):
            reading.take(1)
        ends = (*ends, *(f"\n{one}" for one in ends))
    if types == {"string"}:
        reading.argue('"')
        mark = yield from reading.pass_until(ends, lambda text: reading.argue(inner(text)))
        if mark is None:
            return False
        reading.argue('"')
    else:
        pieces: list[str] = []
        mark = yield from reading.pass_until(ends, pieces.append)
        if mark is None:
            return False
        reading.argue(as_json("".join(pieces), types))
    own = syntax.value_ends[0]
    if mark in (own, f"\n{own}"):
        reading.take(len(mark))
    return True
