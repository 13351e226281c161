"""Both sides of a gap become one prompt, where the model has marks for it."""

from __future__ import annotations

import pytest

from appliance.api.core.prompts import MARKS, infill_of
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import serving
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance


def tokenizer_with(marks):
    texts = (marks.prefix, marks.suffix, marks.middle)
    return Tokenizer(byte_level(*filter(None, texts)))


@pytest.mark.parametrize("marks", MARKS)
def test_every_familys_marks_are_found(marks):
    assert infill_of(tokenizer_with(marks)) is marks
    prompt = marks.prompt("before", "behind")
    assert prompt.index("before") < prompt.index("behind") or marks.is_suffix_first


async def test_a_suffix_is_asked_for_in_the_models_marks(tmp_path):
    appliance = FakeAppliance(tokenizer_with(MARKS[0]))
    appliance.model = appliance.model.__class__("m", 256, 400, (), None, 0)
    async with serving(appliance, tmp_path / "api.sock") as served:
        assert (await served.complete(prompt="a(", suffix=")")).status_code == 200
        refused = await served.complete(prompt=[1, 2], suffix=")")
    text = "<|fim_prefix|>a(<|fim_suffix|>)<|fim_middle|>"
    assert appliance.submitted[0].prompt_text == text
    ids = appliance.submitted[0].sequences[0].prompt_token_ids
    assert appliance.tokenizer.special_id("<|fim_middle|>") == ids[-1]
    assert refused.status_code == 400


async def test_a_model_without_marks_refuses_a_suffix_by_name(tmp_path):
    appliance = FakeAppliance(Tokenizer(byte_level()))
    async with serving(appliance, tmp_path / "api.sock") as served:
        error = (await served.complete(suffix="x")).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "suffix")
