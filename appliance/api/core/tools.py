"""Read `tools` and `tool_choice`, and make the grammar that calls of functions must match.

Invariant: a call that is required is written in the model's own format, with arguments that
match their schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from appliance.api.core import fields as chats
from appliance.api.core.offered_tools import Origin, read_choice, read_offer
from appliance.api.formats.format_choice import OutputFormat
from appliance.json.fields import invalid_value
from engine.errors import Unreadable
from engine.text.reading import READER
from engine.text.tokenizer import Tokenizer

MAX_FAILED_READS = 12
"""Enough to find the one schema of a thousand that takes too much; a failure may take seconds."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that the model may call; there is at least one."""

    definitions: list[dict[str, Any]]
    """The client's definitions for the template, unchanged but for cache marks."""
    schemas: dict[str, Mapping[str, Any] | None]
    """Schemas of the arguments, by the name of each function that may be called."""
    is_required: bool
    is_parallel: bool
    strict: frozenset[str]
    """Names of functions whose client asks for arguments that match their schema."""
    is_legacy: bool = False
    """They came as `functions`, and a call is told as `function_call`."""
    marked: tuple[int, ...] = ()
    """Numbers of leading definitions that end at a cache mark of the client."""
    origins: dict[str, Origin] = field(default_factory=dict)
    """How the client knows the functions, by the names that the model is told."""

    def grammar(
        self, output_format: OutputFormat, tokenizer: Tokenizer, answer: str | None = None
    ) -> str | None:
        """Make and try the grammar of the output; None if free text and calls begin alike.

        Args:
            answer: a grammar that the output must match where it is no call.

        Raises:
            Unreadable: the schemas are too large, or cannot be compiled.
        """
        tool_format = output_format.tools
        special_ids = tokenizer.special_ids(output_format.tokens)
        is_free = not self.is_required and answer is None
        if is_free and (tool_format.is_bare or tool_format.is_harmony):
            return None
        # A grammar of free text has no place for special tokens that begin something else.
        if (
            is_free
            and output_format.thoughts
            and special_ids.keys()
            & {
                *output_format.thoughts.begins,
                *output_format.thoughts.ends,
            }
        ):
            return None
        options = {
            "special_ids": special_ids,
            "is_required": self.is_required,
            "is_parallel": self.is_parallel,
            "strict": sorted(self.strict),
            "answer": answer,
        }
        syntax = asdict(tool_format.syntax)
        return READER.read("calls", self.schemas, syntax, options)

    def mended(self) -> tuple[Tools, tuple[str, ...]]:
        """Leave out of the schemas what cannot be enforced, and name it.

        Raises:
            RequestError: a function must match its schema, and it cannot be enforced.
        """
        schemas, left_out = dict(self.schemas), list[str]()
        given = {name: one for name, one in schemas.items() if one is not None}
        lenient = [name for name in given if name not in self.strict]
        for name, (kept, faults) in _mended(given, lenient).items():
            must_match = self.is_required or name in self.strict
            places = [".".join(map(str, ("parameters", *path))) for path, _ in faults]
            if must_match and places:
                why = f"cannot be compiled: function `{name}`, `{places[0]}`: {faults[0][1]}"
                raise invalid_value("tools", why)
            schemas[name] = kept
            left_out += [f"tools.{name}.{place}" for place in places]
        return replace(self, schemas=schemas), tuple(left_out)

    def loosened(self) -> Tools:
        """Let functions have any arguments, except where a schema must be matched."""
        schemas = {name: one if name in self.strict else None for name, one in self.schemas.items()}
        return replace(self, schemas=schemas)


_Mended = dict[str, tuple[Mapping[str, Any] | None, list[tuple[list[str | int], str]]]]
"""What is left of each function's schema, and the places left out with reasons."""


def _mended(schemas: Mapping[str, Mapping[str, Any]], lenient: list[str]) -> _Mended:
    """Leave out what cannot be enforced; all of a schema that takes too much to read.

    All are read in one job, as each job waits for an idle core; halves where that takes too much.
    """
    found: _Mended = {}
    waiting, num_failed = [list(schemas)] if schemas else [], 0
    while waiting:
        names = waiting.pop()
        try:
            asked = {name: schemas[name] for name in names}
            found |= json.loads(READER.read("mended", asked, lenient))
            continue
        except Unreadable as error:
            num_failed += 1
            why = error.what
        if num_failed == MAX_FAILED_READS:
            names, waiting = [one for each in (names, *waiting) for one in each], []
        elif len(names) > 1:
            half = len(names) // 2
            waiting += [names[half:], names[:half]]
            continue
        found |= {name: (None, [([], why)]) for name in names}
    return {name: found[name] for name in schemas}


def read_tools(body: chats.ChatSettings) -> tuple[Tools | None, list[str]]:
    """Read the tools that a chat may use, and name what is left out.

    There are none without functions, or where `tool_choice` is `none`.
    """
    is_legacy = bool(body.functions) and not body.tools
    values: list[Any]
    chosen: str | dict[str, Any] | None
    if is_legacy:  # as OpenAI's API was before tools
        values = [{"type": "function", "function": _plain(one)} for one in body.functions or ()]
        where, name, asked = "functions", "function_call", body.function_call
        chosen = (
            asked
            if not isinstance(asked, chats.ChosenFunction)
            else {"type": "function", "name": asked.name}
        )
    else:
        values, where, name, chosen = body.tools or [], "tools", "tool_choice", body.tool_choice
    offer = read_offer(values, where)
    mode, names = read_choice(chosen, offer, name, where)
    # Small models repeat a call that they must make until they run out of tokens.
    is_parallel = body.parallel_tool_calls
    is_parallel = mode != "required" if is_parallel is None else is_parallel
    if mode == "none" or not offer.functions:
        return None, offer.left_out
    schemas: dict[str, Mapping[str, Any] | None] = {
        one.function.name: one.function.parameters or None for one in offer.functions
    }
    tools = Tools(
        definitions=[one.definition for one in offer.functions],
        schemas={one: schemas[one] for one in names},
        is_required=mode in ("required", "named"),
        is_parallel=is_parallel and mode != "named" and not is_legacy,
        strict=frozenset(one.function.name for one in offer.functions if one.function.strict),
        is_legacy=is_legacy,
        marked=tuple(i for i, one in enumerate(offer.functions, 1) if one.is_marked),
        origins=offer.origins,
    )
    return tools, offer.left_out


def _plain(function: chats.Function) -> dict[str, Any]:
    """Write a function for a template, without what its client left out."""
    told: dict[str, Any] = msgspec.to_builtins(function)
    return {name: value for name, value in told.items() if value is not None}
