"""Fields of vLLM's and llama.cpp's servers that are served here, or refused by name."""

from __future__ import annotations

import pytest

from appliance.api.core import prepare
from appliance.api.core.ask import MAX_TRUNCATED
from engine.text.reading import READER
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import events, says
from tests.tiny_tokenizers import CHATML, byte_level
from tests.worlds.daemon_parts import FakeAppliance


@pytest.fixture
def appliance():
    template = CHATML + "{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=template))
    appliance.model = appliance.model.__class__("m", 64, 300, (257,), None, 0)
    return appliance


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
    for most, extra in ((4, {"truncate_prompt_tokens": 60}), (63, {"truncate_prompt_tokens": 1})):
        await served.complete(prompt="x" * 80, n_predict=-1, **extra)
        assert sampling_of(appliance).max_tokens == most, "as many as fit"
    await served.complete(grammar='root ::= "a"', max_tokens=3)
    assert sampling_of(appliance).grammar is not None
    await served.complete(json_schema={"type": "object"}, max_tokens=3)
    assert sampling_of(appliance).grammar is not None


async def test_a_prompt_is_cut_to_its_last_tokens(served, appliance):
    await served.complete(prompt=[1, 2, 3, 4], truncate_prompt_tokens=2, max_tokens=2)
    assert appliance.submitted[-1].sequences[0].prompt_token_ids == [3, 4]
    await served.complete(prompt="x" * 500, truncate_prompt_tokens=-1, max_tokens=4)
    assert appliance.submitted[-1].sequences[0].num_prompt_tokens == 60
    assert (await served.complete(prompt="x" * 500, max_tokens=4)).status_code == 400
    endless = await served.complete(prompt="x" * (MAX_TRUNCATED + 1), truncate_prompt_tokens=1)
    assert (endless.status_code, endless.json()["error"]["param"]) == (400, "prompt")


async def test_prompts_have_logprobs_of_their_own(served, appliance):
    asked = {"prompt": ["abc", "d"], "prompt_logprobs": 2, "n": 2, "max_tokens": 2}
    reply = (await served.complete(**asked)).json()
    first, again, *rest = (choice["prompt_logprobs"] for choice in reply["choices"])
    assert first == again
    assert [len(first), *map(len, rest)] == [4, 2, 2]
    assert first[0] is None
    ids = appliance.submitted[-1].sequences[0].prompt_token_ids
    alternatives = {
        "0": {"logprob": -1.0, "rank": 1, "decoded_token": appliance.tokenizer.token_text(0)},
        "1": {"logprob": -2.0, "rank": 2, "decoded_token": appliance.tokenizer.token_text(1)},
    }
    own = {"logprob": -0.5, "rank": 7, "decoded_token": "a"}
    assert first[1] == {str(ids[1]): own, **alternatives}
    chat = (await served.chat(prompt_logprobs=0, max_tokens=2)).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in chat["choices"][0]


async def test_an_echo_has_as_many_alternatives_as_logprobs_asks_for(served):
    asked = {"echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 2}
    (choice,) = (await served.complete(**asked)).json()["choices"]
    assert [top and len(top) for top in choice["logprobs"]["top_logprobs"]][:3] == [None, 2, 2]
    assert [top and len(top) for top in choice["prompt_logprobs"]] == [None, 4]


async def test_the_likeliest_are_told_and_all_are_counted(served, appliance):
    appliance.confidence = {0: -3.0, 1: -0.5, 2: -1.0, 3: -0.7, 4: -0.6, 5: -9.0}.get
    asked = {"prompt": ["a", "b"], "n": 2, "best_of": 3, "max_tokens": 4}
    reply = (await served.complete(**asked, return_token_ids=True)).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    prompts = [one.prompt_token_ids for one in appliance.submitted[-1].sequences]
    told = [choice["prompt_token_ids"] for choice in reply["choices"]]
    assert told == [prompts[i] for i in (1, 2, 4, 3)]
    assert reply["usage"]["completion_tokens"] == 6 * 4
    assert all(choice["logprobs"] is None for choice in reply["choices"])


async def test_bad_words_are_sought_as_they_are_and_behind_a_space(served, appliance):
    await served.complete(bad_words=["b", "bc"], max_tokens=2)
    encode = appliance.tokenizer.encode
    bare = [tuple(encode(word, add_special_tokens=False)) for word in ("b", "bc")]
    assert sampling_of(appliance).bad_words == tuple(bare)  # a space is a token of its own here
    appliance.model = appliance.model.__class__("m", 64, encode("b")[-1], (), None, 0)
    error = (await served.complete(prompt=[1], bad_words=["b"])).json()["error"]
    assert (error["param"], error["code"]) == ("bad_words", "invalid_value")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_may_begin_with_the_message_that_it_goes_on_from(served, appliance, stream):
    says(appliance, " two.")  # its last token counts as one that ends an answer
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "One"}]
    heartbeat = {"continue_final_message": True, "add_generation_prompt": False}
    for messages, others, text in (
        (said, heartbeat, "One two"),
        (said, {}, "One two"),
        (said[:1], {"add_generation_prompt": False}, "x two"),
        (said[:1], {}, " two"),
    ):
        body = {"messages": messages, "echo": True, "max_tokens": 9, "stream": stream, **others}
        reply = await served.http.post("/v1/chat/completions", json=body)
        if stream:
            choices = [one["choices"][0]["delta"] for one in events(reply.text)]
            assert "".join(one.get("content") or "" for one in choices) == text
        else:
            assert reply.json()["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"allowed_token_ids": [5], "bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
    ],
)
async def test_what_cannot_be_followed_to_an_end_is_named(served, appliance, fields, param):
    appliance.refuse_after = 2
    appliance.model = appliance.model.__class__("m", 4096, 300, (257,), None, 0)
    reply = await served.chat(**fields, max_tokens=9)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_value", param)
    assert f"`{param}`" in error["message"]
    reply = await served.chat(**fields, max_tokens=9, stream=True)
    *_chunks, last = events(reply.text)
    assert last["error"] == error


async def test_other_apis_name_it_in_their_words(served, appliance):
    appliance.refuse_after = 2
    asked = {"type": "json_schema", "schema": {"type": "object"}}
    body = {"input": "x", "text": {"format": {**asked, "name": "x"}}}
    error = (await served.http.post("/v1/responses", json=body)).json()["error"]
    assert error["param"] == "text.format"


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


async def test_a_chats_reply_has_the_ids_of_its_prompt(served, appliance):
    asked = {"max_tokens": 2, "return_token_ids": True}
    whole = (await served.chat(**asked)).json()
    ids = appliance.submitted[-1].sequences[0].prompt_token_ids
    assert whole["prompt_token_ids"] == ids
    first, *others = events((await served.chat(**asked, stream=True)).text)
    assert first["prompt_token_ids"] == ids
    assert not any("prompt_token_ids" in chunk for chunk in others)


@pytest.mark.parametrize(
    ("fields", "most", "param"),
    [
        ({"echo": True}, "MAX_ECHOED_CHARS", "echo"),
        ({"echo": True, "logprobs": 2}, "MAX_ECHOED_LOGPROBS", "echo"),
        ({"prompt_logprobs": 2}, "MAX_ECHOED_LOGPROBS", "prompt_logprobs"),
    ],
)
async def test_a_prompt_is_not_repeated_many_times_over(served, monkeypatch, fields, most, param):
    monkeypatch.setattr(prepare, most, 25)
    for num_choices, status in ((1, 200), (8, 400)):
        reply = await served.complete(prompt="hello", n=num_choices, **fields)
        assert reply.status_code == status, reply.text
    assert reply.json()["error"]["param"] == param


async def test_no_grammar_is_read_for_a_prompt_that_is_too_long(served, monkeypatch):
    jobs, read = [], READER.read
    monkeypatch.setattr(READER, "read", lambda *job: jobs.append(job[0]) or read(*job))
    for prompt, status in (("hello " * 64, 400), ("hello", 200)):
        reply = await served.complete(prompt=prompt, guided_regex="a+")
        assert reply.status_code == status, reply.text
        assert jobs == (["constraint"] if status == 200 else [])
