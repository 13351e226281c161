"""A served model whose tokenizer takes too much for some texts: only these requests are refused."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.daemons import ALONE, Daemon
from tests.hostile_models import HOSTILE_TEXTS, greedy_tokenizer

pytestmark = pytest.mark.usefixtures("in_time")


def bodies(text):
    user = [{"role": "user", "content": text}]
    whole = {"prompt": text + " " * 100_000, "max_tokens": 1, "truncate_prompt_tokens": 10}
    return [
        ("/v1/completions", {"prompt": text, "max_tokens": 1}),
        ("/v1/completions", whole),
        ("/v1/chat/completions", {"messages": user, "max_tokens": 1}),
        ("/v1/responses", {"input": text, "max_output_tokens": 1}),
        ("/v1/messages", {"model": "m", "messages": user, "max_tokens": 1}),
        ("/api/generate", {"model": "m", "prompt": text}),
        ("/tokenize", {"prompt": text}),
        ("/v1/messages/count_tokens", {"model": "m", "messages": user}),
    ]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    daemon = Daemon(folder, *ALONE, model=greedy_tokenizer(folder / "m")).wait_ready()
    yield daemon
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.stderr
    assert "panicked" not in daemon.stderr


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
def test_texts_that_take_too_much_cost_their_requests_alone(daemon, text):
    before_bytes = psutil.Process(daemon.pid).memory_info().rss
    asks = bodies(text) if text == HOSTILE_TEXTS["letter that doubles"] else bodies(text)[:2]
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(daemon.http.post, path, json=body) for path, body in asks]
        while not all(each.done() for each in asked):
            assert daemon.get_status("/health") == 200
    told = [(str(each.result().url), each.result().status_code) for each in asked]
    assert {status for _, status in told} == {400}, told
    assert daemon.complete("a", max_tokens=2)["usage"]["completion_tokens"] == 2
    assert psutil.Process(daemon.pid).memory_info().rss < before_bytes + (64 << 20)


def test_a_worker_that_is_started_again_reads_no_file_of_the_model_again(daemon, tmp_path):
    """But the weights, which lie where the daemon was told."""
    (folder,) = daemon.folder.glob("m")
    for name in ("config.json", "generation_config.json"):
        (folder / name).rename(tmp_path / name)
        os.mkfifo(folder / name)
    (worker,) = daemon.state()["workers"]
    os.kill(worker["pid"], signal.SIGKILL)
    daemon.wait_for(lambda: daemon.state()["workers"][0]["pid"] not in (None, worker["pid"]))
    assert daemon.wait_ready().complete("a", max_tokens=2)["usage"]["completion_tokens"] == 2
