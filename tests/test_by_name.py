"""A daemon that is started with a model's name, on a hub of the tests' own."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from tests.byte_tokenizer import write_tokenizer
from tests.daemons import ALONE, Daemon
from tests.text_checkpoints import add_modules, make_text_checkpoint
from tests.worlds.hub_server import Hub, Repository, folder_files, serving

NAME, VECTORS = "owner/tiny-llama", "owner/tiny-embedding"


@pytest.fixture(scope="module")
def embedding(tmp_path_factory) -> Path:
    folder = make_text_checkpoint(tmp_path_factory.mktemp("it") / "it", "bert", num_hidden_layers=1)
    add_modules(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def hub(tiny_llama: Path, embedding: Path):
    of = {"owner__tiny-llama": tiny_llama, "owner__tiny-embedding": embedding}
    with serving(**{name: Repository(folder_files(folder)) for name, folder in of.items()}) as hub:
        yield hub


def environ(hub: Hub, home: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "PENSTOCK_MODEL": NAME}


def test_it_is_downloaded_once_and_everybody_can_see_how_far_it_is(hub, start_daemon, tmp_path):
    hub.chunk_pause = threading.Event()
    env = environ(hub, tmp_path) | {"PENSTOCK_EMBEDDING_MODEL": VECTORS}
    daemon = start_daemon(*ALONE, env=env)
    daemon.wait_for(daemon.is_listening)
    assert daemon.get_status("/health") == 200
    daemon.wait_for(lambda: "iB at" in daemon.http.get("/ready").text)
    assert daemon.get_status("/ready") == 503
    state = daemon.state()
    assert (state["state"], state["model"], state["max_model_len"]) == ("loading", NAME, None)
    assert state["state_reason"].startswith(f"downloading {NAME}: ")
    refused = daemon.http.post("/v1/completions", json={"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
    assert "downloading" in refused.json()["error"]["message"]
    assert daemon.get_status("/v1/models") == 503
    assert daemon.get_status("/metrics") == 200
    assert daemon.http.get("/v1/requests").json()["data"] == []
    with daemon.http.stream("GET", "/v1/penstock/stream") as stream:
        lines = stream.iter_lines()
        assert "downloading" in next(lines)
        hub.chunk_pause.set()
        assert list(lines) is not None  # it ends when the model is there
    daemon.wait_ready()
    assert [one["id"] for one in daemon.http.get("/v1/models").json()["data"]] == [NAME, VECTORS]
    assert daemon.complete("a", max_tokens=2, model=NAME)["model"] == NAME
    assert daemon.http.post("/v1/embeddings", json={"input": "a"}).json()["model"] == VECTORS
    assert f"vectors of 64 numbers by {VECTORS} in float32" in daemon.stderr
    assert daemon.stop() == 0
    hub.asked.clear()  # what is in the cache needs no hub
    second = start_daemon(*ALONE, env=env | {"HF_HUB_OFFLINE": "1"}).wait_ready()
    assert second.complete("a", max_tokens=2)["usage"]["completion_tokens"] == 2
    assert second.stop() == 0
    assert hub.asked == []


@pytest.mark.parametrize(
    ("name", "words", "code"),
    [
        ("owner/none", "has no such model", 5),
        ("owner/tiny-llama@v9", "no revision v9", 5),
        ("owner/tiny-llama:Q4_K_M", "no quantisation 'Q4_K_M'", 78),
    ],
)
def test_a_name_that_leads_nowhere_ends_the_start(hub, tmp_path, name, words, code):
    env = environ(hub, tmp_path) | {"PENSTOCK_MODEL": name}
    daemon = Daemon(tmp_path / "d", env=env)
    assert daemon.process.wait(120) == code
    assert words in daemon.stderr
    daemon.http.close()


def test_a_daemon_that_is_told_to_stop_ends_the_download_with_it(hub, start_daemon, tmp_path):
    hub.chunk_pause = threading.Event()
    daemon = start_daemon(*ALONE, env=environ(hub, tmp_path))
    daemon.wait_for(daemon.is_listening)
    daemon.wait_for(lambda: "iB at" in daemon.http.get("/ready").text)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(120) == 0
    hub.chunk_pause.set()
    assert not daemon.socket.exists()
