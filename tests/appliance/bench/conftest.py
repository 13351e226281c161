import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.bench.exchange import Target
from tests.worlds.fake_openai import FakeOpenAI


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeOpenAI]:
    with FakeOpenAI(tmp_path / "peer.sock") as fake:
        yield fake


@pytest.fixture
def target(server: FakeOpenAI) -> Target:
    """The fake server on its socket, met."""
    target = Target("fake", server.unix, random.Random(0))
    target.meet()
    return target
