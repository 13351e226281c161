"""Prepare the servers of a comparison, and turn their figures into rows.

Owns: which daemons run, and how long; which figures are compared, and which direction of each is
better.
Invariant: what was started is stopped when the `with` ends, however it ends; a server that was
there is left as it was.
Never: measures.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import NamedTuple, TypeVar

from appliance.bench.exchange import SERVERS_LOG, Target
from appliance.bench.load import exchange
from appliance.bench.reply_events import ReceivedReply
from appliance.bench.statistics import Figures, band, ratio, spread, verdict
from appliance.client import DaemonUnreachable
from appliance.configuration import address, config
from appliance.ephemeral import daemon
from engine.errors import ConfigError, PenstockError

ROLES = ("static", "colocated", "elastic")
WARM_UP_S = 120.0
_NAMED = re.compile(r"([\w.+-]+)=(.+)")


class Arms:
    """Targets by label, each met and warmed up when it is asked for; use it in a `with`.

    Args:
        specs: of each arm an address, or roles with which to start a daemon; `NAME=` may precede.
        model: for the daemons that are started; None: what the settings say.
        is_text: send prompts as text.
        is_alone: start a daemon anew for each use, so that no other is there meanwhile.
        warm_up: prompt and output tokens of the request that is not measured.

    Raises:
        ConfigError: a spec is wrong, or two have one label.
    """

    def __init__(
        self,
        specs: Sequence[str],
        *,
        model: str | None,
        is_text: bool = False,
        is_alone: bool = False,
        warm_up: tuple[int, int] = (64, 8),
        seed: int = 0,
    ) -> None:
        named = [_label_and_place(spec) for spec in specs]
        self._place_by_label = dict(named)
        if len(self._place_by_label) < len(named):
            raise ConfigError(
                "two servers have the same name",
                where=" ".join(specs),
                hint="name them: NAME=ADDRESS",
            )
        self._model = model
        self._is_text = is_text
        self._is_alone = is_alone
        self._warm_up = warm_up
        self._rng = random.Random(seed)
        self._kept = ExitStack()
        self._targets: dict[str, Target] = {}

    @property
    def labels(self) -> list[str]:
        """In the order in which they were given."""
        return list(self._place_by_label)

    def __enter__(self) -> Arms:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._kept.close()

    @contextmanager
    def ready(self, label: str) -> Iterator[Target]:
        """Yield a target to measure; a daemon of ours runs at least until the end.

        Raises:
            PenstockError: it does not start, does not answer, or fails the first request.
        """
        with ExitStack() as until_then:
            if label not in self._targets:
                is_brief = self._is_alone and self._place_by_label[label] in ROLES
                target = self._open(label, until_then if is_brief else self._kept)
                if is_brief:
                    yield target
                    return
                self._targets[label] = target
            yield self._targets[label]

    def _options(self, roles: str) -> list[str]:
        served = config.load({"model": self._model}).model
        return ["--roles", roles, *([] if served is None else ["--model", str(served)])]

    def _open(self, label: str, stack: ExitStack) -> Target:
        place = self._place_by_label[label]
        if place in ROLES:
            where: address.Address = stack.enter_context(daemon(*self._options(place)))
        else:
            where = address.find(place)
        target = Target(label, where, self._rng, is_text=self._is_text)
        try:
            target.meet()
        except DaemonUnreachable as error:
            error.hint = f"a server is the address of one that runs, or one of {', '.join(ROLES)}"
            raise
        request, reply = target.request(*self._warm_up), ReceivedReply(time.perf_counter_ns())
        asyncio.run(exchange(where, request, reply, WARM_UP_S))
        if reply.problem is not None or reply.ended_ns is None:
            problem = reply.problem or f"no end within {WARM_UP_S:.0f} s"
            raise PenstockError(
                f"the first request failed: {problem}", where=str(where), hint=SERVERS_LOG
            )
        target.learn_length(self._warm_up[0], reply.prompt_tokens)
        return target


def _label_and_place(spec: str) -> tuple[str, str]:
    named = _NAMED.fullmatch(spec)
    return (named[1], named[2]) if named else (spec, spec)


# Interleaved rounds: every arm in each of them, in a new order, and the first arm twice.
# What slows a machine for a while slows all arms of a round, so ratios within a round hold where
# absolute figures do not. The first arm's second turn shows by how much equal things differ.
# Owns: the order. Invariant: every list of results is in the order of rounds.
# Never: looks at a result.


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


# Arms over rounds as rows: a figure with its spread, its ratio to the base, and the verdict.
# Invariant: pure; the A/A rows come first, and every verdict is against their band.
# Never: calls a difference one that the same arm shows against itself.


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
    Metric("p99_loaded_over_p50_quiet"),
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
        metrics: what to compare.
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
