from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.openai import NEUTRAL, Ask, parse_chat, parse_completion
from appliance.request import ModelInfo
from engine.errors import RequestError

MODEL = ModelInfo("served", 100, 50, (), None, 0)
USER = {"role": "user", "content": "hi"}


def completion(**fields) -> Ask:
    return parse_completion(json.dumps({"prompt": "hi", **fields}).encode(), MODEL, max_prompts=4)


def chat(**fields) -> Ask:
    return parse_chat(json.dumps({"messages": [USER], **fields}).encode(), MODEL)


def refusal(parse, **fields) -> RequestError:
    with pytest.raises(RequestError) as error:
        parse(**fields)
    return error.value


def test_defaults_are_openais():
    ask = completion()
    sampling = ask.sampling(10, MODEL.max_model_len)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 1.0, 1.0)
    assert (sampling.top_k, sampling.min_p, sampling.logprobs) == (0, 0.0, None)
    assert not ask.is_stream
    assert not ask.include_usage
    assert sampling.seed != ask.sampling(10, MODEL.max_model_len).seed


def test_absent_max_tokens_is_what_the_context_leaves():
    assert completion().sampling(95, 100).max_tokens == 5
    assert chat().sampling(10, 100).max_tokens == 90
    assert chat().sampling(10, 100_000).max_tokens == 2048


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(100, None), (90, 11), (1, 2**62)])
def test_what_exceeds_the_context_is_refused_with_the_numbers(num_prompt_tokens, max_tokens):
    ask = chat(max_tokens=max_tokens)
    with pytest.raises(RequestError, match=f"100 tokens.*{num_prompt_tokens} for") as error:
        ask.sampling(num_prompt_tokens, 100)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    completion().check_length("x" * 500, 5, 100)
    with pytest.raises(RequestError, match="at least 100 for"):
        completion().check_length("x" * 501, 5, 100)
    with pytest.raises(RequestError, match="at least 101 for"):
        completion().check_length([1] * 101, 5, 100)


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 49], [[1, 49]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_prompts_come_in_four_forms(prompt, wanted):
    assert completion(prompt=prompt).prompts == wanted


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("", "invalid_value"),
        ([], "invalid_value"),
        ([[]], "invalid_value"),
        (["a", ""], "invalid_value"),
        ([50], "invalid_value"),
        ([-1], "invalid_value"),
        ([1.0], "invalid_type"),
        ([True], "invalid_type"),
        ([1, "a"], "invalid_type"),
        (["a", 1], "invalid_type"),
        ([[["a"]]], "invalid_type"),
        ({"a": 1}, "invalid_type"),
        (3, "invalid_type"),
        (["a"] * 5, "invalid_value"),
        (None, "missing_required_parameter"),
        ([2**70], "invalid_value"),
    ],
)
def test_prompts_that_cannot_be_are_refused(prompt, code):
    error = refusal(completion, prompt=prompt)
    assert (error.code, error.param, error.status) == (code, "prompt", 400)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("temperature", -0.1, "invalid_value"),
        ("temperature", 2.1, "invalid_value"),
        ("temperature", True, "invalid_type"),
        ("temperature", "1", "invalid_type"),
        ("temperature", 2**70, "invalid_value"),
        ("top_p", 0, "invalid_value"),
        ("top_p", 1.01, "invalid_value"),
        ("top_k", -2, "invalid_value"),
        ("top_k", 1.5, "invalid_type"),
        ("min_p", 1.5, "invalid_value"),
        ("max_tokens", 0, "invalid_value"),
        ("max_tokens", 2**63, "invalid_value"),
        ("max_tokens", "16", "invalid_type"),
        ("max_tokens", True, "invalid_type"),
        ("seed", 2**63, "invalid_value"),
        ("seed", 0.5, "invalid_type"),
        ("stop", "", "invalid_value"),
        ("stop", ["a", ""], "invalid_value"),
        ("stop", ["a"] * 17, "invalid_value"),
        ("stop", [1], "invalid_type"),
        ("stop", {"a": 1}, "invalid_type"),
        ("stop_token_ids", [50], "invalid_value"),
        ("stop_token_ids", [1] * 129, "invalid_value"),
        ("stop_token_ids", 1, "invalid_type"),
        ("ignore_eos", 1, "invalid_type"),
        ("stream", "yes", "invalid_type"),
        ("return_token_ids", 0, "invalid_type"),
        ("stream_options", {"include_usage": True}, "invalid_value"),
        ("stream_options", [], "invalid_type"),
        ("model", 3, "invalid_type"),
    ],
)
@pytest.mark.parametrize("parse", [completion, chat])
def test_a_refusal_names_the_field(parse, name, value, code):
    error = refusal(parse, **{name: value})
    assert (error.code, error.param, error.status) == (code, name, 400)


@pytest.mark.parametrize("value", [21, -1, True, 1.0])
def test_logprobs_of_completions_are_a_count(value):
    assert completion(logprobs=0).num_logprobs == 0
    assert refusal(completion, logprobs=value).param == "logprobs"


def test_logprobs_of_chats_are_a_switch_and_a_count():
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).num_logprobs == 20
    assert chat(logprobs=False).num_logprobs is None
    assert refusal(chat, logprobs=1).param == "logprobs"
    assert refusal(chat, top_logprobs=3).param == "top_logprobs"
    assert refusal(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"


def test_max_completion_tokens_wins_over_max_tokens():
    assert chat(max_completion_tokens=3, max_tokens=5).max_tokens == 3
    assert refusal(chat, max_completion_tokens=0).param == "max_completion_tokens"


@pytest.mark.parametrize(("seed", "wanted"), [(0, 0), (7, 7), (2**63 - 1, 2**63 - 1)])
def test_a_seed_is_kept(seed, wanted):
    assert completion(seed=seed).sampling(1, 100).seed == wanted


def test_a_negative_seed_becomes_one_that_workers_take():
    seeds = {completion(seed=seed).sampling(1, 100).seed for seed in (-1, -2, -(2**63))}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("parse", [completion, chat])
def test_values_that_ask_for_nothing_are_accepted(parse):
    for name, neutral in NEUTRAL.items():
        for value in (*neutral, None):
            assert parse(**{name: value}) is not None
    assert parse(user="me", store=True, metadata={}, nobody_knows=[1]) is not None
    assert parse(top_k=-1).top_k == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("best_of", 3),
        ("echo", True),
        ("suffix", "x"),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("functions", [{}]),
        ("tool_choice", "required"),
    ],
)
@pytest.mark.parametrize("parse", [completion, chat])
def test_what_is_known_and_not_supported_is_refused_by_name(parse, name, value):
    error = refusal(parse, **{name: value})
    assert (error.code, error.param) == ("unsupported_parameter", name)


def test_another_model_does_not_exist():
    assert completion(model="served") is not None
    error = refusal(completion, model="gpt-9")
    assert (error.status, error.code, error.kind) == (404, "model_not_found", "not_found_error")


def test_messages_become_roles_and_text():
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "d", "tool_call_id": "7"},
    ]
    assert chat(messages=messages).messages == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b\nc"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "d", "tool_call_id": "7"},
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hi", "messages"),
        ([], "messages"),
        (None, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([USER, {"role": "boss", "content": "hi"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ],
)
def test_a_message_that_cannot_be_is_named_by_its_place(messages, param):
    assert refusal(chat, messages=messages).param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nope",
        b"[1]",
        b'"text"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
        "{'prompt': 'a'}".encode("utf-16"),
    ],
)
def test_what_is_not_json_is_refused(body):
    for parse in (lambda: parse_completion(body, MODEL, 4), lambda: parse_chat(body, MODEL)):
        with pytest.raises(RequestError) as error:
            parse()
        assert error.value.status == 400


def test_of_duplicate_keys_the_last_counts():
    body = b'{"prompt": "a", "prompt": "b"}'
    assert parse_completion(body, MODEL, 4).prompts == ["b"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
NAMES = [
    *NEUTRAL,
    *("prompt", "messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs", "top_logprobs"),
    *("stream", "stream_options", "return_token_ids", "user"),
]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=8), st.booleans())
def test_any_object_is_an_ask_or_a_refusal(fields, has_prompt):
    if has_prompt:
        fields |= {"prompt": "hi", "messages": [USER]}
    body = json.dumps(fields).encode("utf-8", "surrogatepass")
    for parse in (lambda: parse_completion(body, MODEL, 4), lambda: parse_chat(body, MODEL)):
        with contextlib.suppress(RequestError):  # and nothing else may be raised
            ask = parse()
            assert ask.is_chat != bool(ask.prompts)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_read(body):
    for parse in (lambda: parse_completion(body, MODEL, 4), lambda: parse_chat(body, MODEL)):
        with pytest.raises(RequestError):
            parse()
