"""Ask a measured server for its model and token ids, and build the requests to send it.

Invariant: no prompt is made twice, so that no prefix cache meets one again, unless a workload asks
for it; and then never beyond one turn of one arm.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from appliance.bench.workloads import PlannedArrival
from appliance.client.address import Address, TcpAddress
from appliance.client.calls import Client, ClientError, ReplyError
from engine.errors import PenstockError

SERVERS_LOG = "the server's own log says why"


_STATE = "/v1/penstock/state"
_SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog; 0123456789 boxes were packed, "
    'with five dozen liquor jugs (and one more?) in them: "Sphinx of black quartz, judge my vow!"'
)
"""Text whose token ids the model has; a prompt needs no more."""
_WORDS = _SAMPLE_TEXT.split()


class MachineReading(NamedTuple):
    """What a daemon of ours says of its machine at one moment."""

    power_w: float | None
    """Watts of all domains; None: none reports."""
    is_starved: bool
    """Other programs keep the workers from their cores."""


class Target:
    """One arm of a measurement, by its address.

    Args:
        label: its name in the tables.
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
        self.max_model_len: int | None = None
        """Tokens of a prompt and its reply, where the server says so."""
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
            model = self._client.get("/v1/models")["data"][0]
            self._model, self.max_model_len = str(model["id"]), model.get("max_model_len")
        except (LookupError, TypeError) as error:
            raise PenstockError(
                "the server lists no model", where=str(self.address), hint=SERVERS_LOG
            ) from error
        if self._is_text:
            return
        try:
            reply = self._client.post("/tokenize", {"model": self._model, "prompt": _SAMPLE_TEXT})
            self._ids = sorted(set(reply["tokens"]))
            self._words_per_token = len(_WORDS) / max(len(reply["tokens"]), 1)
        except (ReplyError, LookupError, TypeError) as error:
            raise PenstockError(
                "the server does not tell ids by POST /tokenize",
                where=str(self.address),
                hint="send prompts as text with --prompt-text",
            ) from error

    def request(self, input_tokens: int, output_tokens: int) -> bytes:
        """Build a request for a streamed completion with a fresh prompt."""
        return self.completion(self._prompt(self._rng, input_tokens), output_tokens)

    def requests(self, schedule: Sequence[PlannedArrival]) -> list[bytes]:
        """Build a request for each arrival; prompts share what the trace says they share."""
        salt = self._rng.getrandbits(64)

        def prompt(each: PlannedArrival) -> list[int] | str:
            if not each.hash_ids:
                return self._prompt(self._rng, each.input_tokens)
            blocks = [
                self._prompt(random.Random(f"{salt}/{one}"), each.block_tokens)
                for one in each.hash_ids
            ]
            if self._ids is None:
                words = " ".join(map(str, blocks)).split()
                return " ".join(words[: self._num_words(each.input_tokens)])
            joined: list[Any] = [token_id for block in blocks for token_id in block]
            return joined[: each.input_tokens]

        return [self.completion(prompt(each), each.output_tokens) for each in schedule]

    def ids(self, num_tokens: int) -> list[int] | None:
        """Tokens that have not been sent before; None if the server cannot say which it has."""
        return None if self._ids is None else self._rng.choices(self._ids, k=num_tokens)

    def completion(self, prompt: list[int] | str, output_tokens: int) -> bytes:
        """Build a request for a streamed completion."""
        body = {
            "prompt": prompt,
            "max_tokens": output_tokens,
            "stream_options": {"include_usage": True},
        }
        if not self._is_text:  # a server without /tokenize may refuse this, too
            body["return_token_ids"] = True
        return self.post("/v1/completions", body)

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """Build a request for a greedy, streamed reply up to its token limit."""
        fixed = {"model": self._model, "temperature": 0, "ignore_eos": True, "stream": True}
        content = msgspec.json.encode({**fixed, **body})
        host, key = "localhost", None
        if isinstance(self.address, TcpAddress):
            host, key = str(self.address).partition("://")[2], self.address.shown_key()
        head = [
            f"POST {path} HTTP/1.1",
            f"Host: {host}",
            "Content-Type: application/json",
            "anthropic-version: 2023-06-01",
            f"Content-Length: {len(content)}",
            "Connection: close",
            *([f"Authorization: Bearer {key}"] if key else []),
        ]
        return "\r\n".join([*head, "", ""]).encode() + content

    def learn_length(self, asked_tokens: int, counted_tokens: int | None) -> None:
        """Correct the length of later word prompts by the server's count."""
        if counted_tokens:
            self._words_per_token *= asked_tokens / counted_tokens

    def reading(self) -> MachineReading | None:
        """Read what the daemon says of its machine now; None: it says nothing, or is not ours."""
        if not self._has_frames:
            return None
        try:
            frame = self._client.get(_STATE)
            devices = frame["devices"]
        except (ClientError, LookupError):
            self._has_frames = False
            return None
        power_w = [each["power_w"] for each in devices if each.get("power_w") is not None]
        return MachineReading(sum(power_w) if power_w else None, bool(frame.get("starved")))

    def _prompt(self, rng: random.Random, num_tokens: int) -> list[int] | str:
        if self._ids is not None:
            return rng.choices(self._ids, k=num_tokens)
        return " ".join(rng.choices(_WORDS, k=self._num_words(num_tokens)))

    def _num_words(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self._words_per_token))
