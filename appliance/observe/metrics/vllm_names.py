"""List vLLM's metrics that have a meaning here.

Invariant: names, labels and bucket edges are vLLM's. To its readers the appliance is one engine,
`0`, and each sequence is a request.
Never: makes up a figure for what does not exist here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from appliance.observe.frame.histograms import (
    GAP_S,
    NUM_SEQUENCES,
    REQUEST_S,
    STEP_TOKENS,
    TTFT_S,
    Edges,
    Histogram,
    Histograms,
)
from appliance.observe.frame.protocol import DraftFrame, Frame
from appliance.observe.metrics.metric_family import MetricFamily, counter, gauge, histogram
from appliance.observe.telemetry.signals import STAGING, used_ratio


def vllm_families(frame: Frame, histograms: Histograms) -> Iterator[MetricFamily]:
    labels = {"model_name": frame.model, "engine": "0"}
    yield from _gauges(frame, labels)
    yield from _counters(frame, histograms, labels)
    for name, about, shown, edges in _histograms(histograms):
        yield histogram(f"vllm:{name}", about, [(labels, shown, edges)])


def _gauges(frame: Frame, labels: dict[str, str]) -> Iterator[MetricFamily]:
    queue = frame.queue
    running = queue.prefilling + queue.handing_off + queue.decoding
    yield gauge(
        "vllm:num_requests_running", "Sequences in steps or being handed over.", [(labels, running)]
    )
    waiting = queue.queued + queue.paused
    yield gauge("vllm:num_requests_waiting", "Queued, or preempted.", [(labels, waiting)])
    yield gauge(
        "vllm:num_requests_waiting_by_reason",
        "Sequences in the queue.",
        [
            ({**labels, "reason": "capacity"}, waiting),
            ({**labels, "reason": "deferred"}, 0),
        ],
    )
    pools = [pool for pool in frame.pools if pool.name != STAGING]
    used = [ratio for pool in pools if (ratio := used_ratio(pool)) is not None]
    fullest = max(used, default=None)
    yield gauge(
        "vllm:kv_cache_usage_perc", "Used share of the fullest pool, 0 to 1.", [(labels, fullest)]
    )
    about = {
        # whole numbers: gateways read them; the pools of a daemon have one layout
        "block_size": str(pools[0].block_size if pools else 0),
        "cache_dtype": frame.dtype,
        "enable_prefix_caching": str(frame.totals.has_prefix_cache),
        "num_gpu_blocks": str(sum(pool.num_blocks for pool in pools)),
        "engine": labels["engine"],
    }
    yield gauge("vllm:cache_config_info", "The KV pools.", [(about, 1)])
    none = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    yield gauge("vllm:lora_requests_info", "Adapters are not supported.", [(none, 1)])


def _counters(
    frame: Frame, histograms: Histograms, labels: dict[str, str]
) -> Iterator[MetricFamily]:
    totals = frame.totals
    by_source = (
        ({**labels, "source": "local_compute"}, totals.prompt_tokens - totals.cached_tokens),
        ({**labels, "source": "local_cache_hit"}, totals.cached_tokens),
    )
    about = "Prompt tokens, computed or found in the prefix cache."
    yield counter("vllm:prompt_tokens_by_source_total", about, by_source)
    about = "Tokens found in the local prefix cache."
    yield counter("vllm:prompt_tokens_cached_by_source_total", about, by_source[1:])
    for name, about, number in (
        ("prompt_tokens", "Of answered prompts.", totals.prompt_tokens),
        ("prompt_tokens_cached", "Found in the prefix cache.", totals.cached_tokens),
        ("prefix_cache_queries", "Prompt tokens looked for.", totals.prefix_cache_queries),
        ("prefix_cache_hits", "Prompt tokens found there.", totals.prefix_cache_hits),
        ("generation_tokens", "Generated.", totals.output_tokens),
        ("num_preemptions", "Sequences whose blocks were given to others.", totals.preemptions),
    ):
        yield counter(f"vllm:{name}_total", about, [(labels, number)])
    yield from _drafts(frame.totals.drafts, labels)
    yield counter(
        "vllm:request_success_total",
        "Ended sequences, by finish reason.",
        [
            ({**labels, "finished_reason": reason}, number)
            for reason, number in histograms.finished.items()
        ],
    )


def _drafts(drafts: list[DraftFrame], labels: dict[str, str]) -> Iterator[MetricFamily]:
    guessed, right = (
        [sum(numbers) for numbers in zip_longest(*lists, fillvalue=0)]
        for lists in ([each.guessed for each in drafts], [each.right for each in drafts])
    )
    for name, about, number in (
        ("num_drafts", "Guesses checked.", sum(guessed[:1])),
        ("num_draft_tokens", "Tokens guessed.", sum(guessed)),
        ("num_accepted_tokens", "Guessed tokens that were right.", sum(right)),
    ):
        yield counter(f"vllm:spec_decode_{name}_total", about, [(labels, number)])
    yield counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "Right tokens by place in the guess.",
        [({**labels, "position": str(place)}, number) for place, number in enumerate(right or [0])],
    )


def _histograms(histograms: Histograms) -> Iterator[tuple[str, str, Histogram, Edges]]:
    stages, tokens = histograms.stage_s, histograms.token_edges
    yield "time_to_first_token_seconds", "Arrival to token 1.", histograms.ttft_s, TTFT_S
    yield "inter_token_latency_seconds", "Between two tokens.", histograms.itl_s, GAP_S
    yield "request_time_per_output_token_seconds", "Mean gap.", histograms.tpot_s, GAP_S
    yield "e2e_request_latency_seconds", "Arrival to end.", histograms.e2e_s, REQUEST_S
    yield "request_queue_time_seconds", "Waiting.", stages["queue"], REQUEST_S
    yield "request_inference_time_seconds", "All but waiting.", histograms.running_s, REQUEST_S
    yield "request_prefill_time_seconds", "Computing the prompt.", stages["prefill"], REQUEST_S
    yield "request_decode_time_seconds", "Computing the rest.", stages["decode"], REQUEST_S
    yield "request_prompt_tokens", "In the prompt.", histograms.prompt_tokens, tokens
    yield "request_prefill_kv_computed_tokens", "Computed.", histograms.prompt_tokens, tokens
    yield "request_generation_tokens", "In the output.", histograms.output_tokens, tokens
    yield "request_max_num_generation_tokens", "Asked for.", histograms.max_tokens, tokens
    yield "request_params_max_tokens", "The limit asked for.", histograms.max_tokens, tokens
    yield "request_params_n", "Sequences asked for.", histograms.num_sequences, NUM_SEQUENCES
    yield "iteration_tokens_total", "Tokens in a step.", histograms.step_tokens, STEP_TOKENS
