"""Fields of vLLM's and llama.cpp's servers that are served here, or refused by name."""

from __future__ import annotations

import pytest

from engine.tokenizer import Tokenizer
from tests.appliance.api_server import says, serving
from tests.fakes import FakeAppliance
from tests.tiny_tokenizers import CHATML, byte_level


@pytest.fixture
def appliance():
    template = CHATML + "{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=template))
    appliance.model = appliance.model.__class__("m", 64, 300, (257,), None, 0)
    return appliance


@pytest.fixture
async def served(appliance, tmp_path):
    async with serving(appliance, tmp_path / "api.sock") as served:
        yield served


def sampling_of(appliance):
    return appliance.submitted[-1].sequences[0].sampling


async def test_llamas_names_are_those_of_the_same_things(served, appliance):
    await served.complete(n_predict=3, repeat_penalty=1.5)
    assert (sampling_of(appliance).max_tokens, sampling_of(appliance).repetition_penalty) == (
        3,
        1.5,
    )
    await served.complete(n_predict=-1, max_tokens=5, repeat_penalty=1.5, repetition_penalty=1.2)
    assert (sampling_of(appliance).max_tokens, sampling_of(appliance).repetition_penalty) == (
        5,
        1.2,
    )
    await served.complete(grammar='root ::= "a"', max_tokens=3)
    assert sampling_of(appliance).grammar is not None
    await served.complete(json_schema={"type": "object"}, max_tokens=3)
    assert sampling_of(appliance).grammar is not None


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("typical_p", 0.5, 1.0),
        ("mirostat", 2, 0),
        ("xtc_probability", 0.1, 0.0),
        ("dry_multiplier", 0.8, 0),
        ("bad_words", ["x"], []),
        ("allowed_token_ids", [1], []),
        ("prompt_logprobs", 1, None),
    ],
)
async def test_what_would_change_the_answer_is_refused_by_name(served, name, value, neutral):
    error = (await served.complete(**{name: value})).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)
    assert (await served.complete(**{name: neutral}, max_tokens=2)).status_code == 200


async def test_a_bias_that_is_wrong_is_named(served):
    error = (await served.complete(logit_bias={"5": 1, "999": 1})).json()["error"]
    assert error["param"] == "logit_bias.999"
    error = (await served.complete(logit_bias={"5": 200})).json()["error"]
    assert error["param"] == "logit_bias.5"


async def test_a_prompt_is_cut_to_its_last_tokens(served, appliance):
    await served.complete(prompt=[1, 2, 3, 4], truncate_prompt_tokens=2, max_tokens=2)
    assert appliance.submitted[-1].sequences[0].prompt_token_ids == [3, 4]
    await served.complete(prompt="x" * 500, truncate_prompt_tokens=-1, max_tokens=4)
    assert appliance.submitted[-1].sequences[0].num_prompt_tokens == 60
    assert (await served.complete(prompt="x" * 500, max_tokens=4)).status_code == 400


async def test_special_tokens_and_stop_strings_are_shown_on_request(served, appliance):
    says(appliance, "a<|im_start|>b STOP c")
    asked = {"max_tokens": 40, "stop": "STOP"}
    for shown, text in ((False, "ab "), (True, "a<|im_start|>b STOP")):
        reply = await served.complete(
            **asked, skip_special_tokens=not shown, include_stop_str_in_output=shown
        )
        assert reply.json()["choices"][0]["text"] == text


async def test_an_echo_has_special_tokens_that_were_sent_by_id(served, appliance):
    start = appliance.tokenizer.special_id("<|im_start|>")
    reply = await served.complete(prompt=[start, 68], echo=True, max_tokens=0)
    letter = appliance.tokenizer.decode([68])
    assert reply.json()["choices"][0]["text"] == f"<|im_start|>{letter}"


async def test_documents_reach_the_template(served, appliance):
    await served.chat(documents=[{"text": "facts"}], max_tokens=2)
    assert appliance.submitted[-1].prompt_text.endswith("facts")


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions"])
async def test_a_path_may_be_without_its_version(served, path):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    assert (await served.http.post(path, json=body)).status_code == 200
    assert (await served.http.get("/nothing")).status_code == 404


async def test_aliases_name_the_model(served, appliance):
    appliance.model = appliance.model.__class__("m", 64, 300, (), None, 0, aliases=("gpt-*", "x"))
    for name, status in (("gpt-4o", 200), ("x", 200), ("m:latest", 200), ("y", 404)):
        reply = await served.complete(model=name, max_tokens=2)
        assert reply.status_code == status
    assert (await served.http.get("/v1/models/gpt-4o")).json()["id"] == "m"
