"""The prefix cache in real daemons: greedy float32 tokens are transformers' in whatever state."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.checkpoint.checkpoint import Checkpoint
from engine.text.tokenizer import Tokenizer
from tests.checkpoints import load_oracle, make_checkpoint
from tests.daemons import ALONE, ARMS, MANY, STEP_BY_STEP, Daemon
from tests.test_exactness import MAX_MARGIN, assert_same, make_served, prompts

SLOW = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
"""Of a model whose prompts take long enough that copying blocks beats computing them."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return make_served(tmp_path_factory, "llama")


def ask(daemon, prompt, max_tokens, **fields):
    reply = daemon.complete(prompt, max_tokens=max_tokens, ignore_eos=True, **fields)
    outputs = [choice["token_ids"] for choice in reply["choices"]]
    return outputs, reply["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module", params=["alias", "2x2"])
def arm(request):
    return request.param


@pytest.fixture(scope="module")
def daemon(arm, served, tmp_path_factory):
    folder, _ = served
    daemon = Daemon(tmp_path_factory.mktemp(arm), *{**ARMS, **MANY}[arm], model=folder)
    yield daemon.wait_ready()
    daemon.assert_all_free()
    assert daemon.stop() == 0


def switch_roles(daemon, roles):
    daemon.http.post("/v1/penstock/roles", json={"roles": roles}).raise_for_status()


def test_turns_choices_and_twins_are_those_of_a_cold_cache(daemon, arm, served):
    _, oracle = served
    started_as = daemon.state()["roles"]
    for roles in ("static", "elastic", "colocated") if arm == "alias" else (started_as,):
        switch_roles(daemon, roles)
        num_computed = assert_turns_choices_and_twins(daemon, oracle, roles)
        if arm != "2x2":
            assert num_computed == 1, "one computed it for all"
        else:  # where another worker is free, to compute it may be quicker than to wait
            assert 1 <= num_computed <= 2
    switch_roles(daemon, started_as)


def test_a_reply_and_the_log_say_why_a_prompt_missed(daemon):
    (prompt,) = prompts([200], seed=41)
    other = [*prompt[:150], (prompt[150] + 1) % 256, *prompt[151:]]
    said = []
    for asked in (prompt, other, other):
        reply = daemon.complete(asked, max_tokens=1, cache_salt="misses")
        said.append(reply["usage"]["prompt_tokens_details"])
    reasons = [each.get("cache_miss") for each in said]
    assert reasons == ["token 0: never stored", "token 150: other text", None]
    assert "cache_miss_texts" not in said[0]
    assert len(set(said[1]["cache_miss_texts"].values())) == 2
    rows = daemon.http.get("/v1/penstock/log", params={"limit": 2}).json()["data"]
    assert [row["cache_miss"] for row in rows] == [None, "token 150: other text"]


def assert_turns_choices_and_twins(daemon, oracle, salt):
    """How many of three that ask the same at once found nothing of it in the cache."""
    (prompt,) = prompts([200], seed=7)
    for turn in range(3):
        (output,), num_cached = ask(daemon, prompt, 70, cache_salt=salt)
        assert_same(prompt, output, oracle, 70)
        assert (num_cached >= 192) == (turn > 0), (turn, num_cached)
        prompt = [*prompt, *output, *prompts([9], seed=turn)[0]]
    (twins,) = prompts([300], seed=8)
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda _: ask(daemon, twins, 12, n=2, cache_salt=salt), range(3)))
    for outputs, _ in replies:
        for output in outputs:
            assert_same(twins, output, oracle, 12)
    return sum(num_cached == 0 for _, num_cached in replies)


def test_salts_and_users_are_set_apart(daemon, arm):
    if arm != "alias":
        pytest.skip("where blocks lie makes no difference")
    (prompt,) = prompts([150], seed=5)
    found = [ask(daemon, prompt, 2, **f)[1] for f in ({}, {}, *2 * [{"cache_salt": "hers"}])]
    assert found == [0, 128, 0, 128]
    daemon.wait_for(lambda: [row["cached_tokens"] for row in daemon.log_rows(4)] == found[::-1])


def test_warm_turns_while_roles_change_and_workers_die(daemon, served):
    _, oracle = served
    conversations = prompts([150, 70, 200], seed=11)
    for turn, roles in enumerate(["static", "colocated", "elastic", "static"]):
        switch_roles(daemon, roles)
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(ask, daemon, prompt, 40) for prompt in conversations]
            if turn in (1, 3):
                os.kill(daemon.state()["workers"][turn // 2]["pid"], signal.SIGKILL)
            for i, ((output,), _) in enumerate(each.result() for each in asked):
                assert_same(conversations[i], output, oracle, 40)
                conversations[i] = [*conversations[i], *output, turn]


def assert_greedy(prompt, output, oracle):
    """Each token is the likeliest after those before it; the reference sees all of them once."""
    import torch

    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    behind = logits.max(-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert float(behind.max()) < MAX_MARGIN


def test_an_answer_that_only_the_decode_pool_has_is_fetched(tmp_path):
    options = {**SLOW, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    folder = make_checkpoint(tmp_path / "model", max_position_embeddings=2048, **options)
    oracle = load_oracle(folder)
    daemon = Daemon(tmp_path / "d", *MANY["1x1"], model=folder).wait_ready()
    (prompt,) = prompts([100], seed=4)
    for turn in range(3):
        (output,), num_cached = ask(daemon, prompt, 200)
        assert_greedy(prompt, output, oracle)
        assert num_cached == (len(prompt) - 10) // 64 * 64 * (turn > 0)
        prompt = [*prompt, *output, *prompts([9], seed=turn)[0]]
    assert daemon.fresh_state()["totals"]["prefix_cache_fetches"] == 7 * 64 - 64
    pid = daemon.worker_pid("decode")
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(ask, daemon, prompt, 20)
        os.kill(pid, signal.SIGKILL)
        ((output,), _) = again.result()
    assert_greedy(prompt, output, oracle)
    daemon.assert_all_free()
    assert daemon.stop() == 0


def test_in_bfloat16_nothing_that_was_sent_is_lost_repeated_or_altered(tmp_path):
    options = {"num_key_value_heads": 4, "max_position_embeddings": 2048}
    folder = make_checkpoint(tmp_path / "model", dtype="bfloat16", **options)
    block_bytes = Checkpoint.open(folder).config.kv_block_bytes(64, "bfloat16")
    options = [*STEP_BY_STEP, "--max-model-len", "512", "--kv-memory", str(28 * block_bytes)]
    daemon = Daemon(tmp_path / "d", *MANY["1x1"], *options, model=folder).wait_ready()
    asked = prompts([5, 200, 64, 130], seed=9)
    tokenizer = Tokenizer.from_folder(folder)
    for turn in range(3):  # cold, warm, warm; two of them under a death
        begun = threading.Event()
        with ThreadPoolExecutor(4) as pool:
            replies = [
                pool.submit(lambda p, begun=begun: list(sent(daemon, p, begun)), prompt)
                for prompt in asked
            ]
            if turn < 2:
                assert begun.wait(120)
                os.kill(daemon.state()["workers"][turn]["pid"], signal.SIGKILL)
            for reply in replies:
                ids = [i for _, new in reply.result() for i in new]
                assert len(ids) == 250
                assert "".join(text for text, _ in reply.result()) == tokenizer.decode(ids)
    assert {row["completion_tokens"] for row in daemon.log_rows()} == {250}
    assert daemon.fresh_state()["totals"]["preemptions"]
    daemon.assert_all_free()
    assert daemon.stop() == 0


def sent(daemon, prompt, begun):
    """Text and token ids of each event of a stream; `begun` is set at the first."""
    for event in daemon.stream(prompt, max_tokens=250, ignore_eos=True):
        begun.set()
        for choice in event["choices"]:
            yield choice["text"], choice["token_ids"]


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


def test_off_is_off(served, tmp_path):
    folder, _ = served
    (prompt,) = prompts([150], seed=5)
    off = Daemon(tmp_path, *ALONE, "--prefix-cache", "off", model=folder).wait_ready()
    for _ in range(2):
        usage = off.complete(prompt, max_tokens=2)["usage"]
        assert "prompt_tokens_details" not in usage
    assert all(pool["cached"] == 0 for pool in off.state()["pools"])
    assert [row["cached_tokens"] for row in off.log_rows()] == [None, None]
    assert off.stop() == 0
