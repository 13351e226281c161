"""List the jobs of the process that reads strangers' text.

Invariant: arguments are plain data, and the result is a text, or the bytes of what a model's files
hold.
"""

from __future__ import annotations

import functools
import json
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from engine.checkpoint.checkpoint import Checkpoint, weight_files
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.text_model import Kind, TextModelConfig
from engine.checkpoint.written_models import written
from engine.errors import Unreadable, reading_model
from engine.system.priority import lower_priority
from engine.text.call_syntax import CallSyntax
from engine.text.calls_grammar import calls_grammar
from engine.text.grammar import (
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
    validate,
    with_deep_stack,
)
from engine.text.jinja_templates import JinjaTemplate
from engine.text.schema_faults import mend
from engine.text.tokenizer import Tokenizer, TokenizerFiles
from engine.text.tokenizer_expressions import expressions_of

TEXTS_NICE = 10
"""How far a process that tokenizes many texts at once stands back."""
NUM_TEMPLATES = 8
"""A model has up to two, and several models may take turns."""

compiled = functools.lru_cache(NUM_TEMPLATES)(JinjaTemplate)


def _takes_tools(source: str, tool_source: str) -> str:
    """Compile both templates of a model; say `yes` if the second one shows tools."""
    compiled(source)
    return "yes" if compiled(tool_source).uses("tools") else ""


def _render(source: str, variables: dict[str, Any]) -> str:
    return compiled(source).render(variables)


def _constraint(kind: str, value: Any, is_whole: bool) -> str:
    """Make a grammar of what a client sent.

    Args:
        is_whole: it is tried; else it becomes a part of another.
    """
    grammar = _MAKERS[kind](value)
    if is_whole:
        validate(grammar)
    return grammar


def _schema(value: Any, *, is_lenient: bool = False) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise Unreadable(f"it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Unreadable("a JSON schema is an object")
    return json_grammar(value, is_lenient=is_lenient)


_MAKERS: dict[str, Callable[[Any], str]] = {
    "json": _schema,
    "lenient_json": functools.partial(_schema, is_lenient=True),
    "json_object": lambda _value: json_grammar(),
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": lark_grammar,
}


def _calls(schemas: dict[str, Any], syntax: dict[str, str], options: dict[str, Any]) -> str:
    """Make and try the grammar of tool calls, with the options of calls_grammar."""
    grammar = calls_grammar(schemas, CallSyntax(**syntax), **options)
    validate(grammar)
    return grammar


def _mended(schemas: dict[str, dict[str, Any]], lenient: list[str]) -> str:
    """Leave out of schemas what cannot be enforced; of each the rest, and places with reasons."""
    found = with_deep_stack(
        lambda: {name: mend(one, is_lenient=name in lenient) for name, one in schemas.items()}
    )
    return json.dumps({name: [one.schema, one.faults] for name, one in found.items()})


def _checkpoint(path: bytes) -> bytes:
    return written(Checkpoint.open(Path(os.fsdecode(path))))


def _weight_names(path: bytes) -> bytes:
    with reading_model(folder := Path(os.fsdecode(path))):
        return written([path.name for path in weight_files(folder)[1]])


def _config(path: bytes) -> bytes:
    """Read a model's configuration, whose weights need not be there."""
    with reading_model(folder := Path(os.fsdecode(path))):
        return written(ModelConfig.from_folder(folder))


def _text_model(path: bytes, kind: Kind, has_weights: bool) -> bytes:
    folder = Path(os.fsdecode(path))
    return written(TextModelConfig.from_folder(folder, kind, has_weights=has_weights))


def _tokenizer(path: bytes, has_chats: bool, source: str = "") -> bytes:
    """Read a tokenizer's files, and build and use it once, within this process's limits."""
    files = TokenizerFiles.read(Path(os.fsdecode(path)), has_chats=has_chats, source=source)
    _built[:] = [files.build_on_trial()]
    return written(files)


def _expressions(path: bytes, has_chats: bool, source: str = "") -> str:
    files = TokenizerFiles.read(Path(os.fsdecode(path)), has_chats=has_chats, source=source)
    return expressions_of(files.text)


_built: list[Tokenizer] = []
"""The tokenizer of the model that this process has read last."""


def _encode(text: str, has_special: bool) -> bytes:
    with _refused_texts():
        return array("I", _built[0].encode(text, has_special)).tobytes()


def _encode_each(texts: list[Any], has_special: bool, cpus: list[int]) -> bytes:
    """Encode texts, or pairs of them, for vectors; their numbers of tokens come first.

    Args:
        cpus: the cores to do it on; empty: any, as where it may use none of them.
    """
    lower_priority(TEXTS_NICE)  # chats are decoded meanwhile
    if cpus:
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)
    with _refused_texts():
        found = list(_built[0].encode_each(texts, has_special))
    return array("I", chain(map(len, found), chain.from_iterable(found))).tobytes()


def _spans(text: str) -> bytes:
    with _refused_texts():
        return array("I", chain.from_iterable(_built[0].spans(text))).tobytes()


def _decode(token_ids: list[int], skips_special: bool) -> str:
    with _refused_texts():
        return _built[0].decode(token_ids, skips_special)


@contextmanager
def _refused_texts() -> Iterator[None]:
    """Turn into Unreadable the plain Exception that `tokenizers` raises for any reason."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise Unreadable(str(error)) from error


JOBS: dict[str, Callable[..., str | bytes]] = {
    "takes_tools": _takes_tools,
    "render": _render,
    "constraint": _constraint,
    "calls": _calls,
    "mended": _mended,
    "checkpoint": _checkpoint,
    "config": _config,
    "text_model": _text_model,
    "weight_names": _weight_names,
    "tokenizer": _tokenizer,
    "expressions": _expressions,
    "encode": _encode,
    "encode_each": _encode_each,
    "spans": _spans,
    "decode": _decode,
}
