"""From bodies to requests: which are read where, and what is too much."""

from __future__ import annotations

import threading

from appliance.api.core import body_threads, decode
from appliance.json.fields import MAX_MARKS, decode_object
from tests.worlds.daemon_parts import until


async def refusal(served, path, body):
    reply = await served.http.post(path, json=body)
    error = reply.json()["error"]
    return reply.status_code, error["param"], error["message"]


async def test_a_body_of_a_million_lists_is_refused_before_it_is_decoded(served):
    body = {"prompt": "hello", "x": [[]] * MAX_MARKS}
    for path in ("/v1/completions", "/tokenize"):
        status, _, message = await refusal(served, path, body)
        assert (status, "brackets" in message) == (400, True)


async def test_a_large_body_that_is_a_text_is_read(served, appliance):
    reply = await served.complete(prompt="hello", max_tokens=1, x="x" * (1 << 20))
    assert reply.status_code == 200
    assert reply.headers["x-penstock-ignored"] == "x"


async def test_token_ids_are_taken_as_they_are_and_what_is_none_is_refused(served, appliance):
    await served.complete(prompt=[[1, 2.0], [3]], max_tokens=1)
    sequences = appliance.submitted[0].sequences
    assert [sequence.prompt_token_ids for sequence in sequences] == [[1, 2], [3]]
    for bad in ([1, True], [1, 2.5], [1, -1], [1, 10**30], [1, None], [1, "a"]):
        assert (await refusal(served, "/v1/completions", {"prompt": bad}))[:2] == (400, "prompt")


async def test_more_token_ids_than_the_queue_takes_are_refused_before_work_is_spent(served):
    body = {"prompt": [[1] * 200] * 6, "max_tokens": 1}
    status, param, message = await refusal(served, "/v1/completions", body)
    assert (status, param) == (400, "prompt")
    assert "1200 tokens" in message


async def test_large_bodies_wait_for_each_other_and_small_ones_for_none_of_them(
    served, appliance, monkeypatch
):
    gate, entered = threading.Event(), []

    def slow(body):
        if len(body) > body_threads.MAX_SMALL_BYTES:
            entered.append(len(body))
            assert gate.wait(120)
        return decode_object(body)

    monkeypatch.setattr(decode, "decode_object", slow)
    large = {"prompt": "hello", "max_tokens": 1, "x": "x" * body_threads.MAX_SMALL_BYTES}
    try:
        waiting = [await served.post("/v1/completions", large) for _ in range(3)]
        await until(lambda: len(entered) == body_threads.NUM_EACH)
        assert (await served.chat(max_tokens=1)).status_code == 200
        assert len(entered) == body_threads.NUM_EACH
        _, writer = waiting.pop()
        writer.close()  # whose work has not begun
    finally:
        gate.set()
    for reader, _ in waiting:
        assert b" 200 " in await reader.readline()
