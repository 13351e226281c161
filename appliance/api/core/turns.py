"""Move, join or reword messages that the model's chat template would refuse or drop.

Coding agents send a system message behind the user's, several at the beginning, two user turns in a
row, or parallel calls. Many templates refuse that, some leave such a message out silently, and some
read contents in parts alone. Each of FORMS changes a conversation a little more. The first form is
used that the template renders with all that was said, and remembered for other conversations of the
same shape. What a template does with a message is seen by other words in its place, which nothing
else in the prompt resembles.

Invariant: a conversation that the template takes is not changed; nothing that was said is lost. The
words that an assistant said beside its calls may be: they are named then.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

from appliance.api.core.tools_in_words import in_words, needs_words
from appliance.observe.frame.figures import things
from engine.errors import RequestError
from engine.text.chat_template import Shape

Message = dict[str, Any]
Step = Callable[[list[Message]], tuple[list[Message], str]]
"""Makes a changed copy, and says what was changed; empty: nothing."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""The names that templates have for what an assistant thought."""
MAX_SHAPES = 256
_ID_CHARS = 9
"""Mistral's templates refuse ids of calls that have more or fewer."""


class Rendered(NamedTuple):
    """The text of a prompt, and what was changed for it."""

    text: str
    changes: tuple[str, ...] = ()
    lost: tuple[int, ...] = ()
    """Messages whose words the template leaves out: an assistant's, beside its calls."""


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
        LeftOut: every form that it takes lacks a message.
        RequestError: it refuses every form; the text is about the messages as sent. Or it takes too
            long for one.
    """
    shape = _shape(messages, has_tools=has_tools)
    first = known.get(shape)
    if first is not None and (found := _known_form(messages, first, render_form)) is not None:
        return found
    tried: list[list[Message]] = []
    acceptable: tuple[int, Rendered] | None = None
    failure: RequestError | None = None
    for index, steps in enumerate(FORMS):
        if acceptable is not None and index >= FIRST_IN_WORDS:
            break
        form, changes = _formed(messages, steps)
        if form in tried:
            continue
        tried.append(form)
        try:
            text = render_form(form)
            lost = _lost(messages, steps, render_form)
        except RequestError as error:
            if error.code != "invalid_value":  # another form would not help
                raise
            failure = failure or error
            continue
        found = Rendered(text, changes, lost)
        if not lost:
            return _remembered(known, shape, index, found)
        if all(_is_beside_calls(messages[one]) for one in lost):
            acceptable = acceptable or (index, found)
        else:
            hard = next(one for one in lost if not _is_beside_calls(messages[one]))
            failure = failure or LeftOut(hard)
    if acceptable is not None:
        return _remembered(known, shape, *acceptable)
    assert failure is not None
    raise failure


class LeftOut(RequestError):
    """The template leaves out the words of a message, in every form of the conversation."""

    def __init__(self, index: int) -> None:
        super().__init__(
            "the model's chat template leaves out a message", code="invalid_value", param="messages"
        )
        self.index = index


def _known_form(
    messages: list[Message], index: int, render_form: Callable[[list[Message]], str]
) -> Rendered | None:
    """Render the form that was taken before; None where these messages need another."""
    form, changes = _formed(messages, FORMS[index])
    try:
        text = render_form(form)
        if _has_all(text, messages):
            return Rendered(text, changes)
        lost = _lost(messages, FORMS[index], render_form)
    except RequestError as error:
        if error.code != "invalid_value":
            raise
        return None
    is_taken = all(_is_beside_calls(messages[one]) for one in lost)
    return Rendered(text, changes, lost) if is_taken else None


def _has_all(text: str, messages: list[Message]) -> bool:
    """Tell whether each message's words stand in a prompt, in order or as JSON."""
    place = 0
    for message in messages:
        words = message["content"].strip()
        at = text.find(words, place)
        if at >= 0:
            place = at + len(words)
        elif words not in text and json.dumps(words, ensure_ascii=False)[1:-1] not in text:
            return False
    return True


def _lost(
    messages: list[Message],
    steps: tuple[Step, ...],
    render_form: Callable[[list[Message]], str],
) -> tuple[int, ...]:
    """Find the messages whose words a form's prompt lacks, with marks in the words' places.

    Raises:
        RequestError: the template refuses them, or writes parts as they stand in the code.
    """
    marks = {i: f"q{i}zvwk" for i, one in enumerate(messages) if one["content"].strip()}
    marked = [{**one, "content": marks.get(i, "")} for i, one in enumerate(messages)]
    text = render_form(_formed(marked, steps)[0])
    if _typed in steps and _PARTS_AS_CODE.search(text):
        raise RequestError("the chat template reads no parts", code="invalid_value")
    told = set(_MARKS.findall(text))
    return tuple(index for index, mark in marks.items() if mark not in told)


_MARKS = re.compile(r"q\d+zvwk")
_PARTS_AS_CODE = re.compile(r"""['"]type['"]: ?['"]text['"]""")


def _is_beside_calls(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("tool_calls"))


def with_thoughts(messages: list[Message], source: str) -> tuple[list[Message], bool]:
    """Give thoughts the name that a template reads; false if there are some and it reads none."""
    if not any(one.get("reasoning_content") for one in messages):
        return messages, True
    read = next((key for key in THOUGHTS if re.search(rf"""[.'"]{key}\b""", source)), None)
    if read in (None, "reasoning_content"):
        return messages, read is not None
    renamed = []
    for one in messages:
        rest = {key: value for key, value in one.items() if key != "reasoning_content"}
        thought = one.get("reasoning_content")
        renamed.append({**rest, read: thought} if thought else rest)
    return renamed, True


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
    changed, waiting, count = [], OrderedDict[str, None](), 0
    for index, message in enumerate(messages):
        one = dict(message)
        if calls := one.get("tool_calls"):
            ids = [_short(call.get("id") or f"{index}.{i}") for i, call in enumerate(calls)]
            one["tool_calls"] = [{**c, "id": new} for c, new in zip(calls, ids, strict=True)]
            waiting = OrderedDict.fromkeys(ids)
        elif one["role"] == "tool":
            own = one.get("tool_call_id")
            new = _short(own) if own else next(iter(waiting), None) or _short(str(index))
            one["tool_call_id"] = new
            waiting.pop(new, None)
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
    groups: list[list[Message]] = []
    for message in messages:
        role, first = message["role"], groups[-1][0]["role"] if groups else ""
        is_users = role == "user" and first in ("user", "tool")
        if is_users or role == first == "assistant":
            groups[-1].append(message)
        else:
            groups.append([message])
    num_joined = len(messages) - len(groups)
    words = f"{things(num_joined, 'turn')} joined with the one before" if num_joined else ""
    return list(map(_one_turn, groups)), words


def _one_turn(turns: list[Message]) -> Message:
    if len(turns) == 1:
        return turns[0]
    one = {**turns[0], "content": _joined(turns)}
    if calls := [call for each in turns for call in each.get("tool_calls", ())]:
        one["tool_calls"] = calls
    for key in THOUGHTS:
        if thoughts := list(filter(None, (each.get(key) for each in turns))):
            one[key] = "\n\n".join(thoughts)
    return one


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
    parts: list[list[Message]] = []
    behind: dict[str, list[Message]] = {}  # the newest call of each id, with its results
    num_apart = 0
    for message in messages:
        if message["role"] == "tool" and message["tool_call_id"] in behind:
            behind[message["tool_call_id"]].append(message)
            continue
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            parts.append([message])
            for call in calls:
                behind.pop(call["id"], None)
            continue
        num_apart += len(calls)
        for index, call in enumerate(calls):
            content = "" if index else message["content"]
            behind[call["id"]] = [{**message, "content": content, "tool_calls": [call]}]
            parts.append(behind[call["id"]])
    words = f"{num_apart} parallel calls given one by one" if num_apart else ""
    return list(chain.from_iterable(parts)), words


def _words_apart(messages: list[Message]) -> tuple[list[Message], str]:
    """Give the words that an assistant said beside its calls a message of their own."""
    changed, count = [], 0
    for message in messages:
        if _is_beside_calls(message) and message["content"]:
            count += 1
            thoughts = {key: message[key] for key in THOUGHTS if key in message}
            changed.append({"role": "assistant", "content": message["content"], **thoughts})
            message = {key: one for key, one in message.items() if key not in thoughts}
            message["content"] = ""
        changed.append(message)
    return changed, f"{things(count, 'answer')} put before its calls" if count else ""


def _calls_in_words(messages: list[Message]) -> tuple[list[Message], str]:
    """Write calls and results as text, as for a template that knows no tools."""
    if not needs_words(messages):
        return messages, ""
    return in_words(messages, None), "calls and results told in words"


def _typed(messages: list[Message]) -> tuple[list[Message], str]:
    """Write contents as parts, as for a model that reads images, too."""
    parted = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    return parted, "contents told in parts"


def _joined(messages: list[Message]) -> str:
    return "\n\n".join(filter(None, (one["content"] for one in messages)))


_NATIVE: tuple[tuple[Step, ...], ...] = (
    (),
    (_short_ids,),
    (_short_ids, _system_first),
    (_short_ids, _system_first, _turns_joined),
    (_short_ids, _calls_apart),
    (_short_ids, _system_first, _turns_joined, _system_to_user),
    (_short_ids, _words_apart),
)
_IN_WORDS: tuple[tuple[Step, ...], ...] = (
    (_calls_in_words, _system_first, _turns_joined),
    (_calls_in_words, _system_first, _turns_joined, _system_to_user),
)
FORMS: tuple[tuple[Step, ...], ...] = (
    *_NATIVE,
    *((*steps, _typed) for steps in _NATIVE),
    *_IN_WORDS,
    *((*steps, _typed) for steps in _IN_WORDS),
)
"""What is tried in turn: as sent, then a little more changed each time."""
FIRST_IN_WORDS = 2 * len(_NATIVE)
