"""Texts reach workers in batches and come back once, whatever dies meanwhile."""

import asyncio
from array import array

import pytest

from appliance.daemon.serving.text_computing import MAX_BATCHES, MAX_DEATHS, TextComputing
from appliance.fleet.text_models import LoadedTexts, TextModel
from engine.checkpoint.text_model import TextModelConfig
from engine.errors import RequestError, Unavailable
from engine.text.tokenizer import Tokenizer
from engine.wire.messages import TextModelSpec, TextsComputed
from tests.text_checkpoints import add_modules, make_text_checkpoint
from tests.wordpiece_tokenizer import write_wordpiece


class FakeTextWorkers:
    """Two workers; each text's result is its number of tokens."""

    def __init__(self):
        self.up = ["one", "two"]
        self.cpus = [0]
        self.is_lost = False
        self.sent = []

    def ready(self):
        return self.up

    def send(self, worker, command):
        self.sent.append((worker, command))

    def take(self, worker):
        taken = [command for name, command in self.sent if name == worker]
        self.sent = [each for each in self.sent if each[0] != worker]
        return taken

    def take_all(self):
        taken, self.sent = self.sent, []
        return taken


def answer(command):
    results = [array("f", [len(ids)]).tobytes() for ids in command.texts]
    return TextsComputed(command.batch_id, 1, 2, results)


@pytest.fixture
def workers():
    return FakeTextWorkers()


@pytest.fixture
def busy():
    return []


@pytest.fixture
def computing(workers, busy):
    made = TextComputing(lambda: None, busy.append)
    made.serve((), workers, 8)
    return made


def ask(computing, lengths, owner="a", model="m"):
    return asyncio.ensure_future(computing.compute(model, owner, [[5] * n for n in lengths]))


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def serve_all(computing, workers):
    await settle()
    while workers.sent:
        for worker, command in workers.take_all():
            computing.computed(worker, answer(command))
        await settle()


def numbers(found):
    return [list(one) for one in found]


async def run(coroutine):
    return await asyncio.wait_for(coroutine, 20)


def test_results_come_in_the_order_of_the_texts(computing, workers, busy):
    async def scenario():
        call = ask(computing, [3, 1, 8, 2, 20, 1])
        await settle()
        assert busy[-1] == {"one", "two"}
        await serve_all(computing, workers)
        return await run(call)

    assert numbers(asyncio.run(scenario())) == [[3], [1], [8], [2], [20], [1]]
    assert busy[-1] == frozenset()
    assert computing.is_idle
    assert computing.num_texts == 6
    assert computing.num_tokens == 35


def test_a_worker_has_few_batches_at_once(computing, workers):
    async def scenario():
        call = ask(computing, [8] * 20)
        await settle()
        assert len(workers.take("one")) == len(workers.take("two")) == MAX_BATCHES
        call.cancel()

    asyncio.run(scenario())


def test_a_dead_workers_batches_are_sent_again_and_counted_once(computing, workers):
    async def scenario():
        call = ask(computing, [8, 7, 6, 5])
        await settle()
        stale = workers.take("one")
        workers.up = ["two"]
        computing.worker_died("one")
        await serve_all(computing, workers)
        found = await run(call)
        for command in stale:  # what it had sent before it died is void
            computing.computed("one", answer(command))
        return found

    assert numbers(asyncio.run(scenario())) == [[8], [7], [6], [5]]
    assert computing.num_texts == 4


def test_a_text_that_ends_worker_after_worker_fails_alone(computing, workers):
    async def scenario():
        bad, good = ask(computing, [8]), ask(computing, [3], owner="b")
        deaths = 0
        while not bad.done():
            await settle()
            for worker, command in workers.take_all():
                if [5] * 8 in command.texts:
                    deaths += 1
                    computing.worker_died(worker)
                else:
                    computing.computed(worker, answer(command))
            await settle()
        with pytest.raises(RequestError) as error:
            await bad
        return deaths, error.value.code, await run(good)

    deaths, code, good = asyncio.run(scenario())
    assert deaths == MAX_DEATHS
    assert code == "worker_died"
    assert numbers(good) == [[3]]


def test_no_number_fails_its_call_alone(computing, workers):
    async def scenario():
        bad, good = ask(computing, [2]), ask(computing, [3], owner="b")
        await settle()
        for worker, command in workers.take_all():
            report = answer(command)
            results = [
                b"" if len(ids) == 2 else one
                for ids, one in zip(command.texts, report.results, strict=True)
            ]
            computing.computed(worker, TextsComputed(command.batch_id, 1, 2, results))
        with pytest.raises(RequestError) as error:
            await run(bad)
        return error.value.code, await run(good)

    code, good = asyncio.run(scenario())
    assert code == "not_finite"
    assert numbers(good) == [[3]]


def test_a_cancelled_call_leaves_nothing_behind(computing, workers, busy):
    async def scenario():
        call = ask(computing, [8] * 20)
        await settle()
        call.cancel()
        await settle()
        assert computing.is_idle
        await serve_all(computing, workers)

    asyncio.run(scenario())
    assert busy[-1] == frozenset()


def test_another_model_takes_over_what_was_under_way(computing, workers):
    async def scenario():
        call = ask(computing, [4, 4])
        await settle()
        old, others = workers.take("one") + workers.take("two"), FakeTextWorkers()
        computing.serve((), others, 8)
        for command in old:
            computing.computed("one", answer(command))
        assert not call.done()
        await serve_all(computing, others)
        return await run(call)

    assert numbers(asyncio.run(scenario())) == [[4], [4]]


def test_calls_end_when_no_worker_is_left(computing, workers):
    async def scenario():
        call = ask(computing, [4])
        await settle()
        computing.end_all(Unavailable("gone", code="engine_dead"))
        with pytest.raises(Unavailable):
            await run(call)
        workers.is_lost = True
        with pytest.raises(Unavailable):
            await run(ask(computing, [4]))

    asyncio.run(scenario())


@pytest.mark.parametrize("pools_prompt", [True, False])
def test_a_prompts_tokens_are_counted_without_the_special_one_behind_a_text(
    pools_prompt, computing, workers, tmp_path
):
    folder = make_text_checkpoint(tmp_path / "it", "bert", num_hidden_layers=1)
    add_modules(folder, pooling={"pooling_mode": "mean", "include_prompt": pools_prompt})
    write_wordpiece(folder, ["query", "hello"])
    config = TextModelConfig.from_folder(folder, "embedding")
    spec = TextModelSpec("it", str(folder), "embedding", "float32")
    model, tokenizer = TextModel("it", folder, config), Tokenizer.from_folder(folder)
    computing.serve([LoadedTexts(model, tokenizer, spec)], workers, 8)
    encoder = computing.encoders["it"]
    assert encoder.num_unpooled("") == 0
    assert encoder.num_unpooled("query: ") == (0 if pools_prompt else 3)

    async def scenario():
        (text,) = encoder.tokenize(["query: hello"])
        call = asyncio.ensure_future(encoder.compute("a", [text], [3]))
        await settle()
        ((_, command),) = workers.take_all()
        call.cancel()
        return command

    assert asyncio.run(scenario()).num_unpooled == [3]
