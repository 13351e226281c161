"""Move, join or reword messages that the model's chat template would refuse or drop.

Coding agents send a system message behind the user's, several at the beginning, two user turns in a
row, or parallel calls. Many templates refuse that, and some leave such a message out silently.
Each of FORMS changes a conversation a little more. The first form is used that the template renders
with all system messages in the text, and remembered for other conversations of the same shape.

Invariant: a conversation that the template takes is not changed; nothing that was said is lost.
Never: knows which model a template belongs to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

from appliance.api.tools_in_words import in_words, needs_words
from appliance.frame.figures import things
from engine.errors import RequestError
from engine.text.chat_template import Shape

Message = dict[str, Any]
Step = Callable[[list[Message]], tuple[list[Message], str]]
"""Makes a changed copy, and says what was changed; empty: nothing."""

MAX_SHAPES = 256
_ID_CHARS = 9
"""Mistral's templates refuse ids of calls that have more or fewer."""


class Rendered(NamedTuple):
    """The text of a prompt, and what was changed for it."""

    text: str
    changes: tuple[str, ...] = ()


def render(
    messages: list[Message],
    render_form: Callable[[list[Message]], str],
    known: dict[Shape, int],
    *,
    has_tools: bool,
) -> Rendered:
    """Render the first form that the template takes.

    Args:
        known: the forms that this template took before, by the shape of the conversation.

    Raises:
        RequestError: it refuses every form; the text is about the messages as sent.
    """
    shape = _shape(messages, has_tools=has_tools)
    first = known.get(shape)
    order = range(len(FORMS)) if first is None else (first, *range(len(FORMS)))
    tried: list[list[Message]] = []
    incomplete: tuple[int, Rendered] | None = None
    refusal: RequestError | None = None
    for index in order:
        form, changes = _formed(messages, FORMS[index])
        if form in tried:
            continue
        tried.append(form)
        try:
            found = Rendered(render_form(form), changes)
        except RequestError as error:
            refusal = error if form == messages or refusal is None else refusal
            continue
        if index == first or _is_complete(found.text, messages):
            return _remembered(known, shape, index, found)
        incomplete = incomplete or (index, found)
    if incomplete is not None:
        return _remembered(known, shape, *incomplete)
    assert refusal is not None
    raise refusal


def _remembered(known: dict[Shape, int], shape: Shape, index: int, found: Rendered) -> Rendered:
    if len(known) >= MAX_SHAPES:
        known.clear()
    known[shape] = index
    return found


def _shape(messages: list[Message], *, has_tools: bool) -> Shape:
    """Tell conversations apart by which kinds of messages follow each other in them."""
    kinds = ["tools" if has_tools else "", *map(_kind, messages)]
    return frozenset(zip(kinds, [*kinds[1:], ""], strict=True))


def _kind(message: Message) -> str:
    calls = message.get("tool_calls") or ()
    ids = [one.get("id") for one in calls] + [message.get("tool_call_id")] * (not calls)
    are_short = all(one is not None and _is_short(one) for one in ids)
    return f"{message['role']} {min(len(calls), 2)} {are_short}"


def _is_complete(text: str, messages: list[Message]) -> bool:
    """Check that no system message is missing; the first may have marks that templates take out."""
    later = [one for one in messages[1:] if one["role"] == "system"]
    return all(one["content"].strip() in text for one in later)


def _formed(
    messages: list[Message], steps: tuple[Step, ...]
) -> tuple[list[Message], tuple[str, ...]]:
    changes = []
    for step in steps:
        messages, words = step(messages)
        changes.append(words)
    return messages, tuple(filter(None, changes))


def _short_ids(messages: list[Message]) -> tuple[list[Message], str]:
    """Shorten ids of calls and results to nine characters, and add missing ones."""
    changed, waiting, count = [], list[str](), 0
    for index, message in enumerate(messages):
        one = dict(message)
        if calls := one.get("tool_calls"):
            ids = [_short(call.get("id") or f"{index}.{i}") for i, call in enumerate(calls)]
            one["tool_calls"] = [{**c, "id": new} for c, new in zip(calls, ids, strict=True)]
            waiting = ids.copy()
        elif one["role"] == "tool":
            own = one.get("tool_call_id")
            new = _short(own) if own else waiting[0] if waiting else _short(str(index))
            one["tool_call_id"] = new
            if new in waiting:
                waiting.remove(new)
        count += one != message
        changed.append(one)
    return changed, "ids of calls shortened" if count else ""


def _is_short(call_id: str) -> bool:
    return len(call_id) == _ID_CHARS and call_id.isascii() and call_id.isalnum()


def _short(call_id: str) -> str:
    if _is_short(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:_ID_CHARS]


def _system_first(messages: list[Message]) -> tuple[list[Message], str]:
    """Join the leading system messages; later ones become the user's, where they are."""
    num_leading = next(
        (i for i, one in enumerate(messages) if one["role"] != "system"), len(messages)
    )
    leading, rest = messages[:num_leading], messages[num_leading:]
    moved = [{**one, "role": "user"} if one["role"] == "system" else one for one in rest]
    num_moved = sum(one["role"] == "system" for one in rest)
    words = [f"{num_leading} system messages joined"] if num_leading > 1 else []
    if num_moved:
        words.append(f"{things(num_moved, 'later system message')} made the user's")
    first = [{**leading[0], "content": _joined(leading)}] if leading else []
    return [*first, *moved], ", ".join(words)


def _turns_joined(messages: list[Message]) -> tuple[list[Message], str]:
    """Join neighbouring turns of one role; the user's words behind a result are put to it."""
    changed: list[Message] = []
    for message in messages:
        last, role = changed[-1] if changed else {"role": ""}, message["role"]
        if role not in ("user", "assistant") or last["role"] not in (role, "tool"):
            changed.append(message)
            continue
        if last["role"] == "tool" and role == "assistant":
            changed.append(message)
            continue
        one = {**last, "content": _joined([last, message])}
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            one["tool_calls"] = calls
        thoughts = [each.get("reasoning_content") for each in (last, message)]
        if any(thoughts):
            one["reasoning_content"] = "\n\n".join(filter(None, thoughts))
        changed[-1] = one
    num_joined = len(messages) - len(changed)
    return changed, f"{things(num_joined, 'turn')} joined with the one before" if num_joined else ""


def _system_to_user(messages: list[Message]) -> tuple[list[Message], str]:
    """Put the system message in front of the user's first words."""
    if messages[0]["role"] != "system":
        return messages, ""
    first, rest = {**messages[0], "role": "user"}, messages[1:]
    if rest and rest[0]["role"] == "user":
        first["content"] = _joined([first, rest.pop(0)])
    return [first, *rest], "system message put into the user's first turn"


def _calls_apart(messages: list[Message]) -> tuple[list[Message], str]:
    """Give each of several parallel calls a message of its own, with its result behind it."""
    changed: list[Message] = []
    results: dict[str, list[Message]] = {}
    for message in messages:
        if message["role"] == "tool" and message["tool_call_id"] in results:
            results[message["tool_call_id"]].append(message)
            continue
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            changed.append(message)
            continue
        for index, call in enumerate(calls):
            content = "" if index else message["content"]
            changed.append({**message, "content": content, "tool_calls": [call]})
            changed.append({"role": "results", "of": call["id"]})
            results[call["id"]] = []
    whole: list[Message] = []
    for one in changed:
        whole += results[one["of"]] if one["role"] == "results" else [one]
    return whole, f"{len(results)} parallel calls given one by one" if results else ""


def _calls_in_words(messages: list[Message]) -> tuple[list[Message], str]:
    """Write calls and results as text, as for a template that knows no tools."""
    if not needs_words(messages):
        return messages, ""
    return in_words(messages, None), "calls and results told in words"


def _joined(messages: list[Message]) -> str:
    return "\n\n".join(filter(None, (one["content"] for one in messages)))


FORMS: tuple[tuple[Step, ...], ...] = (
    (),
    (_short_ids,),
    (_short_ids, _system_first),
    (_short_ids, _system_first, _turns_joined),
    (_short_ids, _calls_apart),
    (_short_ids, _system_first, _turns_joined, _system_to_user),
    (_calls_in_words, _system_first, _turns_joined),
    (_calls_in_words, _system_first, _turns_joined, _system_to_user),
)
"""What is tried in turn: as sent, then a little more changed each time."""
