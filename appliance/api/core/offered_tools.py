"""Sort the tools of a request: functions that its client runs, and tools of an API's own servers.

The rule, for every API: a tool that only another server could run is left out, and so is a choice
of it; both are named in x-penstock-ignored. Functions within a namespace are told to the model like
any other, by their own names; a name that is met twice has its namespace before it.

Invariant: every function has a name of its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from appliance.api.core import fields as chats
from appliance.json.fields import Json, check, invalid_type, invalid_value, required

CUSTOM_INPUT: Json = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""What a tool that takes a text is called with."""


class Origin(NamedTuple):
    """How the client knows a function."""

    name: str
    namespace: str | None
    is_custom: bool


class OfferedFunction(NamedTuple):
    """A function of a request."""

    definition: Json
    """The function in a chat's form, for templates."""
    function: chats.Function
    origin: Origin
    is_marked: bool
    """Other prompts go on differently behind it."""


@dataclass(slots=True)
class Offer:
    """The tools of one request."""

    functions: list[OfferedFunction] = field(default_factory=list)
    hosted: set[str] = field(default_factory=set)
    """Types and names of tools that are left out."""
    left_out: list[str] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)
    """How the client knows the functions, by the names that the model is told."""
    told_names: dict[tuple[str, object], str] = field(default_factory=dict)
    """The other way, by name and namespace, and by the name alone (None)."""

    def told_name(self, name: str, namespace: object = None) -> str:
        """Find the name that the model is told; a name that is not offered stays."""
        known = namespace if namespace is None or isinstance(namespace, str) else ""
        return self.told_names.get((name, known), name)


def read_offer(values: list[Any], where: str = "tools") -> Offer:
    """Read tools as chats, Responses and Ollama's clients write them.

    Raises:
        RequestError: a function is not well described, or two have the same name.
    """
    offer = Offer()
    for index, value in enumerate(values):
        _read(offer, value, f"{where}[{index}]", f"{where}.{index}")
    counts = Counter(one.origin.name for one in offer.functions)
    for at, one in enumerate(offer.functions):
        if one.origin.namespace and counts[one.origin.name] > 1:
            offer.functions[at] = _renamed(one, f"{one.origin.namespace}__{one.origin.name}")
    for one in offer.functions:
        told = one.function.name
        offer.origins[told] = one.origin
        for namespace in (None, one.origin.namespace):
            offer.told_names.setdefault((one.origin.name, namespace), told)
    if len(offer.origins) < len(offer.functions):
        raise invalid_value(where, "has two functions of the same name")
    return offer


def _read(
    offer: Offer,
    value: Any,
    where: str,
    place: str,
    namespace: str | None = None,
    *,
    is_inner: bool = False,
) -> None:
    if not isinstance(value, dict):
        raise invalid_type(where, "an object", value)
    kind = value.get("type")
    if kind is None and value.get("function") is not None:
        kind = "function"  # older clients of Ollama leave it out
    if kind is None:
        raise required(f"{where}.type")
    if not isinstance(kind, str):
        raise invalid_type(f"{where}.type", "a string", kind)
    if kind in ("function", "custom"):
        if isinstance(value.get(kind), dict):
            value = {**value, kind: _with_schema(value[kind], offer, place)}
        else:
            value = _with_schema(value, offer, place)
        offer.functions.append(_function(value, kind, where, namespace))
        if len(offer.functions) > chats.MAX_TOOLS:
            raise invalid_value(where, f"is beyond the {chats.MAX_TOOLS} functions that are read")
    elif kind == "namespace" and isinstance(value.get("tools"), list) and not is_inner:
        name = value.get("name")
        for index, one in enumerate(value["tools"]):
            at, inner = f"{where}.tools[{index}]", f"{place}.tools.{index}"
            _read(offer, one, at, inner, name if isinstance(name, str) else None, is_inner=True)
    else:
        offer.left_out.append(place)
        offer.hosted |= {one for one in (kind, value.get("name")) if isinstance(one, str)}


def _with_schema(function: Json, offer: Offer, place: str) -> Json:
    """Read what is no schema as any arguments, and name it; where it must be matched, it stays.

    An empty list is an empty object, as PHP writes it.
    """
    parameters = function.get("parameters")
    if parameters is None:
        return function
    if isinstance(parameters, dict):
        if parameters.get("properties") != []:
            return function
        return {**function, "parameters": {**parameters, "properties": {}}}
    if parameters not in ([], True):  # which are PHP's empty object, and any value
        if function.get("strict"):
            return function  # which is refused by its type
        offer.left_out.append(f"{place}.parameters")
    return {**function, "parameters": {}}


def _function(value: Json, kind: str, where: str, namespace: str | None) -> OfferedFunction:
    """Read a function, whose fields stand below its type or beside it."""
    inner = value.get(kind)
    is_flat = inner is None
    inner, at = (value, where) if is_flat else (inner, f"{where}.{kind}")
    if kind == "custom":
        tool = check(inner, chats.CustomTool, at)
        grammar = tool.format.text if tool.format else None
        words = [tool.description, grammar and f"The input follows this grammar:\n{grammar}"]
        told = "\n\n".join(filter(None, words)) or None
        function = chats.Function(tool.name, description=told, parameters=CUSTOM_INPUT)
    else:
        function = check(inner, chats.Function, at)
    if kind == "custom" or is_flat:
        fields = msgspec.structs.asdict(function)
        plain = {name: one for name, one in fields.items() if one is not None}
        definition: Json = {"type": "function", "function": plain}
    else:
        definition = {"type": kind, **value}
    is_marked = definition.pop("cache_control", None) is not None
    origin = Origin(function.name, namespace, kind == "custom")
    return OfferedFunction(definition, function, origin, is_marked)


def _renamed(one: OfferedFunction, name: str) -> OfferedFunction:
    definition = {**one.definition, "function": {**one.definition["function"], "name": name}}
    function = msgspec.structs.replace(one.function, name=name)
    return one._replace(definition=definition, function=function)


class Choice(NamedTuple):
    """How a model must choose (none, auto, required, named), and among which functions."""

    mode: str
    names: list[str]


_MODES = {"any": "required", "required": "required", "auto": "auto", "none": "none"}
"""A choice's kinds; Anthropic calls `required` any."""


def read_choice(value: str | Json | None, offer: Offer, param: str, where: str) -> Choice:
    """Read a choice; one of tools that are left out is left out, too, and named.

    Raises:
        RequestError: it names a function that is not there, or needs one and there is no function.
    """
    choice = _choice(value, offer, param, where)
    if choice is not None and choice.mode == "required" and not choice.names:
        if not offer.hosted:
            raise invalid_value(param, f"needs `{where}`")
        choice = None
    if choice is None:
        offer.left_out.append(param)
        return Choice("auto", list(offer.origins))
    return choice


def _choice(value: str | Json | None, offer: Offer, param: str, where: str) -> Choice | None:
    """Read a choice; None: it is about tools that are left out."""
    if not isinstance(value, dict):
        return Choice(value or "auto", list(offer.origins))
    kind = value.get("type")
    if not isinstance(kind, str):
        raise required(f"{param}.type") if kind is None else invalid_type(param, "a string", kind)
    if kind in _MODES:
        return Choice(_MODES[kind], list(offer.origins))
    if kind == "allowed_tools":
        return _allowed(value, offer, param, where)
    name = _name_of(value)
    if name is None and kind in ("function", "custom", "tool"):
        raise required(f"{param}.name" if kind == "tool" else f"{param}.{kind}.name")
    told = offer.told_name(name, value.get("namespace")) if name else ""
    if told in offer.origins:
        return Choice("named", [told])
    if kind in ("function", "custom", "tool") and name not in offer.hosted:
        raise invalid_value(param, f"names a function that is not in `{where}`")
    return None


def _allowed(value: Json, offer: Offer, param: str, where: str) -> Choice | None:
    """Read a choice among some of the tools, whose list stands below its type or beside it."""
    inner = value.get("allowed_tools")
    allowed = check(value if inner is None else inner, chats.AllowedTools, param)
    if not allowed.tools:
        return Choice("none", [])
    choices = [_choice(one, offer, param, where) for one in allowed.tools]
    names = [name for one in choices if one is not None for name in one.names]
    if names and None in choices:
        offer.left_out.append(param)
    return Choice(allowed.mode, names) if names else None


def _name_of(value: Json) -> str | None:
    kinds = (value.get("function"), value.get("custom"), value)
    inner = next((one for one in kinds if isinstance(one, dict)), value)
    name = inner.get("name")
    return name if isinstance(name, str) and name else None
