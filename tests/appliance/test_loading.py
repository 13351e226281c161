"""Two workers on one device: timed, and by that one of them is left out or not. Swaps of models."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance import loading, process
from appliance.configuration.config import ServeConfig
from appliance.fleet.placer import MeasuredModel, StepMemory
from appliance.loading import Rehearsing, Swapping
from engine.cache.blocks import Ledger
from engine.cache.places import DECODE, PREFILL, make_places
from engine.errors import PenstockError
from engine.kernels.cpu import AGAIN
from engine.schedule.queue import FairQueue
from engine.schedule.router import Router
from engine.text.tokenizer import Tokenizer
from engine.wire.messages import Rehearse, Rehearsed, RehearsedStep
from tests.appliance.model_folder import make_model

PROMPT_MS, DECODE_MS = 200.0, 10.0


class Device:
    """On which two processes compute at once, or take turns: then steps take longer beside others.

    Args:
        slowdown: of each process's steps while the other computes.
    """

    def __init__(self, slowdown: float) -> None:
        self.slowdown = slowdown
        self.told: list[tuple[str, Rehearse]] = []
        places = make_places([PREFILL], [DECODE], "alias", home=DECODE).with_pools({"kv": 100})
        self.router = Router(
            places,
            Ledger(places.books(64)),
            FairQueue(8, 4096),
            send=self.send,
            emit=lambda *_: None,
            max_step_tokens=4096,
            roles="elastic",
            cores={PREFILL: (), DECODE: ()},
        )
        for name in places.names:
            self.router.worker_ready(name, 0)

    def send(self, worker: str, command: object) -> None:
        if isinstance(command, Rehearse):
            self.told.append((worker, command))

    def answer(self, rehearsing: Rehearsing) -> None:
        """What all have been told, who have it at the same time."""
        told, self.told = self.told, []
        ratio = self.slowdown if len(told) > 1 else 1.0
        for worker, command in told:
            made = [
                RehearsedStep(
                    s.num_sequences, s.num_tokens, s.num_before,
                    ratio * (DECODE_MS if s.num_tokens == 1 else PROMPT_MS),
                )
                for s in command.steps[:6]
            ]  # fmt: skip
            rehearsing.reported(worker, Rehearsed(command.rehearsal_id, made))


def started(device: Device, memory: StepMemory, *, dies: bool = False) -> str | None:
    async def start() -> str | None:
        send = device.send
        rehearsing = Rehearsing(device.router, send, 4096, memory, is_trial=True)
        assert memory.read().is_trying
        running = asyncio.create_task(rehearsing.run(8192))
        while not running.done():
            await asyncio.sleep(0)
            if dies and device.told:
                rehearsing.died()
            device.answer(rehearsing)
        return await running

    return asyncio.run(start())


@pytest.mark.parametrize(
    ("slowdown", "roles", "words"),
    [(1.1, "elastic", "both workers go on"), (2.0, "colocated", "decode does everything")],
)
def test_two_workers_go_on_where_they_are_better_and_one_does_everything_where_not(
    slowdown: float, roles: str, words: str, tmp_path: Path
) -> None:
    device, memory = Device(slowdown), StepMemory(tmp_path, "a model here")
    about = started(device, memory)
    assert about is not None
    assert about.startswith(words)
    assert device.router.roles.roles == roles
    known = memory.read()
    assert not known.is_trying
    assert known.pair is not None
    assert known.pair.decode_beside_ms == pytest.approx(slowdown * DECODE_MS)
    device.router.check_invariants()


def test_a_start_that_fails_while_it_tries_two_workers_is_remembered(tmp_path: Path) -> None:
    device, memory = Device(1.0), StepMemory(tmp_path, "a model here")
    about = started(device, memory, dies=True)
    assert about is not None
    assert "could not be timed" in about
    assert memory.read() == MeasuredModel(is_trying=True)


def two_models(tmp_path):
    """Settings of model a, which know b; a service of a, as far as swaps ask it; its events."""
    a, b = (
        ServeConfig(
            model=make_model(tmp_path / name).parent, socket=tmp_path / "s", state_dir=tmp_path
        )
        for name in ("a", "b")
    )
    a.models["b"] = b
    events: list[tuple[str, str]] = []
    service = SimpleNamespace(
        model=SimpleNamespace(model_id="a"),
        tokenizer=Tokenizer.from_folder(a.model),
        idle=asyncio.Event(),
        refused_before_queue=None,
        availability=SimpleNamespace(),
        event=lambda _, code, message: events.append((code, message)),
        make_frame=lambda: None,
    )
    return a, service, events


async def test_a_swap_serves_with_the_tokenizer_that_was_looked_at_before(tmp_path, monkeypatch):
    a, service, _ = two_models(tmp_path)
    served: list[tuple[str, Tokenizer]] = []
    failing = ["b", "a"]

    def change_model(plan: str, router: object, workers: object, tokenizer: Tokenizer) -> None:
        served.append((plan, tokenizer))
        service.tokenizer = tokenizer

    async def stop() -> None:
        """There is nothing."""

    async def load() -> None:
        if failing and failing.pop(0):
            raise PenstockError("its worker died")

    service.change_model = change_model
    monkeypatch.setattr(loading, "BACK_AFTER_S", (0,))
    monkeypatch.setattr(Swapping, "_plan", lambda self, name: name)
    started = (None, None)
    swapping = Swapping(lambda: a, service, None, start=lambda _: started, stop=stop, load=load)
    first, swap = service.tokenizer, await swapping._prepare("b")
    for each in (a, a.models["b"]):
        (each.model / "tokenizer.json").unlink()
    assert await swap() == "its worker died"
    assert [name for name, _ in served] == ["b", "a", "a"]
    assert service.tokenizer is first
    assert await swap() is None
    assert served[-1] == ("b", served[0][1])


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ([], f"elastic roles act as static ones: the machine was too busy to time steps; {AGAIN}"),
        (
            [RehearsedStep(1, 16, 0, 2.0)],
            "elastic roles choose each prompt's worker by what steps take here, but as with static "
            "roles for steps of more than 16 tokens, until some have been seen: the machine was "
            f"busy; {AGAIN}. Timed: 1 step in 0.9 s, of up to 16 prompt tokens, or of up to 1 "
            "sequence together",
        ),
        (
            [RehearsedStep(1, 512, 1024, 2.0), RehearsedStep(8, 8, 0, 1.0)],
            "elastic roles choose each prompt's worker by what steps take here. Timed: 2 steps in "
            "0.9 s, of up to 512 prompt tokens after up to 1,024 others, or of up to 8 sequences "
            "together",
        ),
    ],
)
def test_what_elastic_roles_go_by_is_a_sentence_and_then_figures(made, expected):
    assert loading._words(SimpleNamespace(made=made), 0.9, 512) == expected


async def test_files_that_cannot_be_read_are_an_event_of_their_model(tmp_path):
    a, service, events = two_models(tmp_path)
    swapping = Swapping(lambda: a, service, None, start=None, stop=None, load=None)
    (a.models["b"].model / "tokenizer.json").unlink()
    with pytest.raises(PenstockError, match="tokenizer"):
        await swapping._prepare("b")
    [(code, message)] = events
    assert code == "model.swap_failed"
    assert message.startswith("b cannot be served: ")


async def test_a_folder_that_still_hangs_gets_no_second_reader(tmp_path, monkeypatch):
    for name, value in (("_LOOK_S", 0.01), ("SILENT_S", 0.05), ("HANG_S", 0.1)):
        monkeypatch.setattr(process, name, value)
    a, service, events = two_models(tmp_path)
    swapping = Swapping(lambda: a, service, None, start=None, stop=None, load=None)
    answers, readers = threading.Event(), []

    def hang(config):
        readers.append(threading.current_thread())
        answers.wait()

    monkeypatch.setattr(loading, "check_files", hang)
    with pytest.raises(PenstockError, match="does not answer for"):
        await swapping._prepare("b")
    with pytest.raises(PenstockError, match="still does not answer to who read it last"):
        await swapping._prepare("b")
    assert len(readers) == 1
    assert [code for code, _ in events].count("model.swap_failed") == 2
    answers.set()
    await asyncio.to_thread(readers[0].join)
    await swapping._prepare("b")
    assert len(readers) == 2
