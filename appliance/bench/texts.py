"""Ask a server for vectors of texts over and over: texts in a second, and milliseconds per request.

Invariant: every request that began within the time counts, and the window ends with the last reply.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

from appliance.client.calls import Client
from appliance.observe.frame.latency import quantile
from engine.errors import PenstockError

Json = dict[str, Any]

_PATH = "/v1/embeddings"
_SYLLABLES = [a + b for a, b in product("bdfgklmnprst", "aeiou")]
_WORDS = ["".join(each) for each in product(_SYLLABLES, repeat=2)]
_TOKENS_PER_WORD = 4
"""Hardly more than a word has in any tokenizer; a short text says how many it has."""


@dataclass(frozen=True, slots=True)
class TextLoad:
    """What is asked: a closed loop of `concurrency` requests."""

    num_tokens: int
    """About the length of each text, in whole words."""
    num_texts: int
    """The texts of one request."""
    concurrency: int
    seconds: float
    model: str | None = None
    """Its name; None: the one that is served."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Answered:
    """One request."""

    began_s: float
    ended_s: float
    num_tokens: int


def measure_texts(client: Client, load: TextLoad, on_share: Callable[[float], None]) -> Json:
    """Put a server under the load, and return the figures.

    Args:
        on_share: takes the share of the time that is over.

    Raises:
        ClientError: a request failed.
    """
    ask = _Asker(client, load.model)
    num_words = ask.words_of(load.num_tokens)
    began_s = time.perf_counter()
    until_s = began_s + load.seconds

    def loop(number: int) -> list[_Answered]:
        draw, answered = random.Random(f"{load.seed}/{number}"), []
        while (now_s := time.perf_counter()) < until_s:
            if not number:
                on_share((now_s - began_s) / load.seconds)
            texts = [" ".join(draw.choices(_WORDS, k=num_words)) for _ in range(load.num_texts)]
            sent_s = time.perf_counter()
            num_tokens = ask(texts)
            answered.append(_Answered(sent_s, time.perf_counter(), num_tokens))
        return answered

    with ThreadPoolExecutor(load.concurrency) as threads:
        found = [one for each in threads.map(loop, range(load.concurrency)) for one in each]
    return _figures(found, load.num_texts)


def _figures(answered: list[_Answered], num_texts: int) -> Json:
    window_s = max(one.ended_s for one in answered) - min(one.began_s for one in answered)
    times_ms = [1e3 * (one.ended_s - one.began_s) for one in answered]
    num_all, num_tokens = num_texts * len(answered), sum(one.num_tokens for one in answered)
    return {
        "num_requests": len(answered),
        "num_texts": num_all,
        "tokens_per_text": num_tokens / num_all,
        "texts_per_s": num_all / window_s,
        "tokens_per_s": num_tokens / window_s,
        "latency_ms_p50": quantile(times_ms, 0.5),
        "latency_ms_p99": quantile(times_ms, 0.99),
    }


class _Asker:
    """Ask for vectors of texts."""

    def __init__(self, client: Client, model: str | None) -> None:
        self._client = client
        self._more: Json = {"encoding_format": "base64"} | ({"model": model} if model else {})

    def __call__(self, texts: list[str]) -> int:
        """Have texts computed, however long that takes; return the number of their tokens.

        Raises:
            PenstockError: there is not a vector for each.
        """
        with self._client.stream(_PATH, {"input": texts, **self._more}) as reply:
            body = next(iter(reply))
        if len(body.get("data") or ()) != len(texts):
            what, where = "the reply lacks a vector for each text", str(self._client.address)
            raise PenstockError(what, where=where, hint="does the server make vectors?")
        return int(body["usage"]["prompt_tokens"])

    def words_of(self, num_tokens: int) -> int:
        """Count the words of a text of about this length."""
        draw = random.Random(0)
        words = draw.choices(_WORDS, k=max(num_tokens // _TOKENS_PER_WORD, 2))
        least, most = self(words[:1]), self([" ".join(words)])
        per_word = max((most - least) / (len(words) - 1), 1.0)
        return max(round(1 + (num_tokens - least) / per_word), 1)
