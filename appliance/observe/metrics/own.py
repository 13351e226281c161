"""List our own metrics, `penstock_*`."""

from __future__ import annotations

# a name that was ever shown stays: dashboards ask for it
from collections import Counter
from collections.abc import Iterator
from typing import Any

from appliance.observe.frame.histograms import FINE_GAP_S, REQUEST_S, STAGE_S, TTFT_S, Histograms
from appliance.observe.frame.offload_frame import OffloadFrame
from appliance.observe.frame.protocol import (
    DeviceFrame,
    Frame,
    LinkFrame,
    SwapsFrame,
    TotalsFrame,
    WayFrame,
)
from appliance.observe.frame.tier_frames import TierFrame
from appliance.observe.metrics.metric_family import MetricFamily, counter, gauge, histogram

_STATES = ("loading", "ready", "draining", "degraded")
_BLOCK_STATES = ("free", "cached", "reserved", "active", "draining")


def families(frame: Frame, histograms: Histograms) -> Iterator[MetricFamily]:
    """Yield every metric under its `penstock_` name."""
    yield from _appliance(frame)
    yield from _requests(frame)
    yield from _latency(frame, histograms)
    yield from _workers(frame)
    yield from _kv(frame)
    yield from _links(frame.links)
    yield from _tier("dram", frame.dram)
    yield from _tier("ssd", frame.ssd)
    yield from _energy(frame)
    yield from _devices(frame.devices)


def _appliance(frame: Frame) -> Iterator[MetricFamily]:
    about = {"model": frame.model, "dtype": frame.dtype, "roles": frame.roles}
    yield gauge(
        "penstock_model_info",
        "The served model, with roles and transport.",
        [({**about, "transport": frame.transport or "none"}, 1)],
    )
    yield gauge(
        "penstock_state",
        "1 for the current state.",
        [({"state": state}, frame.state == state) for state in _STATES],
    )
    yield gauge(
        "penstock_alert",
        "1 for each alert.",
        [
            ({"code": each.code, "severity": each.severity, "subject": each.subject}, 1)
            for each in frame.alerts
        ],
    )
    yield gauge("penstock_uptime_seconds", "Since the daemon started.", frame.uptime_s)
    lost = frame.totals.log_rows_lost
    yield counter("penstock_log_rows_lost_total", "Rows lost by the request log.", lost)
    lacks = None if frame.unwritten is None else frame.unwritten.num_requests
    yield gauge("penstock_log_unwritten_requests", "While the log cannot be written.", lacks)


def _requests(frame: Frame) -> Iterator[MetricFamily]:
    totals, queue = frame.totals, frame.queue
    by_result = ("finished", "refused", "aborted", "failed")
    yield counter(
        "penstock_requests_total",
        "Requests that have ended.",
        [({"result": result}, getattr(totals, result)) for result in by_result],
    )
    yield gauge(
        "penstock_requests_live", "Accepted requests without their last reply.", frame.num_requests
    )
    phases = ("queued", "prefilling", "handing_off", "paused", "decoding")
    yield gauge(
        "penstock_sequences",
        "By phase.",
        [({"phase": phase}, getattr(queue, phase)) for phase in phases],
    )
    yield gauge("penstock_queue_limit_sequences", "That may wait.", queue.max_queued)
    yield gauge("penstock_queue_tokens", "Prompt tokens that wait.", queue.queued_tokens)
    yield gauge("penstock_queue_owners", "Users and keys with waiting requests.", queue.num_owners)
    yield gauge(
        "penstock_queue_oldest_seconds", "The longest wait now.", _s(queue.oldest_queued_ms)
    )
    yield counter("penstock_prompt_tokens_total", "Of answered prompts.", totals.prompt_tokens)
    yield counter("penstock_output_tokens_total", "Generated.", totals.output_tokens)
    yield counter("penstock_texts_total", "Vectors and scores computed.", totals.texts)
    yield counter("penstock_text_tokens_total", "Of these texts.", totals.text_tokens)
    placed = (name.partition(" ") for name in totals.routes)
    yield counter(
        "penstock_placements_total",
        "Sequences placed, by route and reason.",
        [
            ({"route": route, "reason": reason}, totals.routes[f"{route} {reason}"])
            for route, _, reason in placed
        ],
    )
    yield from _predictions(totals.ways)
    if frame.swaps is not None:
        yield from _swaps(frame.swaps)
    queries, hits = totals.prefix_cache_queries, totals.prefix_cache_hits
    yield counter("penstock_prefix_cache_queries_total", "Prompt tokens looked for.", queries)
    yield counter("penstock_prefix_cache_hits_total", "Of these, found computed.", hits)
    fetched, spent_s = totals.prefix_cache_fetches, totals.prefix_cache_s
    yield counter("penstock_prefix_cache_fetches_total", "Tokens copied between pools.", fetched)
    yield counter("penstock_prefix_cache_seconds_total", "Hashing, finding, publishing.", spent_s)
    yield counter(
        "penstock_prefix_cache_evicted_blocks_total",
        "Kept, and taken for something else.",
        [({"pool": pool.name}, pool.evicted) for pool in frame.pools],
    )
    recovered = totals.recovered_sequences
    saved = "Sequences saved from a dead worker or daemon."
    yield counter("penstock_recoveries_total", saved, recovered)
    yield counter(
        "penstock_preemptions_total",
        "Preemptions: a sequence's KV blocks were given to others.",
        totals.preemptions,
    )
    yield from _reader(totals)
    yield from _drafts(totals)


def _reader(totals: TotalsFrame) -> Iterator[MetricFamily]:
    yield counter(
        "penstock_reader_failures_total",
        "Templates and grammars that took too much to read.",
        [({"of": why}, number) for why, number in totals.reader_failures.items()],
    )
    restarts = totals.reader_restarts
    yield counter("penstock_reader_restarts_total", "Of the process that reads them.", restarts)


def _drafts(totals: TotalsFrame) -> Iterator[MetricFamily]:
    steps, tokens = totals.decode_steps, totals.decode_step_tokens
    yield counter("penstock_decode_steps_total", "Decode steps, for each sequence.", steps)
    yield counter("penstock_decode_step_tokens_total", "Tokens of these steps.", tokens)
    for name, what in (("guessed", "Tokens that speculation guessed"), ("right", "Right guesses")):
        yield counter(
            f"penstock_speculation_{name}_tokens_total",
            f"{what}, by source and place in the guess.",
            [
                ({"drafter": each.drafter, "position": str(place)}, number)
                for each in totals.drafts
                for place, number in enumerate(getattr(each, name))
            ],
        )


def _predictions(ways: list[WayFrame]) -> Iterator[MetricFamily]:
    """Yield elastic predictions by route; step sizes are merged."""
    counts: Counter[tuple[str, str, str]] = Counter()
    closed: Counter[tuple[str, str]] = Counter()
    for way in ways:
        labels = way.route, "yes" if way.is_beside else "no"
        counts[*labels, "as predicted"] += way.num_judged - way.num_missed
        counts[*labels, "twice as bad"] += way.num_missed
        counts[*labels, "gave way"] += way.num_gave_way
        closed[labels] += way.is_closed
    yield counter(
        "penstock_route_outcomes_total",
        "Prompts placed by elastic roles' predictions, by outcome.",
        [
            ({"route": route, "beside_decodes": beside, "outcome": outcome}, count)
            for (route, beside, outcome), count in counts.items()
        ],
    )
    yield gauge(
        "penstock_routes_closed",
        "Routes out of use: twice as slow as predicted and not measured again.",
        [({"route": r, "beside_decodes": beside}, n) for (r, beside), n in closed.items()],
    )


def _latency(frame: Frame, histograms: Histograms) -> Iterator[MetricFamily]:
    yield histogram(
        "penstock_time_to_first_token_seconds",
        "From arrival to token 1.",
        [({}, histograms.ttft_s, TTFT_S)],
    )
    yield histogram(
        "penstock_inter_token_latency_seconds",
        "Between two tokens of a sequence.",
        [({}, histograms.itl_s, FINE_GAP_S)],
    )
    yield histogram(
        "penstock_request_duration_seconds",
        "Time from arrival to the end, of sequences that completed.",
        [({}, histograms.e2e_s, REQUEST_S)],
    )
    yield histogram(
        "penstock_stage_seconds",
        "Time in each stage, of sequences that completed; stages add up to the duration.",
        [({"stage": stage}, each, STAGE_S) for stage, each in histograms.stage_s.items()],
    )
    latency, aims = frame.latency, {"ttft": frame.slo_ttft_ms, "itl": frame.slo_itl_ms}
    yield gauge(
        "penstock_slo_target_seconds",
        "The target; no sample where it is relative.",
        [({"target": name}, _s(target_ms)) for name, target_ms in aims.items()],
    )
    yield gauge(
        "penstock_slo_attainment_ratio",
        f"Share within the target, of the last {latency.window_s:.0f} seconds.",
        [
            ({"target": "ttft"}, latency.ttft_slo_ratio),
            ({"target": "itl"}, latency.itl_slo_ratio),
        ],
    )


def _workers(frame: Frame) -> Iterator[MetricFamily]:
    named = [({"worker": worker.name}, worker) for worker in frame.workers]
    yield gauge("penstock_worker_up", "1 if ready.", [(n, w.state == "ready") for n, w in named])
    for name, about, field, scale in (
        ("busy_ratio", "Share of the last second spent in steps.", "busy_ratio", 1.0),
        ("batch_size", "Mean sequences in a step, last second.", "batch_size_mean", 1.0),
        ("last_step_age_seconds", "Since its last step, with work.", "last_step_age_ms", 1e-3),
        ("resident_memory_bytes", "With what it shares.", "rss_bytes", 1.0),
        ("disk_wait_ratio", "Of its time, for weights on disk.", "disk_wait_ratio", 1.0),
    ):
        yield gauge(f"penstock_worker_{name}", about, _of_field(named, field, scale))
    refused = _of_field(named, "num_refused")
    yield gauge("penstock_worker_refused_kernels", "That the self-test found wrong.", refused)
    restarts = _of_field(named, "num_restarts")
    yield counter("penstock_worker_restarts_total", "Restarts of the worker.", restarts)
    ranks = [
        ({"worker": worker.name, "rank": str(rank)}, process)
        for worker in frame.workers
        for rank, process in enumerate(worker.ranks)
    ]
    if ranks:
        about = "Of a process of a group, with what it shares."
        held, waits = _of_field(ranks, "rss_bytes"), _of_field(ranks, "wait_ratio")
        yield gauge("penstock_worker_rank_resident_bytes", about, held)
        about = "Of its time, for its group within steps."
        yield gauge("penstock_worker_rank_wait_ratio", about, waits)
    if frame.offload is not None:
        read = _of_field(named, "disk_read_bytes")
        yield counter("penstock_worker_disk_read_bytes_total", "That it read from disk.", read)
        yield from _offload(frame.offload)


def _offload(offload: OffloadFrame) -> Iterator[MetricFamily]:
    each, whole = offload.disk_bytes, offload.weights_bytes
    yield gauge("penstock_weights_disk_bytes", "That each step reads from disk.", each)
    yield gauge("penstock_weights_bytes", "Of all weights, where some are on disk.", whole)
    yield gauge("penstock_weights_resident_bytes", "Of these, in memory.", offload.resident_bytes)


def _kv(frame: Frame) -> Iterator[MetricFamily]:
    yield gauge(
        "penstock_kv_bytes",
        "Blocks of a pool, by state.",
        [
            ({"pool": pool.name, "state": state}, getattr(pool, state) * pool.block_bytes)
            for pool in frame.pools
            for state in _BLOCK_STATES
        ],
    )
    yield gauge(
        "penstock_kv_records",
        "Records of recurrent states in a pool: of running sequences, and kept for prompts.",
        [
            ({"pool": pool.name, "kind": kind}, count)
            for pool in frame.pools
            if pool.record_blocks
            for kind, count in (("running", pool.records), ("snapshot", pool.snapshots))
        ],
    )
    totals, handoff = frame.totals, frame.handoff
    yield counter("penstock_handoffs_total", "From prefill to decode.", totals.handoffs)
    yield counter("penstock_handoff_bytes_total", "Moved in handoffs.", totals.handoff_bytes)
    if handoff is not None:
        yield counter("penstock_handoff_failures_total", "That failed.", handoff.num_failed)
        yield gauge(
            "penstock_handoff_probe_bytes_per_second",
            "Copy rate measured at start.",
            handoff.probe_bytes_per_s,
        )


def _links(links: list[LinkFrame]) -> Iterator[MetricFamily]:
    """Yield figures of the links between pools; none if all share one pool."""
    named = [({"from_pool": link.from_pool, "to_pool": link.to_pool}, link) for link in links]
    yield gauge(
        "penstock_link_up",
        "1; 0 where its blocks take the fallback. The transport is that in force.",
        [({**labels, "transport": link.transport}, link.down is None) for labels, link in named],
    )
    about = "Bytes of blocks that arrived over the link."
    yield counter("penstock_link_bytes_total", about, _of_field(named, "num_bytes"))
    for name, about, field in (
        (
            "copy_bytes_per_second",
            "Recent copy rate of the link, while copying.",
            "copy_bytes_per_s",
        ),
        ("probe_bytes_per_second", "Copy rate in the trial at start.", "probe_bytes_per_s"),
        ("strikes", "Copies in a row that failed or were slow.", "num_strikes"),
    ):
        yield gauge(f"penstock_link_{name}", about, _of_field(named, field))


def _swaps(swaps: SwapsFrame) -> Iterator[MetricFamily]:
    yield counter("penstock_model_swaps_total", "Swaps from one model to another.", swaps.num_swaps)
    last_s = _s(swaps.last_swap_ms)
    yield gauge("penstock_model_swap_last_seconds", "Time of the last swap.", last_s)
    waiting = swaps.num_waiting
    yield gauge("penstock_model_swap_waiting", "Requests for another model.", waiting)
    if swaps.resident:
        loaded = [({"model": one.model}, one.num_bytes) for one in swaps.resident]
        about = "Bytes of loaded models that are not served."
        yield gauge("penstock_model_resident_bytes", about, loaded)
    if swaps.failed:
        failed = [({"model": one.model}, 1) for one in swaps.failed]
        yield gauge("penstock_model_failed", "Failed to load; not tried for now.", failed)


def _tier(name: str, tier: TierFrame | None) -> Iterator[MetricFamily]:
    """Yield the figures of the DRAM or SSD cache; none if it is off."""
    if tier is None or tier.state not in ("on", "down", "failed"):
        return
    about = "1 while the cache is usable."
    yield gauge(f"penstock_{name}_up", about, tier.state == "on")
    if tier.state == "failed":
        return
    yield gauge(f"penstock_{name}_bytes", "Bytes of cached blocks.", tier.num_bytes)
    if tier.other_models:
        kept = [({"model": model}, held) for model, held in tier.other_models.items()]
        about = "Bytes of blocks kept for models that are not served."
        yield gauge(f"penstock_{name}_other_model_bytes", about, kept)
    yield gauge(f"penstock_{name}_limit_bytes", "Maximum bytes of cached blocks.", tier.max_bytes)
    yield gauge(f"penstock_{name}_waiting_sequences", "For blocks from it.", tier.waiting)
    counts = {
        "stored": tier.stored_blocks,
        "loaded": tier.loaded_blocks,
        "evicted": tier.evicted_blocks,
        "expired": tier.expired_blocks,
        "damaged": tier.damaged_blocks,
        "not_stored": tier.failed_stores,
    }
    yield counter(
        f"penstock_{name}_blocks_total",
        "Blocks, by outcome.",
        [({"outcome": outcome}, count) for outcome, count in counts.items()],
    )
    decided = {"loaded": tier.loads, "declined": tier.declined_loads}
    yield counter(
        f"penstock_{name}_decisions_total",
        "Prompts with cached blocks, by whether loading was predicted to beat computing.",
        [({"decision": decision}, count) for decision, count in decided.items()],
    )
    yield counter(f"penstock_{name}_loaded_tokens_total", "Not computed.", tier.loaded_tokens)
    yield counter(
        f"penstock_{name}_late_loads_total",
        "Loads that missed their deadline.",
        tier.missed_deadlines,
    )
    yield counter(f"penstock_{name}_load_seconds_total", "Waited for loads.", tier.load_ms / 1e3)
    about = "Time by which loads exceeded the predicted computing."
    yield counter(f"penstock_{name}_regret_seconds_total", about, tier.regret_ms / 1e3)
    yield gauge(f"penstock_{name}_read_bytes_per_second", "Of loads.", tier.read_bytes_per_s)


def _energy(frame: Frame) -> Iterator[MetricFamily]:
    energy = frame.energy
    if energy is None:
        return
    yield counter(
        "penstock_energy_joules_total",
        "Energy by use; the parts add up to all that was measured.",
        [
            ({"phase": "prefill"}, energy.prefill_j),
            ({"phase": "decode"}, energy.decode_j),
            ({"phase": "unattributed"}, energy.unattributed_j),
        ],
    )


def _devices(devices: list[DeviceFrame]) -> Iterator[MetricFamily]:
    named = [({"device": device.name}, device) for device in devices]
    readings = (
        ("power_watts", "Drawn.", "power_w", 1.0),
        ("power_limit_watts", "That it may draw.", "power_limit_w", 1.0),
        ("temperature_celsius", "Of the chip.", "temperature_c", 1.0),
        ("clock_hertz", "Of its processors.", "clock_mhz", 1e6),
        ("utilization_ratio", "Share of time in use.", "utilization_ratio", 1.0),
        ("memory_used_bytes", "In use.", "memory_used_bytes", 1.0),
        ("memory_size_bytes", "There is.", "memory_total_bytes", 1.0),
    )
    for name, about, field, scale in readings:
        yield gauge(f"penstock_device_{name}", about, _of_field(named, field, scale))
    energy, about = _of_field(named, "energy_j"), "Since the daemon started."
    yield counter("penstock_device_energy_joules_total", about, energy)


def _of_field(
    named: list[tuple[dict[str, str], Any]], field: str, scale: float = 1.0
) -> list[tuple[dict[str, str], float | None]]:
    """Read a field of each part of a frame, with its labels."""
    read = ((labels, getattr(part, field)) for labels, part in named)
    return [(labels, None if value is None else value * scale) for labels, value in read]


def _s(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1e3
