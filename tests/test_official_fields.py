"""What only a model can show: the fields of the official client against the running daemon.

Each is asked for on the socket, streamed, and on TCP, whole: presence_penalty, frequency_penalty,
repetition_penalty, logit_bias, n, echo, min_tokens, logprobs in both forms, max_completion_tokens,
content in parts and all roles, response_format (json_object, json_schema), tools and tool_choice
(auto, none, required, a named function), stream_options (include_usage, continuous_usage_stats),
best_of; vLLM's prompt_logprobs, allowed_token_ids, bad_words; our output_offset.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import openai
import pydantic
import pytest
import tokenizers

from appliance.hub.names import STARTER_FOLDER
from tests.checkpoints import load_oracle
from tests.daemons import ALONE, DOORS, open_by_both_doors
from tests.family_templates import FAMILIES

MODEL = "with-tools"
USER = {"role": "user", "content": "hi"}
EOS_ID = 297


class Step(pydantic.BaseModel):
    """A small schema, whose values cannot grow long."""

    done: bool
    kind: str = pydantic.Field(pattern="^[ab]{1,3}$")


TOOL = openai.pydantic_function_tool(Step, name="step")
NAMED = {"type": "function", "function": {"name": "step"}}


@pytest.fixture(scope="module")
def folder(tiny_llama, tmp_path_factory):
    """The tiny model with a template that takes tools."""
    folder = tmp_path_factory.mktemp("models") / MODEL
    shutil.copytree(tiny_llama, folder)
    (folder / "chat_template.jinja").write_text(FAMILIES["qwen"])
    return folder


@pytest.fixture(scope="module")
def opened(folder, tmp_path_factory):
    with open_by_both_doors(tmp_path_factory.mktemp("fields"), folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def daemon(opened):
    return opened[0]


@pytest.fixture(params=DOORS)
def door(request):
    return request.param


@pytest.fixture
def client(opened, door):
    return opened[1][door]


@pytest.fixture
def stream(door):
    return door == "socket"


@dataclass
class Said:
    """One choice, put together from wherever it came."""

    text: str = ""
    finish_reason: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    calls: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    """Arguments by the index of the call."""


def read(reply) -> list[Said]:
    """The choices of a reply, or of a stream."""
    found: dict[int, Said] = defaultdict(Said)
    for chunk in reply if isinstance(reply, openai.Stream) else [reply]:
        for choice in chunk.choices:
            said = found[choice.index]
            said.finish_reason = choice.finish_reason or said.finish_reason
            said.prompt_token_ids += getattr(choice, "prompt_token_ids", None) or []
            said.token_ids += getattr(choice, "token_ids", None) or []
            if hasattr(choice, "text"):
                said.text += choice.text
                said.logprobs += choice.logprobs.token_logprobs if choice.logprobs else []
                continue
            message = choice.message if hasattr(choice, "message") else choice.delta
            said.text += message.content or ""
            for index, call in enumerate(message.tool_calls or []):
                said.calls[getattr(call, "index", index)] += call.function.arguments or ""
            entries = choice.logprobs.content if choice.logprobs else []
            said.logprobs += [entry.logprob for entry in entries]
    return [found[index] for index in sorted(found)]


def complete(client, **fields) -> list[Said]:
    extra = {"return_token_ids": True, **fields.pop("extra_body", {})}
    fixed = {"model": MODEL, "prompt": "a b", "max_tokens": 24, "temperature": 0}
    return read(client.completions.create(**(fixed | fields), extra_body=extra))


def chat(client, **fields) -> list[Said]:
    extra = {"return_token_ids": True, **fields.pop("extra_body", {})}
    fixed = {"model": MODEL, "messages": [USER], "temperature": 0}
    return read(client.chat.completions.create(**(fixed | fields), extra_body=extra))


def test_a_viewer_reads_and_generates_nothing_and_a_stranger_neither(daemon):
    with daemon.official_client(daemon.keys["wall"]) as wall:
        assert wall.models.list().data[0].id == MODEL
        with pytest.raises(openai.PermissionDeniedError, match="viewer"):
            complete(wall)
    with daemon.official_client("wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with daemon.official_client(daemon.keys["laptop"]) as laptop:
        complete(laptop, max_tokens=1)
    assert daemon.log_rows(1)[0]["user"] == "key:laptop"
    assert daemon.keys["laptop"] not in str(daemon.log_rows())


# Sampling


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_change_the_output(client, stream, penalty):
    (plain,) = complete(client, extra_body={"ignore_eos": True})
    (punished,) = complete(client, stream=stream, extra_body={"ignore_eos": True, penalty: 2})
    assert len(set(punished.token_ids)) >= len(set(plain.token_ids))
    assert punished.token_ids != plain.token_ids


def test_a_bias_forces_a_token_and_forbids_another(client, stream):
    (plain,) = complete(client)
    (forced,) = complete(client, logit_bias={"65": 100}, stream=stream)
    assert forced.token_ids == [65] * 24
    (other,) = complete(client, logit_bias={str(plain.token_ids[0]): -100}, stream=stream)
    assert other.token_ids[0] != plain.token_ids[0]


def test_choices_differ_and_repeat(client, stream):
    def texts():
        choices = complete(client, n=3, seed=1, temperature=2, max_tokens=12, stream=stream)
        return [choice.text for choice in choices]

    first = texts()
    assert texts() == first
    assert len(set(first)) == 3


def test_no_output_ends_before_the_minimum(client, stream):
    asked = {"logit_bias": {str(EOS_ID): 100}, "max_tokens": 9, "stream": stream}
    (ended,) = complete(client, **asked)
    assert ended.token_ids == [EOS_ID]
    (held,) = complete(client, **asked, extra_body={"min_tokens": 5})
    assert held.token_ids.index(EOS_ID) == len(held.token_ids) - 1 == 5
    assert held.finish_reason == "stop"


def test_only_allowed_tokens_and_no_bad_words_come(client, stream):
    free = {"ignore_eos": True}
    (few,) = complete(client, extra_body={**free, "allowed_token_ids": [65, 66]}, stream=stream)
    assert {*few.token_ids} <= {65, 66}
    (plain,) = complete(client, extra_body=free)
    word = plain.text[3]
    (without,) = complete(client, extra_body={**free, "bad_words": [word]}, stream=stream)
    assert without.text[:3] == plain.text[:3]
    assert word not in without.text


def test_an_answer_goes_on_where_another_was_cut_off(client, stream):
    drawn = {"seed": 7, "temperature": 2, "frequency_penalty": 1, "stream": stream}
    extra = {"ignore_eos": True, "min_tokens": 20}
    (whole,) = complete(client, **drawn, extra_body=extra)
    prompt = whole.prompt_token_ids
    for cut in (1, 9, 23):
        fields = {"prompt": prompt + whole.token_ids[:cut], "max_tokens": 24 - cut}
        (rest,) = complete(client, **drawn, **fields, extra_body={**extra, "output_offset": cut})
        assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
        assert whole.text.endswith(rest.text)


def test_the_best_of_several_is_the_likeliest(client):
    drawn = {"seed": 1, "temperature": 2, "max_tokens": 6, "logprobs": 0}
    every = complete(client, n=4, **drawn, extra_body={"ignore_eos": True})
    (best,) = complete(client, best_of=4, **drawn, extra_body={"ignore_eos": True})
    assert best == max(every, key=lambda said: sum(said.logprobs))


# Log-probabilities, usage


def oracle_logprobs(folder, ids) -> list[float]:
    """Of each id but the first, after those before it."""
    import torch

    with torch.inference_mode():
        logits = load_oracle(folder)(torch.tensor([ids])).logits[0]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    return [logprobs[at, token_id].item() for at, token_id in enumerate(ids[1:])]


def test_logprobs_of_an_echo_are_the_models_own(client, folder, stream):
    prompt = "To be, or not to be: that is the question, and so on and on."
    (said,) = complete(client, prompt=prompt, echo=True, logprobs=2, max_tokens=4, stream=stream)
    assert said.text.startswith(prompt)
    wanted = oracle_logprobs(folder, said.prompt_token_ids + said.token_ids)
    assert said.logprobs[0] is None
    assert said.logprobs[1:] == pytest.approx(wanted, abs=1e-3)


def test_logprobs_of_a_chat_are_the_models_own(client, folder, stream):
    (said,) = chat(client, logprobs=True, top_logprobs=2, max_completion_tokens=6, stream=stream)
    wanted = oracle_logprobs(folder, said.prompt_token_ids + said.token_ids)
    assert len(said.logprobs) == 6
    assert said.logprobs == pytest.approx(wanted[-6:], abs=1e-3)
    assert said.finish_reason == "length"


def test_logprobs_of_a_prompt_are_the_models_own(client, folder):
    asked = {"model": MODEL, "max_tokens": 2, "extra_body": {"prompt_logprobs": 2}}
    completion = client.completions.create(prompt="To be, or not", **asked).choices[0]
    chat = client.chat.completions.create(messages=[USER], **asked)
    for first, *others in (completion.prompt_logprobs, chat.prompt_logprobs):
        assert first is None
        assert all(len(one) in (2, 3) for one in others)
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("To be, or not").ids
    wanted = oracle_logprobs(folder, ids)
    told = [one[str(i)] for one, i in zip(completion.prompt_logprobs[1:], ids[1:], strict=True)]
    assert [one["logprob"] for one in told] == pytest.approx(wanted, abs=1e-3)
    for one, likeliest in zip(told, completion.prompt_logprobs[1:], strict=True):
        better = [other for other in likeliest.values() if other["logprob"] > one["logprob"]]
        assert one["rank"] == len(better) + 1 or one["rank"] > 2


@pytest.mark.parametrize("is_chat", [False, True])
def test_usage_runs_along_and_comes_at_the_end(client, is_chat):
    create = client.chat.completions.create if is_chat else client.completions.create
    fields = {"messages": [USER]} if is_chat else {"prompt": "a b"}
    fields |= {"model": MODEL, "max_tokens": 5, "extra_body": {"ignore_eos": True}}
    whole = create(**fields).usage
    for options, is_running in (
        ({"include_usage": True}, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True),
    ):
        *chunks, last = create(**fields, stream=True, stream_options=options)
        assert (last.choices, last.usage) == ([], whole)
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
        assert counts == sorted(counts)
        assert counts[-1:] == ([5] if is_running else [])


# Messages and forms


def test_a_grammar_that_explodes_on_the_way_ends_its_own_request_alone(client, stream):
    later = " | ".join(f'"{i}" "x"' for i in range(3500))  # more than one step may look at
    forms = {"structured_outputs": {"grammar": f'start: "a" rest\nrest: {later}'}}
    with ThreadPoolExecutor() as pool:
        others = [
            pool.submit(complete, client, max_tokens=60, extra_body={"ignore_eos": True})
            for _ in range(2)
        ]
        with pytest.raises(openai.APIError, match="grammar`") as got:
            complete(client, extra_body=forms, stream=stream)
        assert [len(one.result()[0].token_ids) for one in others] == [60, 60]
    assert stream or got.value.status_code == 400
    assert got.value.param == "structured_outputs.grammar"


def test_parts_and_all_roles_make_the_same_prompt_as_text(client, stream):
    call = {"id": "c", "type": "function", "function": {"name": "step", "arguments": "{}"}}
    rest = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "17", "tool_call_id": "c"},
    ]
    plain = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a\nb"}, *rest]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    newer = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}, *rest]
    first, second = (
        chat(client, messages=messages, max_completion_tokens=8, stream=stream)
        for messages in (plain, newer)
    )
    assert first == second
    assert first[0].token_ids


@pytest.mark.parametrize("temperature", [0, 2])
def test_answers_have_the_form_that_was_asked_for(client, temperature):
    fields = {"model": MODEL, "messages": [USER], "response_format": Step}
    fields |= {"temperature": temperature, "seed": 3, "max_tokens": 400}
    whole = client.chat.completions.parse(**fields).choices[0]
    assert isinstance(whole.message.parsed, Step)
    assert whole.finish_reason == "stop"
    with client.chat.completions.stream(**fields) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole.message.parsed


def test_any_object_is_an_object(client, stream):
    kind = {"type": "json_object"}
    # Biased to a few characters it ends soon, whatever the model would like to say.
    bias = {str(token_id): 50 for token_id in ids_of(client, '{"a":1}')}
    (said,) = chat(client, response_format=kind, logit_bias=bias, max_tokens=200, stream=stream)
    assert said.finish_reason == "stop"
    assert isinstance(json.loads(said.text), dict)


def ids_of(client, text) -> list[int]:
    (said,) = complete(client, prompt=text, max_tokens=1)
    return [*said.prompt_token_ids, EOS_ID]


def test_choices_and_patterns_bind_completions_too(client, stream):
    (choice,) = complete(client, extra_body={"guided_choice": ["yes", "no"]}, stream=stream)
    assert choice.text in ("yes", "no")
    pattern = {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}}
    (digits,) = complete(client, extra_body=pattern, stream=stream)
    assert len(digits.text) == 6
    assert digits.text.replace("-", "").isdigit()


# Tools


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
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


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_free_text_with_tools_at_hand_is_served(client, stream, choice):
    asked = {"tools": [TOOL], "tool_choice": choice, "temperature": 1.5, "seed": 1}
    (said,) = chat(client, **asked, max_tokens=60, stream=stream)
    for arguments in said.calls.values():
        assert Step(**json.loads(arguments))
    assert said.text or said.calls
    if choice == "none":
        (without,) = chat(client, temperature=1.5, seed=1, max_tokens=60, stream=stream)
        assert said == without


def test_the_starter_model_takes_tools_and_their_results(start_daemon):
    daemon = start_daemon(*ALONE).wait_ready()
    # it was not taught to call: left alone it writes blanks without end
    tokenizer = tokenizers.Tokenizer.from_file(str(STARTER_FOLDER / "tokenizer.json"))
    blanks = (tokenizer.encode(text).ids for text in (" ", "\n", "\t", "\r"))
    bias = {str(ids[0]): -100 for ids in blanks}
    fixed = {"tools": [TOOL], "logit_bias": bias, "max_tokens": 400, "parallel_tool_calls": False}
    with daemon.official_client() as client:
        fixed["model"] = client.models.list().data[0].id
        for choice in ("required", NAMED):
            reply = client.chat.completions.parse(messages=[USER], tool_choice=choice, **fixed)
            (call,) = reply.choices[0].message.tool_calls
            assert isinstance(call.function.parsed_arguments, Step)
            assert reply.choices[0].finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        said = reply.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})
        messages = [USER, said, result]
        after = client.chat.completions.create(messages=messages, **{**fixed, "max_tokens": 8})
    assert after.usage.prompt_tokens > reply.usage.prompt_tokens
