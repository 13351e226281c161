"""A daemon that guesses: the same replies in fewer steps, and figures of it."""

import pytest

from tests.daemons import ALONE, Daemon
from tests.levels import needs_kernels

BODY = {
    "model": "",
    "messages": [{"role": "user", "content": "Tell me about blocks"}],
    "max_tokens": 60,
    "seed": 5,
    "temperature": 0.7,
}


@pytest.fixture(scope="module")
def daemon(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculation")
    daemon = Daemon(folder, *ALONE, "--speculate", "7", model=tiny_llama).wait_ready()
    yield daemon
    daemon.stop()


@pytest.fixture
def chat(daemon):
    """Chat by OpenAI's own client; what the cache has is found under one salt alone."""
    with daemon.official_client() as client:
        model = client.models.list().data[0].id

        def create(salt, **fields):
            extra = {"ignore_eos": True, "cache_salt": salt}
            asked = {**BODY, "model": model, "extra_body": extra, **fields}
            return client.chat.completions.create(**asked)

        yield create


@needs_kernels
def test_a_predicted_reply_is_the_same_and_is_counted(daemon, chat):
    reply = chat("a")
    text = reply.choices[0].message.content
    predicted = {"type": "content", "content": text}
    again = chat("b", prediction=predicted)
    assert again.choices[0].message.content == text
    details = again.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens >= 0
    assert details.accepted_prediction_tokens < again.usage.completion_tokens == 60
    row = daemon.wait_for(
        lambda: daemon.http.get(f"/v1/requests/{again.id}").json().get("speculation")
    )
    assert "prediction" in row
    totals = daemon.fresh_state()["totals"]
    assert totals["decode_step_tokens"] > totals["decode_steps"] > 0
    assert "prediction" in {each["drafter"] for each in totals["drafts"]}


@needs_kernels
def test_a_wrong_prediction_and_a_stream_change_no_letter(chat):
    text = chat("c").choices[0].message.content
    wrong = {"type": "content", "content": text[: len(text) // 2] + "0123456789 and so on"}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = chat("d", prediction=wrong, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert last.usage.completion_tokens_details.accepted_prediction_tokens > 0
    halves = chat("e", prediction=wrong, stop=[text[10:14]]).choices[0].message.content
    assert halves == text[: text.index(text[10:14])]
