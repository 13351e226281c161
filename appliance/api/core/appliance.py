"""Define what the API calls in the daemon, so that API tests need no workers.

Invariant: an implementation runs on the daemon's loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Protocol

from appliance.daemon.requests.request import ModelInfo, Peer, Request
from appliance.daemon.requests.text_encoder import TextEncoder
from appliance.daemon.requests.text_request import TextRequest
from appliance.fleet.roles_change import RolesChange
from appliance.fleet.swaps import Swaps
from appliance.observe.frame.histograms import Histograms
from appliance.observe.frame.protocol import Frame
from appliance.observe.log.query import EventQuery, RowQuery, Span, UsageQuery
from engine.errors import RequestError
from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.prefixes.cache_contents import CacheContents
from engine.scheduler.sequences.sequence import Sequence
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Readings:
    """What /metrics shows: one moment."""

    frame: Frame
    histograms: Histograms


class Appliance(Protocol):
    """What the api calls in the daemon, on its loop unless a call says that it blocks."""

    @property
    def model(self) -> ModelInfo:
        """The model being served."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of that model."""

    @property
    def text_encoders(self) -> Mapping[str, TextEncoder]:
        """The models that make vectors or scores of whole texts, by name."""

    @property
    def hasher(self) -> PrefixHasher | None:
        """Hashes prompts' blocks, from any thread; None: the prefix cache is off."""

    @property
    def max_per_request(self) -> int:
        """Sequences that one request may bring; the queue never takes more at once."""

    @property
    def max_tokens_per_request(self) -> int:
        """Prompt tokens that one of several sequences may bring; the queue never takes more."""

    @property
    def swaps(self) -> Swaps | None:
        """Which models a request may name; None: one is served, and no other."""

    @property
    def cache_contents(self) -> CacheContents | None:
        """What the prefix cache holds by tokens; None: there is no model yet."""

    def check_available(self) -> None:
        """Raise Unavailable while loading or draining."""

    def check_room(self, owner: str, num_bytes: int) -> None:
        """Raise QueueFull where a prompt of this owner in so large a body would not be taken."""

    def not_ready_reason(self) -> str | None:
        """Tell why /ready is not 200; None if it is."""

    def degraded_reason(self) -> str | None:
        """Tell what is wrong while other workers serve; None: nothing."""

    def next_seq_id(self) -> int:
        """Make a sequence id that this daemon has never used."""

    def submit(self, request: Request) -> None:
        """Accept it whole or raise QueueFull, Unavailable or RequestError and keep nothing."""

    def stop_sequence(self, sequence: Sequence, num_kept_tokens: int) -> None:
        """End a sequence after a stop string matched, with finish reason `stop`.

        Only the first `num_kept_tokens` output tokens count. No TokensEmitted follows.
        """

    def queue_place(self, request: Request) -> int | None:
        """Count the sequences ahead of a request's first; None if it does not wait."""

    def owner_of(self, request_id: str) -> str | None:
        """Name the peer of a live request; None if the id is not live."""

    def cancel(self, request_id: str, by: str) -> bool:
        """Abort every unfinished sequence of it; False if the id is not live.

        Each aborted sequence gets a last TokensEmitted with finish reason `abort`.
        """

    def refused(self, peer: Peer, error: RequestError) -> None:
        """Count a request that was answered with an error, and has no row."""

    def event(self, severity: str, code: str, message: str, actor: str | None = None) -> None:
        """Tell the operator in journal, console and log, which also keeps the actor."""

    def drain(self, by: str) -> None:
        """Take no new work; finish what is accepted. Nothing happens if it drains already."""

    def resume(self, by: str) -> None:
        """Take work again; nothing happens if it does.

        Raises:
            RequestError: 409 `stopping`: the daemon was told to end, and its drain is final.
        """

    def set_roles(self, change: RolesChange, by: str | None) -> dict[str, object]:
        """Change what the workers are for; return the roles and targets in force."""

    def measurement(self) -> dict[str, object]:
        """Tell how far the model's profile is; raises Unavailable while a model loads."""

    def measure(self) -> dict[str, object]:
        """Allow measuring once more; return the progress. Raises as measurement()."""

    def open_texts(self, request: TextRequest) -> None:
        """Show an accepted request for vectors or scores, until it is closed."""

    def close_texts(self, request: TextRequest, http_status: int) -> None:
        """Write its log row: the reply is about to be sent, or its client is gone."""

    def close(self, request: Request, http_status: int) -> None:
        """Write the log row: the last reply has been sent, or its client is gone."""

    def request_frames(self) -> list[dict[str, object]]:
        """List live requests, then the last finished ones, as RequestFrame dictionaries."""

    def request_frame(self, request_id: str) -> dict[str, object] | None:
        """Find a live or newly finished request by its id; None if it is not there."""

    def logged_frame(self, request_id: str) -> dict[str, object] | None:
        """Find a finished request in the log by its id; blocking, call in a thread."""

    def frame_json(self) -> bytes:
        """Encode the newest frame as JSON."""

    def readings(self) -> Readings:
        """Assemble the present state, and what was counted since the start."""

    async def next_frame_json(self, after_seq: int) -> tuple[int, bytes]:
        """Wait for a frame newer than `after_seq`; returns its seq and the encoded frame."""

    def log_rows(self, query: RowQuery) -> list[dict[str, object]]:
        """Read finished requests from the log; blocks, so call it in a thread."""

    def log_events(self, query: EventQuery) -> list[dict[str, object]]:
        """Read events from the log; blocks, so call it in a thread."""

    def log_usage(self, query: UsageQuery) -> list[dict[str, object]]:
        """Sum up the log; blocks, so call it in a thread."""

    def log_recording(self, span: Span) -> IO[bytes]:
        """Make a recording from the log, for the reader to close; blocking, call in a thread."""
