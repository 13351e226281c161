from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.api.core.ask import Ask
from appliance.api.core.stream import Delta, OpenReply, StopMatcher
from appliance.api.openai.ask import chat_ask, completion_ask
from appliance.daemon.requests.request import ModelInfo, Peer, Request, TokensEmitted
from appliance.daemon.survival.journal import anew
from engine.scheduler.sequences.sequence import Sequence, Stamps
from engine.text.tokenizer import Tokenizer
from engine.wire.finish_reason import FinishReason
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams, TokenLogprob
from tests.tiny_tokenizers import byte_level


class StopRecorder:
    """The part of an Appliance that a reply calls."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer(byte_level())
        self.model = ModelInfo("m", 100, 300, (), None, 0)
        self.stopped: list[tuple[int, int]] = []

    def stop_sequence(self, sequence, num_kept_tokens):
        self.stopped.append((sequence.index, num_kept_tokens))


@pytest.fixture(scope="module")
def appliance():
    return StopRecorder()


@pytest.fixture(autouse=True)
def _forget(appliance):
    appliance.stopped.clear()


def request_of(num_sequences: int = 1) -> Request:
    sequences = [
        Sequence(
            seq_id=10 + index,
            request_id="cmpl-1",
            index=index,
            prompt_token_ids=[1],
            spec=RunSpec(SamplingParams(max_tokens=99, seed=0)),
            stamps=Stamps(arrived_ns=0),
        )
        for index in range(num_sequences)
    ]
    return Request("cmpl-1", "/v1/completions", "m", Peer(), True, "", sequences)


def asking(stop=(), **fields) -> Ask:
    """A chat, whose answer begins a text of its own."""
    body = {"messages": [{"role": "user", "content": "hi"}], "stop": list(stop), **fields}
    return chat_ask(body, ModelInfo("m", 100, 300, (), None, 0))


def emit(request, token_ids, *, index=0, reason=None, logprobs=()):
    sequence = request.sequences[index]
    sequence.output_token_ids += token_ids
    sequence.finish_reason = reason
    emitted = TokensEmitted(sequence, token_ids, list(logprobs), reason is not None)
    request.inbox.put_nowait(emitted)


async def collect(reply: OpenReply) -> list[Delta]:
    return [delta async for deltas in reply.deltas() for delta in deltas]


def told(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.sequence.index == index)


async def spoken(appliance, chunks, *, stop=(), reason=FinishReason.LENGTH) -> list[Delta]:
    """The deltas of one sequence that emits these chunks of ids, each read before the next."""
    request = request_of()
    reply = OpenReply(appliance, request, asking(stop), anew)
    deltas: list[Delta] = []
    stream = reply.deltas()
    for number, ids in enumerate(chunks):
        emit(request, ids, reason=reason if number == len(chunks) - 1 else None)
        try:
            deltas += await anext(stream)
        except StopAsyncIteration:
            break
    return deltas


async def test_tokens_become_text_and_the_last_delta_says_why_it_ended(appliance):
    ids = appliance.tokenizer.encode("hello wörld", False)
    deltas = await spoken(appliance, [[i] for i in ids])
    assert told(deltas) == "hello wörld"
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(ids) - 1)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert not any("\ufffd" in delta.text for delta in deltas)


async def test_whatever_waits_is_taken_at_once(appliance):
    request = request_of(2)
    reply = OpenReply(appliance, request, asking(), anew)
    ids = appliance.tokenizer.encode("hello", False)
    for token_id in ids:
        emit(request, [token_id], index=0)
        emit(request, [token_id], index=1)
    emit(request, [], index=0, reason=FinishReason.ABORT)
    emit(request, [], index=1, reason=FinishReason.LENGTH)
    wakes = [deltas async for deltas in reply.deltas()]
    assert len(wakes) == 1
    assert [(d.text, d.finish_reason) for d in wakes[0]] == [
        ("hello", FinishReason.ABORT),
        ("hello", FinishReason.LENGTH),
    ]


async def test_silence_is_reported_and_loses_nothing(appliance):
    request = request_of()
    stream = OpenReply(appliance, request, asking(), anew).deltas(0.01)
    assert await anext(stream) == []
    assert await anext(stream) == []
    emit(request, appliance.tokenizer.encode("hello", False), reason=FinishReason.LENGTH)
    assert told(await anext(stream)) == "hello"


async def test_a_stop_string_across_tokens_is_not_sent_and_stops_the_sequence(appliance):
    ids = appliance.tokenizer.encode("xyz12 stop abc", False)
    deltas = await spoken(appliance, [[i] for i in ids], stop=("z12 st",))
    assert told(deltas) == "xy"
    assert deltas[-1].finish_reason is FinishReason.STOP
    kept = len(appliance.tokenizer.encode("xyz12 st", False))
    assert appliance.stopped == [(0, kept)]
    assert sum(len(delta.token_ids) for delta in deltas) == kept


async def test_a_beginning_of_a_stop_string_is_held_back_and_sent_when_it_is_none(appliance):
    ids = appliance.tokenizer.encode("abcX", False)
    deltas = await spoken(appliance, [[i] for i in ids], stop=("abcd",))
    assert [delta.text for delta in deltas] == ["", "", "", "abcX"]


async def test_at_the_end_what_was_held_back_is_sent(appliance):
    ids = appliance.tokenizer.encode("abc", False)
    assert told(await spoken(appliance, [ids], stop=("abcd",))) == "abc"
    assert appliance.stopped == []


@pytest.mark.parametrize("stop", ["<|end|>", "c<|end|>\nu", "\n<|end|>"])
@pytest.mark.parametrize("is_spelled", [False, True])
async def test_a_stop_string_with_a_special_token_in_it_matches_that_token(
    appliance, stop, is_spelled
):
    tokenizer = appliance.tokenizer
    before, _, after = f"abc\n{stop}more".partition("<|end|>")
    mark = tokenizer.special_ids(["<|end|>"])["<|end|>"]
    spelled = [one for letter in "<|end|>" for one in tokenizer.encode(letter, False)]
    ids = [*tokenizer.encode(before, False), *(spelled if is_spelled else [mark])]
    ids += tokenizer.encode(after, False)
    deltas = await spoken(appliance, [[i] for i in ids], stop=(stop,))
    assert told(deltas) == f"abc\n{stop}".partition(stop)[0]
    assert deltas[-1].stop_text == stop
    assert deltas[-1].finish_reason is FinishReason.STOP


async def test_a_special_token_that_only_begins_a_stop_string_has_no_text(appliance):
    tokenizer = appliance.tokenizer
    mark = tokenizer.special_ids(["<|end|>"])["<|end|>"]
    ids = [*tokenizer.encode("ab", False), mark, *tokenizer.encode("cd", False)]
    deltas = await spoken(appliance, [[i] for i in ids], stop=("<|end|>x",))
    assert told(deltas) == "abcd"
    assert appliance.stopped == []


async def test_tokens_that_come_after_a_stop_are_dropped(appliance):
    request = request_of(2)
    reply = OpenReply(appliance, request, asking(("b",)), anew)
    emit(request, appliance.tokenizer.encode("abab", False), index=0)
    emit(request, appliance.tokenizer.encode("aaaa", False), index=0)
    emit(request, appliance.tokenizer.encode("cc", False), index=1, reason=FinishReason.LENGTH)
    deltas = await collect(reply)
    assert told(deltas, 0) == "a"
    assert told(deltas, 1) == "cc"
    assert appliance.stopped == [(0, 2)]


async def test_a_stop_string_in_the_last_tokens_wins_over_length(appliance):
    ids = appliance.tokenizer.encode("abc", False)
    deltas = await spoken(appliance, [ids], stop=("bc",))
    assert (told(deltas), deltas[-1].finish_reason) == ("a", FinishReason.STOP)
    assert appliance.stopped == [(0, 3)]


async def test_the_id_that_ends_a_sequence_is_no_text(appliance):
    ids = appliance.tokenizer.encode("abc", False)
    deltas = await spoken(appliance, [ids], reason=FinishReason.STOP)
    assert told(deltas) == "ab"
    assert deltas[-1].token_ids == ids
    assert told(await spoken(appliance, [ids[:2], []], reason=FinishReason.ABORT)) == "ab"


async def test_logprobs_stay_with_their_tokens_and_know_where_the_text_begins(appliance):
    request = request_of()
    reply = OpenReply(appliance, request, asking(("c",)), anew)
    ids = appliance.tokenizer.encode("aäbcd", False)
    logprobs = [TokenLogprob(-float(i), [], []) for i in range(len(ids))]
    emit(request, ids, reason=FinishReason.LENGTH, logprobs=logprobs)
    (delta,) = await collect(reply)
    assert delta.token_ids == ids[:5]
    assert [entry.logprob for entry in delta.logprobs] == [0, -1, -2, -3, -4]
    assert delta.text_offsets == [0, 1, 1, 2, 3]


async def test_an_unfinished_character_at_the_end_is_one_replacement(appliance):
    ids = appliance.tokenizer.encode("a\u00e4", False)[:-1]
    assert told(await spoken(appliance, [[i] for i in ids])) == "a\ufffd"


TEXTS = st.text(alphabet="ab1ä😀 ", max_size=14)
STOPS = st.lists(st.text(alphabet="ab1ä😀 ", min_size=1, max_size=4), max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, stops=STOPS, data=st.data())
def test_the_text_does_not_depend_on_how_tokens_are_batched(appliance, text, stops, data):
    ids = appliance.tokenizer.encode(text, False)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=4)) | {0, len(ids)})
    batches = [ids[a:b] for a, b in itertools.pairwise(cuts)] or [[]]
    singly = [[token_id] for token_id in ids] or [[]]
    outcomes = []
    for chunks in (singly, batches):
        appliance.stopped.clear()
        deltas = asyncio.run(spoken(appliance, chunks, stop=stops))
        num_tokens = sum(len(delta.token_ids) for delta in deltas)
        outcomes.append((told(deltas), num_tokens, list(appliance.stopped)))
    assert outcomes[0] == outcomes[1]


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, stops=STOPS, data=st.data())
def test_the_text_goes_on_where_an_earlier_reply_was_cut_off(appliance, text, stops, data):
    ids = appliance.tokenizer.encode(text, False)
    cut = data.draw(st.integers(0, len(ids)))
    before, after = ids[:cut], ids[cut:]
    whole = asyncio.run(continued(appliance, [], ids, stops))
    if before:
        unsaid = asyncio.run(continued(appliance, [], before, stops, has_ended=False))
        if unsaid.finish_reason is not None:
            return  # it had ended
        rest = asyncio.run(continued(appliance, before, after, stops))
        assert unsaid.text + rest.text == whole.text
        assert rest.finish_reason == whole.finish_reason


def test_what_is_held_back_across_many_silent_tokens_is_not_forgotten(appliance):
    silent = appliance.tokenizer.encode("<|im_end|>", False)
    assert [appliance.tokenizer.is_silent(one) for one in silent] == [True]
    begin, end = (appliance.tokenizer.encode(text, False) for text in ("so sto", "p it"))
    rest = asyncio.run(continued(appliance, [*begin, *silent * 100], end, ("stop",)))
    assert (rest.text, rest.finish_reason) == ("", FinishReason.STOP)
    rest = asyncio.run(continued(appliance, [*begin, *silent * 100], end[1:], ("stop",)))
    assert rest.text == "sto it"


async def continued(appliance, before, after, stops, *, has_ended=True) -> Delta:
    """What a reply says of these tokens, after earlier ones that another has told."""
    request = request_of()
    body = {"prompt": [1, *before], "output_offset": len(before), "stop": list(stops)}
    ask = completion_ask(body, ModelInfo("m", 10_000, 300, (), None, 0), 1)
    request.sequences[0].prompt_token_ids = [1, *before]
    request.sequences[0].spec = RunSpec(ask.sampling(1 + len(before), 10_000, anew))
    reply = OpenReply(appliance, request, ask, anew)
    said = Delta(request.sequences[0])
    emit(request, after, reason=FinishReason.LENGTH if has_ended else None)
    async for deltas in reply.deltas(0.01):
        for delta in deltas:
            said.add(delta)
        if not deltas or not has_ended:
            break
    return said


@given(pieces=st.lists(TEXTS, max_size=8), stops=STOPS)
def test_a_matcher_lets_out_what_precedes_the_first_complete_stop(pieces, stops):
    matcher = StopMatcher(stops)
    sent = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    text = "".join(pieces)
    ends = [
        (end, start)
        for end in range(len(text) + 1)
        for start in range(end)
        if text[start:end] in stops
    ]
    assert matcher.has_matched == bool(ends)
    assert sent == (text[: min(ends)[1]] if ends else text)


WHOLE = '<tool_call>\n{"name": "f", "arguments": {"a": "}"}'


@pytest.mark.parametrize(
    ("text", "choice", "reason"),
    [
        (WHOLE, "required", FinishReason.STOP),
        (WHOLE + "}\n</tool_c", "required", FinishReason.STOP),
        (WHOLE + "}\n</tool_call>\n<tool_call>", "required", FinishReason.LENGTH),
        (WHOLE[:-1], "required", FinishReason.LENGTH),
        (WHOLE[:20], "required", FinishReason.LENGTH),
        (WHOLE, {"type": "function", "function": {"name": "f"}}, FinishReason.STOP),
        (WHOLE, "auto", FinishReason.LENGTH),
    ],
)
async def test_a_required_call_is_whole_where_only_its_marks_are_cut_off(
    appliance, text, choice, reason
):
    request, several = request_of(), {"parallel_tool_calls": True}
    tool = {"type": "function", "function": {"name": "f"}}
    reply = OpenReply(appliance, request, asking(tools=[tool], tool_choice=choice, **several), anew)
    emit(request, appliance.tokenizer.encode(text, False), reason=FinishReason.LENGTH)
    deltas = await collect(reply)
    assert deltas[-1].finish_reason is reason
