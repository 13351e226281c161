"""GET /metrics is for whoever may look, and counts replies."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from appliance.api.operator import cache as cache_api
from engine.errors import Unavailable
from tests.appliance.api_server import serving
from tests.appliance.peers import VIEWER, client_of

PROGRAM = Path("/proc/self/comm").read_text().strip()


async def scrape(client) -> dict[tuple, float]:
    reply = await client.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


async def test_replies_are_counted_by_route_method_and_status(appliance, tmp_path):
    async with serving(appliance, tmp_path / "api.sock") as served:
        await served.complete()
        await served.http.get("/v1/models/a/b")
        await served.http.get("/nowhere")
        await served.http.get("/v1/completions")
        appliance.unavailable = Unavailable("draining", code="draining")
        await served.complete()
        await served.http.get("/ready")
        samples = await scrape(served.http)
        again = await scrape(served.http)
    counted = {key[1:]: n for key, n in samples.items() if key[0] == "http_requests_total"}
    assert counted == {
        ("/v1/completions", "2xx", "POST"): 1,
        ("/v1/completions", "5xx", "POST"): 1,
        ("/v1/completions", "4xx", "GET"): 1,
        ("/v1/models/{id:path}", "4xx", "GET"): 1,
        ("4xx", "GET", "none"): 1,
    }
    assert samples["http_request_duration_seconds_count", "/v1/completions", "POST"] == 2
    assert samples["http_request_duration_seconds_sum", "/v1/completions", "POST"] > 0
    assert {key for key in again if key[0] == "http_requests_total"} == {
        ("http_requests_total", *key) for key in counted
    }


async def test_refused_requests_are_counted_by_caller_and_answers_are_not(appliance, tmp_path):
    async with serving(appliance, tmp_path / "api.sock") as served:
        await served.complete()
        for _ in range(3):
            await served.complete(model="gone")
        await served.http.get("/nowhere")
        await served.http.get("/v1/requests/cmpl-gone")
        assert (await served.http.post("/ready")).status_code == 405
    callers = {caller for caller, _ in appliance.refusals}
    codes = [code for _, code in appliance.refusals]
    assert codes == ["model_not_found"] * 3 + ["unknown_url"]
    assert callers == {f"{PROGRAM} {os.getpid()}"}


async def test_who_may_look_may_scrape(appliance):
    samples = await scrape(client_of(appliance, VIEWER))
    assert samples["vllm:num_requests_running", "0", "penstock-starter-random-1"] == 26
    assert (await client_of(appliance, VIEWER).post("/metrics")).status_code == 405


async def test_the_loop_turns_while_metrics_are_written(appliance, tmp_path, monkeypatch):
    exposition, turns, seen = cache_api.exposition, [0], []

    async def turn():
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    def watched(*readings):
        for part in exposition(*readings):
            seen.append(turns[0])
            yield part

    monkeypatch.setattr(cache_api, "exposition", watched)
    async with serving(appliance, tmp_path / "api.sock") as served:
        turning = asyncio.create_task(turn())
        await served.http.get("/metrics")
        turning.cancel()
    assert len(set(seen)) == len(seen) > 5
