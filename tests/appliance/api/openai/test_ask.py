from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.api.core.ask import Ask, PromptTooLong
from appliance.api.openai.ask import CHAT_NEUTRAL, COMPLETION_NEUTRAL, chat_ask, completion_ask
from appliance.daemon.requests.request import ModelInfo
from appliance.daemon.survival.journal import anew
from appliance.json.fields import decode_object
from engine.errors import RequestError

MODEL = ModelInfo("served", 100, 50, (), None, 0)
USER = {"role": "user", "content": "hi"}


def calling(arguments: str) -> dict:
    """An assistant's message with a call."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def completion(**fields) -> Ask:
    return parse_completion(json.dumps({"prompt": "hi", **fields}).encode())


def chat(**fields) -> Ask:
    return parse_chat(json.dumps({"messages": [USER], **fields}).encode())


def parse_completion(body: bytes) -> Ask:
    return completion_ask(decode_object(body), MODEL, max_prompts=4)


def parse_chat(body: bytes) -> Ask:
    return chat_ask(decode_object(body), MODEL)


def refusal(parse, **fields) -> RequestError:
    with pytest.raises(RequestError) as error:
        parse(**fields)
    return error.value


def test_defaults_are_openais():
    ask = completion()
    sampling = ask.sampling(10, MODEL.max_model_len, anew)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 1.0, 1.0)
    assert (sampling.top_k, sampling.min_p, sampling.logprobs) == (0, 0.0, None)
    assert not ask.is_stream
    assert not ask.include_usage
    assert sampling.seed != ask.sampling(10, MODEL.max_model_len, anew).seed


def test_the_models_own_defaults_hold_until_a_request_says_otherwise():
    model = replace(MODEL, sampling={"temperature": 0.0, "top_k": 20})
    base = completion_ask({"prompt": "a"}, model, max_prompts=1).base
    assert (base.temperature, base.top_k, base.top_p) == (0.0, 20, 1.0)
    said = completion_ask(
        {"prompt": "a", "temperature": 0.5, "top_k": -1}, model, max_prompts=1
    ).base
    assert (said.temperature, said.top_k) == (0.5, 0)


def test_absent_max_tokens_is_what_the_context_leaves():
    assert completion().sampling(95, 100, anew).max_tokens == 5
    assert chat().sampling(10, 100, anew).max_tokens == 90
    assert chat().sampling(10, 100_000, anew).max_tokens == 99_990


def test_an_operators_default_holds_where_a_chat_names_no_limit():
    model = replace(MODEL, default_max_tokens=2048)
    messages = [{"role": "user", "content": "a"}]

    def limit(**fields):
        return chat_ask({"messages": messages, **fields}, model).sampling(10, 100_000, anew)

    assert limit().max_tokens == 2048
    assert limit(max_tokens=4096).max_tokens == 4096
    assert limit(max_tokens=-1).max_tokens == 99_990
    ask = completion_ask({"prompt": "a"}, model, max_prompts=1)
    assert ask.sampling(10, 100_000, anew).max_tokens == 16


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_a_limit_of_minus_one_is_the_room_left(name):
    assert chat(**{name: -1}).sampling(10, 100, anew).max_tokens == 90
    if name != "max_completion_tokens":
        assert completion(**{name: -1}).sampling(10, 100, anew).max_tokens == 90
    assert refusal(chat, **{name: -2}).param == name


@pytest.mark.parametrize("max_tokens", [11, 32_000, 64_000, 2**62])
def test_a_limit_beyond_the_room_left_is_cut_to_it(max_tokens):
    assert chat(max_tokens=max_tokens).sampling(90, 100, anew).max_tokens == 10
    assert completion(max_tokens=max_tokens).sampling(90, 100, anew).max_tokens == 10


@pytest.mark.parametrize("max_tokens", [None, 11, 2**62])
def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(max_tokens):
    with pytest.raises(PromptTooLong, match=r"100 tokens.*has 100") as error:
        chat(max_tokens=max_tokens).sampling(100, 100, anew)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    completion().check_length("x" * 500, 5, 100)
    with pytest.raises(RequestError, match="has 101"):
        completion().check_length("x" * 501, 5, 100)
    with pytest.raises(RequestError, match="has 101"):
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


def test_logprobs_of_completions_are_a_count():
    assert completion(logprobs=0).base.logprobs == 0


def test_logprobs_of_chats_are_a_switch_and_a_count():
    assert chat(logprobs=True).base.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).base.logprobs == 20
    assert chat(logprobs=False).base.logprobs is None


def test_max_completion_tokens_wins_over_max_tokens():
    assert chat(max_completion_tokens=3, max_tokens=5).max_tokens == 3


@pytest.mark.parametrize(("seed", "wanted"), [(0, 0), (7, 7), (2**63 - 1, 2**63 - 1)])
def test_a_seed_is_kept(seed, wanted):
    assert completion(seed=seed).sampling(1, 100, anew).seed == wanted


def test_a_negative_seed_becomes_one_that_workers_take():
    seeds = {completion(seed=seed).sampling(1, 100, anew).seed for seed in (-1, -2, -(2**63))}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("parse", "neutral"), [(completion, COMPLETION_NEUTRAL), (chat, CHAT_NEUTRAL)]
)
def test_values_that_ask_for_nothing_are_accepted(parse, neutral):
    for name, values in neutral.items():
        for value in (*values, None):
            assert parse(**{name: value}).ignored == ()
    assert parse(top_k=-1).base.top_k == 0


@pytest.mark.parametrize("parse", [completion, chat])
def test_fields_that_nobody_knows_are_ignored_and_told(parse):
    ask = parse(user="me", store=True, metadata={}, nobody_knows=[1], nothing=None)
    assert ask.ignored == ("user", "store", "metadata", "nobody_knows")


@pytest.mark.parametrize("parse", [completion, chat])
def test_penalties_biases_and_minimum_reach_the_sampler(parse):
    ask = parse(
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={"7": -100, "49": 0.5},
        min_tokens=3,
        max_tokens=4,
    )
    sampling = ask.sampling(10, 100, anew)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2.0, 2.0)
    assert sampling.repetition_penalty == 1.5
    assert sampling.logit_bias == {7: -100.0, 49: 0.5}
    assert sampling.min_tokens == 3
    assert refusal(lambda: parse(min_tokens=17, max_tokens=16).sampling(1, 100, anew)).param == (
        "min_tokens"
    )


def test_an_answer_that_goes_on_counts_what_was_output_before():
    ask = completion(prompt=[1, 2, 3, 4], output_offset=3, max_tokens=2, min_tokens=5)
    assert ask.base.output_offset == 3
    sampling = ask.sampling(4, 100, anew)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.output_offset) == (2, 5, 3)
    late = completion(prompt=[1, 2, 3, 4], output_offset=3, max_tokens=2, min_tokens=6)
    assert refusal(lambda: late.sampling(4, 100, anew)).param == "min_tokens"
    assert completion(output_offset=0).base.output_offset == 0


def test_choices_have_seeds_of_their_own_that_repeat():
    ask = completion(n=3, seed=5)
    assert ask.num_choices == 3
    assert [ask.sampling(1, 100, anew, choice=i).seed for i in range(3)] == [5, 6, 7]
    assert completion(n=2, best_of=2).num_choices == 2
    assert completion(n=2, best_of=2).num_best is None
    last = completion(n=2, seed=2**63 - 1)
    assert last.sampling(1, 100, anew, choice=1).seed == 0


def test_an_echo_asks_for_the_prompts_logprobs_and_may_write_nothing():
    assert completion(echo=True).sampling(1, 100, anew).prompt_logprobs is None
    assert completion(echo=True, logprobs=2).sampling(1, 100, anew).prompt_logprobs == 2
    assert completion(logprobs=2).sampling(1, 100, anew).prompt_logprobs is None
    assert completion(echo=True, max_tokens=0).max_tokens == 0


def test_prompts_are_told_of_as_widely_as_either_field_asks():
    assert chat(prompt_logprobs=3).sampling(1, 100, anew).prompt_logprobs == 3
    ask = completion(prompt_logprobs=1, echo=True, logprobs=4)
    assert (ask.sampling(1, 100, anew).prompt_logprobs, ask.prompt_logprobs, ask.logprobs) == (
        4,
        1,
        4,
    )
    assert completion(prompt_logprobs=0, stream=True).prompt_logprobs is None


def test_the_best_of_more_are_found_by_their_logprobs():
    ask = completion(n=2, best_of=5)
    assert (ask.num_choices, ask.num_best, ask.logprobs) == (5, 2, None)
    assert ask.sampling(1, 100, anew).logprobs == 0
    assert completion(best_of=3, logprobs=4).base.logprobs == 4


def test_allowed_tokens_and_bad_words_count_once():
    assert completion(allowed_token_ids=[3, 1, 3]).base.allowed_token_ids == (1, 3)
    assert completion(allowed_token_ids=[7] * 4096).base.allowed_token_ids == (7,)
    assert completion(bad_words=["b", "a", "b"]).bad_words == ("b", "a")
    assert completion(bad_words=[]).bad_words == ()


def test_usage_in_every_chunk_comes_with_usage_at_the_end():
    both = {"include_usage": True, "continuous_usage_stats": True}
    ask = chat(stream=True, stream_options=both)
    assert (ask.include_usage, ask.has_running_usage) == (True, True)
    ask = chat(stream=True, stream_options={"continuous_usage_stats": True})
    assert (ask.include_usage, ask.has_running_usage) == (False, False)


def test_templates_take_switches_and_may_continue_the_last_message():
    ask = chat(chat_template_kwargs={"enable_thinking": False}, continue_final_message=True)
    assert ask.chat.variables == {"enable_thinking": False}
    assert (ask.chat.continue_final_message, ask.chat.add_generation_prompt) == (True, False)
    assert ask.is_continuation


def test_another_model_does_not_exist():
    assert completion(model="served") is not None
    error = refusal(completion, model="gpt-9")
    assert (error.status, error.code, error.kind) == (404, "model_not_found", "not_found_error")
    assert "`served`" in error.what


def test_a_model_that_does_not_exist_is_told_all_that_do():
    model = replace(MODEL, others={"one": None, "two": None}, aliases=("gpt-*",))
    with pytest.raises(RequestError, match=r"`one`, `two` and `gpt-\*`"):
        completion_ask({"prompt": "x", "model": "claude"}, model, 8)
    many = replace(MODEL, others={f"m{index}": None for index in range(40)})
    with pytest.raises(RequestError, match=r"`m18` and 21 more do$"):
        completion_ask({"prompt": "x", "model": "claude"}, many, 8)


def test_messages_become_roles_and_text():
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "d", "tool_call_id": "7"},
        {"role": "function", "content": "e", "name": "f"},
    ]
    assert chat(messages=messages).chat.messages == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b\nc"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "d", "tool_call_id": "7"},
        {"role": "tool", "content": "e", "name": "f"},
    ]


def test_calls_of_earlier_turns_have_their_arguments_as_objects():
    function = {"name": "f", "arguments": '{"a": [1]}'}
    calls = [{"id": "c1", "type": "function", "function": function}]
    (message,) = chat(
        messages=[{"role": "assistant", "content": None, "tool_calls": calls}]
    ).chat.messages
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
        ],
    }


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
    for parse in (parse_completion, parse_chat):
        with pytest.raises(RequestError) as error:
            parse(body)
        assert error.value.status == 400


def test_of_duplicate_keys_the_last_counts():
    body = b'{"prompt": "a", "prompt": "b"}'
    assert parse_completion(body).prompts == ["b"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
NAMES = [
    *CHAT_NEUTRAL,
    *COMPLETION_NEUTRAL,
    *("prompt", "messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs", "top_logprobs"),
    *("stream", "stream_options", "return_token_ids", "user", "n", "best_of", "echo", "min_tokens"),
    *("presence_penalty", "repetition_penalty", "logit_bias", "response_format"),
    *("structured_outputs", "guided_json", "guided_choice", "guided_regex", "guided_grammar"),
    *("prompt_logprobs", "allowed_token_ids", "bad_words", "output_offset"),
    *("tool_choice", "parallel_tool_calls", "chat_template_kwargs", "continue_final_message"),
]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=8), st.booleans())
def test_any_object_is_an_ask_or_a_refusal(fields, has_prompt):
    if has_prompt:
        fields |= {"prompt": "hi", "messages": [USER]}
    body = json.dumps(fields).encode("utf-8", "surrogatepass")
    for parse in (parse_completion, parse_chat):
        with contextlib.suppress(RequestError):  # and nothing else may be raised
            ask = parse(body)
            assert ask.is_chat != bool(ask.prompts)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_read(body):
    for parse in (parse_completion, parse_chat):
        with pytest.raises(RequestError):
            parse(body)


def test_what_front_ends_send_for_nothing_asks_for_nothing():
    ask = completion(stop=["", "b"], seed=-1)
    assert ask.stop == ("b",)
    assert len({ask.sampling(1, 100, anew).seed for _ in range(5)}) == 5
