"""Hold conversations with a server through any of four APIs.

Owns: how histories, tools and results are written in each; their pace, and what of each prompt an
infinite cache would have had.
Invariant: every turn that was due is a sample; a conversation ends at the first
that fails, and where the server's context does.
Never: computes a statistic.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from appliance.bench.exchange import Target
from appliance.bench.load import PATIENCE_S, Measured, Tick, send
from appliance.bench.planned_conversations import PlannedConversation
from appliance.bench.sample import Sample
from appliance.bench.talks import ClientConversation, CompletionTalk, MessageTalk

MAX_WAIT_S = 3600.0
"""For all of it; a server that answers nothing has failed long before."""


@dataclass(frozen=True, slots=True)
class TurnPace:
    """How a workload is brought to a server."""

    api: str
    speed: float = 1.0
    """Times as fast, of pauses and beginnings."""
    length_scale: float = 1.0

    def length(self, num_tokens: int) -> int:
        """Tokens of a part that the workload has so many of."""
        return max(1, round(num_tokens * self.length_scale))

    def least_s(self, conversations: Iterable[PlannedConversation]) -> float:
        """Seconds that beginnings and pauses take, however fast a server is."""
        return max(
            (each.starts_at_s + sum(turn.think_s for turn in each.turns[1:])) / self.speed
            for each in conversations
        )


async def converse(
    target: Target,
    conversations: Sequence[PlannedConversation],
    pace: TurnPace,
    label: str,
    round_index: int,
    tick: Tick,
) -> Measured:
    """Have all conversations; the window is until the last has ended."""
    most = max(each.shared_tokens for each in conversations)
    shared = _Shared(target, pace, pace.length(most) if most else 0)
    origin_ns = time.perf_counter_ns()
    num_due, num_done = sum(len(each.turns) for each in conversations), 0

    def done(number: int) -> None:
        nonlocal num_done
        num_done += number
        tick(num_done / num_due)

    async def have(each: PlannedConversation) -> list[Sample]:
        await asyncio.sleep(each.starts_at_s / pace.speed)
        partner = _SimulatedUser(target, shared, pace, each, origin_ns)
        for _ in each.turns:
            if not await partner.take_turn():
                break
            done(1)
        done(len(each.turns) - len(partner.samples))
        return partner.samples

    ended = await asyncio.gather(*map(have, conversations))
    window_ms = max((time.perf_counter_ns() - origin_ns) / 1e6, 1.0)
    samples = [sample for each in ended for sample in each]
    return Measured(label, round_index, window_ms, samples)


class _Shared:
    """The system prompt of a workload, new for each server and turn."""

    def __init__(self, target: Target, pace: TurnPace, num_tokens: int) -> None:
        is_bare = pace.api == "completions"
        self.num_tokens = num_tokens
        self.ids = (target.ids(num_tokens) if is_bare else None) if num_tokens else None
        self.text = target.words(num_tokens) if num_tokens and self.ids is None else ""
        self.was_sent = False


class _SimulatedUser:
    """Who has one conversation."""

    def __init__(
        self,
        target: Target,
        shared: _Shared,
        pace: TurnPace,
        conversation: PlannedConversation,
        origin_ns: int,
    ) -> None:
        self._target = target
        self._shared = shared
        self._pace = pace
        self._conversation = conversation
        self._origin_ns = origin_ns
        self._is_bare = pace.api == "completions"
        self._talk: ClientConversation
        if self._is_bare:
            has_ids = target.ids(1) is not None
            self._talk = CompletionTalk(target, (shared.ids or []) if has_ids else shared.text)
        else:
            has_tools = conversation.has_tools
            self._talk = MessageTalk(target, pace.api, shared.text, has_tools=has_tools)
        self._num_known = 0
        """Tokens that the server has seen of this conversation, as it counts them."""
        self._num_asked = 0
        """As they were asked for."""
        self.samples: list[Sample] = []

    async def take_turn(self) -> bool:
        """The next turn; False if the conversation has ended with it, or before it."""
        number = len(self.samples)
        turn = self._conversation.turns[number]
        if number:
            await asyncio.sleep(turn.think_s / self._pace.speed)
        num_new = self._pace.length(turn.input_tokens)
        num_output = self._pace.length(turn.output_tokens)
        self._num_asked += num_new + (0 if number else self._shared.num_tokens)
        most = self._target.max_model_len
        if most is not None and max(self._num_known + num_new, self._num_asked) + num_output > most:
            return False
        new = self._target.ids(num_new) if self._is_bare else None
        request = self._talk.request(new or self._target.words(num_new), num_output)
        reusable = self._num_known if number else self._in_front()
        due_ns = time.perf_counter_ns()
        until_s = min((due_ns - self._origin_ns) / 1e9 + PATIENCE_S, MAX_WAIT_S)
        sample, reply = await send(self._target, request, self._origin_ns, due_ns, until_s)
        sample.turn = number + 1
        if reusable is not None and sample.prompt_tokens is not None:
            sample.reusable_tokens = min(reusable, sample.prompt_tokens)
        self.samples.append(sample)
        self._num_known = (sample.prompt_tokens or 0) + (sample.output_tokens or 0)
        self._num_asked += num_output
        self._talk.hear(reply)
        return sample.is_completed

    def _in_front(self) -> int:
        """What an earlier conversation had in front of its first message, too."""
        was_sent, self._shared.was_sent = self._shared.was_sent, True
        return self._shared.num_tokens if was_sent else 0
