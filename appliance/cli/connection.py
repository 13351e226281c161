"""Connect run and chat to a daemon with the wanted model; wait for it or start it.

Invariant: a daemon started here ends with the command. A download is announced with its name,
source and size.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from appliance.cli import models, terminal
from appliance.cli.terminal import ProgressLine
from appliance.client.address import UnixAddress
from appliance.client.calls import Client, DaemonAbsent, ReplyError
from appliance.client.ephemeral import users_daemon
from appliance.configuration import client_settings, paths
from appliance.configuration.setting_kinds import nearest
from appliance.hub import cache
from appliance.hub.names import HubName, NoSuchModel, is_model_file
from appliance.hub.short_names import SHORT_NAMES
from engine.errors import AlreadyRunning
from engine.printable import printable

SAMPLING: Mapping[str, float] = {"temperature": 0.6, "top_p": 0.9}
"""Default sampling; at the API's temperature of 1 small models ramble."""
Answer = TypeVar("Answer")
POLL_S = 0.2
GRACE_S = 3.0
"""Maximum seconds to wait for a new daemon's lock."""
MAX_START_S = 20.0
"""Maximum seconds from the lock to the socket; the daemon reads a model's header meanwhile."""
_WITH_TAG = re.compile(r"[a-z][a-z0-9.-]*:[\w.-]+")
"""Matches a short name such as `llama3.2:1b`, known or not."""


class ChosenModel(NamedTuple):
    """The model that requests go to."""

    name: str | None
    """The model's name in requests; None: any served model."""
    about: Mapping[str, Any]
    """Its entry of /v1/models."""

    @property
    def sampling(self) -> dict[str, float]:
        """Default sampling for values that neither the user nor the model sets."""
        own = self.about.get("sampling") or {}
        return {n: v for n, v in SAMPLING.items() if own.get(n, {}).get("source") != "model"}


class Connection:
    """Connect to the daemon, starting one if needed."""

    def __init__(self, host: str | None) -> None:
        self.client = terminal.client(host)
        self._is_named = bool(host or os.environ.get("PENSTOCK_HOST"))
        self._models: list[dict[str, Any]] = []
        self._absent: DaemonAbsent | None = None
        try:
            self._models = self._listed()
        except DaemonAbsent as error:
            self._absent = error
            if self._is_starting():
                self._absent = None
                self._models = self._listed()

    def names_model(self, word: str) -> bool:
        """Say whether a first word names a model and is not a prompt."""
        if not word or any(char.isspace() for char in word):
            return False
        if any(word == model["id"] for model in self._models) or _WITH_TAG.fullmatch(word):
            return True
        meant = client_settings.model_named(word, terminal.passed_over)
        looks_like_path = word.startswith(("/", "./", "../", "~/"))
        return isinstance(meant, HubName) or looks_like_path or is_model_file(meant)

    @contextmanager
    def with_model(self, asked: str | None) -> Iterator[ChosenModel]:
        """Have the model served until the `with` ends; None: the daemon's current one.

        Raises:
            ClientError: no daemon runs, and none may be started.
            NoSuchModel: the model does not exist, or the daemon serves another.
        """
        self.check(asked)
        if self._absent is None:
            yield self._chosen(asked)
            return
        with self._started(self._absent, asked):
            self._models = self._listed()
            is_own = self._absent is not None
            yield ChosenModel(None, self._models[0]) if is_own else self._chosen(asked)

    def check(self, asked: str | None) -> None:
        """Refuse an unavailable model before anything is started for it.

        Raises:
            NoSuchModel: no model has this name, or the running daemon serves another.
        """
        if asked is not None and self._absent is None:
            self._found(asked)
        elif asked is not None:
            _check_exists(asked, client_settings.model_named(asked, terminal.passed_over))

    def _is_starting(self) -> bool:
        """Wait for a daemon that may be starting here; whether it listens now."""
        where, began_s = self.client.address, time.monotonic()
        if not isinstance(where, UnixAddress):
            return False
        grace_s = GRACE_S / 3 if self._may_start else GRACE_S
        folder, line = client_settings.state_dir(None, warn=terminal.passed_over), ProgressLine()
        try:
            while (waited_s := time.monotonic() - began_s) < MAX_START_S:
                with suppress(OSError):
                    where.dial(1.0).hang_up()
                    return True
                is_own = paths.is_of_socket(folder, where.path)
                if waited_s > grace_s and not (is_own and paths.is_daemon_alive(folder)):
                    return False
                line.wait("no daemon yet; waiting for one that starts")
                time.sleep(POLL_S)
        finally:
            line.end()
        return False

    @property
    def _may_start(self) -> bool:
        """Whether a daemon may be started here: for a person, and where none was named."""
        where = self.client.address
        is_ours = isinstance(where, UnixAddress) and where.path != paths.SYSTEM_SOCKET
        return is_ours and not self._is_named and sys.stderr.isatty()

    def _listed(self) -> list[dict[str, Any]]:
        """List the daemon's models, the one served first at the beginning."""
        reply = when_loaded(self.client, lambda: self.client.awaited("/v1/models"))
        return model_entries(self.client, self.client.listed(reply)) or [{"id": ""}]

    def _chosen(self, asked: str | None) -> ChosenModel:
        """Choose the model, loading it if the daemon knows it and serves another now."""
        if asked is None:
            served = self._models[0]
            has_others = any("kind" not in model for model in self._models[1:])
            # a request without a name is for the first model, for which the served one would leave
            return ChosenModel(served["id"] if has_others else None, served)
        about = self._found(asked)
        if about.get("is_loaded") is False:
            about = load(self.client, str(about["id"]), self._models[0]["id"])
        return ChosenModel(str(about["id"]), about)

    def _found(self, asked: str) -> dict[str, Any]:
        """Find the daemon's entry of a model by any kind of name.

        Raises:
            NoSuchModel: it has none.
        """
        meant = client_settings.model_named(asked, terminal.passed_over)
        ids = client_settings.ids_of(asked, terminal.passed_over)
        for model in self._models:
            root = Path(model.get("root") or "/")
            if model["id"] in ids or meant in (
                root,
                root.parent if root.is_file() else root,
            ):
                return model
        try:
            return _entry(self.client, asked)  # it knows its aliases
        except ReplyError as error:
            if error.status != 404:
                raise
            _check_exists(asked, meant)
            file = paths.config_file_to_edit(os.environ)
            raise NoSuchModel(
                f"the daemon serves {self._models[0]['id']}",
                where=asked,
                hint=f"{_how_to_serve(asked, meant)}; or name both as [models.NAME] in {file}",
            ) from error

    @contextmanager
    def _started(self, absent: DaemonAbsent, asked: str | None) -> Iterator[None]:
        """Run a daemon on the usual socket, with the user's settings, until the `with` ends.

        One that a `serve` of the same moment starts there is used instead.

        Raises:
            DaemonAbsent: `absent`, where none may be started.
        """
        where = self.client.address
        meant = None if asked is None else client_settings.model_named(asked, terminal.passed_over)
        if not self._may_start:
            if asked is not None:
                absent.hint = f"start it with 'penstock serve --model {asked}'"
            raise absent
        wanted = meant or client_settings.models_named(terminal.passed_over)[0]
        root = cache.hub_cache(os.environ)
        if isinstance(wanted, HubName) and cache.resolve(root, wanted) is None:
            models.fetch(wanted)
        assert isinstance(where, UnixAddress)
        terminal.note("penstock: no daemon is running; starting one until this command ends")
        line = ProgressLine()
        daemon = users_daemon(where, meant, lambda reason: line.wait(_loading_text(reason)))
        with ExitStack() as stack:
            try:
                stack.enter_context(daemon)
            except AlreadyRunning:
                if not self._is_starting():
                    raise
                self._absent = None
            finally:
                line.end()
            yield


def load(client: Client, name: str, served: str) -> dict[str, Any]:
    """Load a model in place of the served one, and return its entry of /v1/models."""
    terminal.note(f"penstock: loading {printable(name)} in place of {printable(served)} ...")
    with client.stream("/api/generate", {"model": name, "stream": True}) as events:
        for _ in events:
            pass
    return _entry(client, name)


def _entry(client: Client, name: str) -> dict[str, Any]:
    return model_entries(client, [client.awaited(f"/v1/models/{quote(name)}")])[0]


def model_entries(client: Client, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return entries of /v1/models with what is read of them in its type.

    Raises:
        UnusableAnswer: they are none.
    """

    def sampling(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
        own = row.get("sampling") or {}
        return {n: {**each, "value": float(each["value"])} for n, each in own.items()}

    with client.reading():
        return [
            {
                **row,
                "id": str(row["id"]),
                "root": str(row.get("root") or ""),
                "sampling": sampling(row),
            }
            for row in rows
        ]


def when_loaded(client: Client, ask: Callable[[], Answer]) -> Answer:
    """Ask the daemon something; while its model loads, wait and ask again.

    Raises:
        ClientError: as `ask`.
    """
    try:
        return ask()
    except ReplyError as error:
        if error.code != "model_loading":
            raise
    line = ProgressLine()
    try:
        while (frame := client.get("/v1/penstock/state")).get("state") == "loading":
            line.wait(_loading_text(frame.get("state_reason")))
            time.sleep(POLL_S)
    finally:
        line.end()
    return ask()


def _loading_text(reason: object) -> str:
    return "loading the model" if reason in (None, "", "model_loading") else printable(reason)


def _how_to_serve(asked: str, meant: Path | HubName) -> str:
    """Say what to run so that a daemon of this machine serves a model that exists."""
    name = shlex.quote(asked)
    serve = f"`penstock stop` and `penstock serve --model {name}`"
    if isinstance(meant, HubName) and cache.resolve(cache.hub_cache(os.environ), meant) is None:
        return f"it is not on this machine: run `penstock pull {name}`, {serve}"
    return f"it is on this machine: run {serve}"


def _check_exists(asked: str, meant: Path | HubName) -> None:
    """Refuse a name that is neither on the hub nor on this machine.

    Raises:
        NoSuchModel: it is not.
    """
    if isinstance(meant, HubName) or is_model_file(meant):
        return
    near = nearest(asked, SHORT_NAMES)
    hint = "use owner/model, a folder or a .gguf file; `penstock list` shows what is here"
    raise NoSuchModel(f"no model {asked!r}", hint=f"is {near} meant? {hint}" if near else hint)
