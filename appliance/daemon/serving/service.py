"""Take requests in, hand tokens out, and record each request once.

Invariant: every accepted request is closed exactly once, with one log row.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from appliance.api.core.appliance import Readings
from appliance.configuration.settings import ServeConfig
from appliance.daemon.process.disk_reads import read_in_thread
from appliance.daemon.requests.request import (
    CLIENT_CLOSED_REQUEST,
    FAILED,
    HUNG_UP,
    ModelInfo,
    Peer,
    Request,
    TokensEmitted,
)
from appliance.daemon.requests.row import LogRow
from appliance.daemon.requests.text_encoder import TextEncoder
from appliance.daemon.requests.text_request import TextRequest
from appliance.daemon.serving.closed_requests import MAX_FRAMES, ClosedRequests
from appliance.daemon.serving.open_texts import OpenTexts
from appliance.daemon.serving.text_computing import TextComputing
from appliance.daemon.survival.keeper_channel import keeper_problem
from appliance.devices.machine import Devices
from appliance.fleet.boot import BootPlan, model_info
from appliance.fleet.cache_identity import make_hasher
from appliance.fleet.kv_caches import KvCaches
from appliance.fleet.measuring import Measuring
from appliance.fleet.roles_change import RolesChange, change_roles, roles_frame
from appliance.fleet.supervisor import Supervisor
from appliance.fleet.swaps import IncomingRequest, Swaps
from appliance.fleet.text_models import GPU_STEP_TOKENS, STEP_TOKENS, TextWorkers
from appliance.json.lines import encode_line
from appliance.observe.frame.figures import things
from appliance.observe.frame.late_frames import SurvivedFrame
from appliance.observe.frame.logged_requests import ended_frame
from appliance.observe.frame.protocol import (
    EventFrame,
    Frame,
    RequestFrame,
    TotalsFrame,
    iso_time,
    utc_now,
)
from appliance.observe.log.query import RowQuery, UsageQuery
from appliance.observe.log.writer import RequestLog
from appliance.observe.telemetry.deadlines import Availability, Deadlines
from appliance.observe.telemetry.disturbances import Disturbances
from appliance.observe.telemetry.frames import Frames, ServiceState
from appliance.observe.telemetry.telemetry import Telemetry
from engine.errors import InvariantViolated, QueueFull, RequestError, Unavailable
from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.router import Router
from engine.scheduler.sequences.sequence import Phase, Sequence
from engine.text.reading import READER
from engine.text.tokenizer import Tokenizer
from engine.wire.finish_reason import FinishReason
from engine.wire.messages import Begun, Copied, CoresUsed, PoolMade, Report, Stepped, TextsComputed
from engine.wire.sampling import TokenLogprob

log = logging.getLogger("penstock")

DRAIN_CHECK_S = 0.2
READER_EVENT_INTERVAL_S = 60.0
SHOWN_AGAIN_S = 300.0
"""Maximum age at a start of an earlier daemon's requests to list: what a timeline spans."""
REFUSALS_S = 10.0
"""Between two counts of one caller's refusals in the log."""
TOKEN_BYTES = 8  # of a body: more than most have, lest one is taken for longer than it is
_SUMMED_UP_AT_START = {"worker.ready", "ssd.on", "dram.on"}
"""Events that are not printed while a model loads: the announcement says what they add up to."""


class Service:
    """The appliance as its clients see it."""

    def __init__(
        self,
        plan: BootPlan,
        router: Router,
        supervisor: Supervisor,
        tokenizer: Tokenizer,
        request_log: RequestLog,
        *,
        keeps_text: bool,
        devices: Devices | None = None,
        caches: KvCaches | None = None,
    ) -> None:
        self._router, self._supervisor, self._log = router, supervisor, request_log
        self._tokenizer, self.cache_contents = tokenizer, router.cache_contents
        self.log_rows, self.log_events = request_log.rows, request_log.events
        self.log_usage, self.log_recording = request_log.usage, request_log.recording
        self.keeps_text = keeps_text
        """Whether prompts go into the log; may change at any time."""
        self.swaps: Swaps | None = None
        self.hasher: PrefixHasher | None = None
        """Hashes prompts' blocks; None: the prefix cache is off or not loaded yet."""
        model = model_info(plan, tokenizer)
        self._telemetry = Telemetry(model.max_model_len)
        self._frames = Frames(
            plan, model, router, supervisor, self._telemetry, devices, request_log.frame, caches
        )
        self._energy = self._frames.energy
        self._totals = TotalsFrame(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        self._live: dict[str, Request] = {}
        most = plan.placement.max_num_batched_tokens
        self.deadlines = Deadlines(router, supervisor, most, self._live, self.event)
        self.availability = Availability(supervisor, self.deadlines)
        self.texts = TextComputing(self._begin_texts, self._texts_moved)
        self._serve_texts(plan)
        self._closed = ClosedRequests(request_log)
        self._open_texts = OpenTexts(request_log, self._closed, self._totals, self._telemetry.today)
        self._last_seq_id, self._num_checked = 0, -1
        self._next_reader_event_s = 0.0
        self._refusals_logged_s = 0.0
        self._measuring: Measuring | None = None
        self.kept: Callable[[], list[RequestFrame]] = list
        """Lists the previous daemon's requests that wait for the model to be loaded."""
        self._survived: SurvivedFrame | None = None
        self._disturbances = Disturbances()
        self.idle = asyncio.Event()  # while no request is live
        self.idle.set()
        today = UsageQuery(by="day", since=utc_now()[:10])
        with contextlib.suppress(Unavailable):  # they are then counted from now on
            self._telemetry.today.go_on_from(request_log.usage(today))
            since = iso_time(time.time() - SHOWN_AGAIN_S)
            self._closed.go_on_from(request_log.rows(RowQuery(limit=MAX_FRAMES, since=since)))
        self._frames.make(self._standing())

    @property
    def text_encoders(self) -> Mapping[str, TextEncoder]:
        """The models of whole texts, by name."""
        return self.texts.encoders

    def _serve_texts(self, plan: BootPlan) -> None:
        has_gpu = any(worker.gpu is not None for worker in plan.placement.workers)
        workers = TextWorkers(self._supervisor)
        self.texts.serve(plan.texts, workers, GPU_STEP_TOKENS if has_gpu else STEP_TOKENS)

    def _begin_texts(self) -> None:
        """Raise Unavailable if no texts are taken now; else end the measuring of idle times."""
        self.check_available()
        if self._measuring is not None:
            self._measuring.stop()
        self.texts.queue.weights, self.texts.queue.max_tokens = self._router.text_limits()

    def _texts_moved(self, workers: frozenset[str]) -> None:
        self._router.set_text_workers(workers)
        self.deadlines.text_workers = workers

    def continue_from(
        self, survived: SurvivedFrame | None, kept: Callable[[], list[RequestFrame]]
    ) -> None:
        """Tell of the previous daemon's end, and show the requests that it left open.

        Args:
            survived: its end; None: it was told to stop, or there was none.
            kept: lists the requests that wait for the model to be loaded.
        """
        self._survived, self.kept = survived, kept
        if self._log.crash is not None:
            number = 0 if survived is None else survived.num_kept
            rest = f"; {things(number, 'request')} continue{'s' * (number == 1)}" if number else ""
            self.event("error", "daemon.died", f"{self._log.crash.about}{rest}")
        self.make_frame()

    @property
    def model(self) -> ModelInfo:
        return self._frames.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def max_per_request(self) -> int:
        return self._router.max_per_request

    @property
    def max_tokens_per_request(self) -> int:
        """Prompt tokens that a request of several sequences may bring."""
        return self._router.max_tokens_per_request

    def change_model(
        self, plan: BootPlan, router: Router, workers: Supervisor, text: Tokenizer
    ) -> None:
        """Serve another model from now on; no request is live."""
        old, self._router, self._supervisor = self._router, router, workers
        router.continue_from(old)
        self._tokenizer, self.cache_contents = text, router.cache_contents
        self._measuring = None
        self._frames.change_model(plan, model_info(plan, text), router, workers)
        self.deadlines.change_model(router, workers, plan.placement.max_num_batched_tokens)
        self.availability.change_model(workers)
        self._serve_texts(plan)

    def begin(self, measuring: Measuring) -> None:
        """Take requests from now on; each ends what is measured while there are none."""
        self.availability.is_preparing = False
        self._measuring = self._frames.measuring = measuring
        self._telemetry.windows.begin_model(time.monotonic_ns())
        measuring.serves()

    @property
    def is_quiet(self) -> bool:
        """True while all workers are ready and no request is live."""
        is_idle = self.idle.is_set() and self.texts.is_idle
        return is_idle and self.not_ready_reason() is None and not self.degraded_reason()

    def check_available(self) -> None:
        """Raise Unavailable while loading or draining, or when no worker can come back."""
        self.availability.check()

    def check_room(self, owner: str, num_bytes: int) -> None:
        self._ask_router(partial(self._router.check_room, owner, num_bytes // TOKEN_BYTES + 1))

    def not_ready_reason(self) -> str | None:
        return self.availability.not_ready_reason

    def degraded_reason(self) -> str | None:
        """Return the fault while part of the daemon serves on; None: there is no fault."""
        return self.availability.degraded_reason or keeper_problem()

    async def rekey(self, config: ServeConfig, plan: BootPlan) -> None:
        """Make the hasher of this model's prefix cache; None where the cache is off."""
        what, tell = f"the disk of {plan.model_id}", partial(self.event, "warning", "model.slow")
        self.hasher = await read_in_thread(what, partial(make_hasher, config, plan), tell)

    def next_seq_id(self) -> int:
        """Return a new sequence id."""
        self._last_seq_id += 1
        return self._last_seq_id

    def submit(self, request: Request) -> None:
        """Accept a request whole, or raise and keep nothing."""
        self.check_available()
        if self._measuring is not None:
            self._measuring.stop()
        submit = self._router.resume if request.is_resumed else self._router.submit
        self._ask_router(partial(submit, request.sequences))
        self._log.opened(LogRow.from_request(request))
        if not request.is_resumed:  # the first part of a resumed request's energy is unknown
            self._energy.opened(request)
        self._live[request.request_id] = request
        self.idle.clear()
        self._totals.accepted += 1

    def open_texts(self, request: TextRequest) -> None:
        """Show a request for vectors or scores until it is closed."""
        self._open_texts.open(request)

    def close_texts(self, request: TextRequest, http_status: int) -> None:
        """Close such a request after its reply, or after its client disconnected."""
        self._open_texts.close(request, http_status)

    def refused(self, peer: Peer, error: RequestError) -> None:
        """Count a request that was answered with an error, and has no row."""
        self._telemetry.refusals.count(peer, error, time.monotonic())

    def refused_before_queue(
        self, asker: IncomingRequest, waited: RequestFrame | None, error: RequestError | None
    ) -> None:
        """Record a request that was refused before it reached its model; see RefusedRequest.

        A request that waited had an id that could be seen and cancelled, so it gets a row.
        """
        self._totals.refused += error is not None
        if waited is None:
            return
        is_cancelled = waited.cancelled_by is not None
        frame = msgspec.structs.replace(
            waited,
            phase="finished",
            waits_for=None,
            finish_reason=FinishReason.ABORT if is_cancelled else FinishReason.ERROR,
            error=None if error is None else error.what,
            tokenize_ms=0.0,
            queue_ms=waited.age_ms,
            e2e_ms=waited.age_ms,
        )
        status = CLIENT_CLOSED_REQUEST if error is None else error.status
        self._closed.add(
            frame, LogRow.of_waiting(frame, asker.peer, asker.client_request_id, status)
        )

    def _ask_router(self, ask: Callable[[int], None]) -> None:
        try:
            ask(time.monotonic_ns())
        except QueueFull:
            self._totals.refused += 1
            raise

    def stop_sequence(self, sequence: Sequence, num_kept_tokens: int) -> None:
        """End a sequence whose stop string matched after `num_kept_tokens` output tokens."""
        self._router.stop(sequence, num_kept_tokens, time.monotonic_ns())

    def queue_place(self, request: Request) -> int | None:
        """Count the sequences ahead of the request in the queue; None: it is not queued."""
        if all(sequence.phase is not Phase.QUEUED for sequence in request.sequences):
            return None
        return self._router.queue_place(request.request_id, time.monotonic_ns())

    def owner_of(self, request_id: str) -> str | None:
        """Name of the peer whose live request it is; None if the id is not live."""
        if (request := self._live.get(request_id)) is not None:
            return request.peer.name
        if (owner := self._open_texts.owner_of(request_id)) is not None:
            return owner
        return None if self.swaps is None else self.swaps.owner_of(request_id)

    def cancel(self, request_id: str, by: str) -> bool:
        """Abort every unfinished sequence of a live request; False if the id is not live."""
        request = self._live.get(request_id)
        if request is None or request.is_finished:
            is_ended = self._open_texts.cancel(request_id, by)
            return is_ended or (self.swaps is not None and self.swaps.cancel(request_id, by))
        request.cancelled_by = request.cancelled_by or by
        for sequence in request.sequences:
            self._router.abort(sequence, FinishReason.ABORT, time.monotonic_ns())
        # the rows of others say it; clients could fill the journal by hanging up
        if by not in (HUNG_UP, FAILED):
            self.event("info", "request.cancelled", f"{request_id} cancelled by {by}", by)
        return True

    def close(self, request: Request, http_status: int) -> None:
        """Close a request after its last reply, or after its client disconnected."""
        if self._live.pop(request.request_id, None) is None:
            return
        now_ns, request.http_status = time.monotonic_ns(), http_status
        for sequence in request.sequences:
            self._router.abort(sequence, FinishReason.ABORT, now_ns)
        reasons = {sequence.finish_reason for sequence in request.sequences}
        if request.has_failed:
            self._totals.failed += 1
        elif reasons & {FinishReason.ABORT, FinishReason.ERROR}:
            self._totals.aborted += 1
        else:
            self._totals.finished += 1
        self._telemetry.finished(request, now_ns)
        self._closed.add(
            self._frames.closed(request, now_ns),
            LogRow.from_request(request, with_text=self.keeps_text),
        )
        self._energy.closed(request)
        if not self._live:
            self.idle.set()

    def request_frames(self) -> list[dict[str, object]]:
        """List live requests, oldest first, then finished ones, newest first."""
        live = self._frames.live(self._standing(), time.monotonic_ns())
        return [*map(msgspec.to_builtins, live), *self._closed.frames()]

    def request_frame(self, request_id: str) -> dict[str, object] | None:
        """Find a live or newly finished request by id."""
        return next((one for one in self.request_frames() if one["id"] == request_id), None)

    def logged_frame(self, request_id: str) -> dict[str, object] | None:
        """Read a finished request from the log by id; blocks."""
        row = self._log.row(request_id)
        return None if row is None else msgspec.to_builtins(ended_frame(row))

    def frame_json(self) -> bytes:
        """Encode the current state; rates and readings come from the newest frame."""
        return encode_line(self._frames.now(self._standing()))

    @property
    def frame(self) -> Frame:
        """The newest reading, of at most a second ago."""
        return self._frames.newest

    def readings(self) -> Readings:
        """Return the current frame and the histograms since the start."""
        return Readings(self._frames.now(self._standing()), self._telemetry.histograms)

    async def next_frame_json(self, after_seq: int) -> tuple[int, bytes]:
        return await self._frames.next_json(after_seq)

    def drain(self, by: str) -> None:
        """Refuse new requests; accepted ones finish."""
        if self.availability.drain():
            self._tell_of_drain(f"Draining, by {by}; {self.drain_status}", by)

    def resume(self, by: str) -> None:
        """Take work again; raises RequestError if the daemon was told to end."""
        if self.availability.resume():
            if self.swaps is not None:
                self.swaps.open()
            self.event("info", "drain.ended", f"Resumed by {by}", by)
            self.make_frame()

    def set_roles(self, change: RolesChange, by: str | None) -> dict[str, object]:
        """Change what the workers are for; raises RequestError as change_roles()."""
        about = change_roles(self._router, change, time.monotonic_ns())
        if about:
            self.event("info", "roles.changed", f"{about}, by {by or 'the settings'}", by)
            self.make_frame()
        return roles_frame(self._router.roles_now())

    def measurement(self) -> dict[str, object]:
        """Return the progress of the model's profile."""
        if self._measuring is None:
            raise Unavailable("the model is still loading", code="model_loading")
        return self._measuring.frame()

    def measure(self) -> dict[str, object]:
        """Allow measuring once more; return the profile's progress."""
        if self._measuring is not None:
            self._measuring.allow_again()
        return self.measurement()

    # What workers and the router cause

    def emit(
        self, sequence: Sequence, token_ids: list[int], logprobs: list[TokenLogprob], is_last: bool
    ) -> None:
        """Pass tokens on to the open reply."""
        request = self._live.get(sequence.request_id)
        if request is None:
            return
        if token_ids and sequence.stamps.last_token_ns is not None:
            at_ns, user = sequence.stamps.last_token_ns, request.peer.name
            self._telemetry.tokens(sequence, len(token_ids), at_ns, user)
        request.inbox.put_nowait(TokensEmitted(sequence, token_ids, logprobs, is_last))

    def worker_reported(self, worker: str, report: Report) -> None:
        """Handle a worker's report of steps, copies or cores."""
        now_ns = time.monotonic_ns()
        if isinstance(report, Stepped):
            self._telemetry.stepped(worker, report)
            num_cores = report.num_cores or self._router.num_cores(worker)
            num_cores = num_cores or len(self._supervisor.workers[worker].plan.cpus)
            self._energy.stepped(worker, report, num_cores)
            self._router.stepped(worker, report, now_ns)
        elif isinstance(report, TextsComputed):
            self.texts.computed(worker, report)
        elif isinstance(report, Begun):
            self._router.begun(report)
        elif isinstance(report, Copied):
            self._router.copied(worker, report, now_ns)
        elif isinstance(report, CoresUsed):
            self._router.cores_used(worker, report)
        elif isinstance(report, PoolMade):
            limit = self._router.pool_made(worker, report.num_blocks)
            self._frames.model = self._frames.model.limited_to(limit)

    def worker_ready(self, worker: str) -> None:
        """Note that a worker takes work, for the first time or again."""
        state = self._supervisor.workers[worker]
        self._router.worker_ready(worker, time.monotonic_ns(), state.probes)
        self.texts.pump()
        self.event("info", "worker.ready", f"worker {worker} is ready (pid {state.pid})")
        self.make_frame()

    def worker_died(self, worker: str, about: str) -> None:
        """Handle a worker's death, after all its messages."""
        trouble = self._supervisor.workers[worker].trouble
        self.event("error", "worker.died", "; ".join(filter(None, (about, trouble))))
        self._router.worker_died(worker, time.monotonic_ns())
        self.texts.worker_died(worker)
        self.make_frame()

    def worker_lost(self, about: str) -> None:
        """Handle a worker that cannot restart; end all requests if it was the last."""
        self.event("error", "worker.lost", about)
        if self.texts.is_lost:
            self.texts.end_all(Unavailable(about, code="engine_dead"))
        if self._supervisor.is_lost:
            error = Unavailable(about, code="engine_dead")
            for request in list(self._live.values()):
                self.deadlines.end(request, error, time.monotonic_ns())
        self.make_frame()

    # What the daemon does

    def event(self, severity: str, code: str, message: str, actor: str | None = None) -> None:
        """Tell the operator: journal, console and request log, which also keeps the actor."""
        is_detail = severity == "info" and code in _SUMMED_UP_AT_START
        if not (is_detail and self.availability.is_loading):
            log.log(logging.getLevelNamesMapping()[severity.upper()], "%s", message)
        event = EventFrame(utc_now(), severity, code, message)
        self._telemetry.events.append(event)
        self._log.event(severity, code, message, actor, at=event.at)

    def reader_told(self, sentence: str) -> None:
        """Record an event of the reader, at most one a minute: clients may cause them."""
        if time.monotonic() >= self._next_reader_event_s:
            self._next_reader_event_s = time.monotonic() + READER_EVENT_INTERVAL_S
            self.event("warning", "reader.failed", sentence)

    @property
    def drain_status(self) -> str:
        num_running = len(self._live) + len(self._open_texts)
        return f"{num_running} running" if num_running else "nothing running"

    def stop_accepting(
        self, by: str = "a signal", again: str = "", *, takes_stragglers: bool = False
    ) -> None:
        """Drain for good: the daemon ends when it has drained.

        Args:
            again: how to end running requests at once.
            takes_stragglers: what comes on open connections is still taken, lest a request that
                crosses the signal is refused; new connections wait for the next daemon.
        """
        self.availability.stop(takes_stragglers=takes_stragglers)
        is_busy = bool(self._live or self._open_texts)
        hint = f". {again} ends them now" if again and is_busy else ""
        self._tell_of_drain(f"Stopping ({by}); {self.drain_status}{hint}", by)

    def _tell_of_drain(self, about: str, by: str) -> None:
        if self.swaps is not None:
            self.swaps.close()
        self.event("info", "drain.started", about, by)
        self.make_frame()

    async def drained(self, grace_s: float) -> None:
        """Wait until every request has had its terminal reply.

        Replies that are complete, to clients that do not read them, are waited for `grace_s`.
        """
        await self._open_texts.idle.wait()
        while not all(request.is_finished for request in self._live.values()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.idle.wait(), DRAIN_CHECK_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), grace_s)

    def abort_all(self, *, but_kept: bool = False) -> None:
        """End every live request now; each open reply is told.

        Args:
            but_kept: only the requests that end with the daemon.
        """
        self.texts.end_all(Unavailable("the daemon is stopping", code="draining"))
        for request_id, request in list(self._live.items()):
            if not (but_kept and request.inbox.is_kept):
                self.cancel(request_id, "drain")

    def make_frame(self) -> None:
        """Take a frame and wake its readers; on failure there is no frame this second."""
        pids = [pid for worker in self._supervisor.workers.values() for pid in worker.pids]
        is_disturbed = self._disturbances.look(pids, time.monotonic())
        self._router.learn(is_disturbed=is_disturbed)
        self._check_when_idle()
        while self._log.said:
            self._telemetry.events.append(self._log.said.popleft())
        try:
            changes = self._frames.make(self._standing())
        except OSError as error:  # no descriptor left to read with
            log.warning("no frame this time: %s", error)
        except Exception:  # which must end neither the readings nor what asks for one
            log.exception("no frame this time")
        else:
            for change in changes:
                # at a stop what is over is no recovery: nothing more is asked of it
                if change.severity != "info" or not self.availability.is_stopping:
                    self.event(*change)
        self._closed.complete(self._energy.take_complete())
        self._log_refusals()

    def _log_refusals(self) -> None:
        """Write the counts of refused requests to the log, every few seconds and at the end."""
        now_s = time.monotonic()
        if self.availability.is_stopping or now_s - self._refusals_logged_s >= REFUSALS_S:
            self._refusals_logged_s = now_s
            for row in self._telemetry.refusals.take_rows():
                self._log.record(row)

    def _standing(self) -> ServiceState:
        self._totals.has_prefix_cache = self.hasher is not None
        self._totals.reader_failures = dict(READER.failures)
        self._totals.reader_restarts = READER.num_restarts
        self._totals.texts = self.texts.num_texts
        self._totals.text_tokens = self.texts.num_tokens
        live, reason = list(self._live.values()), self.not_ready_reason() or self.degraded_reason()
        kept, survived = self.kept(), self._survived
        if survived is not None:
            survived = msgspec.structs.replace(survived, num_waiting=len(kept))
        lost = self._log.rows_lost
        texts = self._open_texts.frames(time.monotonic_ns())
        return ServiceState(
            reason,
            live,
            self._totals,
            lost,
            self.swaps,
            kept,
            survived,
            texts,
            self._log.unwritten,
        )

    def _check_when_idle(self) -> None:
        if not self._router.is_idle or self._num_checked == self._totals.accepted:
            return
        self._num_checked = self._totals.accepted
        try:
            self._router.check_invariants()
        except InvariantViolated as error:
            self.availability.violation = str(error)
            self.event("error", "invariant.violated", str(error))
