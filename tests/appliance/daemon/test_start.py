"""A start: what it goes on with, and a model on a disk that does not answer."""

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.configuration.settings import ServeConfig
from appliance.daemon import start as daemon
from appliance.daemon.process import disk_reads
from appliance.daemon.survival.kept_pools import KeptPools
from appliance.http.listeners import PassedSockets
from appliance.observe.log.writer import RequestLog
from engine.errors import PenstockError
from engine.text.reading import READER
from tests.appliance.logs import row
from tests.appliance.model_folder import make_model

NOTHING_PASSED = PassedSockets([], [], {}, KeptPools({}))


def config_of(model: Path, folder: Path, **settings: object) -> ServeConfig:
    return ServeConfig(model=model, socket=folder / "s", state_dir=folder / "state", **settings)


@pytest.mark.parametrize("is_first", [True, False], ids=["served first", "of a table"])
def test_a_start_gives_up_a_disk_that_hangs_and_names_the_model(tmp_path, monkeypatch, is_first):
    for name, value in (("_LOOK_S", 0.01), ("SILENT_S", 0.05), ("HANG_S", 0.2)):
        monkeypatch.setattr(disk_reads, name, value)
    folder = make_model(tmp_path / "model").parent
    config = config_of(folder if is_first else tmp_path / "gone", tmp_path)
    if not is_first:
        config.models["other"] = config_of(folder, tmp_path)
    READER.start()
    os.kill(READER.pid, signal.SIGSTOP)  # as if it waited for a disk
    try:
        with pytest.raises(PenstockError, match=r"disk of /.*for 0\.2 s") as raised:
            daemon.check(config)
    finally:
        os.kill(READER.pid, signal.SIGCONT)
    assert ("a disk of other" in raised.value.what) == (not is_first)


@pytest.mark.parametrize("hanging", [1, 2], ids=["config and weights", "tokenizer"])
async def test_what_is_read_after_a_check_or_a_download_may_hang_as_well(
    tmp_path, monkeypatch, caplog, hanging
):
    num_reads = 0

    async def read(what, read, tell, late=lambda _: None):
        nonlocal num_reads
        num_reads += 1
        if num_reads == hanging:
            tell(f"{what} is slow")
            raise PenstockError(f"{what} hangs")
        return read()

    config = config_of(make_model(tmp_path / "m").parent, tmp_path)
    monkeypatch.setattr(daemon, "read_in_thread", read)
    one = daemon._Daemon(config, lambda: config, None, NOTHING_PASSED, -1)
    monkeypatch.setattr(one._served, "start", lambda plan: setattr(one._served, "plan", plan))
    one._request_log = RequestLog(tmp_path / "log.db")
    try:
        with pytest.raises(PenstockError, match=r"the disk of /.*/m hangs"):
            await one._start_model()
        assert "/m is slow" in caplog.text
    finally:
        one._core_note.close()
        one._request_log.close()
        if hanging == 2:
            one._served.plan.close()


async def test_who_may_do_what_is_what_was_checked(tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    keys.write_text(f"ann operator sha256:{'a' * 64}\n")
    keys.chmod(0o600)
    config = config_of(make_model(tmp_path / "m").parent, tmp_path, api_keys=keys)
    config.state_dir.mkdir()
    policy, placed, _ = await asyncio.to_thread(daemon.check, config)
    keys.unlink()
    one = daemon._Daemon(config, lambda: config, placed, NOTHING_PASSED, -1)
    bound = []

    def bind(policy):
        bound.extend(policy.keys)
        raise PenstockError("no more of it")

    monkeypatch.setattr(one, "_bind", bind)
    with pytest.raises(PenstockError, match="no more of it"):
        await one.run(policy)
    assert [key.name for key in bound] == ["ann"]


def test_the_row_of_a_request_that_cannot_continue_says_what_its_client_got(tmp_path):
    one = daemon._Daemon(config_of(tmp_path, tmp_path), lambda: None, None, NOTHING_PASSED, -1)
    recorded = []
    one._request_log = SimpleNamespace(record=recorded.append)
    cut = row("cmpl-1", http_status=500, completion_tokens=None, num_sequences=2)
    journal = SimpleNamespace(num_tokens=17, num_deaths=3)
    one._record_failed(SimpleNamespace(http_status=503, journal=journal), cut)
    unread = SimpleNamespace(num_tokens=None, num_deaths=0)
    one._record_failed(SimpleNamespace(http_status=200, journal=unread), cut)
    one._record_failed(SimpleNamespace(http_status=499, journal=unread), cut)
    told = [(each.http_status, each.completion_tokens, each.recoveries) for each in recorded]
    assert told == [(503, 17, 6), (200, None, 2), (499, None, 2)]
    assert [each.finish_reason for each in recorded][1:] == [cut.finish_reason, "abort"]
