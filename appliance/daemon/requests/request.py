"""Describe an accepted request: what it asks, its caller, its open reply.

Invariant: exactly one terminal reply and one log row per accepted request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from fnmatch import fnmatchcase
from types import MappingProxyType

from appliance.api.formats.format_choice import PLAIN, OutputFormat
from appliance.hub.facts import ModelFacts
from engine.errors import RequestError
from engine.scheduler.sequences.draft_counts import DraftCounts
from engine.scheduler.sequences.sequence import Sequence
from engine.wire.finish_reason import FinishReason
from engine.wire.sampling import TokenLogprob

HUNG_UP = "client"
"""`cancelled_by` of a request whose client disconnected."""
FAILED = "api"
"""`cancelled_by` of the rest of a failed request, which no client would read."""
CLIENT_CLOSED_REQUEST = 499
"""Nginx's status for a client that left before its reply; it is only logged."""


class Role(IntEnum):
    """What a peer may do; each may all that those before it may."""

    VIEWER = 1
    """Read states, requests and the log."""
    USER = 2
    """Generate, and cancel what is its own."""
    OPERATOR = 3
    """Cancel anyone's requests, drain, resume, switch roles."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process (by SO_PEERCRED) or the API key behind a request.

    Unknown parts are None.
    """

    uid: int | None = None
    gid: int | None = None
    pid: int | None = None
    user: str | None = None
    """Name of the uid."""
    key: str | None = None
    """Name of the API key; never the key itself."""
    role: Role = Role.USER
    program: str | None = None
    """Name of the process; None on TCP, or where it ended at once."""
    address: str | None = None
    """Its address and port on TCP."""

    @property
    def client(self) -> str:
        """The program with its process id, or the address; empty: neither is known."""
        if self.pid:
            return f"{self.program or 'pid'} {self.pid}"
        return self.address or ""

    @property
    def program_or_host(self) -> str:
        """The client without what each of its connections has of its own."""
        return self.program or (self.address or "").rpartition(":")[0]

    @property
    def caller(self) -> str:
        """The client, or its user where that is unknown."""
        return self.client or self.name

    @property
    def name(self) -> str:
        """The peer as one word; it owns its requests and has one share of the queue."""
        if self.key is not None:
            return f"key:{self.key}"
        if self.user is not None:
            return self.user
        return "unknown" if self.uid is None else f"uid:{self.uid}"


@dataclass(slots=True)
class TokensEmitted:
    """New tokens of one sequence, in order; `is_last` closes the sequence.

    `sequence.finish_reason` and `sequence.error` are set when `is_last` is.
    """

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    """One entry per token of token_ids; empty if not asked for."""
    is_last: bool


class Inbox:
    """What has come for one reply, which alone reads it.

    Every token of every stream passes it: so it hands over all there is at once, and its timer is
    not set for each wait, but again when it runs out too soon.
    """

    is_kept = False
    """Whether the reply outlives the daemon."""

    def __init__(self) -> None:
        self._emitted: list[TokensEmitted] = []
        self._waiter: asyncio.Future[None] | None = None
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put_nowait(self, emitted: TokensEmitted) -> None:
        """Add tokens, and wake the reply."""
        self._emitted.append(emitted)
        self._wake()

    async def next_batch(self, patience_s: float | None = None) -> list[TokensEmitted]:
        """Take all emitted tokens; wait for the first, at most `patience_s`."""
        if not self._emitted:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            self._since_s = loop.time()
            if patience_s is not None and self._timer is None:
                self._timer = loop.call_later(patience_s, self._look, patience_s)
            await self._waiter
        emitted, self._emitted = self._emitted, []
        return emitted

    def close(self) -> None:
        """Stop the timer; the inbox has no reader any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, patience_s: float) -> None:
        """Wake the reply if it has waited for so long; look again when it might have."""
        loop = asyncio.get_running_loop()
        waited_s = loop.time() - self._since_s
        if waited_s >= patience_s:
            self._timer = None
            self._wake()
        else:
            self._timer = loop.call_later(patience_s - waited_s, self._look, patience_s)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """What a client asked; one reply, one log row."""

    request_id: str
    """`cmpl-...`, `chatcmpl-...`, `resp_...`; the reply's `id`, and its x-request-id header."""
    endpoint: str
    model: str
    peer: Peer
    is_stream: bool
    received_at: str
    """ISO 8601, UTC, milliseconds."""
    sequences: list[Sequence]
    prompt_text: str | None = None
    client_request_id: str | None = None
    inbox: Inbox = field(default_factory=Inbox)
    """Filled by the daemon; read by exactly one reply."""
    http_status: int = 200
    cancelled_by: str | None = None
    """HUNG_UP, FAILED, `drain`, or the name of the peer that asked for it."""
    swap_wait_ms: float = 0.0
    """Its wait until its model was served; it counts as time in the queue."""
    asked_max_tokens: int | None = None
    """Its limit, where that was cut to the room left; None: it was not."""
    message_changes: tuple[str, ...] = ()
    """How its messages were brought into the form that the chat template takes."""
    failure: RequestError | None = None
    """What its client is told where the daemon has ended it; None: what its sequences say."""
    waited_for: str | None = None
    """What its prompt waited for when that was last looked at; None: it did not wait then."""
    is_resumed: bool = False
    """Whether a daemon that died has begun it."""
    prefill_j: float | None = None
    """Energy of its prompts so far, as appliance.observe.telemetry.energy has divided it; None: no
    power reading."""
    decode_j: float | None = None
    """Energy of its outputs so far."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompts, each counted once, also where it has several answers."""
        prompts = {id(one.prompt_token_ids): one.num_prompt_tokens for one in self.sequences}
        return sum(prompts.values())

    @property
    def max_tokens(self) -> int:
        """The limit in force; of several prompts that of the longest."""
        return min(sequence.sampling.max_tokens for sequence in self.sequences)

    @property
    def cut_usage(self) -> dict[str, int]:
        """What a reply's usage says of a limit that was cut; empty where none was."""
        return {} if self.asked_max_tokens is None else {"max_tokens_cut_to": self.max_tokens}

    @property
    def changes(self) -> str | None:
        """What was changed to serve it, in words; None: nothing."""
        asked = self.asked_max_tokens
        cut = [] if asked is None else [f"max_tokens cut from {asked} to {self.max_tokens}"]
        return "; ".join([*cut, *self.message_changes]) or None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were found computed; None: the cache is off.

        Of several answers to one prompt the first computes it for the others, so the smallest count
        is taken.
        """
        least: dict[int, int] = {}
        for one in self.sequences:
            if one.prefix is not None:
                found, prompt = one.num_cached_tokens if one.stages else 0, id(one.prompt_token_ids)
                least[prompt] = min(found, least.get(prompt, found))
        return sum(least.values()) if least else None

    @property
    def cache_miss(self) -> str | None:
        """Say at which token the first prompt's cached prefix ended, and why."""
        missed = self.sequences[0].cache_miss
        return None if missed is None else missed.reason

    @property
    def miss_usage(self) -> dict[str, str]:
        """Put the same into a reply's usage; empty where nothing was missed."""
        return {} if self.cache_miss is None else {"cache_miss": self.cache_miss}

    @property
    def drafts(self) -> DraftCounts:
        """What speculation has guessed for all its sequences."""
        return sum((one.drafts for one in self.sequences), DraftCounts())

    @property
    def computed_tokens(self) -> int:
        """Count computed positions, each prompt once."""
        furthest: dict[int, int] = {}
        num_outputs = 0
        for one in self.sequences:
            prompt, num_computed = id(one.prompt_token_ids), one.num_computed_tokens
            of_prompt = min(num_computed, one.num_prompt_tokens)
            furthest[prompt] = max(of_prompt, furthest.get(prompt, 0))
            num_outputs += num_computed - of_prompt
        return sum(furthest.values()) + num_outputs

    @property
    def has_failed(self) -> bool:
        """It ended by an error that is not its client's own."""
        errors = [one for one in self.sequences if one.finish_reason is FinishReason.ERROR]
        return any(self.failure is not None or not one.is_refused for one in errors)

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)


NEUTRAL_SAMPLING: Mapping[str, float] = MappingProxyType(
    {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
)
"""What OpenAI's API takes for what neither the request nor the model's own defaults say."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the api must know of the model being served."""

    model_id: str
    max_model_len: int
    """Prompt and output tokens together, as the pools allow."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    note: str | None
    created: int
    """Unix seconds, for /v1/models."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The model's own defaults of sampling fields, by their names."""
    output_format: OutputFormat = PLAIN
    """How it writes calls and reasoning."""
    tool_parser: str = "auto"
    """The setting: a name in formats.tool_format; auto is by its chat template."""
    reasoning_parser: str = "auto"
    """The setting: a name in formats.tool_format, or none."""
    aliases: tuple[str, ...] = ()
    """Other names by which clients may ask for it; `*` in them is any text."""
    default_max_tokens: int | None = None
    """Most output tokens of a chat that names no limit; None: the room left."""
    folder: str | None = None
    """Where its files are on the daemon's machine."""
    others: Mapping[str, ModelFacts | None] = field(default_factory=dict)
    """Models that a request may name instead; each is swapped in when one does. None: its files
    are not on this machine yet."""
    text_models: Mapping[str, ModelFacts] = field(default_factory=dict)
    """Models beside it that make vectors or scores of texts."""
    text_folders: Mapping[str, str] = field(default_factory=dict)
    """Where their files are."""
    facts: ModelFacts | None = None
    """What the model's files say of it; None: they are still being fetched."""
    has_records: bool = False
    """Its layers are partly recurrent: a cached prefix holds only where a record was kept."""

    def is_called(self, name: str) -> bool:
        """Say whether a client's name for a model means this one."""
        plain = name.removesuffix(":latest")  # which Ollama's clients add
        if plain in self.text_models:  # also where an alias is any text
            return False
        is_own = self.model_id in (plain, plain.removesuffix(".gguf"))  # or its file's name
        return is_own or any(fnmatchcase(plain, one) for one in self.aliases)

    @property
    def sampling_in_force(self) -> dict[str, float]:
        """What holds where a request says nothing: the model's own values, else OpenAI's."""
        return {**NEUTRAL_SAMPLING, **self.sampling}

    def limited_to(self, max_model_len: int) -> ModelInfo:
        """Return a copy with a lower maximum length."""
        return replace(self, max_model_len=min(self.max_model_len, max_model_len))
