"""Start and stop the servers of a comparison.

Invariant: what was started is stopped when the `with` ends, however it ends; a server that was
there is left as it was.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from appliance.bench.exchange import SERVERS_LOG, Target
from appliance.bench.load import exchange
from appliance.bench.reply_events import ReceivedReply
from appliance.client import address
from appliance.client.calls import DaemonUnreachable
from appliance.client.ephemeral import daemon
from appliance.configuration import config
from engine.errors import ConfigError, PenstockError

ROLES = ("static", "colocated", "elastic")
WARM_UP_S = 120.0
_WARM_UP_PROMPT_TOKENS, _WARM_UP_OUTPUT_TOKENS = 64, 8
_NAMED = re.compile(r"([\w.+-]+)=(.+)")


class Arms:
    """Targets by label, each met and warmed up when it is asked for; use it in a `with`.

    Args:
        specs: of each arm an address, or roles with which to start a daemon; `NAME=` may precede.
        model: for the daemons that are started; None: what the settings say.
        is_alone: start a daemon anew for each use, so that no other is there meanwhile.

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
        self._rng = random.Random(seed)
        self._kept = ExitStack()
        self._targets: dict[str, Target] = {}

    @property
    def labels(self) -> list[str]:
        """In the order in which they were given."""
        return list(self._place_by_label)

    def __enter__(self) -> Arms:
        return self

    def __exit__(self, *_: object) -> None:
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
        request = target.request(_WARM_UP_PROMPT_TOKENS, _WARM_UP_OUTPUT_TOKENS)
        reply = ReceivedReply(time.perf_counter_ns())
        asyncio.run(exchange(where, request, reply, WARM_UP_S))
        if reply.problem is not None or reply.ended_ns is None:
            problem = reply.problem or f"no end within {WARM_UP_S:.0f} s"
            raise PenstockError(
                f"the first request failed: {problem}", where=str(where), hint=SERVERS_LOG
            )
        target.learn_length(_WARM_UP_PROMPT_TOKENS, reply.prompt_tokens)
        return target


def _label_and_place(spec: str) -> tuple[str, str]:
    named = _NAMED.fullmatch(spec)
    return (named[1], named[2]) if named else (spec, spec)
