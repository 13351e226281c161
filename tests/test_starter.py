"""The starter model answers from a long document exactly, whichever way its KV went."""

import json
from importlib.resources import files

import pytest

from appliance.hub.names import STARTER_FOLDER
from engine.checkpoint.checkpoint import Checkpoint
from tests.daemons import ARMS, Daemon
from tests.starter.words import SMALL_TALK

SAMPLE = files("engine.starter").joinpath("sample")
RUNBOOK = SAMPLE.joinpath("runbook.txt").read_text("utf-8").strip()
QUESTIONS = json.loads(SAMPLE.joinpath("questions.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def starter(tmp_path_factory):
    """A daemon that copies each handoff."""
    daemon = Daemon(tmp_path_factory.mktemp("shm"), *ARMS["shm"]).wait_ready()
    yield daemon
    daemon.assert_all_free()
    assert daemon.stop() == 0


def ask(client, *contents):
    """The answer to the last of these messages, which the user and the model took turns to say."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    reply = client.chat.completions.create(
        model=STARTER_FOLDER.name, messages=messages, temperature=0, max_tokens=64
    )
    assert reply.choices[0].finish_reason == "stop"
    return reply.choices[0].message.content


def test_questions_over_a_long_document_are_answered_exactly(starter):
    with starter.official_client() as client:
        for asked in QUESTIONS[:3]:
            assert ask(client, f"{RUNBOOK}\n\n{asked['question']}") == asked["answer"]


def test_a_second_question_needs_no_second_document(starter):
    first, second = QUESTIONS[:2]
    opening = f"{RUNBOOK}\n\n{first['question']}"
    with starter.official_client() as client:
        assert ask(client, opening, first["answer"], second["question"]) == second["answer"]


def test_it_says_what_it_is(starter):
    with starter.official_client() as client:
        assert "--model" in ask(client, "Who are you?")
        assert ask(client, "Who are you?") in SMALL_TALK


def test_a_start_says_at_most_eight_lines_until_it_is_ready(starter):
    lines = starter.stderr.splitlines()
    (ready,) = (number for number, line in enumerate(lines, 1) if "ready on" in line)
    assert ready <= 8


def test_the_checkpoint_is_small_and_ordinary():
    checkpoint = Checkpoint.open(STARTER_FOLDER)
    assert sum(path.stat().st_size for path in STARTER_FOLDER.iterdir()) < 12 << 20
    assert checkpoint.config.max_position_embeddings >= 8192
    assert checkpoint.stored_dtype == "bfloat16"
