"""Greedy float32 tokens through the daemon equal transformers' generate, token for token."""

import os
import random
import signal
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace

import pytest

from engine.checkpoint.checkpoint import Checkpoint
from tests.checkpoints import GEMMA4_E, GEMMA4_MOE, load_oracle, make_checkpoint
from tests.daemons import ARMS, MANY, STEP_BY_STEP, Daemon

MAX_MARGIN = 1e-4
STARTED = {"alias": "llama", "shm": "phi3"}
"""Families by transport."""
NEWER = {"gemma4_text": "peer", "qwen3_next": "shm"}
"""Transports by family. Layers differ: in their windows, in the number and size of their heads, or
by having no keys and values of their own; or most of them keep a recurrent state. All families and
transports: tests/engine/worker/test_family_modes.py and test_recurrent_modes.py."""
TINY_POOLS = {"elastic": 22, "shm": 36}
"""Blocks of 64 tokens: one sequence fits each pool, all of them do not."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.2],
    "long_factor": [1.2, 2.0, 4.0, 8.0, 12.0, 16.0],
}
OPTIONS = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    # stretched to 2048, but served up to 1024: by the short factors
    "phi3": {
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 1024,
        "num_key_value_heads": 1,
    },
    "gemma4_text": GEMMA4_E | GEMMA4_MOE,
}


def make_served(tmp_path_factory, family):
    """A checkpoint of the family and its oracle."""
    options = dict(OPTIONS.get(family, {}))
    if "rope_parameters" in options:
        options["rope_parameters"] = {"rope_theta": 10000.0, **options["rope_parameters"]}
    folder = tmp_path_factory.mktemp(family) / "model"
    make_checkpoint(folder, family, max_position_embeddings=2048, **options)
    return folder, load_oracle(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoint and oracle of a family, made once: what an oracle has said is not asked again."""
    return cache(partial(make_served, tmp_path_factory))


@pytest.fixture(
    scope="module",
    params=STARTED.items(),
    ids="-".join,
)
def started(request, made, tmp_path_factory):
    transport, family = request.param
    folder, oracle = made(family)
    options = [*ARMS[transport], "--max-model-len", "1024"]
    daemon = Daemon(tmp_path_factory.mktemp(transport), *options, model=folder).wait_ready()
    yield daemon, oracle
    daemon.assert_all_free()
    assert daemon.stop() == 0


@pytest.fixture(params=["static", "elastic", "colocated"])
def running(request, started):
    """A daemon in these roles, to whose prompts nothing is in the cache, and its oracle."""
    daemon, oracle = started
    daemon.http.post("/v1/penstock/roles", json={"roles": request.param}).raise_for_status()
    return Salted(daemon, request.param), oracle


class Salted:
    """What the prompts of a daemon leave in the cache is found by those of one salt alone."""

    def __init__(self, daemon, salt):
        self.daemon, self.salt = daemon, salt

    def complete(self, prompt, **fields):
        return self.daemon.complete(prompt, cache_salt=self.salt, **fields)


GENERATED = weakref.WeakKeyDictionary()
"""By oracle: what it has said already."""


def generate(oracle, prompt, max_tokens):
    """Greedy tokens of the reference, without end of text, and the log-probabilities of each."""
    said = GENERATED.setdefault(oracle, {})
    key = (tuple(prompt), max_tokens)
    if key not in said:
        said[key] = _generate(oracle, prompt, max_tokens)
    return said[key]


def _generate(oracle, prompt, max_tokens):
    import torch

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logprobs = torch.log_softmax(torch.stack([step[0] for step in out.logits]).float(), -1)
    return out.sequences[0, len(prompt) :].tolist(), logprobs


def assert_same(prompt, got, oracle, max_tokens):
    """Equal tokens; another one is forgiven only where the reference has both at one height.

    What comes after such a tie is compared with what the reference says after the other token.
    """
    expected, logprobs = generate(oracle, prompt, max_tokens)
    pairs = enumerate(zip(got, expected, strict=True))
    at = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
    if at is None:
        return
    margin = float(logprobs[at, expected[at]] - logprobs[at, got[at]])
    print(f"prompt of {len(prompt)}: output {at} is {got[at]}, not {expected[at]}; {margin} below")
    assert margin < MAX_MARGIN
    if at + 1 < max_tokens:
        assert_same([*prompt, *got[: at + 1]], got[at + 1 :], oracle, max_tokens - at - 1)


class CountingOracle:
    """After n comes n + 1; after 3, 4 and 5 are tied, but for less than float32 can tell."""

    def generate(self, ids, *, max_new_tokens, **_):
        import torch

        said, logits = ids[0].tolist(), []
        for _ in range(max_new_tokens):
            row = torch.zeros(1, 16)
            row[0, said[-1] + 1] = 9.0
            row[0, 5] = 9.0 - 1e-6 if said[-1] == 3 else row[0, 5]
            logits.append(row)
            said.append(int(row.argmax()))
        return SimpleNamespace(sequences=torch.tensor([said]), logits=logits)


def test_what_follows_a_tie_is_compared_too():
    oracle = CountingOracle()
    assert_same([1], [2, 3, 4, 5, 6], oracle, 5)
    assert_same([1], [2, 3, 5, 6, 7], oracle, 5)
    assert_same([1], [2, 3, 5], oracle, 3)
    for wrong in ([2, 3, 5, 6, 8], [2, 3, 5, 5, 6], [2, 3, 6, 7, 8], [2, 4, 5, 6, 7]):
        with pytest.raises(AssertionError):
            assert_same([1], wrong, oracle, 5)


def prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(290) for _ in range(n)] for n in lengths]


def assert_all_same(daemon, oracle, cases):
    """Prompts with their max_tokens, six under way at a time."""

    def one(case):
        prompt, max_tokens = case
        reply = daemon.complete(prompt, max_tokens=max_tokens, ignore_eos=True)
        return reply["choices"][0]["token_ids"]

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(one, cases))
    for (prompt, max_tokens), got in zip(cases, results, strict=True):
        assert_same(prompt, got, oracle, max_tokens)


def across_a_death(daemon, prompt, max_tokens):
    """Tokens of a reply whose decode worker is killed when a fifth of it has come."""
    pid, tokens, is_alive = daemon.worker_pid("decode"), [], True
    for event in daemon.stream(prompt, max_tokens=max_tokens, ignore_eos=True):
        tokens += event["choices"][0]["token_ids"] if event["choices"] else []
        if is_alive and len(tokens) >= max_tokens // 5:
            os.kill(pid, signal.SIGKILL)
            is_alive = False
    return tokens


def test_single_prompts_across_block_and_chunk_borders(running):
    daemon, oracle = running
    for prompt in prompts([1, 2, 63, 64, 65, 128, 511, 512, 513, 700]):
        reply = daemon.complete(prompt, max_tokens=20, ignore_eos=True)
        assert_same(prompt, reply["choices"][0]["token_ids"], oracle, 20)


def test_many_prompts_at_once_with_others_joining_and_leaving(running):
    daemon, oracle = running
    cases = [
        (prompt, max_tokens)
        for prompt, max_tokens in zip(
            prompts([5, 300, 64, 17, 900, 33, 128, 1, 450, 70, 12, 256], seed=1),
            [40, 5, 70, 1, 12, 30, 2, 64, 9, 25, 80, 3],
            strict=True,
        )
    ]

    assert_all_same(daemon, oracle, cases)


@pytest.mark.parametrize("arm", ["1x1", "2x2"])
def test_many_workers_that_die_one_after_the_other_while_roles_change(arm, made, tmp_path_factory):
    folder, oracle = made("llama")
    daemon = Daemon(tmp_path_factory.mktemp(arm), *MANY[arm], model=folder).wait_ready()
    lengths = [5, 300, 64, 17, 900, 33, 128, 1, 450, 70, 12, 256, 640, 65]
    cases = [(prompt, 10 + 7 * (i % 8)) for i, prompt in enumerate(prompts(lengths, seed=6))]
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(assert_all_same, daemon, oracle, cases)
        for roles, worker in zip(
            ["static", "elastic", "colocated", "elastic"], daemon.state()["workers"], strict=False
        ):
            time.sleep(0.1)
            os.kill(worker["pid"], signal.SIGKILL)
            daemon.http.post("/v1/penstock/roles", json={"roles": roles}).raise_for_status()
        done.result()
    assert_all_same(daemon, oracle, cases[:4])
    daemon.assert_all_free()
    assert daemon.stop() == 0


@pytest.mark.parametrize("arm", list(TINY_POOLS))
def test_a_pool_that_is_too_small_for_all(arm, made, tmp_path_factory):
    folder, oracle = made("llama")
    options = [*ARMS[arm], *STEP_BY_STEP, "--max-model-len", "512"]
    block_bytes = Checkpoint.open(folder).config.kv_block_bytes(64, "float32")
    options += ["--kv-memory", str(TINY_POOLS[arm] * block_bytes)]
    daemon = Daemon(tmp_path_factory.mktemp(arm), *options, model=folder).wait_ready()
    cases = [(prompt, 400 - len(prompt)) for prompt in prompts([5, 200, 64, 17, 130, 33], seed=9)]
    assert_all_same(daemon, oracle, cases)
    totals = daemon.fresh_state()["totals"]
    assert (totals["preemptions"] > 0, totals["failed"]) == (True, 0)
    paused = [row for row in daemon.log_rows(10) if row["preemptions"]]
    assert paused
    for row in paused:
        stages = ("tokenize", "queue", "prefill", "handoff", "decode_wait", "decode", "paused")
        parts = [row[f"{stage}_ms"] or 0.0 for stage in stages]
        assert sum(parts) == pytest.approx(row["e2e_ms"], abs=0.01)
    daemon.assert_all_free()
    assert daemon.stop() == 0


def test_a_list_of_prompts_in_one_request(running):
    daemon, oracle = running
    batch = prompts([3, 100, 64], seed=2)
    reply = daemon.complete(batch, max_tokens=10, ignore_eos=True)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    for prompt, choice in zip(batch, reply["choices"], strict=True):
        assert_same(prompt, choice["token_ids"], oracle, 10)


def test_end_of_text_ends_where_the_reference_ends(running):
    daemon, oracle = running
    (prompt,) = prompts([40], seed=3)
    tokens, _ = generate(oracle, prompt, 30)
    stop_id = tokens[10]
    reply = daemon.complete(prompt, max_tokens=30, ignore_eos=True, stop_token_ids=[stop_id])
    assert reply["choices"][0]["token_ids"] == tokens[: tokens.index(stop_id) + 1]
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_logprobs_agree_with_the_reference(running):
    daemon, oracle = running
    (prompt,) = prompts([90], seed=4)
    tokens, expected = generate(oracle, prompt, 15)
    reply = daemon.complete(prompt, max_tokens=15, ignore_eos=True, logprobs=5)
    choice = reply["choices"][0]
    assert choice["token_ids"] == tokens
    for i, token_id in enumerate(tokens):
        ours = choice["logprobs"]["token_logprobs"][i]
        assert ours == pytest.approx(float(expected[i, token_id]), abs=1e-4)


@pytest.mark.parametrize(("family", "transport"), NEWER.items())
def test_newer_families_under_all_roles_across_deaths_and_from_the_cache(
    made, family, transport, tmp_path
):
    folder, oracle = made(family)
    options = ["--roles", "static", "--transport", transport, "--max-model-len", "1024"]
    daemon = Daemon(tmp_path, *options, model=folder).wait_ready()
    cases = list(zip(prompts([5, 64, 65, 300, 600], seed=5), [30, 9, 20, 12, 4], strict=True))
    assert_all_same(daemon, oracle, cases)
    for number, roles in enumerate(["elastic", "colocated"]):
        daemon.http.post("/v1/penstock/roles", json={"roles": roles}).raise_for_status()
        again = prompts([70, 130], seed=7 + number)
        assert_all_same(daemon, oracle, [(prompt, 12) for prompt in again])
    daemon.http.post("/v1/penstock/roles", json={"roles": "static"}).raise_for_status()
    (prompt,) = prompts([130], seed=6)
    assert_same(prompt, across_a_death(daemon, prompt, 100), oracle, 100)
    daemon.wait_ready()
    reply = daemon.complete(prompt, max_tokens=20, ignore_eos=True)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert_same(prompt, reply["choices"][0]["token_ids"], oracle, 20)
    daemon.assert_all_free()
    assert daemon.stop() == 0
