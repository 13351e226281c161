"""Swaps of models."""

import asyncio
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from appliance.api.core.appliance import Appliance
from appliance.configuration.settings import ServeConfig
from appliance.daemon.models import swapping as swapping_module
from appliance.daemon.models.loading import Fetching
from appliance.daemon.models.swapping import Swapping
from appliance.daemon.process import disk_reads
from appliance.hub.names import HubName
from engine.errors import ConfigError, PenstockError, Unavailable
from engine.text.tokenizer import Tokenizer
from tests.appliance.model_folder import make_model


def test_while_a_model_downloads_there_is_an_answer_to_all_that_the_api_asks():
    log = SimpleNamespace(event=None, rows=None, events=None, usage=None, recording=None)
    fetching = Fetching([HubName("a/b")], log)
    asked = {name for name in vars(Appliance) if not name.startswith("_")}
    for name in asked - {"model", "tokenizer"}:
        assert hasattr(fetching, name), name
    for name in ("model", "tokenizer"):
        with pytest.raises(Unavailable, match="looking for a/b"):
            getattr(fetching, name)
    with pytest.raises(Unavailable):
        fetching.submit(object())
    assert (fetching.owner_of("x"), fetching.request_frames()) == (None, [])


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


class NoResidents:
    """Nothing stays loaded."""

    def __init__(self):
        self.parked = {}

    async def unload_faulty(self):
        """There is none."""

    def give_away(self, name):
        return None

    def held_bytes(self, served):
        return 1 << 30


def swapping_of(a, service, **more):
    on_gpu = SimpleNamespace(is_on_cores=False)
    served = SimpleNamespace(
        service=service,
        caches=SimpleNamespace(memory=None),
        loaded=lambda: on_gpu,
        router=None,
        supervisor=None,
    )
    vars(served).update(more)
    return Swapping(lambda: a, None, served, NoResidents())


async def test_a_model_whose_pools_do_not_fit_is_refused_before_anything_is_stopped(tmp_path):
    a, service, events = two_models(tmp_path)
    a.models["b"] = replace(a.models["b"], kv_memory_bytes=1 << 50)
    on_cores = SimpleNamespace(is_on_cores=True)
    swapping = swapping_of(a, service, loaded=lambda: on_cores)  # it has nothing to stop it by
    with pytest.raises(ConfigError, match="of KV memory, but only"):
        await swapping._prepare("b")
    assert [code for code, _ in events].count("model.swap_failed") == 1


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
    monkeypatch.setattr(swapping_module, "BACK_AFTER_S", (0,))
    monkeypatch.setattr(Swapping, "_plan", lambda self, name: name)
    swapping = swapping_of(a, service, start=lambda _: None, make_way=stop, load=load)
    first, swap = service.tokenizer, await swapping._prepare("b")
    for each in (a, a.models["b"]):
        (each.model / "tokenizer.json").unlink()
    assert await swap() == "its worker died"
    assert [name for name, _ in served] == ["b", "a", "a"]
    assert service.tokenizer is first
    assert await swap() is None
    assert served[-1] == ("b", served[0][1])


async def test_files_that_cannot_be_read_are_an_event_of_their_model(tmp_path):
    a, service, events = two_models(tmp_path)
    swapping = swapping_of(a, service)
    (a.models["b"].model / "tokenizer.json").unlink()
    with pytest.raises(PenstockError, match="tokenizer"):
        await swapping._prepare("b")
    [(code, message)] = events
    assert code == "model.swap_failed"
    assert message.startswith("b cannot be served: ")


async def test_a_folder_that_still_hangs_gets_no_second_reader(tmp_path, monkeypatch):
    for name, value in (("_LOOK_S", 0.01), ("SILENT_S", 0.05), ("HANG_S", 0.1)):
        monkeypatch.setattr(disk_reads, name, value)
    a, service, events = two_models(tmp_path)
    swapping = swapping_of(a, service)
    answers, ended, readers = threading.Event(), threading.Event(), []

    def hang(config):
        readers.append(config)
        answers.wait()
        ended.set()
        return None, []

    monkeypatch.setattr(swapping_module, "check_files", hang)
    with pytest.raises(PenstockError, match="does not answer for"):
        await swapping._prepare("b")
    with pytest.raises(PenstockError, match="earlier reader"):
        await swapping._prepare("b")
    assert len(readers) == 1
    assert [code for code, _ in events].count("model.swap_failed") == 2
    answers.set()
    await asyncio.to_thread(ended.wait, 60)
    await swapping._prepare("b")
    assert len(readers) == 2


async def test_a_models_files_have_changed_once_one_is_touched_or_missing(tmp_path):
    a, service, _ = two_models(tmp_path)
    swapping = swapping_of(a, service)
    await swapping._prepare("b")
    assert not await swapping._has_changed("b")
    file = a.models["b"].model / "config.json"
    os.utime(file, (1, 1))
    assert await swapping._has_changed("b")
    await swapping._prepare("b")
    assert not await swapping._has_changed("b")
    file.unlink()
    assert await swapping._has_changed("b")


async def test_of_a_folder_that_hangs_nothing_has_changed_and_one_thread_compares_its_files(
    tmp_path, monkeypatch
):
    for name, value in (("_LOOK_S", 0.01), ("SILENT_S", 0.05), ("HANG_S", 0.1)):
        monkeypatch.setattr(disk_reads, name, value)
    a, service, _ = two_models(tmp_path)
    swapping = swapping_of(a, service)
    await swapping._prepare("b")
    answers, ended, readers = threading.Event(), threading.Event(), []

    def hang(model):
        readers.append(model)
        answers.wait()
        ended.set()

    monkeypatch.setattr(swapping_module, "files_stamp", hang)
    try:
        said = [await swapping._has_changed("b") for _ in range(2)]
    finally:
        answers.set()
        await asyncio.to_thread(ended.wait, 60)
    assert (said, len(readers)) == ([False, False], 1)
