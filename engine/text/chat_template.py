"""Render messages into a prompt with the model's chat template, in a sandbox.

Invariant: renders like transformers for equal templates and messages.
Never: lets a template reach anything outside its variables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from engine.errors import CheckpointError, RequestError

Shape = frozenset[tuple[str, str]]
"""The kinds of messages that follow each other in a conversation."""

_CONTINUE = "CONTINUE_FROM_HERE_TAG "
"""Marks the end of a message to continue; its space shows whether the template keeps spaces."""


class ChatTemplate:
    """Hold a model's Jinja chat template, compiled, in a sandbox.

    Args:
        tool_source: the template for conversations with tools, if it differs.
    """

    def __init__(self, source: str, where: str, tool_source: str | None = None) -> None:
        self.where = where
        """The file that it was read from."""
        self.tool_source = source if tool_source is None else tool_source
        """The template for conversations with tools."""
        self._template = _compile(source, where)
        self._tool_template = _compile(self.tool_source, where)
        syntax = self._tool_template.environment.parse(self.tool_source)
        self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(syntax)
        """False: it ignores tools."""
        self.known_forms: dict[Shape, int] = {}
        """The accepted form of conversations by shape, where several were offered."""

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt of a conversation, up to the beginning or continuation of the answer.

        Args:
            messages: with strings as contents, or lists of parts of the type `text`.
            tools: OpenAI's definitions of functions.
            add_generation_prompt: end with the header of an assistant's message.
            continue_final_message: end within the last message instead of after it.
            variables: other variables of the template: special tokens, a client's switches.

        Raises:
            RequestError: the template refuses the messages.
        """
        if continue_final_message:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": _continued(last["content"])}]
        try:
            text = (self._tool_template if tools else self._template).render(
                **{"documents": None, **(variables or {})},
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            raise _refusal(str(error)) from error
        return _cut(text) if continue_final_message else text


def _continued(content: Any) -> Any:
    """Put the mark behind the text of a message, or of its last part."""
    if isinstance(content, str):
        return content + _CONTINUE
    return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE}]


def _cut(text: str) -> str:
    """Cut the text at the mark, trimming it if the template trims contents."""
    end = text.rfind(_CONTINUE.rstrip())
    if end < 0:
        raise _refusal("it leaves out the final message, which the reply continues")
    return text[:end] if text.startswith(_CONTINUE, end) else text[:end].rstrip()


def _refusal(why: str) -> RequestError:
    return RequestError(
        f"the model's chat template refuses these messages: {why}",
        code="invalid_value",
        param="messages",
    )


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str, where: str) -> jinja2.Template:
    """Compile a template in the environment that transformers gives chat templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        what = f"the chat template is broken: {error}"
        hint = "correct it there, or report it to the model's publisher"
        raise CheckpointError(what, where=where, hint=hint) from error


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


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
