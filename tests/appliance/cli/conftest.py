"""What most commands are run with: a user with nothing configured, and a daemon with a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.appliance.cli_process import user_environ
from tests.worlds.fake_daemon import FakeDaemon


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return user_environ(tmp_path)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "p.sock") as fake:
        yield fake
