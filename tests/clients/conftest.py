"""One daemon on the model that was named, and its two doors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.clients.doors import Door
from tests.daemons import DOORS, Daemon, make_keys


@pytest.fixture(scope="session")
def daemon(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("served"), Path(os.environ["PENSTOCK_CHECKED_MODEL"])
    path, keys = make_keys(folder, laptop="user")
    daemon = Daemon(
        folder, "--listen", "127.0.0.1:0", "--api-keys", str(path), "--model-aliases", "*",
        "--kv-memory", "512MiB", model=model,
    )  # fmt: skip
    daemon.key = keys["laptop"]
    yield daemon.wait_ready()
    daemon.assert_all_free()
    assert daemon.stop() == 0


@pytest.fixture(params=DOORS)
def door(daemon, request):
    if request.param == "tcp":
        return Door(daemon.tcp_url, daemon.key, None)
    return Door("http://localhost", "-", str(daemon.socket))
