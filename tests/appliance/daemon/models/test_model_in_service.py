"""The served model: how its start is told, and what it takes over when it is served again."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

from appliance.configuration.settings import ServeConfig
from appliance.daemon.models import model_in_service
from appliance.daemon.models.model_in_service import ModelInService
from tests.worlds.daemon_parts import until


def config_of(folder):
    return ServeConfig(socket=folder / "s", state_dir=folder / "state")


async def test_a_start_that_is_silent_for_long_says_what_it_waits_for(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(model_in_service, "SILENT_S", 0.001)
    caplog.set_level("INFO", "penstock")
    served = ModelInService(lambda: config_of(tmp_path), -1)
    awaited = ["worker a (starting)"]
    served.supervisor = SimpleNamespace(awaited=lambda _: list(awaited), is_started=False)
    hashed = asyncio.Event()
    keying = asyncio.create_task(hashed.wait())
    telling = asyncio.create_task(served._tell_what_is_awaited(keying))
    try:
        await until(lambda: "(starting), hashes of the weights" in caplog.text)
        hashed.set()
        await until(lambda: caplog.text.endswith("for worker a (starting)...\n"))
        awaited.clear()
        served.supervisor.is_started = True
        await until(lambda: caplog.text.endswith("the caches...\n"))
    finally:
        telling.cancel()


def test_a_parked_model_takes_over_the_settings_that_were_reloaded_meanwhile(tmp_path):
    config = config_of(tmp_path)
    served = ModelInService(lambda: config, -1)
    set_to, begun = {}, []
    router = SimpleNamespace(
        set_queue=lambda *limits: set_to.update(limits=limits),
        set_weights=lambda weights: set_to.update(weights=weights),
    )
    topology = SimpleNamespace(is_colocated=True)
    parked = SimpleNamespace(
        plan=SimpleNamespace(placement=SimpleNamespace(topology=topology)),
        router=router,
        supervisor=None,
        measuring="its measuring",
        tokenizer=None,
        hasher="its hasher",
    )
    served.service = SimpleNamespace(
        frame=SimpleNamespace(roles="1x1"), change_model=lambda *_: None, begin=begun.append
    )
    served.caches = SimpleNamespace(open_meanwhile=lambda *_: None)
    config = replace(config, max_queued=3, max_queued_tokens=500, priorities=(("ann", 7.0),))
    served.resume(parked)
    assert set_to == {"limits": (3, 500), "weights": {"ann": 7.0}}
    assert (served.service.hasher, begun) == ("its hasher", ["its measuring"])
