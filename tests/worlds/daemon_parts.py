"""Stand-ins for the daemon's parts, with the behaviour that their contracts promise."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import IO

import msgspec

from appliance.api.core.appliance import Readings
from appliance.api.formats.format_choice import output_format_of
from appliance.daemon.requests.request import ModelInfo, Peer, Request, TokensEmitted
from appliance.daemon.requests.text_encoder import TextEncoder
from appliance.daemon.requests.text_request import TextRequest
from appliance.fleet.roles_change import RolesChange
from appliance.observe.frame.histograms import Histograms
from appliance.observe.log.query import EventQuery, RowQuery, Span, UsageQuery
from engine.errors import QueueFull, RequestError, Unavailable
from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.prefixes.cache_contents import CacheContents
from engine.scheduler.sequences.sequence import Ended, On, RouteStage, Sequence
from engine.text.tokenizer import Tokenizer
from engine.wire.finish_reason import FinishReason
from engine.wire.sampling import TokenLogprob
from tests.tui.frames import busy


class FakeAppliance:
    """An Appliance that generates on the loop, deterministically, one task per sequence.

    Args:
        tokenizer: the model's.
        script: output token ids by prompt; the default repeats the prompt, over and over. A
            script that ends before max_tokens ends the sequence with `stop`.
        burst: tokens per TokensEmitted.
        interval_s: time between them.
    """

    swaps = None
    text_encoders: Mapping[str, TextEncoder] = MappingProxyType({})
    cache_contents: CacheContents | None = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        script: Callable[[list[int]], list[int]] | None = None,
        burst: int = 1,
        interval_s: float = 0.0,
        max_queued: int = 8,
        max_model_len: int = 256,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.burst = burst
        self.interval_s = interval_s
        self.max_queued = max_queued
        self.hasher: PrefixHasher | None = None
        """Tests with a prefix cache set it."""
        self.known_hashes: set[bytes] = set()
        self.model = ModelInfo(
            model_id="fake/tiny-model",
            max_model_len=max_model_len,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=eos_token_ids,
            note=None,
            created=1_700_000_000,
        )
        self.unavailable: Unavailable | None = None
        self.degraded: str | None = None
        self.drained_by: str | None = None
        self.resumed_by: str | None = None
        self.roles_changes: list[tuple[RolesChange, str | None]] = []
        self.gate = asyncio.Event()
        """Nothing is generated until it is set."""
        self.gate.set()
        self.fail_after: int | None = None
        """Sequences fail after so many tokens."""
        self.refuse_after: int | None = None
        """Sequences fail after so many tokens, for what was asked cannot be followed."""
        self.confidence: Callable[[int], float] = lambda index: -0.5
        """Log-probability of each token of a sequence, by its index."""
        self.live: dict[str, Request] = {}
        self.submitted: list[Request] = []
        self.open_texts_now: list[TextRequest] = []
        self.has_texts = asyncio.Event()
        """Set from the first of them on."""
        self.closed_texts: list[tuple[TextRequest, int]] = []
        """Requests for vectors and scores, and their HTTP statuses, in order."""
        self.closed: list[tuple[str, int]] = []
        """Request ids and HTTP statuses, in order."""
        self.events: list[tuple[str, str, str]] = []
        self.refusals: list[tuple[str, str | None]] = []
        """Callers and codes, in order."""
        self.stopped: list[tuple[int, int]] = []
        self.frame_seq = 1
        self._last_seq_id = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def model(self) -> ModelInfo:
        """As it was set, with the output format of the tokenizer's template."""
        return dataclasses.replace(self._model, output_format=output_format_of(self.tokenizer))

    @model.setter
    def model(self, model: ModelInfo) -> None:
        self._model = model

    @property
    def max_per_request(self) -> int:
        return self.max_queued

    @property
    def max_tokens_per_request(self) -> int:
        return 4 * self.model.max_model_len

    def check_available(self) -> None:
        if self.unavailable is not None:
            raise self.unavailable

    def check_room(self, owner: str, num_bytes: int) -> None:
        if sum(len(live.sequences) for live in self.live.values()) >= self.max_queued:
            raise QueueFull("the queue is full", retry_after_ms=1500)

    def not_ready_reason(self) -> str | None:
        return None if self.unavailable is None else self.unavailable.what

    def degraded_reason(self) -> str | None:
        return self.degraded

    def find_cached(self, sequence: Sequence) -> None:
        """What was asked before is found, but for the block of the last token."""
        if sequence.prefix is not None and self.hasher is not None:
            hashes = sequence.prefix.hashes[: (sequence.num_tokens - 1) // self.hasher.block_size]
            found = sum(each in self.known_hashes for each in hashes)
            sequence.num_cached_tokens = found * self.hasher.block_size
            sequence.stages = (RouteStage("decode", sequence.sampling.max_tokens),)
            self.known_hashes.update(sequence.prefix.hashes)

    def next_seq_id(self) -> int:
        self._last_seq_id += 1
        return self._last_seq_id

    def submit(self, request: Request) -> None:
        self.check_available()
        num_live = sum(len(live.sequences) for live in self.live.values())
        if num_live + len(request.sequences) > self.max_queued:
            raise QueueFull("the queue is full", retry_after_ms=1500)
        self.live[request.request_id] = request
        self.submitted.append(request)
        for sequence in request.sequences:
            self.find_cached(sequence)
            if not sequence.is_finished:  # else a daemon before has ended it
                task = asyncio.create_task(self._generate(request, sequence))
                self._tasks[sequence.seq_id] = task

    def stop_sequence(self, sequence: Sequence, num_kept_tokens: int) -> None:
        self.stopped.append((sequence.seq_id, num_kept_tokens))
        self._tasks[sequence.seq_id].cancel()
        del sequence.output_token_ids[num_kept_tokens:]
        self._finish(sequence, FinishReason.STOP)

    def queue_place(self, request: Request) -> int | None:
        waiting = [] if self.gate.is_set() else list(self.live)
        return waiting.index(request.request_id) + 1 if waiting else None

    def owner_of(self, request_id: str) -> str | None:
        request = self.live.get(request_id)
        return None if request is None else request.peer.name

    def refused(self, peer: Peer, error: RequestError) -> None:
        self.refusals.append((peer.caller, error.code))

    def event(self, severity: str, code: str, message: str, actor: str | None = None) -> None:
        self.events.append((severity, code, message))

    def drain(self, by: str) -> None:
        self.drained_by = by
        self.unavailable = Unavailable("the daemon is draining", code="draining")

    def resume(self, by: str) -> None:
        self.resumed_by = by
        self.unavailable = None

    def set_roles(self, change: RolesChange, by: str | None) -> dict[str, object]:
        self.roles_changes.append((change, by))
        targets = {"slo_ttft_ms": change.slo_ttft_ms, "slo_itl_ms": change.slo_itl_ms}
        return {"roles": change.roles or "elastic", **targets}

    def measurement(self) -> dict[str, object]:
        return {"num_facts": 3, "num_unknown": 2, "work_ms": 0.5, "is_going_on": True}

    def measure(self) -> dict[str, object]:
        return self.measurement() | {"work_ms": 0.0}

    def cancel(self, request_id: str, by: str) -> bool:
        request = self.live.get(request_id)
        if request is None or request.is_finished:
            return False
        request.cancelled_by = request.cancelled_by or by
        for sequence in request.sequences:
            if sequence.is_finished:
                continue
            self._tasks[sequence.seq_id].cancel()
            self._finish(sequence, FinishReason.ABORT)
            request.inbox.put_nowait(TokensEmitted(sequence, [], [], True))
        return True

    def open_texts(self, request: TextRequest) -> None:
        self.open_texts_now.append(request)
        self.has_texts.set()

    def close_texts(self, request: TextRequest, http_status: int) -> None:
        self.open_texts_now.remove(request)  # a second close raises
        self.closed_texts.append((request, http_status))

    def close(self, request: Request, http_status: int) -> None:
        assert request.is_finished, "closed while a sequence runs"
        del self.live[request.request_id]  # a second close raises
        request.http_status = http_status
        self.closed.append((request.request_id, http_status))

    def request_frames(self) -> list[dict[str, object]]:
        return [{"id": request.request_id} for request in self.submitted]

    def request_frame(self, request_id: str) -> dict[str, object] | None:
        return next((f for f in self.request_frames() if f["id"] == request_id), None)

    def frame_json(self) -> bytes:
        return msgspec.json.encode({"version": 1, "seq": self.frame_seq})

    def readings(self) -> Readings:
        return Readings(busy(self.frame_seq), Histograms(self.model.max_model_len))

    async def next_frame_json(self, after_seq: int) -> tuple[int, bytes]:
        if after_seq >= self.frame_seq:
            await asyncio.sleep(0.05)
            self.frame_seq += 1
        return self.frame_seq, self.frame_json()

    def logged_frame(self, request_id: str) -> dict[str, object] | None:
        return None

    def log_rows(self, query: RowQuery) -> list[dict[str, object]]:
        rows = [{"id": request_id, "http_status": status} for request_id, status in self.closed]
        return rows[::-1][: query.limit]

    def log_events(self, query: EventQuery) -> list[dict[str, object]]:
        return []

    def log_usage(self, query: UsageQuery) -> list[dict[str, object]]:
        return []

    def log_recording(self, span: Span) -> IO[bytes]:
        return io.BytesIO(b"a recording")

    async def _generate(self, request: Request, sequence: Sequence) -> None:
        await self.gate.wait()
        sequence.where = On(RouteStage("decode", sequence.sampling.max_tokens))
        sequence.num_computed_tokens = sequence.num_prompt_tokens
        if (width := sequence.sampling.prompt_logprobs) is not None:
            size = sequence.num_prompt_tokens - 1
            sequence.prompt_logprobs = self._some_logprobs(width, size, -0.5)
        output = self._output(sequence)
        for start in range(sequence.num_output_tokens, len(output), self.burst):
            await asyncio.sleep(self.interval_s)
            ids = output[start : start + self.burst]
            sequence.output_token_ids += ids
            is_last = start + self.burst >= len(output)
            if self.fail_after is not None and sequence.num_output_tokens >= self.fail_after:
                sequence.error = "the worker died too often"
                self._finish(sequence, FinishReason.ERROR)
                is_last = True
            elif self.refuse_after is not None and sequence.num_output_tokens >= self.refuse_after:
                sequence.error, sequence.is_refused = "no way on", True
                self._finish(sequence, FinishReason.ERROR)
                is_last = True
            elif is_last:
                is_whole = len(output) == sequence.sampling.max_tokens
                self._finish(sequence, FinishReason.LENGTH if is_whole else FinishReason.STOP)
            logprobs = self._logprobs(sequence, ids)
            request.inbox.put_nowait(TokensEmitted(sequence, ids, logprobs, is_last))
            if is_last:
                return

    def _output(self, sequence: Sequence) -> list[int]:
        prompt, size = sequence.prompt_token_ids, sequence.sampling.max_tokens
        if self.script is not None:
            return self.script(prompt)[:size]
        return (prompt * (size // len(prompt) + 1))[:size]

    def _logprobs(self, sequence: Sequence, ids: list[int]) -> list[TokenLogprob]:
        width = sequence.sampling.logprobs
        logprob = self.confidence(sequence.index)
        return [] if width is None else self._some_logprobs(width, len(ids), logprob)

    def _some_logprobs(self, width: int, size: int, logprob: float) -> list[TokenLogprob]:
        alternatives = list(range(width)), [-1.0 - i for i in range(width)]
        return [TokenLogprob(logprob, *alternatives, rank=7) for _ in range(size)]

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        sequence.where = Ended()


async def until(holds: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait for something to become true; the bound only keeps a broken test from hanging."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - tests look on from outside
            await asyncio.sleep(0.005)
