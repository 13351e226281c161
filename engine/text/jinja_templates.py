"""Compile and run Jinja chat templates in a sandbox; in the process that reads strangers' text.

Invariant: renders like transformers for equal templates and variables.
Never: gives a template a function whose globals it could reach; bounds time or memory, which its
process does.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from engine.errors import Unreadable

MAX_ERROR_CHARS = 1000


class JinjaTemplate:
    """A compiled template.

    Raises:
        Unreadable: it is broken.
    """

    def __init__(self, source: str) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except MemoryError:
            raise
        except Exception as error:  # constants are computed, and may do anything
            raise _unreadable(error) from error

    def uses(self, name: str) -> bool:
        """Say whether it reads a variable."""
        return name in self._names

    def render(self, variables: dict[str, Any]) -> str:
        """Render it.

        Raises:
            Unreadable: it refuses the variables.
        """
        try:
            text = self._template.render(variables)
            text.encode()
        except MemoryError:
            raise
        except Exception as error:  # a template may do anything with values that it does not expect
            raise _unreadable(error) from error
        return text


def _unreadable(error: Exception) -> Unreadable:
    return Unreadable(str(error)[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode())


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """Make the environment that transformers gives chat templates, without Jinja's own extras."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    for name in ("lipsum", "cycler", "joiner"):
        del environment.globals[name]
    environment.globals |= {
        "range": _Range(),
        "raise_exception": _RaiseException(),
        "strftime_now": _StrftimeNow(),
    }
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON without Jinja's escaping of HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Range:
    """`range`, of at most the sandbox's maximum."""

    __slots__ = ()

    def __call__(self, *bounds: int) -> range:
        return jinja2.sandbox.safe_range(*bounds)


class _RaiseException:
    __slots__ = ()

    def __call__(self, message: str) -> NoReturn:
        raise jinja2.TemplateError(message)


class _StrftimeNow:
    __slots__ = ()

    def __call__(self, layout: str) -> str:
        return datetime.now().strftime(layout)
