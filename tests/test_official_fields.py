"""What only a model can show: the fields of the official client against the running daemon."""

from __future__ import annotations

import json
import shutil

import httpx
import openai
import pydantic
import pytest

from tests.checkpoints import load_oracle
from tests.daemons import Daemon
from tests.family_templates import FAMILIES

MODEL = "with-tools"
USER = {"role": "user", "content": "hi"}


class Step(pydantic.BaseModel):
    """A small schema, whose values cannot grow long."""

    done: bool
    kind: str = pydantic.Field(pattern="^[ab]{1,3}$")


TOOL = openai.pydantic_function_tool(Step, name="step")


@pytest.fixture(scope="module")
def folder(tiny_llama, tmp_path_factory):
    """The tiny model with a template that takes tools."""
    folder = tmp_path_factory.mktemp("models") / MODEL
    shutil.copytree(tiny_llama, folder)
    (folder / "chat_template.jinja").write_text(FAMILIES["qwen"])
    return folder


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    daemon = Daemon(tmp_path_factory.mktemp("fields"), model=folder).wait_ready()
    yield daemon
    daemon.assert_all_free()
    assert daemon.stop() == 0


@pytest.fixture(scope="module")
def client(served):
    transport = httpx.HTTPTransport(uds=str(served.socket))
    with openai.OpenAI(
        base_url="http://localhost/v1",
        api_key="-",
        max_retries=0,
        http_client=httpx.Client(transport=transport, timeout=60),
    ) as client:
        yield client


def text_of(client, **fields) -> str:
    fixed = {"model": MODEL, "prompt": "a b", "max_tokens": 24, "temperature": 0}
    return client.completions.create(**(fixed | fields)).choices[0].text


def ids_of(served, **fields) -> list[int]:
    return served.complete("a b", max_tokens=24, ignore_eos=True, **fields)["choices"][0][
        "token_ids"
    ]


def test_penalties_change_the_output(served):
    plain = ids_of(served)
    assert ids_of(served) == plain
    for penalty in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        punished = ids_of(served, **{penalty: 2})
        assert len(set(punished)) >= len(set(plain))
        assert punished != plain


def test_a_bias_forces_a_token_and_forbids_another(served):
    first = ids_of(served)[0]
    assert set(ids_of(served, logit_bias={"65": 100})) == {65}
    assert first not in ids_of(served, logit_bias={str(first): -100})[:1]


def test_choices_differ_and_repeat(client):
    def texts():
        reply = client.completions.create(
            model=MODEL, prompt="a", n=3, seed=1, temperature=2, max_tokens=12
        )
        return [choice.text for choice in reply.choices]

    assert texts() == texts()
    assert len(set(texts())) == 3


def test_no_output_ends_before_the_minimum(served, client):
    eos = {"logit_bias": {"297": 100}}  # the tiny model's end-of-text id
    assert served.complete("x", max_tokens=9, **eos)["usage"]["completion_tokens"] == 1
    held = served.complete("x", max_tokens=9, min_tokens=5, **eos)
    assert held["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_an_echo_are_the_models_own(served, folder, stream):
    import torch

    prompt = "To be, or not to be: that is the question, and so on and on."
    fields = {"echo": True, "logprobs": 2, "max_tokens": 4}
    if stream:
        choices = [chunk["choices"][0] for chunk in served.stream(prompt, **fields)]
    else:
        choices = served.complete(prompt, **fields)["choices"]
    assert "".join(choice["text"] for choice in choices).startswith(prompt)
    ids = [one for choice in choices for one in choice.get("prompt_token_ids", [])]
    ids += [one for choice in choices for one in choice["token_ids"]]
    found = [
        one
        for choice in choices
        if choice["logprobs"]
        for one in choice["logprobs"]["token_logprobs"]
    ]
    with torch.inference_mode():
        logits = load_oracle(folder)(torch.tensor([ids])).logits[0]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    wanted = [logprobs[at, token_id].item() for at, token_id in enumerate(ids[1:])]
    assert found[0] is None
    assert found[1:] == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("temperature", [0, 2])
def test_answers_have_the_form_that_was_asked_for(client, temperature):
    reply = client.chat.completions.parse(
        model=MODEL,
        messages=[USER],
        response_format=Step,
        temperature=temperature,
        seed=3,
        max_tokens=400,
    )
    assert isinstance(reply.choices[0].message.parsed, Step)
    assert reply.choices[0].finish_reason == "stop"


def test_choices_and_patterns_bind_completions_too(client):
    choice = text_of(client, extra_body={"guided_choice": ["yes", "no"]})
    assert choice in ("yes", "no")
    digits = text_of(client, extra_body={"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}})
    assert len(digits) == 6
    assert digits.replace("-", "").isdigit()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "step"}}])
def test_required_calls_always_parse(client, choice):
    fixed = {"model": MODEL, "messages": [USER], "tools": [TOOL], "tool_choice": choice}
    fixed |= {"temperature": 2, "seed": 5, "max_tokens": 900, "parallel_tool_calls": False}
    whole = client.chat.completions.parse(**fixed).choices[0]
    (call,) = whole.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Step)
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    with client.chat.completions.stream(**fixed) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    assert final.finish_reason == "tool_calls"


def test_free_text_with_tools_at_hand_is_served(client):
    reply = client.chat.completions.create(
        model=MODEL, messages=[USER], tools=[TOOL], temperature=1.5, seed=1, max_tokens=60
    )
    message = reply.choices[0].message
    for call in message.tool_calls or []:
        assert Step(**json.loads(call.function.arguments))
    assert message.content or message.tool_calls
