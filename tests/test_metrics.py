"""What a running daemon tells of itself agrees: its frame, its metrics, its log, its replies."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.daemons import ARMS, Daemon

GROWING = ("_total", "_count", "_bucket", "_sum")


@pytest.fixture(scope="module")
def daemon(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    daemon = Daemon(folder, *ARMS["shm"], "--slo-ttft-ms", "60000", model=tiny_llama)
    yield daemon.wait_ready()
    assert daemon.stop() == 0


def scrape(daemon):
    """Samples by name and labels."""
    reply = daemon.http.get("/metrics")
    assert reply.status_code == 200
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def total(samples, name, **labels):
    return sum(
        value
        for (found, *given), value in samples.items()
        if found == name and labels.items() <= dict(given).items()
    )


def test_counts_grow_and_agree_with_the_frame_and_the_replies(daemon):
    scrapes = [scrape(daemon)]
    for number in range(3):
        with ThreadPoolExecutor(4) as pool:
            prompts = [f"{number} {one} to be or not to be" for one in range(4)]
            replies = list(pool.map(lambda p: daemon.complete(p, max_tokens=9), prompts))
        scrapes.append(scrape(daemon))
    for before, after in pairwise(scrapes):
        for key, value in before.items():
            if key[0].endswith(GROWING) and not key[0].startswith("process_"):
                assert after[key] >= value, key
    last, frame = scrapes[-1], daemon.state()
    totals, latency = frame["totals"], frame["latency"]
    assert total(last, "penstock_requests_total", result="finished") == totals["finished"] == 12
    assert total(last, "vllm:request_success_total") == 12
    assert total(last, "vllm:e2e_request_latency_seconds_count") == latency["num_requests"]
    assert total(last, "vllm:request_generation_tokens_sum") == totals["output_tokens"]
    assert total(last, "vllm:generation_tokens_total") == totals["output_tokens"]
    assert total(last, "vllm:prompt_tokens_total") == totals["prompt_tokens"]
    assert total(last, "penstock_handoffs_total") == totals["handoffs"] > 0
    assert total(last, "penstock_handoff_bytes_total") == totals["handoff_bytes"] > 0
    assert totals["output_tokens"] >= sum(reply["usage"]["completion_tokens"] for reply in replies)
    rows = daemon.log_rows()
    stages_s = total(last, "penstock_stage_seconds_sum")
    logged_s = sum(row["e2e_ms"] for row in rows) / 1e3
    assert abs(stages_s - logged_s) < 1e-3 * len(rows)
    assert latency["ttft_slo_ratio"] == 1.0
    assert latency["itl_slo_ratio"] is None
    assert latency["e2e_ms_p50"] <= latency["e2e_ms_p99"]
    assert total(last, "penstock_slo_target_seconds") == 60.0


def test_a_dead_worker_is_an_alert_until_it_is_back(daemon):
    def down():  # a busy machine may have other alerts
        alerts = daemon.state()["alerts"]
        return [each["subject"] for each in alerts if each["code"] == "worker.down"]

    os.kill(daemon.worker_pid("decode"), signal.SIGKILL)
    assert daemon.wait_for(down) == ["decode"]
    daemon.wait_for(lambda: not down())
    events = daemon.http.get("/v1/penstock/events?limit=50").json()["data"]
    told = [event["severity"] for event in events if event["code"] == "worker.down"]
    assert told == ["info", "error"]
