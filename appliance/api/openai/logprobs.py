"""Write log-probabilities in OpenAI's and vLLM's shapes.

Invariant: every token has a spelling, also one that is only part of a character.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import msgspec

from appliance.api.core.stream import Delta
from engine.scheduler.sequences.sequence import Sequence
from engine.text.tokenizer import Tokenizer
from engine.wire.sampling import TokenLogprob

Json = dict[str, object]


def completion_logprobs(
    tokenizer: Tokenizer, delta: Delta, most: int, *, by_ids: bool = False
) -> Json:
    """Write columns of tokens and alternatives; an echoed prompt comes first.

    Args:
        most: alternatives to each token.
        by_ids: tokens are `token_id:ID` instead of texts, of which two can be alike.
    """
    token_ids, offsets = delta.token_ids, delta.text_offsets
    entries: list[TokenLogprob | None] = [*delta.logprobs]
    if delta.echo:
        token_ids = delta.sequence.prompt_token_ids + token_ids
        offsets = delta.echo.offsets + offsets
        entries = [None, *delta.sequence.prompt_logprobs, *entries]  # nothing precedes the first
    key = _id_key if by_ids else cache(partial(token_key, tokenizer))
    pairs = list(zip(token_ids, entries, strict=True))
    return {
        "text_offset": offsets,
        "token_logprobs": [entry and finite(entry.logprob) for entry in entries],
        "tokens": [key(token_id) for token_id in token_ids],
        "top_logprobs": [entry and _top(key, token_id, entry, most) for token_id, entry in pairs],
    }


def _top(key: Callable[[int], str], token_id: int, entry: TokenLogprob, most: int) -> msgspec.Raw:
    """Write the likeliest tokens, and the one that came."""
    alternatives = zip(entry.top_ids[:most], entry.top_logprobs, strict=False)
    every = [*alternatives, (token_id, entry.logprob)]
    return _encoded({key(other): finite(logprob) for other, logprob in every})


def chat_logprobs(tokenizer: Tokenizer, delta: Delta) -> Json:
    """Write the entries of a delta as a chat has them."""
    return {"content": chat_entries(tokenizer, delta), "refusal": None}


def chat_entries(tokenizer: Tokenizer, delta: Delta) -> list[msgspec.Raw]:
    """Write one entry for each token of the output."""
    spell = cache(partial(_spelling, tokenizer))
    pairs = zip(delta.token_ids, delta.logprobs, strict=True)
    return [_entry(spell, token_id, entry) for token_id, entry in pairs]


def _entry(spell: Callable[[int], Json], token_id: int, entry: TokenLogprob) -> msgspec.Raw:
    top = zip(entry.top_ids, entry.top_logprobs, strict=True)
    alternatives = [spell(other) | {"logprob": finite(logprob)} for other, logprob in top]
    told: Json = {"logprob": finite(entry.logprob), "top_logprobs": alternatives}
    return _encoded(spell(token_id) | told)


def prompt_logprobs(
    tokenizer: Tokenizer, sequence: Sequence, most: int
) -> list[msgspec.Raw | None]:
    """Write each prompt token's log-probability and its alternatives', by token id."""
    spell = cache(tokenizer.token_text)
    later = zip(sequence.prompt_token_ids[1:], sequence.prompt_logprobs, strict=False)
    # nothing precedes the first
    return [None, *(_ranked(spell, token_id, entry, most) for token_id, entry in later)]


def _ranked(
    spell: Callable[[int], str], token_id: int, entry: TokenLogprob, most: int
) -> msgspec.Raw:
    likeliest = zip(entry.top_ids[:most], entry.top_logprobs, range(1, most + 1), strict=False)
    every = [(token_id, entry.logprob, entry.rank), *likeliest]
    return _encoded(
        {
            str(other): {"logprob": finite(value), "rank": rank, "decoded_token": spell(other)}
            for other, value, rank in every
        }
    )


def _encoded(told: Json) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(told))


def _spelling(tokenizer: Tokenizer, token_id: int) -> Json:
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": tokenizer.token_text(token_id),
        "bytes": None if raw is None else list(raw),
    }


def token_key(tokenizer: Tokenizer, token_id: int) -> str:
    """Write a token's text, or its bytes where it is only part of a character."""
    raw = tokenizer.token_bytes(token_id)
    if raw is None:
        return _id_key(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _id_key(token_id: int) -> str:
    return f"token_id:{token_id}"


def finite(logprob: float) -> float:
    """Replace infinity by OpenAI's -9999; JSON has no infinity."""
    return max(logprob, -9999.0)
