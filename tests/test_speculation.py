"""A daemon that guesses: the same replies in fewer steps, and figures of it."""

import pytest

from tests.daemons import ALONE, Daemon
from tests.levels import needs_kernels

BODY = {
    "messages": [{"role": "user", "content": "Tell me about blocks"}],
    "max_tokens": 60,
    "seed": 5,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def daemon(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculation")
    daemon = Daemon(folder, *ALONE, "--speculate", "7", model=tiny_llama).wait_ready()
    yield daemon
    daemon.stop()


def chat(daemon, **fields):
    reply = daemon.http.post("/v1/chat/completions", json={**BODY, **fields}).json()
    return reply["choices"][0]["message"]["content"], reply["usage"], reply["id"]


@needs_kernels
def test_a_predicted_reply_is_the_same_and_is_counted(daemon):
    text, _, _ = chat(daemon, temperature=0.7, cache_salt="a")
    predicted = {"type": "content", "content": text}
    again, usage, request_id = chat(daemon, temperature=0.7, cache_salt="b", prediction=predicted)
    assert again == text
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    row = daemon.wait_for(
        lambda: daemon.http.get(f"/v1/requests/{request_id}").json().get("speculation")
    )
    assert "prediction" in row
    totals = daemon.fresh_state()["totals"]
    assert totals["decode_step_tokens"] > totals["decode_steps"] > 0
    assert "prediction" in {each["drafter"] for each in totals["drafts"]}
