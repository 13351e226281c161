"""Turn the figures of compared servers into rows: spread, ratio to the first, verdict.

Invariant: the A/A rows come first, and every verdict is against their band.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from appliance.bench.rounds import AGAIN
from appliance.bench.statistics import Figures, band, ratio, spread, verdict


class Metric(NamedTuple):
    """A figure of which each round of an arm has one."""

    key: str
    is_more_better: bool = False


LOAD_METRICS = (
    Metric("output_tokens_per_s", is_more_better=True),
    Metric("requests_per_s", is_more_better=True),
    Metric("goodput_ratio", is_more_better=True),
    Metric("ttft_ms_p50"),
    Metric("ttft_ms_p90"),
    Metric("ttft_ms_p99"),
    Metric("itl_ms_p50"),
    Metric("itl_ms_p99"),
    Metric("itl_ms_max"),
    Metric("tpot_ms_p50"),
    Metric("e2e_ms_p50"),
    Metric("e2e_ms_p99"),
    Metric("joules_per_token"),
    Metric("hit_ratio", is_more_better=True),
    Metric("infinite_hit_ratio"),
    Metric("refused"),
    Metric("failed"),
)
INTERFERENCE_METRICS = (
    Metric("p99_loaded_over_p99_quiet"),
    Metric("p99_over_p50_quiet"),
    Metric("quiet_itl_ms_p50"),
    Metric("quiet_itl_ms_p99"),
    Metric("loaded_itl_ms_p50"),
    Metric("loaded_itl_ms_p99"),
    Metric("loaded_itl_ms_max"),
    Metric("alone_ttft_ms_p50"),
    Metric("loaded_ttft_ms_p50"),
    Metric("loaded_ttft_ms_max"),
    Metric("unanswered"),
)


def rows(
    rounds: Mapping[str, Sequence[Figures]], metrics: Sequence[Metric]
) -> list[dict[str, object]]:
    """Write one row for each arm and observed figure.

    Args:
        rounds: figures by label; the first label is the base, AGAIN its second turn.
    """
    base = next(label for label in rounds if label != AGAIN)
    found: list[dict[str, object]] = []
    for label in (AGAIN, *(label for label in rounds if label != AGAIN)):
        for metric in metrics:
            if (of := spread(rounds[label], metric.key)) is None:
                continue
            over = None if label == base else ratio(rounds[label], rounds[base], metric.key)
            noise = band(ratio(rounds[AGAIN], rounds[base], metric.key))
            is_judged = label not in (base, AGAIN)
            found.append(
                {
                    "arm": label,
                    "metric": metric.key,
                    "median": of.median,
                    "low": of.low,
                    "high": of.high,
                    "ratio": over and over.median,
                    "ratio_low": over and over.low,
                    "ratio_high": over and over.high,
                    "band_low": noise and noise[0],
                    "band_high": noise and noise[1],
                    "verdict": verdict(over, noise, is_more_better=metric.is_more_better)
                    if is_judged
                    else "",
                }
            )
    return found
