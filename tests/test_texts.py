"""Real workers hold models of texts beside the chat model and compute with them."""

import asyncio
import os
import random
import shutil
import signal
from functools import partial

import pytest
import torch

from appliance.configuration.settings import ServeConfig
from appliance.daemon.serving.text_computing import TextComputing
from appliance.fleet.boot import make_plan
from appliance.fleet.supervisor import Supervisor
from appliance.fleet.text_models import TextWorkers
from engine.errors import ConfigError, RequestError
from engine.wire.messages import TextsComputed
from tests.byte_tokenizer import write_tokenizer
from tests.text_checkpoints import (
    CLS,
    SEP,
    add_modules,
    hidden_states,
    load_text_oracle,
    make_text_checkpoint,
    score,
)

NUM_TEXTS, LONGEST = 300, 200


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    at = tmp_path_factory.mktemp("texts")
    embedding = make_text_checkpoint(at / "tiny-embedding", "bert")
    add_modules(embedding, max_seq_length=LONGEST)
    rerank = make_text_checkpoint(at / "tiny-rerank", "xlm-roberta", "rerank")
    write_tokenizer(embedding)
    write_tokenizer(rerank)
    return embedding, rerank


def texts_of(num):
    draw = random.Random(1)
    return [[draw.randrange(5, 290) for _ in range(draw.randrange(1, LONGEST))] for _ in range(num)]


class Workers:
    """The workers of a plan, and what computes texts on them."""

    def __init__(self, config):
        self.plan = make_plan(config)
        self.has_computed = asyncio.Event()
        self.computing = TextComputing(lambda: None, lambda _workers: None)
        self.supervisor = Supervisor(
            self.plan.workers,
            self.plan.inherited_fds,
            on_report=self._reported,
            on_ready=lambda _worker: self.computing.pump(),
            on_died=lambda worker, _about: self.computing.worker_died(worker),
            on_lost=lambda *_about: None,
        )

    def _reported(self, worker, report):
        if isinstance(report, TextsComputed):
            self.computing.computed(worker, report)
            self.has_computed.set()

    async def __aenter__(self):
        self.supervisor.spawn_all()
        await self.supervisor.run()
        self.computing.serve(self.plan.texts, TextWorkers(self.supervisor), 512)
        return self

    async def __aexit__(self, *_error):
        await self.supervisor.stop()
        self.plan.close()


@pytest.fixture
def config(tmp_path, tiny_llama, folders):
    return partial(
        ServeConfig,
        socket=tmp_path / "p.sock",
        state_dir=tmp_path / "state",
        model=tiny_llama,
        roles="static",
        dtype="float32",
        embedding_model=folders[0],
        rerank_model=folders[1],
    )


def test_texts_are_computed_by_the_prefill_worker_and_survive_its_death(config, folders):
    texts = texts_of(NUM_TEXTS)
    pairs = [[CLS, *text[:40], SEP, *text[40:80], SEP] for text in texts[:8]]

    async def scenario():
        async with Workers(config()) as workers:
            computing, prefill = workers.computing, workers.supervisor.workers["prefill"]
            assert [plan.name for plan, setup in workers.plan.workers if setup.text_models] == [
                "prefill"
            ]
            assert computing.cpus == list(prefill.plan.cpus)
            embedding, rerank = (computing.encoders[folder.name] for folder in folders)
            assert (embedding.max_tokens, embedding.num_dimensions) == (LONGEST, 64)
            assert rerank.num_dimensions is None
            for bad in ([], [5] * (LONGEST + 1)):
                with pytest.raises(RequestError):
                    embedding.check([bad])
            calls = [
                asyncio.ensure_future(each)
                for each in (
                    embedding.compute("a", texts[:200]),
                    embedding.compute("b", texts[200:]),
                    rerank.compute("b", pairs),
                )
            ]
            await workers.has_computed.wait()
            os.kill(prefill.pid, signal.SIGKILL)
            first, second, scores = await asyncio.wait_for(asyncio.gather(*calls), 120)
            assert prefill.num_restarts == 1
            assert computing.num_texts == NUM_TEXTS + len(pairs)
            return [*first, *second], scores

    vectors, scores = asyncio.run(scenario())
    oracle = load_text_oracle(folders[0], "bert")
    for text, vector in zip(texts, vectors, strict=True):
        wanted = torch.nn.functional.normalize(hidden_states(oracle, text).mean(0), dim=0)
        assert float((torch.tensor(vector) - wanted).norm()) < 1e-5
    oracle = load_text_oracle(folders[1], "xlm-roberta", "rerank")
    for pair, found in zip(pairs, scores, strict=True):
        wanted = torch.sigmoid(torch.tensor(score(oracle, pair)))
        assert torch.sigmoid(torch.tensor(found[0])) == pytest.approx(float(wanted), rel=1e-5)


def test_two_models_of_one_name_are_refused(config, folders, tmp_path):
    twin = shutil.copytree(folders[1], tmp_path / folders[0].name)
    with pytest.raises(ConfigError) as error:
        make_plan(config(rerank_model=twin))
    assert error.value.where == "rerank_model"


def test_texts_that_no_memory_would_hold_are_refused(config, tmp_path):
    """By a file that names a longer text than any other: rotations need no table of places."""
    folder = make_text_checkpoint(tmp_path / "m", "qwen3", max_position_embeddings=2**31 - 1)
    write_tokenizer(folder)
    with pytest.raises(ConfigError) as error:
        make_plan(config(embedding_model=folder, kv_memory_bytes=1 << 26))
    assert error.value.where == "embedding_model"
    add_modules(folder, max_seq_length=LONGEST)
    make_plan(config(embedding_model=folder)).close()
