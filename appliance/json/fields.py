"""Decode a client's JSON object and check it against a declared type; errors name the field.

Invariant: any bytes at all give a value of the declared type or a RequestError; null counts as
absent, and an integer may be written as 3.0.
"""

from __future__ import annotations

import functools
import gc
import json
import re
from collections.abc import Container, Mapping
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import inspect

from engine.errors import RequestError
from engine.wire.not_json import NOT_JSON

Json = dict[str, Any]
T = TypeVar("T")

INT64_MAX = 2**63 - 1
"""The greatest integer that is asked for anywhere; engine and log keep 64 bits."""


MAX_MARKS = 1 << 18
"""Maximum of brackets, braces and colons per body: ten milliseconds of decoding, or thirty.

No context holds a text with as many."""
_FIRST_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u)")
_WRONG = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
"""An error of msgspec: what is wrong, and where."""
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "list": "a list",
    "object": "an object",
    "dict": "an object",
}
_BOUNDS = {"<=": "at most", ">=": "at least", ">": "more than", "<": "less than"}


def decode_object(body: bytes) -> Json:
    """Decode a body; it must be a JSON object, in UTF-8, UTF-16 or UTF-32."""
    body = as_utf8(body)
    if len(body) > MAX_MARKS and sum(map(body.count, (b"[", b"{", b":"))) > MAX_MARKS:
        raise RequestError(
            f"the body has more than {MAX_MARKS} brackets, braces and colons",
            code="invalid_value",
        )
    try:
        values = decoded(body)
    except RecursionError as error:
        raise RequestError("the body is nested too deeply", code="invalid_json") from error
    except NOT_JSON as error:
        raise RequestError(_not_json(error, body), code="invalid_json") from error
    if not isinstance(values, dict):
        raise RequestError("the body is not a JSON object", code="invalid_type")
    return values


def decoded(data: bytes) -> Any:
    """Decode JSON; a search for garbage among what is all new would take four times as long."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(data)
    finally:
        if is_collecting:  # else another thread decodes, and turns it on again
            gc.enable()


def is_utf8(body: bytes) -> bool:
    """Tell by its first bytes whether JSON is in UTF-8 without a byte-order mark."""
    return json.detect_encoding(body) == "utf-8"


def as_utf8(body: bytes) -> bytes:
    """Return JSON in UTF-8 without a byte-order mark; what cannot be read so is not changed."""
    if is_utf8(body):
        return body
    try:
        return body.decode(json.detect_encoding(body)).encode()
    except UnicodeError:
        return body


def check(values: Any, kind: type[T], where: str = "") -> T:
    """Check a decoded value against its declared type.

    Args:
        values: as `decode_object` gives it, or a part of that.
        kind: a msgspec Struct, whose annotations declare types and ranges.
        where: the value's path in the body, for errors; empty for the body itself.
    """
    try:
        try:
            return msgspec.convert(values, kind)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            return msgspec.convert(_integral(values), kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), values, kind, where) from error


def undeclared(values: Json, kind: type[msgspec.Struct], *known: Container[str]) -> tuple[str, ...]:
    """List the fields of a body that are not declared, nor otherwise known.

    Fields of an object in it are listed, too, where the object has one type.
    """
    declared = {one.encode_name: one.type for one in _struct(kind).fields}
    found: list[str] = []
    for name, value in values.items():
        if value is None or any(name in one for one in known):
            continue
        if name not in declared:
            found.append(name)
        elif isinstance(value, dict) and (inner := _only_struct(declared[name])) is not None:
            found += [f"{name}.{one}" for one in undeclared(value, inner)]
    return tuple(found)


def _struct(kind: type[msgspec.Struct]) -> inspect.StructType:
    found = _info(kind)
    assert isinstance(found, inspect.StructType)
    return found


def _only_struct(kind: inspect.Type) -> type[msgspec.Struct] | None:
    """Find the type that an object of a field has; None: it may have several, or any fields."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    structs = [one.cls for one in kinds if isinstance(one, inspect.StructType)]
    has_any = any(isinstance(one, inspect.DictType | inspect.AnyType) for one in kinds)
    return structs[0] if len(structs) == 1 and not has_any else None


def _integral(value: Any, depth: int = 0) -> Any:
    """Replace numbers like 3.0 by integers, in the body and in its lists and objects."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict) and depth < 2:
        return {name: _integral(one, depth + 1) for name, one in value.items()}
    if isinstance(value, list) and depth < 2:
        return [_integral(one, depth + 1) for one in value]
    return value


def _refusal(said: str, values: Any, kind: Any, where: str) -> RequestError:
    """Translate msgspec's error into ours, which names the field and has a code."""
    found = _WRONG.fullmatch(said)
    assert found is not None
    what, path = found["what"], (found["path"] or "").removeprefix(".")
    if path.endswith("[...]"):
        path = _entry(path.removesuffix("[...]"), values, kind)
    keys = re.findall(r"[^.[\]]+", path)
    param = ".".join(filter(None, (where, path)))
    if missing := re.fullmatch("Object missing required field `(.*)`", what):
        return required(f"{param}.{missing[1]}" if param else missing[1])
    if unknown := re.fullmatch("Object contains unknown field `(.*)`", what, re.DOTALL):
        return unsupported(f"{param}.{unknown[1][:40]}" if param else unknown[1][:40])
    if what.endswith("got `null`") and not param.endswith("]"):
        return required(param)
    if param.endswith("]") and "." not in param and "`object`" not in what:
        param = param[: param.rindex("[")]  # clients know `stop`, not `stop[1]`
    if what.startswith("Invalid"):
        words = [*dict.fromkeys(_choices(_info(kind), keys))]
        code = "unsupported_parameter" if path.endswith("type") else "invalid_value"
        return RequestError(f"`{param}` must be {_either(words)}", code=code, param=param)
    if wrong := re.fullmatch("Expected `(.*)`, got `(.*)`", what, re.DOTALL):
        wanted = [_WORDS.get(one, one) for one in wrong[1].split(" | ") if one != "null"]
        if not wanted:
            return unsupported(param)
        got = _WORDS.get(wrong[2], wrong[2])
        why = f"must be {_either(wanted)}, not {got}"
        return RequestError(f"`{param}` {why}", code="invalid_type", param=param)
    return invalid_value(param, _bound(what))


def _bound(what: str) -> str:
    """Say in words which bound msgspec found exceeded."""
    if length := re.fullmatch("Expected `(.*)` of length ([<>]=) (.*)", what):
        things = "characters" if length[1] == "str" else "entries"
        return f"must have {_BOUNDS[length[2]]} {length[3]} {things}"
    if bound := re.fullmatch("Expected `(.*)` ([<>]=?) (.*)", what):
        return f"must be {_BOUNDS[bound[2]]} {bound[3].removesuffix('.0')}"
    return what.replace("Expected `str` matching regex", "must match")


def _entry(name: str, values: Any, kind: Any) -> str:
    """Find which entry of an object with free keys has the wrong value."""
    hint = get_type_hints(kind, include_extras=True)[name]
    for key, value in values[name].items():
        try:
            msgspec.convert({key: value}, hint)
        except msgspec.ValidationError:
            return f"{name}.{key[:40]}"
    return name


@functools.cache
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _choices(kind: inspect.Type, path: list[str]) -> list[str]:
    """List the words that a field may be, by its path in a type."""
    match kind:
        case inspect.Metadata():
            return _choices(kind.type, path)
        case inspect.UnionType():
            return [word for one in kind.types for word in _choices(one, path)]
        case inspect.ListType() if path:
            return _choices(kind.item_type, path[1:])
        case inspect.StructType() if path == [kind.tag_field]:
            return [str(kind.tag)]
        case inspect.StructType() if path:
            fields = [one.type for one in kind.fields if one.encode_name == path[0]]
            return [word for one in fields for word in _choices(one, path[1:])]
        case inspect.LiteralType() if not path:
            return [str(one) for one in kind.values]
    return []


def _either(words: list[str]) -> str:
    """Join words as `a, b or c`."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else "another"


def _not_json(error: Exception, body: bytes) -> str:
    """Explain why a body is not JSON; half a surrogate pair is JSON but no character."""
    # msgspec 0.22 tells the place within one text, 0.23 none
    if isinstance(error, UnicodeDecodeError) or "UTF-8" in str(error):
        try:
            body.decode()
        except UnicodeDecodeError as whole:
            return f"the body is not JSON: byte {whole.start} is not UTF-8 ({whole.reason})"
    is_cut = "truncated" in str(error)  # cut within the second half of a pair
    if "surrogate" in str(error) or (is_cut and _FIRST_HALF.search(body[-16:])):
        return f"the body has an escape of half a surrogate pair, which is no character: {error}"
    return f"the body is not JSON: {error}"


def integer(value: object, param: str, low: int, high: int = INT64_MAX) -> int:
    """Check that a value is an integer in [low, high]; refuse it otherwise."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_type(param, "an integer", value)
    if not low <= value <= high:
        is_open = high == INT64_MAX and value < low
        wanted = f"{low} or more" if is_open else f"between {low} and {high}"
        raise invalid_value(param, f"must be {wanted}")
    return value


def required(param: str) -> RequestError:
    """Refuse a body without a field."""
    return RequestError(f"`{param}` is required", code="missing_required_parameter", param=param)


def invalid_type(param: str, wanted: str, value: object) -> RequestError:
    """Make the refusal of a field with the wrong JSON type."""
    return RequestError(
        f"`{param}` must be {wanted}, not {_json_type(value)}", code="invalid_type", param=param
    )


def invalid_value(param: str, why: str) -> RequestError:
    """Make the refusal of a field whose value is not allowed."""
    return RequestError(f"`{param}` {why}", code="invalid_value", param=param)


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Translate a refusal to another API's field name, given by our name."""
    param = error.param or ""
    name = names.get(re.split(r"[.[]", param)[0])
    if name is None:
        return error
    return RequestError(
        error.what.replace(f"`{param}`", f"`{name}`"),
        code=error.code,
        param=name,
        status=error.status,
        kind=error.kind,
        hint=error.hint,
    )


def unsupported(param: str, why: str = "is not supported") -> RequestError:
    """Make the refusal of a known OpenAI, vLLM or Ollama field that is not served here."""
    return RequestError(f"`{param}` {why}", code="unsupported_parameter", param=param)


def _json_type(value: object) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)
