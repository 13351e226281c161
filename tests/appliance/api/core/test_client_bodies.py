"""Bodies in the shapes that clients of now sent: each is served, and names what has no effect."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import serving
from tests.tiny_tokenizers import CHATML_WITH_CALLS, byte_level
from tests.worlds.daemon_parts import FakeAppliance

SENT = json.loads((Path(__file__).parent / "client_bodies.json").read_text())


@pytest.fixture
def appliance():
    tokenizer = Tokenizer(byte_level(), chat_template=CHATML_WITH_CALLS)
    appliance = FakeAppliance(tokenizer, max_model_len=8192)
    end_ids = (tokenizer.special_id("<|end|>"),)
    appliance.model = dataclasses.replace(appliance.model, aliases=("*",), eos_token_ids=end_ids)
    return appliance


@pytest.mark.parametrize("sent", SENT, ids=[f"{one['client']}-{i}" for i, one in enumerate(SENT)])
async def test_what_a_client_sent_is_served(appliance, tmp_path, sent):
    async with serving(appliance, tmp_path / "api.sock") as served:
        reply = await served.http.post(sent["path"], json=sent["body"], timeout=120)
    assert reply.status_code == 200, reply.text
    assert reply.headers.get("x-penstock-ignored") == sent["ignored"]
    told = appliance.submitted[0].prompt_text
    assert "words" in told or sent["path"] == "/v1/completions"
