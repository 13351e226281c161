"""A request of Dynamo's as a body for the daemon, and what comes back as an output."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.api.openai.ask import completion_ask
from appliance.daemon.requests.request import ModelInfo
from appliance.dynamo import completion_requests
from appliance.dynamo.completion_requests import Prompts, UnsupportedRequest, completion_body
from appliance.dynamo.outputs import LostError, output_of, raise_error
from appliance.dynamo.served_model import ServedModel

SERVED = ServedModel("tiny", Path("/models/tiny"), 100, 16, 50)
MODEL = ModelInfo("tiny", 100, 50, (1,), None, 0)
STOP = {
    "max_tokens": 8, "stop": ["zz"], "stop_token_ids": None, "stop_token_ids_visible": None,
    "stop_token_ids_hidden": [1], "min_tokens": 5, "ignore_eos": None, "max_thinking_tokens": None,
}  # fmt: skip
SAMPLING = {
    "n": None, "best_of": None, "presence_penalty": None, "frequency_penalty": 0.5,
    "repetition_penalty": None, "temperature": 0.7, "top_p": None, "top_k": None, "min_p": None,
    "use_beam_search": None, "length_penalty": None, "seed": 7, "include_stop_str_in_output": None,
    "guided_decoding": None,
}  # fmt: skip
OUTPUT = {"logprobs": None, "prompt_logprobs": None, "skip_special_tokens": None}


def request(*, token_ids=(5, 6, 7), stop=None, sampling=None, output=None, **more) -> dict:
    """As the frontend of 1.6.1 sends them."""
    return {
        "model": "tiny",
        "token_ids": list(token_ids),
        "stop_conditions": {**STOP, **(stop or {})},
        "sampling_options": {**SAMPLING, **(sampling or {})},
        "output_options": {**OUTPUT, **(output or {})},
        "eos_token_ids": [1],
        "annotations": [],
        "routing": {},
        **more,
    }


def body(num_output=0, **fields) -> dict:
    return completion_body(request(**fields), "r1", num_output, SERVED).body


def test_its_fields_are_ours():
    asked = body(routing={"cache_salt": "s"}, stop={"stop_token_ids": [9]})
    assert (asked["prompt"], asked["max_tokens"], asked["min_tokens"]) == ([5, 6, 7], 8, 5)
    assert (asked["seed"], asked["temperature"], asked["frequency_penalty"]) == (7, 0.7, 0.5)
    assert (asked["stop_token_ids"], asked["cache_salt"]) == ([9], "s")
    assert "stop" not in asked  # the frontend finds these
    assert "presence_penalty" not in asked
    read = completion_ask(asked, MODEL, 1)
    assert not read.ignored


def test_what_comes_again_goes_on_with_all_of_its_output():
    asked = body(3, token_ids=(5, 6, 7, 8, 9, 10), stop={"max_tokens": 5, "min_tokens": 2})
    assert (asked["output_offset"], asked["max_tokens"], asked["min_tokens"]) == (3, 5, 5)


def test_without_a_seed_it_has_one_that_goes_with_it():
    first = body(sampling={"seed": None})["seed"]
    again = body(1, sampling={"seed": None})["seed"]
    other = completion_body(request(sampling={"seed": None}), "r2", 0, SERVED).body["seed"]
    assert first == again != other
    assert 0 <= first < 2**63


def test_an_answer_may_be_as_long_as_the_context_leaves():
    assert body(stop={"max_tokens": None})["max_tokens"] == 97
    assert body(stop={"max_tokens": 1000})["max_tokens"] == 97
    with pytest.raises(UnsupportedRequest, match="context is 100"):
        body(token_ids=range(100))


@pytest.mark.parametrize("form", [{"json": {"type": "object"}}, {"regex": "a+"}, {"choice": ["a"]}])
def test_forms_of_answers_are_passed_on(form):
    guided = {"json": None, "regex": None, "choice": None, "grammar": None, **form}
    assert body(sampling={"guided_decoding": guided})["structured_outputs"] == form


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sampling": {"n": 2}}, "`n`"),
        ({"sampling": {"use_beam_search": True}}, "use_beam_search"),
        ({"sampling": {"guided_decoding": {"structural_tag": {}}}}, "structural_tag"),
        ({"output": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"routing": {"lora_name": "a"}}, "LoRA"),
        ({"multi_modal_data": {"image_url": []}}, "text only"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(fields, says):
    with pytest.raises(UnsupportedRequest, match=says):
        body(**fields)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=20))
def test_the_first_that_is_heard_of_a_prompt_is_its_length(heard):
    prompts, first = Prompts(), {}
    for request_id, num_tokens in heard:
        assert prompts.came(request_id, num_tokens) == (request_id not in first)
        first.setdefault(request_id, num_tokens)
        for longer in range(3):
            assert prompts.num_output(request_id, first[request_id] + longer) == longer
    assert prompts.num_output("never heard of", 9) == 0


def test_old_prompts_are_forgotten(monkeypatch):
    monkeypatch.setattr(completion_requests, "MAX_PROMPTS", 2)
    prompts = Prompts()
    for request_id in "abc":
        prompts.came(request_id, 5)
    assert [prompts.num_output(one, 7) for one in "abc"] == [0, 2, 2]


# What comes back


def test_tokens_their_ends_and_the_usage_are_outputs():
    assert output_of(b'data: {"choices":[{"index":0,"text":"a","token_ids":[4]}]}') == {
        "token_ids": [4]
    }
    ended = b'data: {"choices":[{"text":"","token_ids":[1],"finish_reason":"stop"}]}'
    assert output_of(ended) == {"token_ids": [1], "finish_reason": "stop"}
    assert output_of(b'data: {"choices":[],"usage":{"prompt_tokens":3}}') == {
        "completion_usage": {"prompt_tokens": 3}
    }
    assert output_of(b"data: [DONE]") is output_of(b": waiting") is output_of(b"data:") is None


def test_log_probabilities_are_ranked():
    line = (
        b'data: {"choices":[{"token_ids":[4],"logprobs":{"token_logprobs":[-1.0],"tokens":[""],'
        b'"top_logprobs":[{"token_id:9":-0.5,"token_id:4":-1.0}]}}]}'
    )
    told = output_of(line)
    assert told["log_probs"] == [-1.0]
    assert [(one["rank"], one["token_id"]) for one in told["top_logprobs"][0]] == [(1, 9), (2, 4)]


def test_the_clients_fault_stays_with_it_and_all_else_goes_elsewhere():
    with pytest.raises(UnsupportedRequest, match="no such"):
        raise_error({"message": "no such", "type": "invalid_request_error"})
    for kind in ("unavailable_error", "rate_limit_error", "server_error", None):
        with pytest.raises(LostError):
            raise_error({"message": "busy", "type": kind})
    with pytest.raises(LostError):
        output_of(b'data: {"error":{"message":"it died","type":"server_error"}}')
