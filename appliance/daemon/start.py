"""Run the daemon: start in order, serve, reload, drain, stop in reverse.

Invariant: the first SIGTERM or SIGINT drains, the second ends every reply at once; workers and the
socket are gone when it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import TypeVar

import msgspec

from appliance.api.routes import build_app
from appliance.client.address import TcpAddress
from appliance.configuration import paths
from appliance.configuration.config import changes, take_over, unknown_variables
from appliance.configuration.folders import check_directories, prepare_directories
from appliance.configuration.settings import ServeConfig
from appliance.daemon.announcement import IS_OPEN, OPEN_CODE, announcement
from appliance.daemon.models.loading import Fetching
from appliance.daemon.models.model_in_service import ModelInService, end_model
from appliance.daemon.models.residents import Residents
from appliance.daemon.models.swapping import Swapping
from appliance.daemon.process.disk_reads import read_in_thread
from appliance.daemon.process.garbage import GarbageSearch
from appliance.daemon.process.limits import raise_limit, share_interpreter, standing_threads
from appliance.daemon.process.log_lines import Formatter, has_terminal, own_command
from appliance.daemon.process.repeated_lines import RepeatedLines
from appliance.daemon.process.stacks import wait_for_signal
from appliance.daemon.requests.request import CLIENT_CLOSED_REQUEST, HUNG_UP
from appliance.daemon.requests.row import LogRow, kept_frame
from appliance.daemon.serving.service import Service
from appliance.daemon.survival.keeper import ENDED_BY, RESTART_STATUS, check_next
from appliance.daemon.survival.keeper_channel import (
    BUSY_LOOP,
    close_channel,
    has_keeper,
    notify,
    notify_watchdog,
)
from appliance.daemon.survival.kept_pools import KeptPools
from appliance.daemon.survival.kept_replies import LeftReplies, LeftReply
from appliance.fleet.boot import BootPlan, lock_state_dir, make_plan
from appliance.fleet.boot_check import check_others
from appliance.fleet.core_claims import CoreNote
from appliance.fleet.model_files import to_be_fetched
from appliance.fleet.own_cpus import OWN_CPUS
from appliance.fleet.placed_model import PlacedModel, place
from appliance.http.access import AccessPolicy, credential_path
from appliance.http.listeners import (
    KEPT,
    ListenerCloser,
    PassedSockets,
    check_path,
    open_listeners,
    passed_sockets,
)
from appliance.http.server import ApiServer
from appliance.observe.frame.figures import things
from appliance.observe.frame.late_frames import SurvivedFrame
from appliance.observe.frame.protocol import RequestFrame, utc_now
from appliance.observe.log.retention import RetentionLimits
from appliance.observe.log.writer import RequestLog
from appliance.observe.telemetry.progress import LOOK_INTERVAL_S
from engine.errors import ConfigError, PenstockError
from engine.text.read_models import read_tokenizer
from engine.text.reading import READER
from engine.text.tokenizer_fit import MISFIT_CODE, misfits

log = logging.getLogger("penstock")

T = TypeVar("T")

NUM_THREADS = 8
"""Threads of the loop, for files and for processes that end."""
FRAME_INTERVAL_S = 1.0
LOG_PATIENCE_S, LOG_RETRY_S = 60.0, 0.5
REPLY_GRACE_S = 3.0
"""Between aborting what is live and closing the connections."""


def serve(load_config: Callable[[], ServeConfig]) -> int:
    """Run the daemon until it is told to stop; the exit code.

    Args:
        load_config: called now, and again for each SIGHUP.

    Raises:
        PenstockError: it could not start.
    """
    if sys.platform != "linux":
        raise PenstockError("penstock runs on Linux only", where=sys.platform)
    handler = RepeatedLines(sys.stderr)
    handler.setFormatter(Formatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    log.setLevel(logging.INFO)
    faulthandler.enable()  # for the keeper's SIGABRT
    # until there is something to reload; nohup has it ignored already
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    is_under_nohup = signal.signal(signal.SIGHUP, signal.SIG_IGN) is signal.SIG_IGN
    share_interpreter()
    passed = passed_sockets(os.environ)
    config = load_config()
    if about := raise_limit(config.max_connections):
        log.warning("%s", about)
    for sentence in unknown_variables():
        log.warning("%s", sentence)
    policy, placed, _ = check(config, passed.pools)
    prepare_directories(config)
    lock_fd = lock_state_dir(config.state_dir, config.socket)
    stacks_fd = wait_for_signal(config.state_dir)
    try:
        daemon = _Daemon(config, load_config, placed, passed, stacks_fd)
        daemon.say_counts = handler.say_counts
        daemon.last_end = os.environ.pop(ENDED_BY, "")
        daemon.is_under_nohup = is_under_nohup
        daemon.garbage = GarbageSearch()
        return asyncio.run(daemon.run(policy))
    finally:
        close_channel()
        os.close(lock_fd)


def check(
    config: ServeConfig, kept_pools: KeptPools | None = None
) -> tuple[AccessPolicy, PlacedModel | None, list[str]]:
    """Find what a start would refuse, without making, locking or timing anything.

    Args:
        kept_pools: of a dead daemon; None: there was none.

    Returns:
        the access policy; the placed model, None if it or one beside it has to be downloaded first;
        and a sentence on each of the others that a request may name.

    Raises:
        ConfigError: naming what is wrong.
        PenstockError: a disk hangs.
    """
    policy = AccessPolicy.from_config(config)
    check_directories(config)
    check_path(config.socket)
    look = partial(_look_at_models, config, kept_pools)
    disks = f"a disk of {', '.join(map(str, config.models))}, or " if config.models else ""
    return policy, *asyncio.run(read_in_thread(disks + _disk(config), look, log.warning))


def _look_at_models(
    config: ServeConfig, kept_pools: KeptPools | None
) -> tuple[PlacedModel | None, list[str]]:
    others = check_others(config)
    if to_be_fetched(config):
        return None, others
    return place(config, kept_pools=kept_pools), others


def _disk(config: ServeConfig) -> str:
    return f"the disk of {config.model or 'the starter model'}"


def _address(listener: socket.socket, is_tls: bool) -> str:
    """Return the address that clients use."""
    if listener.family == socket.AF_UNIX:
        return str(listener.getsockname())
    host, port = listener.getsockname()[:2]
    return str(TcpAddress(host, port, is_tls))


def _log_limits(config: ServeConfig) -> RetentionLimits:
    return RetentionLimits(config.log_keep_days, config.log_max_bytes)


class _Daemon:
    """One run; built in the order in which it starts."""

    def __init__(
        self,
        config: ServeConfig,
        load_config: Callable[[], ServeConfig],
        placed: PlacedModel | None,
        passed: PassedSockets,
        stacks_fd: int,
    ) -> None:
        """Take what check() decided; `placed` is None if the model is to be downloaded first."""
        self._config = config
        self._load_config = load_config
        self._placed = placed
        self._served = ModelInService(lambda: self._config, stacks_fd)
        self._swapping: Swapping | None = None
        self._core_note = CoreNote(config.socket)
        self._inherited = passed.of_unit
        """Listeners of a socket unit; with their waiting clients they outlive this process."""
        self._left = LeftReplies(passed.replies)
        self._kept_pools = passed.pools
        self._kept = passed.kept
        """Listeners of a daemon that has died."""
        self._num_signals = 0
        self._restarting: asyncio.Task[None] | None = None
        self._stopped_by = ""
        self._has_terminal = has_terminal()
        self.say_counts: Callable[[], None] = lambda: None
        """Writes how often lines of one kind have repeated, if that is due."""
        self.garbage: GarbageSearch | None = None
        self.is_under_nohup = False
        self.last_end = ""
        """How the daemon before ended, as the keeper says: a signal, or `restart`."""
        self._rows_left: dict[str, LogRow] = {}
        """Rows of the requests that this daemon continues."""
        self._is_ready = False
        self._drain = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self, policy: AccessPolicy) -> int:
        """Start, serve, drain, and take down in reverse what has been started.

        Args:
            policy: until a reload brings another.
        """
        loop = asyncio.get_running_loop()
        loop.set_default_executor(standing_threads(NUM_THREADS, "daemon"))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        async with contextlib.AsyncExitStack() as stack:
            limits = _log_limits(self._config)
            request_log = await self._patiently(partial(RequestLog, self._config.log_path, limits))
            self._request_log = request_log
            self._find_rows()
            stack.push_async_exit(self._close_log)
            listeners = self._bind(policy)
            for listener in listeners:
                is_inherited = listener in self._inherited
                stack.callback(ListenerCloser(listener, is_inherited=is_inherited).close)
            stack.callback(partial(notify, FDSTOREREMOVE=1, FDNAME=KEPT))
            stack.callback(self._core_note.close)
            stack.push_async_callback(self._served.close)
            stack.callback(self._left.end)
            stack.callback(asyncio.create_task(self._left.ping()).cancel)
            missing = to_be_fetched(self._config) if self._placed is None else []
            fetching = Fetching(missing, request_log) if missing else None
            app = build_app(fetching or await self._start_model())
            server = self._server = ApiServer(
                app, listeners, policy, inherited=self._inherited, is_restart=bool(self._kept)
            )
            if fetching is not None:
                server.open()  # a download takes long: clients get 503 meanwhile
            await server.start()
            stack.push_async_callback(server.stop, REPLY_GRACE_S)
            if fetching is not None:
                if not await fetching.has_fetched(unless=self._drain):
                    return 0
                app.state.appliance = await self._start_model()
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
            loop.add_signal_handler(signal.SIGUSR2, self._on_restart)
            if self._has_lost_terminal:  # while it loaded
                self._on_signal(signal.SIGHUP)
            for endless in (self._make_frames(), self._keep_watch(), self._served.measure()):
                stack.callback(asyncio.create_task(endless).cancel)
            await self._serve()
            self._service.make_frame()  # with the energy of the last steps
            request_log.end_run("clean")
        log.info("stopped")
        return 0

    async def _patiently(self, use_log: Callable[[], T]) -> T:
        """Use the log's disk; after a crash, clients wait until it takes writes again.

        Raises:
            PenstockError: it does not within LOG_PATIENCE_S, or this is no restart.
        """
        deadline, has_told = time.monotonic() + LOG_PATIENCE_S, False
        while True:
            try:
                return use_log()
            except PenstockError as error:
                if not self._kept or self._drain.is_set() or time.monotonic() >= deadline:
                    raise
                if not has_told:
                    log.error("%s; trying for %g s", error, LOG_PATIENCE_S)
                has_told = True
            await asyncio.sleep(LOG_RETRY_S)

    async def _close_log(self, _: object, error: BaseException | None, __: object) -> None:
        """Close the log; an error that ends this run is written there for the next start."""
        if isinstance(error, PenstockError):
            self._request_log.event("error", "daemon.failed", str(error))
            self._request_log.end_run("error")
        await asyncio.to_thread(self._request_log.close)

    def _bind(self, policy: AccessPolicy) -> list[socket.socket]:
        """Return the listeners of a socket unit, or open the Unix socket and TCP if wanted."""
        families = {listener.family for listener in self._inherited}
        path = None if socket.AF_UNIX in families else self._config.socket
        tcp = self._config.listen
        if families - {socket.AF_UNIX}:
            policy.check_tcp("the socket unit's ListenStream")
            tcp = None
        listeners = self._inherited + open_listeners(path, tcp, self._kept)
        self._addresses = [_address(each, policy.tls is not None) for each in listeners]
        return listeners

    async def _start_model(self) -> Service:
        """Workers, router and service of the model, which is here now.

        Raises:
            PenstockError: its disk hangs.
        """
        disk, served = _disk(self._config), self._served
        pools = self._kept_pools if has_keeper() else None
        read_plan = partial(make_plan, self._config, self._placed, served.caches.memory, pools)
        plan = await read_in_thread(disk, read_plan, log.warning, BootPlan.close)
        self._kept_pools.give_to_keeper()
        start_run = partial(
            self._request_log.start_run,
            version=version("penstock"),
            model=plan.model_id,
            dtype=plan.dtype,
            roles=plan.roles,
            transport=plan.placement.topology.transport,
            killed_by=self.last_end if self.last_end.startswith("SIG") else "",
        )
        await self._patiently(start_run)
        served.start(plan)  # they import torch meanwhile
        on_cpu = [worker for worker in plan.placement.workers if worker.gpu is None]
        for about in self._core_note.claim({cpu for worker in on_cpu for cpu in worker.cpus}):
            log.warning("%s", about)
        read = partial(read_tokenizer, plan.checkpoint.folder)
        tokenizer = await read_in_thread(disk, read, log.warning)
        self._service = served.service = Service(
            plan,
            served.router,
            served.supervisor,
            tokenizer,
            self._request_log,
            keeps_text=self._config.log_text,
            caches=served.caches,
        )
        loop, told = asyncio.get_running_loop(), self._service.reader_told
        READER.tell = lambda sentence: loop.call_soon_threadsafe(told, sentence)
        self._service.deadlines.max_queue_wait_s = self._config.max_queue_wait_s
        self._service.continue_from(self._survived, self._kept_frames)
        if self._config.models:
            served.residents = Residents(
                plan.model_id,
                lambda: self._config,
                served.caches.memory,
                end_model,
                self._service.event,
            )
            self._swapping = Swapping(
                lambda: self._config, self._request_log, served, served.residents
            )
            self._service.swaps = self._swapping.swaps
        return self._service

    async def _serve(self) -> None:
        """Load, serve, and drain."""
        notify(STATUS="loading")
        loading = asyncio.create_task(self._served.load())
        stopping = asyncio.create_task(self._drain.wait())
        stop_now = asyncio.create_task(self._stop_now.wait())
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._left.replies:  # a drain waits for them, too
                await asyncio.wait({loading, stop_now}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                self._service.make_frame()
                self._continue_replies()
                self._server.open()
            if stopping.done():
                await self._server.has_taken_up()
            else:
                self._announce()
                notify(READY="1", STATUS="ready")
                self._is_ready = True
                if self._swapping is not None:
                    await self._swapping.run_until(stopping)
                await stopping
        finally:
            loading.cancel()
            stopping.cancel()
        notify(STOPPING="1", STATUS=f"stopping; {self._service.drain_status}")
        self._server.open()
        again = "Ctrl-C again" if self._has_terminal else f"Another {self._stopped_by}"
        self._service.stop_accepting(
            self._stopped_by, again, takes_stragglers=bool(self._inherited)
        )
        await self._server.hand_over(self._inherited)
        drained = asyncio.create_task(self._service.drained(REPLY_GRACE_S))
        limit_s = self._config.max_drain_s or None
        await asyncio.wait(
            {drained, stop_now}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not drained.done():
            if not stop_now.done():
                about = f"drain unfinished after {limit_s:g} s (max_drain): ending open requests"
                self._service.event("warning", "drain.timeout", about)
            self._service.abort_all()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(drained, REPLY_GRACE_S)
        else:
            await self._served.caches.flush(is_end=True)
        stop_now.cancel()

    def _find_rows(self) -> None:
        """Leave the requests open that this daemon continues, and end what it cannot read."""
        answered, rows = self._request_log.leave_open(self._left.request_ids)
        for left in self._left.replies:
            is_open = left.request_id in rows
            left.is_answered = left.request_id in answered or (
                left.journal.is_complete and not is_open  # its row is in the log
            )
            if (row := rows.get(left.request_id)) is not None:
                self._rows_left[left.request_id] = row
                left.on_failed = partial(self._record_failed, left, row)
        self._left.end_foreign()

    @property
    def _survived(self) -> SurvivedFrame | None:
        """Return how the daemon before ended; None: it stopped for good, or there was none."""
        crash, number = self._request_log.crash, len(self._kept_frames())
        if crash is not None:
            how = self.last_end if self.last_end.startswith("SIG") else "crash"
            return SurvivedFrame(how, crash.at, number, number)
        return SurvivedFrame("restart", utc_now(), number, number) if number else None

    def _kept_frames(self) -> list[RequestFrame]:
        """Show the requests of the daemon before that wait until this one can continue them."""
        now = time.time()
        return [
            kept_frame(self._rows_left[left.request_id], left.journal.num_tokens, now)
            for left in self._left.replies
            if not left.is_answered and left.request_id in self._rows_left
        ]

    def _record_failed(self, left: LeftReply, row: LogRow) -> None:
        """Record a request that this daemon could not continue, as its client has seen it."""
        journal, status = left.journal, left.http_status
        if status == CLIENT_CLOSED_REQUEST:
            row = msgspec.structs.replace(
                row, finish_reason="abort", error=None, cancelled_by=HUNG_UP
            )
        self._request_log.record(
            msgspec.structs.replace(
                row,
                http_status=status,
                completion_tokens=journal.num_tokens,
                recoveries=max(journal.num_deaths, 1) * row.num_sequences,
            )
        )

    def _continue_replies(self) -> None:
        if self._left.replies:
            log.info(
                "Continuing %s of the previous daemon", things(len(self._left.replies), "request")
            )
        for left in self._left.hand_over():
            self._server.take_up(left)

    def _on_signal(self, number: signal.Signals) -> None:
        self._num_signals += 1
        self._stopped_by = self._stopped_by or number.name
        (self._drain if self._num_signals == 1 else self._stop_now).set()

    def _on_restart(self) -> None:
        """Hand over to a new daemon, unless this one is starting, stopping or handing over."""
        is_at_it = self._restarting is not None and not self._restarting.done()
        if self._is_ready and not self._num_signals and not is_at_it:
            self._restarting = asyncio.create_task(self._hand_over())

    async def _hand_over(self) -> None:
        """End as a crash would: the keeper starts the next daemon, which continues the replies.

        The settings are checked before, by the program that the keeper will start.
        """
        try:
            await asyncio.to_thread(_check_next)
        except (PenstockError, OSError, subprocess.SubprocessError) as error:
            self._service.event("error", "restart.refused", f"Not restarted: {error}")
            return
        served = self._served
        if served.router.is_idle and served.plan.kept_pools is None:  # else it would only take time
            await served.caches.flush(is_end=True)
        if has_keeper() and not self._num_signals:
            await self._server.hand_over_all()
            self._service.abort_all(but_kept=True)
            await self._server.has_kept_alone()
        if self._num_signals:  # it is stopping
            return
        self._service.event("info", "restart", f"Restarting; {self._service.drain_status}")
        self._request_log.end_run("restart")
        self._request_log.close()
        os._exit(RESTART_STATUS)

    @property
    def _has_lost_terminal(self) -> bool:
        return self._has_terminal and not self.is_under_nohup and not has_terminal()

    def _on_hangup(self) -> None:
        """End with the terminal if that is what SIGHUP tells of, else read the settings again."""
        if self._has_lost_terminal:
            self._on_signal(signal.SIGHUP)
        else:
            self._reload()

    def _reload(self) -> None:
        """Take over what a running daemon can, and say what it cannot."""
        if self._is_ready:  # before that systemd would take the READY below for the start's
            notify(RELOADING="1", MONOTONIC_USEC=time.monotonic_ns() // 1000)
        try:
            wanted = self._load_config()
            policy = AccessPolicy.from_config(take_over(self._config, wanted))
        except PenstockError as error:
            self._service.event("error", "config.refused", f"nothing is reloaded: {error}")
            if self._is_ready:
                notify(READY="1", STATUS=f"ready; the last reload was rejected: {error}")
            return
        self._take_over(wanted, policy)
        if self._is_ready:
            notify(READY="1", STATUS="ready")

    def _take_over(self, wanted: ServeConfig, policy: AccessPolicy) -> None:
        changed, fixed = changes(self._config, wanted)
        config = self._config = take_over(self._config, wanted)
        if policy.keys != self._server.policy.keys:
            changed.append("keys")
        self._server.policy = policy
        self._service.deadlines.set_queue_limits(
            config.max_queued, config.max_queued_tokens, config.max_queue_wait_s
        )
        self._served.router.set_weights(dict(config.priorities))
        self._service.keeps_text = config.log_text
        if {"slo_ttft_ms", "slo_itl_ms"} & set(changed):  # else what was set live stays
            self._service.set_roles(self._served.targets(), None)
        self._request_log.set_limits(_log_limits(config))
        about = f"configuration reloaded ({', '.join(changed) or 'nothing changed'})"
        self._service.event("info", "config.reloaded", about)
        if config.api_keys is None and credential_path() is not None:
            fixed.append("the API keys, which are systemd's credential")
        if fixed:
            about = f"{', '.join(fixed)}: only a restart changes this"
            self._service.event("warning", "config.needs_restart", about)

    async def _make_frames(self) -> None:
        while True:
            await asyncio.sleep(FRAME_INTERVAL_S)
            self._service.make_frame()
            self.say_counts()

    async def _keep_watch(self) -> None:
        """Keep the deadlines, and tell systemd that this loop turns, and this task with it."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            try:
                self._service.deadlines.enforce()
            except Exception:
                log.exception("deadlines are not kept")
            else:
                notify_watchdog()
                BUSY_LOOP.watched()
            if self.garbage is not None:
                self.garbage.look(is_idle=self._service.is_quiet)

    def _announce(self) -> None:
        """Say what is served, where and how, in the words an operator needs."""
        served = self._served
        workers = served.supervisor.workers.values()
        for line in announcement(
            self._service.frame,
            self._service.model,
            served.plan.checkpoint.folder,
            abouts={worker.plan.name: worker.about for worker in workers},
            measuring=served.measuring.announce(),
            is_elastic_static=served.router.roles_now().acts_static,
            has_template=self._service.tokenizer.chat_template is not None,
            addresses=self._addresses,
            is_found=_is_looked_for(self._addresses[0]),
            texts=[one.about for one in served.plan.texts],
            command=own_command(),
        ):
            log.info("%s", line)
        for about in misfits(
            self._service.tokenizer,
            served.plan.checkpoint.config.vocab_size,
            served.plan.checkpoint.config.unknown_ends,
        ):
            self._service.event("warning", MISFIT_CODE, about)
        if self._config.is_open_to_network:
            self._service.event("warning", OPEN_CODE, f"{self._addresses[-1]} {IS_OPEN}")


def _check_next() -> None:
    """Check the settings for the next daemon, where it counts the cores that this one does."""
    with OWN_CPUS.all_in_use():
        check_next(sys.orig_argv)


def _is_looked_for(address: str) -> bool:
    """Say whether this user's clients find the address without an option."""
    try:
        return address == str(paths.client_socket(os.environ))
    except ConfigError:
        return False
