"""The prefix cache in real daemons: greedy float32 tokens are transformers' in whatever state."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.daemons import ARMS, MANY, Daemon
from tests.test_exactness import assert_same, make_served, prompts


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return make_served(tmp_path_factory, "llama")


def ask(daemon, prompt, max_tokens, **fields):
    reply = daemon.complete(prompt, max_tokens=max_tokens, ignore_eos=True, **fields)
    outputs = [choice["token_ids"] for choice in reply["choices"]]
    return outputs, reply["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("arm", [*ARMS, *MANY])
def test_turns_choices_and_twins_are_those_of_a_cold_cache(arm, served, tmp_path_factory):
    folder, oracle = served
    daemon = Daemon(tmp_path_factory.mktemp(arm), *{**ARMS, **MANY}[arm], model=folder)
    daemon.wait_ready()
    (prompt,) = prompts([200], seed=7)
    for turn in range(3):
        (output,), num_cached = ask(daemon, prompt, 70)
        assert_same(prompt, output, oracle, 70)
        assert (num_cached >= 192) == (turn > 0), (turn, num_cached)
        prompt = [*prompt, *output, *prompts([9], seed=turn)[0]]
    (twins,) = prompts([300], seed=8)
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda _: ask(daemon, twins, 12, n=2), range(3)))
    for outputs, _ in replies:
        for output in outputs:
            assert_same(twins, output, oracle, 12)
    assert sum(num_cached == 0 for _, num_cached in replies) == 1, "one computed it for all"
    daemon.assert_all_free()
    assert daemon.stop() == 0


def test_a_tiny_pool_evicts_and_a_death_loses_nothing(served, tmp_path_factory):
    folder, oracle = served
    folder_of_daemon = tmp_path_factory.mktemp("tiny")
    daemon = Daemon(folder_of_daemon, *ARMS["alias"], "--kv-memory", "1MiB", model=folder)
    daemon.wait_ready()
    conversations = prompts([70, 90, 130], seed=3)
    for turn in range(4):
        for i, prompt in enumerate(conversations):
            (output,), _ = ask(daemon, prompt, 20)
            assert_same(prompt, output, oracle, 20)
            conversations[i] = [*prompt, *output, turn]
        if turn == 1:
            os.kill(daemon.state()["workers"][turn]["pid"], signal.SIGKILL)
    daemon.assert_all_free()
    assert daemon.stop() == 0


def test_salts_and_users_are_set_apart_and_off_is_off(served, tmp_path_factory):
    folder, _ = served
    (prompt,) = prompts([150], seed=5)
    daemon = Daemon(tmp_path_factory.mktemp("salts"), *ARMS["alias"], model=folder).wait_ready()
    found = [ask(daemon, prompt, 2, **f)[1] for f in ({}, {}, *2 * [{"cache_salt": "hers"}])]
    assert found == [0, 128, 0, 128]
    assert sorted(row["cached_tokens"] for row in daemon.log_rows()) == [0, 0, 128, 128]
    assert daemon.stop() == 0
    off = Daemon(tmp_path_factory.mktemp("off"), "--prefix-cache", "off", model=folder)
    off.wait_ready()
    for _ in range(2):
        usage = off.complete(prompt, max_tokens=2)["usage"]
        assert "prompt_tokens_details" not in usage
    assert all(pool["cached"] == 0 for pool in off.state()["pools"])
    assert [row["cached_tokens"] for row in off.log_rows()] == [None, None]
    assert off.stop() == 0
