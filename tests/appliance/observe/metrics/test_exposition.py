"""What Prometheus reads: well formed, true to the frame, and what vLLM's dashboards ask for."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from appliance.api.operator.cache import HttpCounts
from appliance.observe.frame.histograms import Histograms
from appliance.observe.frame.late_frames import UnwrittenFrame
from appliance.observe.frame.latency import stages
from appliance.observe.frame.protocol import (
    AlertFrame,
    DeviceFrame,
    DraftFrame,
    EnergyFrame,
    FailedModelFrame,
    HandoffFrame,
    LatencyFrame,
    SwapsFrame,
    WayFrame,
)
from appliance.observe.metrics.exposition import exposition
from appliance.observe.telemetry.signals import STAGING
from engine.scheduler.sequences.sequence import Sequence, Stamps
from engine.wire.finish_reason import FinishReason
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from tests.tui.frames import busy, eight_gpus, idle, loading, pool, three_pools, worker

QUERIES = Path(__file__).with_name("vllm_dashboards.promql")
BY_THE_SCRAPER = {"job", "instance"}
"""Labels that Prometheus adds to what it scrapes."""
NOT_HERE = {
    "up": "Prometheus's own",
    "vllm:external_prefix_cache_": "there is none outside",
    "vllm:prompt_tokens_recomputed_": "not counted",
    'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}': "prompts come from here",
    "vllm:mm_cache_": "text only",
    "vllm:engine_sleep_state": "it does not sleep",
    "vllm:sleep_mode_": "it does not sleep",
    "vllm:rl_weight_update_": "weights do not change",
    "vllm:estimated_": "not estimated",
    "vllm:kv_block_": "blocks are not evicted",
    "vllm:kv_offload_": "one tier",
    "vllm:simple_kv_offload_": "one tier",
    "vllm:num_requests_kv_fetch_by_stage": "no KV comes from elsewhere",
    "vllm:nixl_": "another transport; ours is penstock_handoff_ and penstock_stage_seconds",
    "vllm:time_per_output_token_seconds": "vLLM's old name of inter_token_latency_seconds",
    "vllm:num_requests_swapped": "vLLM has dropped it",
    "vllm:gpu_cache_usage_perc": "vLLM's old name of kv_cache_usage_perc",
    "vllm:cpu_cache_usage_perc": "vLLM has dropped it",
}
_METRIC = re.compile(r"((?:vllm:|http_|process_)\w+|\bup\b)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
_GROUPING = re.compile(r"by \(([^)]*)\) \((?:rate|increase)?\(?((?:vllm:|http_)\w+)")


def sequence(finish_reason=FinishReason.STOP, num_output_tokens=3) -> Sequence:
    """One that has ended, with every stage."""
    ms = 1_000_000
    stamps = Stamps(0, 1 * ms, 21 * ms, 121 * ms, 123 * ms, 124 * ms, 140 * ms, 160 * ms, 161 * ms)
    made = Sequence(1, "cmpl-1", 0, [1] * 40, RunSpec(SamplingParams(max_tokens=8, seed=0)), stamps)
    made.output_token_ids = [1] * num_output_tokens
    made.finish_reason = finish_reason
    return made


def counted(*sequences: Sequence) -> Histograms:
    histograms = Histograms(4096)
    for each in sequences:
        histograms.ttft_s.observe(0.121)
        histograms.itl_s.observe(0.019)
        histograms.itl_s.observe(0.020)
        histograms.step_tokens.observe(40)
        histograms.num_sequences.observe(1)
        histograms.ended(each, stages(each.stamps, each.num_output_tokens))
    return histograms


def scraped(frame, histograms=None, more=()) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name, from the text."""
    text = b"".join(exposition(frame, histograms or Histograms(4096), more)).decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type != "unknown"
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def http_counts() -> HttpCounts:
    counts = HttpCounts()
    counts.count("/v1/completions", "POST", 200, 0.5)
    counts.count("/v1/completions", "POST", 503, 0.1)
    return counts


def references(query: str):
    """Names and matchers of each metric in a query."""
    for name, selector in _METRIC.findall(query):
        yield name, _MATCHER.findall(selector)


def is_not_here(name: str, matchers) -> bool:
    exact = "".join(f'{{{label}="{value}"}}' for label, op, value in matchers if label == "source")
    return f"{name}{exact}" in NOT_HERE or any(
        name.startswith(prefix) for prefix in NOT_HERE if "{" not in prefix
    )


def test_a_model_that_failed_to_load_is_a_sample_while_it_is_not_tried():
    swaps = SwapsFrame(["small"], None, 0, 0, None)
    failed = [FailedModelFrame("small", "its worker died", "2026-11-21T01:02:03Z")]
    for frame, expected in ((swaps, None), (msgspec.structs.replace(swaps, failed=failed), 1)):
        found = scraped(msgspec.structs.replace(busy(1), swaps=frame))
        values = found.get("penstock_model_failed", [({"model": "small"}, None)])
        assert values == [({"model": "small"}, expected)]


QUERY_LINES = [line for line in QUERIES.read_text().splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def samples():
    return scraped(busy(1), counted(sequence()), http_counts().families())


@pytest.mark.parametrize("query", QUERY_LINES)
def test_a_query_for_vllm_finds_what_it_asks_for(samples, query):
    found = list(references(query))
    assert found
    for name, matchers in found:
        if is_not_here(name, matchers):
            assert all(name != here for here in samples) or matchers
            continue
        assert name in samples, name
        wanted = {label: value for label, op, value in matchers if op == "=" and "$" not in value}
        names = {label for label, _, _ in matchers} - BY_THE_SCRAPER
        assert any(
            names <= labels.keys() and wanted.items() <= labels.items()
            for labels, _ in samples[name]
        ), (name, names, wanted)
    for labels, name in _GROUPING.findall(query):
        if not is_not_here(name, []):
            names = set(labels.split(", ")) - BY_THE_SCRAPER
            assert all(names <= sample.keys() for sample, _ in samples[name])


@pytest.mark.parametrize(
    ("histogram", "targets"),
    [
        (
            "vllm:time_to_first_token_seconds",
            ["0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0"],
        ),
        (
            "vllm:request_time_per_output_token_seconds",
            ["0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5"],
        ),
    ],
)
def test_the_targets_that_its_dashboard_offers_are_edges(samples, histogram, targets):
    edges = {labels["le"] for labels, _ in samples[f"{histogram}_bucket"]}
    assert edges >= set(targets)


def test_what_is_said_not_to_be_here_is_asked_for_and_is_not_here(samples):
    asked = [reference for query in QUERY_LINES for reference in references(query)]
    for prefix in NOT_HERE:
        assert any(
            name.startswith(prefix.partition("{")[0]) and is_not_here(name, matchers)
            for name, matchers in asked
        ), prefix
        assert "{" in prefix or not any(name.startswith(prefix) for name in samples), prefix


@pytest.mark.parametrize(
    "frame", [busy(1), idle(), loading(), three_pools(), idle(model='a"b\\c\nd')]
)
def test_the_text_is_well_formed_and_says_each_thing_once(frame):
    for name, found in scraped(frame).items():
        keys = [tuple(sorted(labels.items())) for labels, _ in found]
        assert len(set(keys)) == len(keys), name


def test_no_label_names_a_user_or_a_request(samples):
    frame = busy(1)
    private = {request.id for request in frame.requests} | {r.user for r in frame.requests}
    for found in samples.values():
        for labels, _ in found:
            assert not private & set(labels.values())
            assert not {"user", "request", "id", "key"} & labels.keys()


def test_histograms_are_cumulative_and_end_in_their_count():
    samples = scraped(busy(1), counted(sequence(), sequence(num_output_tokens=1)))
    names = [name for name in samples if name.endswith("_bucket")]
    assert names
    for name in names:
        series: dict[tuple, list[float]] = {}
        for labels, value in samples[name]:
            key = tuple(sorted((k, v) for k, v in labels.items() if k != "le"))
            series.setdefault(key, []).append(value)
        counts = samples[name.replace("_bucket", "_count")]
        for (key, values), (labels, count) in zip(series.items(), counts, strict=True):
            assert values == sorted(values)
            assert values[-1] == count
            assert dict(key) == labels


def test_a_sequence_that_was_cut_short_is_counted_and_not_timed():
    samples = scraped(
        busy(1), counted(sequence(), sequence(FinishReason.ABORT), sequence(FinishReason.ERROR))
    )
    reasons = {labels["finished_reason"]: n for labels, n in samples["vllm:request_success_total"]}
    assert reasons == {"stop": 1, "length": 0, "abort": 1, "error": 1}
    ((_, timed),) = samples["vllm:e2e_request_latency_seconds_count"]
    ((_, seconds),) = samples["vllm:e2e_request_latency_seconds_sum"]
    assert (timed, seconds) == (1, pytest.approx(0.161))


def test_the_stages_of_what_was_timed_add_up_to_its_duration():
    samples = scraped(busy(1), counted(sequence(), sequence(FinishReason.LENGTH)))
    stage_s = [value for _, value in samples["penstock_stage_seconds_sum"]]
    ((_, whole_s),) = samples["penstock_request_duration_seconds_sum"]
    assert sum(stage_s) == pytest.approx(whole_s)


def test_what_is_not_reported_has_no_sample():
    frame = idle(devices=[DeviceFrame("package-0", "cpu")], handoff=HandoffFrame("alias", 0, 0, 0))
    frame.energy = EnergyFrame(*[None] * 4, 60.0, None, None, None, "not reported")
    samples = scraped(frame)
    absent = ("penstock_device_", "penstock_energy_", "penstock_handoff_probe_", "penstock_slo_")
    assert not [name for name in samples if name.startswith(absent)]
    assert "penstock_worker_last_step_age_seconds" not in samples


def as_the_endpoint_picker_reads_it(frame) -> dict[str, object]:
    """What the Gateway API's endpoint picker and llm-d's keep of a scrape, by their rules.

    A family that is missing or empty is an error, and so is a label that Go's strconv.Atoi does not
    take. Gauges are read as floats and cut to whole numbers, adapters are a list with commas.
    """
    samples = scraped(frame)
    read: dict[str, object] = {}
    for name in ("num_requests_waiting", "num_requests_running"):
        read[name] = int(samples[f"vllm:{name}"][-1][1])
    read["kv_cache_usage_perc"] = samples["vllm:kv_cache_usage_perc"][-1][1]
    adapters = samples["vllm:lora_requests_info"][-1][0]
    for name in ("running_lora_adapters", "waiting_lora_adapters"):
        read[name] = [one.strip() for one in adapters[name].split(",") if one.strip()]
    cache = samples["vllm:cache_config_info"][-1][0]
    for name, labels in (("max_lora", adapters), ("block_size", cache), ("num_gpu_blocks", cache)):
        assert re.fullmatch(r"[+-]?[0-9]+", labels[name]), (name, labels[name])
        read[name] = int(labels[name])
    return read


@pytest.mark.parametrize("frame", [busy(1), idle(), three_pools()])
def test_endpoint_pickers_of_gateways_find_what_they_route_by(frame):
    read = as_the_endpoint_picker_reads_it(frame)
    pools = [pool for pool in frame.pools if pool.name != STAGING]
    assert read["block_size"] == pools[0].block_size
    assert read["num_gpu_blocks"] == sum(pool.num_blocks for pool in pools)
    assert read["num_requests_waiting"] == frame.queue.queued + frame.queue.paused
    assert 0 <= read["kv_cache_usage_perc"] <= 1
    assert (read["max_lora"], read["running_lora_adapters"], read["waiting_lora_adapters"]) == (
        0, [], [],
    )  # fmt: skip


def test_a_daemon_that_loads_breaks_no_reader_of_gateways():
    samples = scraped(loading())
    ((cache, _),) = samples["vllm:cache_config_info"]
    assert cache["block_size"].isdigit()
    assert cache["num_gpu_blocks"].isdigit()


def test_units_are_those_of_the_names():
    latency = LatencyFrame(60.0, 1, *[None] * 8, ttft_slo_ratio=0.97)
    frame = idle(
        devices=[DeviceFrame("gpu0", "gpu", clock_mhz=1980.0, energy_j=7.5)],
        energy=EnergyFrame(10.0, 2.0, 3.0, 5.0, 60.0, 9.0, 0.1, 0.2, "rapl"),
        handoff=HandoffFrame("shm", 0, 0, 0, 2e9, 3),
        workers=[worker("decode", last_step_age_ms=250.0)],
        pools=[pool(active=24)],
        latency=latency,
        slo_ttft_ms=500,
        alerts=[AlertFrame("kv.occupancy", "error", "full", "T", "kv")],
        unwritten=UnwrittenFrame("the disk is full", 14, "/var/lib", would_crash_lose=False),
    )
    frame.pools[0].record_blocks, frame.pools[0].records, frame.pools[0].snapshots = 51, 4, 9
    samples = scraped(frame)

    def value(name, **labels):
        (found,) = [v for given, v in samples[name] if labels.items() <= given.items()]
        return found

    assert value("penstock_device_clock_hertz") == 1.98e9
    assert value("penstock_device_energy_joules_total", device="gpu0") == 7.5
    assert value("penstock_energy_joules_total", phase="unattributed") == 5.0
    assert value("penstock_handoff_failures_total") == 3
    assert value("penstock_log_unwritten_requests") == 14
    assert value("penstock_handoff_probe_bytes_per_second") == 2e9
    assert value("penstock_worker_last_step_age_seconds", worker="decode") == 0.25
    assert value("penstock_kv_bytes", pool="kv", state="active") == 24 * (2 << 20)
    assert value("penstock_kv_records", pool="kv", kind="running") == 4
    assert value("penstock_kv_records", pool="kv", kind="snapshot") == 9
    assert value("penstock_slo_target_seconds", target="ttft") == 0.5
    assert value("penstock_slo_attainment_ratio", target="ttft") == 0.97
    assert value("penstock_alert", code="kv.occupancy", severity="error", subject="kv") == 1
    assert value("penstock_state", state="ready") == 1
    assert value("vllm:kv_cache_usage_perc") == 24 / 1024
    assert value("process_resident_memory_bytes") > 1 << 20


def test_http_labels_are_of_a_fixed_set_and_probes_do_not_count():
    counts = HttpCounts()
    for path, method in (("/v1/models", "GET"), (None, "GET"), (None, "BREW"), ("/ready", "GET")):
        counts.count(path, method, 404, 0.25)
    samples = scraped(idle(), more=counts.families())
    assert samples["http_requests_total"] == [
        ({"handler": "/v1/models", "method": "GET", "status": "4xx"}, 1),
        ({"handler": "none", "method": "GET", "status": "4xx"}, 1),
        ({"handler": "none", "method": "other", "status": "4xx"}, 1),
    ]
    assert [value for _, value in samples["http_request_duration_seconds_sum"]] == [0.25] * 3


def test_a_prompt_token_was_computed_or_found_and_never_both() -> None:
    frame = busy()
    frame.totals.prompt_tokens, frame.totals.cached_tokens = 100, 60
    by_source = scraped(frame)["vllm:prompt_tokens_by_source_total"]
    found = {labels["source"]: value for labels, value in by_source}
    assert found == {"local_compute": 40, "local_cache_hit": 60}


def test_guesses_are_counted_by_source_and_place() -> None:
    frame = busy()
    frame.totals.decode_steps, frame.totals.decode_step_tokens = 10, 19
    frame.totals.drafts = [
        DraftFrame("own_text", [5, 4], [4, 3]),
        DraftFrame("prediction", [2], [2]),
    ]
    found = scraped(frame)
    own = found["penstock_speculation_guessed_tokens_total"]
    assert ({"drafter": "own_text", "position": "1"}, 4) in own
    right = found["penstock_speculation_right_tokens_total"]
    assert ({"drafter": "prediction", "position": "0"}, 2) in right
    totals = {
        name: [value for _, value in found[f"vllm:spec_decode_{name}_total"]]
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    }
    assert totals == {"num_drafts": [7], "num_draft_tokens": [11], "num_accepted_tokens": [9]}
    by_place = found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert [(labels["position"], value) for labels, value in by_place] == [("0", 6), ("1", 3)]


def test_what_came_of_predictions_is_counted_by_way() -> None:
    frame = busy()
    frame.totals.ways = [
        WayFrame("decode", "decode", True, True, 64, 3, 2, 1, 2.6, True),
        WayFrame("decode", "decode", True, False, 512, 4, 0, 0, 1.1, False),
    ]
    found = scraped(frame)
    outcomes = {labels["outcome"]: n for labels, n in found["penstock_route_outcomes_total"]}
    assert outcomes == {"as predicted": 5, "twice as bad": 2, "gave way": 1}
    assert found["penstock_routes_closed"] == [({"route": "decode", "beside_decodes": "yes"}, 1)]


def test_every_link_has_its_bytes_rates_strikes_and_whether_its_detour_is_taken():
    frame = eight_gpus()
    frame.links[0] = msgspec.structs.replace(frame.links[0], num_bytes=14, num_strikes=3)
    found = scraped(frame)
    first, broken = frame.links[0], frame.links[7]
    named = {"from_pool": first.from_pool, "to_pool": first.to_pool}
    for name, value in (
        ("penstock_link_bytes_total", 14),
        ("penstock_link_strikes", 3),
        ("penstock_link_copy_bytes_per_second", first.copy_bytes_per_s),
        ("penstock_link_probe_bytes_per_second", first.probe_bytes_per_s),
    ):
        assert (named, value) in found[name]
        assert len(found[name]) == len(frame.links)
    up = found["penstock_link_up"]
    assert ({**named, "transport": "peer"}, 1) in up
    assert [labels for labels, value in up if not value] == [
        {"from_pool": broken.from_pool, "to_pool": broken.to_pool, "transport": "shm"}
    ]
    assert not [name for name in scraped(idle()) if name.startswith("penstock_link_")]
