"""The arms of a comparison: servers that are there, and daemons that it starts for itself.

Owns: those daemons' processes and their temporary folders. Called by: rounds, cli.
Invariant: what was started is stopped when the `with` ends, however it ends; a server that was
there is left as it was.
Never: measures.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from appliance import address, config
from appliance.bench.exchange import exchange
from appliance.bench.reply import Reply
from appliance.bench.target import Target
from appliance.client import Client, ClientError
from engine.errors import ConfigError, PenstockError

ROLES = ("static", "colocated", "elastic")
READY_S = 300.0
STOP_S = 30.0
WARM_UP_S = 120.0
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_NAMED = re.compile(r"([\w.+-]+)=(.+)")
_OWN_SETTINGS = ("config", "socket", "state_dir", "roles", "listen", "host", "api_key")
"""Of the environment, these would make two daemons one; the others hold for every arm."""


class Arms:
    """Targets by label, each met and warmed up when it is asked for; use it in a `with`.

    Args:
        specs: of each arm an address, or roles with which to start a daemon; `NAME=` may precede.
        model: for the daemons that are started; None: what the settings say.
        is_text: send prompts as text.
        is_alone: start a daemon anew for each use, so that no other is there meanwhile.
        warm_up: prompt and output tokens of the request that is not measured.

    Raises:
        ConfigError: a spec is wrong, or two have one label.
    """

    def __init__(
        self,
        specs: Sequence[str],
        *,
        model: str | None,
        is_text: bool = False,
        is_alone: bool = False,
        warm_up: tuple[int, int] = (64, 8),
        seed: int = 0,
    ) -> None:
        named = [_label_and_place(spec) for spec in specs]
        self._place_by_label = dict(named)
        if len(self._place_by_label) < len(named):
            raise ConfigError(
                "two arms have one name", where=" ".join(specs), hint="name them: NAME=ADDRESS"
            )
        self._model = model
        self._is_text = is_text
        self._is_alone = is_alone
        self._warm_up = warm_up
        self._rng = random.Random(seed)
        self._kept = ExitStack()
        self._targets: dict[str, Target] = {}

    @property
    def labels(self) -> list[str]:
        """In the order in which they were given."""
        return list(self._place_by_label)

    def __enter__(self) -> Arms:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._kept.close()

    @contextmanager
    def ready(self, label: str) -> Iterator[Target]:
        """A target to measure; its daemon, if it has one of ours, runs at least until the end.

        Raises:
            PenstockError: it does not start, does not answer, or fails the first request.
        """
        with ExitStack() as until_then:
            if label not in self._targets:
                is_brief = self._is_alone and self._place_by_label[label] in ROLES
                target = self._open(label, until_then if is_brief else self._kept)
                if is_brief:
                    yield target
                    return
                self._targets[label] = target
            yield self._targets[label]

    def _open(self, label: str, stack: ExitStack) -> Target:
        place = self._place_by_label[label]
        if place in ROLES:
            where: address.Address = stack.enter_context(started(place, self._model))
        else:
            where = address.find(place)
        target = Target(label, where, self._rng, is_text=self._is_text)
        target.meet()
        request, reply = target.request(*self._warm_up), Reply(time.perf_counter_ns())
        asyncio.run(exchange(where, request, reply, WARM_UP_S))
        if reply.problem is not None or reply.ended_ns is None:
            problem = reply.problem or f"no end within {WARM_UP_S:.0f} s"
            raise PenstockError(f"the first request failed: {problem}", where=str(where))
        target.learn_length(self._warm_up[0], reply.prompt_tokens)
        return target


@contextmanager
def started(roles: str, model: str | None) -> Iterator[address.UnixAddress]:
    """A daemon of our own with these roles, ready, on a socket in a temporary folder.

    Raises:
        PenstockError: it ended before it was ready; what it said last is in the message.
    """
    served = config.load({"model": model}).model
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        (folder / "penstock.toml").touch()
        where = address.UnixAddress(folder / "p.sock")
        command = [sys.executable, "-m", "appliance.cli", "serve", "--roles", roles]
        command += ["--socket", str(where.path), "--state-dir", str(folder / "state")]
        command += ["--config", str(folder / "penstock.toml")]
        command += [] if served is None else ["--model", str(served)]
        with (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=_environ(),
                preexec_fn=_end_with_parent,
            )
        try:
            _wait_ready(process, Client(where), folder / "stderr", roles)
            yield where
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _end_with_parent() -> None:
    """In the daemon's process: be told to stop when the benchmark is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _environ() -> dict[str, str]:
    left_out = {config.variable(name) for name in _OWN_SETTINGS}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def _wait_ready(process: subprocess.Popen[bytes], client: Client, stderr: Path, roles: str) -> None:
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise _not_started(stderr.read_text(errors="replace"), roles, process.returncode)
        try:
            client.get("/ready")
        except ClientError:  # not listening yet, or still loading
            time.sleep(_POLL_S)
        else:
            return
    raise PenstockError(f"the daemon was not ready within {READY_S:.0f} s", where=roles)


def _not_started(said: str, roles: str, code: int) -> PenstockError:
    """The daemon's own last words, which end with a hint if it has one."""
    lines = said.strip().splitlines() or [f"exit code {code}"]
    is_hint = lines[-1].startswith("hint: ")
    hint = lines.pop().removeprefix("hint: ") if is_hint else ""
    problem = lines[-1].removeprefix("penstock: ") if lines else f"exit code {code}"
    return PenstockError(f"the daemon did not start: {problem}", where=roles, hint=hint)


def _label_and_place(spec: str) -> tuple[str, str]:
    named = _NAMED.fullmatch(spec)
    return (named[1], named[2]) if named else (spec, spec)
