"""Read what is asked of a model of texts: which texts, as tokens, and how much of each.

Invariant: every text has 1 to `max_tokens` tokens; what is cut keeps the special tokens at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from appliance.api.texts import fields as bodies
from appliance.daemon.requests.text_encoder import TextEncoder
from appliance.json.fields import integer, invalid_type, invalid_value
from engine.errors import RequestError

MAX_TOKEN_ID = (1 << 31) - 1
MAX_TOKENS = 1 << 21
"""Maximum of all texts of a body: a query or a prompt may stand beside each of 2,048."""


class TextTooLong(RequestError):
    """A text has more tokens than its model takes.

    Args:
        param: the field that has the text.
    """

    def __init__(self, num_tokens: int, max_tokens: int, param: str) -> None:
        super().__init__(
            f"this model's maximum context length is {max_tokens} tokens; "
            f"`{param}` has {num_tokens}",
            code="context_length_exceeded",
            param=param,
        )
        self.num_tokens, self.max_tokens = num_tokens, max_tokens


@dataclass(frozen=True, slots=True)
class TextAsk:
    """The tokens of all texts of a body, or of all pairs."""

    token_ids: list[list[int]]
    num_cut: int = 0
    """Texts of which the end was left out."""
    num_unpooled: Sequence[int] = ()
    """The first tokens of each that its pooling leaves out; empty: of none."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


def read_inputs(asked: str | Sequence[Any], param: str) -> list[str | list[int]]:
    """Read one text or many, each a string or token ids, told apart by the first element.

    Raises:
        RequestError: too many, one is empty, or of another type.
    """
    if isinstance(asked, str) or not isinstance(asked[0], str | list):
        asked = [asked]
    if len(asked) > bodies.MAX_TEXTS:
        raise invalid_value(param, f"must have at most {bodies.MAX_TEXTS} entries")
    for place, one in enumerate(asked):
        where = f"{param}[{place}]"
        if not isinstance(one, str | list):
            raise invalid_type(where, "a string, token ids, or a list of either", one)
        if not one:
            raise invalid_value(where, "is empty")
        if isinstance(one, list) and set(map(type, one)) != {int}:
            for token_id in one:
                integer(token_id, where, 0, MAX_TOKEN_ID)
    return [one if isinstance(one, str) else list(map(int, one)) for one in asked]


def tokenize_texts(
    encoder: TextEncoder,
    texts: Sequence[str | list[int]],
    param: str,
    *,
    cut: int | None = None,
    prompt: str = "",
) -> TextAsk:
    """Make tokens of texts; token ids stay as they are.

    Args:
        param: the field that has them, for errors.
        cut: tokens of each text to keep at most, -1: as many as the model takes; None: a longer
            text is refused.
        prompt: put before each string.

    Raises:
        TextTooLong: and `cut` is None.
        RequestError: a text has no tokens.
    """
    empty = [] if cut is None else next(encoder.tokenize([prompt]))
    most = encoder.max_tokens if cut in (None, -1) else min(cut, encoder.max_tokens)
    made = encoder.tokenize(prompt + text for text in texts if isinstance(text, str))
    of_prompt = encoder.num_unpooled(prompt)
    found, num_cut, num_tokens = [], 0, 0
    for place, text in enumerate(texts):
        where = param if len(texts) == 1 else f"{param}[{place}]"
        is_ids = isinstance(text, list)
        ids = text if isinstance(text, list) else next(made)
        if len(ids) > most:
            if cut is None:
                raise TextTooLong(len(ids), most, where)
            ids = ids[:most] if is_ids else _cut(ids, empty, most)
            num_cut += 1
        if not ids:
            raise invalid_value(where, "is empty")
        num_tokens += len(ids)
        _check_total(num_tokens, param)
        found.append(ids)
    unpooled = [0 if isinstance(text, list) else of_prompt for text in texts]
    return TextAsk(found, num_cut, unpooled if of_prompt else ())


def tokenize_pairs(
    encoder: TextEncoder,
    pairs: Sequence[tuple[str, str]],
    params: tuple[str, str],
    *,
    cut: int | None = None,
    document_tokens: int | None = None,
) -> TextAsk:
    """Make tokens of pairs of a query and a document.

    Args:
        params: the fields that have queries and documents, for errors.
        cut: tokens of each pair to keep at most, as for texts; the document loses its end.
        document_tokens: of each document to keep at most; None: all.

    Raises:
        TextTooLong: a pair is too long and `cut` is None, or a query alone.
    """
    most = encoder.max_tokens if cut in (None, -1) else min(cut, encoder.max_tokens)
    without = _tokenize_queries(encoder, pairs, most, params[0])
    found, num_cut, num_tokens = [], 0, 0
    for place, ids in enumerate(encoder.tokenize_pairs(pairs)):
        empty = without[pairs[place][0]]
        room = most if document_tokens is None else min(most, len(empty) + document_tokens)
        if len(ids) > room:
            if cut is None:
                raise TextTooLong(len(ids), most, f"{params[1]}[{place}]")
            ids = _cut(ids, empty, room)
            num_cut += 1
        if not ids:
            raise invalid_value(f"{params[1]}[{place}]", "is empty")
        num_tokens += len(ids)
        _check_total(num_tokens, params[1])
        found.append(ids)
    return TextAsk(found, num_cut)


def _tokenize_queries(
    encoder: TextEncoder, pairs: Sequence[tuple[str, str]], most: int, param: str
) -> dict[str, list[int]]:
    """Make tokens of each query beside an empty document."""
    queries = list(dict.fromkeys(query for query, _ in pairs))
    made = encoder.tokenize_pairs((query, "") for query in queries)
    found: dict[str, list[int]] = {}
    num_tokens = 0
    for query, ids in zip(queries, made, strict=True):
        if len(ids) > most:
            raise TextTooLong(len(ids), most, param)
        num_tokens += len(ids)
        _check_total(num_tokens, param)
        found[query] = ids
    return found


def _check_total(num_tokens: int, param: str) -> None:
    if num_tokens > MAX_TOKENS:
        why = f"has more than {MAX_TOKENS:,} tokens, with what stands beside each text"
        raise invalid_value(param, why)


def _cut(ids: list[int], empty: list[int], most: int) -> list[int]:
    """Leave out the end of a text, but for the special tokens behind it.

    Args:
        empty: the tokens of an empty text, which ends with the same special tokens.
    """
    num_behind = 0
    while num_behind < min(len(empty), most) and ids[-1 - num_behind] == empty[-1 - num_behind]:
        num_behind += 1
    return ids[: most - num_behind] + ids[len(ids) - num_behind :]


def read_dimensions(asked: int | None, encoder: TextEncoder) -> int | None:
    """Check how many numbers of each vector are wanted; None: all."""
    if asked is not None and encoder.num_dimensions is not None and asked > encoder.num_dimensions:
        why = f"must be at most {encoder.num_dimensions}, as many as the model's vectors have"
        raise invalid_value("dimensions", why)
    return asked


def read_prompt(name: str | None, encoder: TextEncoder) -> str:
    """Find the text that the model's makers put before texts of some use.

    Args:
        name: empty: none; None: the one that they put before all others.
    """
    name = encoder.default_prompt if name is None else name
    if not name:
        return ""
    if name not in encoder.prompts:
        known = ", ".join(f"`{one}`" for one in encoder.prompts)
        what = f"must be one of {known}" if known else "is not supported: the model has no prompts"
        raise invalid_value("prompt_name", what)
    return encoder.prompts[name]
