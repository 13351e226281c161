"""What most tests of the api serve: a FakeAppliance behind a socket; some have one of their own."""

import pytest

from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import serving
from tests.tiny_tokenizers import CHATML, byte_level
from tests.worlds.daemon_parts import FakeAppliance


@pytest.fixture
def appliance():
    return FakeAppliance(Tokenizer(byte_level(), chat_template=CHATML))


@pytest.fixture
async def served(appliance, tmp_path):
    async with serving(appliance, tmp_path / "api.sock") as served:
        yield served
