"""Two appliances behind NVIDIA Dynamo's frontend: what clients see of deaths, drains and hangs.

Skipped where its wheels are not to be had; the adapter's own tests are in appliance/dynamo.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.daemons import is_alive
from tests.worlds.dynamo_cluster import cluster, lacking, own_network, wait_for

_WHY = lacking()
pytestmark = [
    pytest.mark.skipif(_WHY is not None, reason=_WHY or ""),
    pytest.mark.slow,
]
LONG = 400
DRAWN = {"temperature": 1.0, "seed": 5, "top_k": 2, "frequency_penalty": 0.4}
"""Of two tokens, so that few draws come near a border."""


@pytest.fixture(scope="module")
def running(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("dynamo")
    with own_network(), cluster(folder, tiny_llama, "--roles", "colocated") as made:
        yield made


@pytest.fixture(autouse=True)
def _whole(running):
    """Each test begins and ends with everything there."""
    wait_for(running.is_serving)
    yield
    for appliance in running.appliances:
        if appliance.daemon.process.poll() is not None:
            appliance.start_daemon()
            appliance.daemon.wait_ready()
        if appliance.adapter.poll() is not None:
            num_before = appliance.told.count("the router may choose")
            appliance.start_adapter()
            wait_for(lambda a=appliance, n=num_before: a.has_joined(n + 1))


def ask(running, **fields) -> dict:
    body = {"model": running.model, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    reply = running.http.post("/v1/completions", json=body | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def direct(running, number=0, **fields) -> dict:
    body = {"max_tokens": 16, "temperature": 0, "ignore_eos": True} | fields
    return running.appliances[number].daemon.http.post("/v1/completions", json=body).json()


def text_of(reply: dict) -> str:
    return reply["choices"][0]["text"]


def counts(running) -> list[int]:
    return [appliance.num_requests() for appliance in running.appliances]


def busy(running) -> list[int]:
    """Requests under way, by appliance."""
    return [
        sum(one["phase"] != "finished" for one in appliance.daemon.requests())
        if appliance.daemon.process.poll() is None
        else 0
        for appliance in running.appliances
    ]


def under_way(running, pool, count=4, **fields):
    """Long replies, begun at both appliances; their futures, and what each should say."""
    bodies = [{"prompt": f"stream {i}", "max_tokens": LONG, **fields} for i in range(count)]
    wanted = [text_of(direct(running, 0, **body)) for body in bodies]
    replies = [pool.submit(ask, running, **body) for body in bodies]
    wait_for(lambda: all(busy(running)) or all(one.done() for one in replies))
    return replies, wanted


def test_the_official_client_reads_what_the_appliance_says(running):
    prompt = "The official client asks."
    wanted = text_of(direct(running, prompt=prompt))
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client:
        asked = {"model": running.model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
        extra = {"ignore_eos": True}
        whole = client.completions.create(**asked, extra_body=extra)
        stream = client.completions.create(**asked, extra_body=extra, stream=True)
        assert whole.choices[0].text == wanted
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == wanted
        assert whole.usage.completion_tokens == 16
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**asked, extra_body={"min_tokens": 17})


def test_conversations_go_to_the_appliance_that_holds_them(running):
    """By events alone: the router has not sent the first turns, for they came by the socket."""

    def all_go_home(attempt: int) -> bool:
        documents = {
            f"document {attempt}.{turn} of appliance {number} " * 30: number
            for turn in range(4)
            for number in (0, 1)
        }
        for document, number in documents.items():
            direct(running, number, prompt=document, max_tokens=1)
        time.sleep(0.3 * 2**attempt)  # for the events, which nobody answers
        for document, number in documents.items():
            before = counts(running)
            ask(running, prompt=document + "and now?", max_tokens=1)
            new = [now - then for now, then in zip(counts(running), before, strict=True)]
            if new[number] != 1 or new[1 - number]:
                return False
        return True

    assert any(all_go_home(attempt) for attempt in range(6))


@pytest.mark.parametrize("fields", [{}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("victim", ["daemon", "adapter"])
def test_streams_outlive_a_death_to_the_letter(running, victim, fields):
    with ThreadPoolExecutor(4) as pool:
        replies, wanted = under_way(running, pool, **fields)
        killed = running.appliances[1]
        (killed.daemon.process if victim == "daemon" else killed.adapter).kill()
        assert [text_of(one.result()) for one in replies] == wanted
    (killed.daemon.process if victim == "daemon" else killed.adapter).wait()
    assert text_of(ask(running, prompt="afterwards")) == text_of(
        direct(running, prompt="afterwards")
    )


def test_a_daemon_that_hangs_is_left_and_taken_back(running):
    stopped = running.appliances[1]
    num_joined = stopped.told.count("the router may choose")
    with ThreadPoolExecutor(4) as pool:
        replies, wanted = under_way(running, pool)
        pid = stopped.daemon.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            assert [text_of(one.result()) for one in replies] == wanted
        finally:
            os.kill(pid, signal.SIGCONT)
    if "left the router: the daemon does not answer" in stopped.told:
        wait_for(lambda: stopped.has_joined(num_joined + 1))


def test_a_drain_sends_everybody_elsewhere_and_fails_nobody(running):
    drained = running.appliances[1]
    num_joined = drained.told.count("the router may choose")
    is_over, failed = threading.Event(), []

    def go_on_asking():
        while not is_over.is_set():
            body = {"model": running.model, "prompt": "a", "max_tokens": 1}
            reply = httpx.post(f"{running.url}/v1/completions", json=body, timeout=120)
            if reply.status_code != 200:
                failed.append(reply.text)

    with ThreadPoolExecutor(5) as pool:
        replies, wanted = under_way(running, pool)
        asking = pool.submit(go_on_asking)
        drained.daemon.http.post("/v1/penstock/drain")
        wait_for(lambda: "left the router: the daemon is draining" in drained.told)
        assert [text_of(one.result()) for one in replies] == wanted
        drained.daemon.http.post("/v1/penstock/resume")
        wait_for(lambda: drained.has_joined(num_joined + 1))
        is_over.set()
        asking.result()
    assert not failed


def test_an_adapter_that_is_told_to_end_leaves_first_and_lets_its_streams_end(running):
    ended = running.appliances[1]
    with ThreadPoolExecutor(4) as pool:
        replies, wanted = under_way(running, pool)
        ended.adapter.terminate()
        assert [text_of(one.result()) for one in replies] == wanted
    assert ended.adapter.wait(120) == 0
    assert "told to end" in ended.told


def test_who_hangs_up_frees_the_appliance(running):
    body = {"model": running.model, "prompt": "a", "max_tokens": 1500, "ignore_eos": True}
    with running.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
        next(reply.iter_lines())
        wait_for(lambda: any(busy(running)))
    wait_for(lambda: not any(busy(running)))


def test_a_router_that_dies_knows_the_appliances_again(running):
    said = "what was said before the router died " * 40
    ask(running, prompt=said)
    running.frontend.kill()
    running.frontend.wait()
    assert all(is_alive(appliance.adapter.pid) for appliance in running.appliances)
    running.start_frontend()
    wait_for(running.is_serving)
    assert text_of(ask(running, prompt=said)) == text_of(direct(running, prompt=said))
