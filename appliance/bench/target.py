"""A server under measurement: its model, prompts that fit it, its power.

Owns: what is asked of every server alike, so that arms differ in nothing else.
Called by: arms, load, interference.
Invariant: no prompt is made twice, so that no server's prefix cache meets one again.
Never: measures.
"""

from __future__ import annotations

import os
import random
from typing import Any

import msgspec

from appliance.address import Address, TcpAddress
from appliance.client import Client, ClientError, ReplyError
from engine.errors import PenstockError

_STATE = "/v1/penstock/state"
_SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog; 0123456789 boxes were packed, "
    'with five dozen liquor jugs (and one more?) in them: "Sphinx of black quartz, judge my vow!"'
)
"""Ids of these words are ids that the model has, which is all that a prompt needs."""
_WORDS = _SAMPLE_TEXT.split()


class Target:
    """One arm of a measurement, by its address.

    Args:
        label: its name in the tables.
        address: of its API.
        is_text: send prompts as words, for a server that cannot say which ids it has; a prompt then
            has about as many tokens as were asked for, and the server says how many it counted.
        rng: of all prompts of the run.
    """

    def __init__(
        self, label: str, address: Address, rng: random.Random, *, is_text: bool = False
    ) -> None:
        self.label = label
        self.address = address
        self._rng = rng
        self._client = Client(address)
        self._model: str | None = None
        self._ids: list[int] | None = None
        self._is_text = is_text
        self._words_per_token = 1.0
        self._has_frames = True

    def meet(self) -> None:
        """Ask for the model and for ids that it has.

        Raises:
            ClientError: it does not answer.
            PenstockError: it is no such server.
        """
        try:
            self._model = str(self._client.get("/v1/models")["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise PenstockError("the server lists no model", where=str(self.address)) from error
        if self._is_text:
            return
        try:
            reply = self._client.post("/tokenize", {"model": self._model, "prompt": _SAMPLE_TEXT})
            self._ids = sorted(set(reply["tokens"]))
        except (ReplyError, LookupError, TypeError) as error:
            raise PenstockError(
                "the server does not tell ids by POST /tokenize",
                where=str(self.address),
                hint="send prompts as text with --prompt-text",
            ) from error

    def request(self, input_tokens: int, output_tokens: int) -> bytes:
        """A request for a streamed completion with a fresh prompt, ready to send."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": self._prompt(input_tokens),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        content = msgspec.json.encode(body)
        is_tcp = isinstance(self.address, TcpAddress)
        host = str(self.address).removeprefix("http://") if is_tcp else "localhost"
        key = os.environ.get("PENSTOCK_API_KEY") if is_tcp else None
        head = [
            "POST /v1/completions HTTP/1.1",
            f"Host: {host}",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            "Connection: close",
            *([f"Authorization: Bearer {key}"] if key else []),
        ]
        return "\r\n".join([*head, "", ""]).encode() + content

    def learn_length(self, asked_tokens: int, counted_tokens: int | None) -> None:
        """A prompt was so long in fact; the next ones of words are made accordingly."""
        if counted_tokens:
            self._words_per_token *= asked_tokens / counted_tokens

    def power_w(self) -> float | None:
        """Of all domains that the daemon reads; None where it reports none, or is not ours."""
        if not self._has_frames:
            return None
        try:
            devices = self._client.get(_STATE)["devices"]
        except (ClientError, LookupError):
            self._has_frames = False
            return None
        readings = [each["power_w"] for each in devices if each.get("power_w") is not None]
        return sum(readings) if readings else None

    def _prompt(self, num_tokens: int) -> list[int] | str:
        if self._ids is not None:
            return self._rng.choices(self._ids, k=num_tokens)
        num_words = max(1, round(num_tokens * self._words_per_token))
        return " ".join(self._rng.choices(_WORDS, k=num_words))
