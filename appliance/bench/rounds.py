"""Measure servers in interleaved rounds, the first one twice.

A slow spell of the machine slows every server of a round, so ratios within a round hold where
absolute figures do not. The second turn of the first server shows how much equal things differ.

Invariant: every list of results is in the order of rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from appliance.bench.arms import Arms
from appliance.bench.exchange import Target

AGAIN = "A/A"
"""The label of the first arm's second turn."""

T = TypeVar("T")


def interleaved(
    arms: Arms, num_rounds: int, seed: int, measure: Callable[[Target, str, int], T]
) -> dict[str, list[T]]:
    """Collect results by label, the second turns of the first arm under AGAIN.

    Args:
        arms: open; the first is the base of all ratios.
        num_rounds: how often each is measured.
        seed: of the order.
        measure: takes the target, the label of its turn and the round's index.
    """
    results: dict[str, list[T]] = {label: [] for label in (*arms.labels, AGAIN)}
    for round_index, turns in enumerate(order(arms.labels, num_rounds, seed)):
        for label in turns:
            with arms.ready(arms.labels[0] if label == AGAIN else label) as target:
                results[label].append(measure(target, label, round_index))
    return results


def order(labels: list[str], num_rounds: int, seed: int) -> list[list[str]]:
    """Draw the order of the arms' labels for each round."""
    rng, turns = random.Random(seed), [*labels, AGAIN]
    return [rng.sample(turns, len(turns)) for _ in range(num_rounds)]
