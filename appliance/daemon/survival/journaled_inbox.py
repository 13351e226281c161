"""Record the batches that a reply takes, and hand a dead daemon's batches over again.

Invariant: a replayed reply takes the dead daemon's batches first, in their order.
"""

from __future__ import annotations

import asyncio
import weakref

import msgspec

from appliance.daemon.requests.request import Inbox, Request, TokensEmitted
from appliance.daemon.survival.journal import End, Facts, Journal, Tokens
from engine.errors import RequestError
from engine.scheduler.sequences.sequence import Ended, RouteStage, Sequence
from engine.wire.finish_reason import FinishReason
from engine.wire.sampling import TokenLogprob

BATCHES_PER_TURN = 64
"""Maximum replayed batches before other replies have a turn of the loop."""


class JournaledInbox(Inbox):
    """The inbox of a request that outlives the daemon.

    Args:
        journal: of the request.
        request: its sequences are moved to where a dead daemon left them.
    """

    def __init__(self, journal: Journal, request: Request) -> None:
        super().__init__()
        self._journal = journal
        # It has this inbox: two that refer to each other are freed by a garbage collection alone.
        self._request = weakref.proxy(request)
        self._told: dict[int, bool] = {}
        """Sequences whose facts are recorded; true: those after the second token."""
        self._num_replayed = 0
        if not journal.is_replay:
            return
        request.is_resumed = True
        self._restore()

    @property
    def is_kept(self) -> bool:  # type: ignore[override]
        """Say whether the keeper has the journal."""
        return self._journal.fd >= 0

    async def next_batch(self, patience_s: float | None = None) -> list[TokensEmitted]:
        """Take a dead daemon's next batch, or all emitted tokens; record them."""
        if self._journal.batches:
            self._num_replayed += 1
            if self._num_replayed % BATCHES_PER_TURN == 0:
                await asyncio.sleep(0)
            return [self._emitted_of(each) for each in self._journal.batches.popleft()]
        if patience_s is not None:
            patience_s = max(patience_s - self._journal.silent_s, 0.0)
            self._journal.silent_s = 0.0
        emitted = await super().next_batch(patience_s)
        self._journal.took([self._tokens_of(each) for each in emitted])
        return emitted

    def _restore(self) -> None:
        for tokens in (each for batch in self._journal.batches for each in batch):
            sequence = self._request.sequences[tokens.index]
            sequence.output_token_ids += tokens.token_ids
            sequence.num_preemptions = tokens.num_preemptions
            if tokens.prompt_logprobs:
                _restore_prompt(sequence, tokens.prompt_logprobs)
            if tokens.facts is not None:
                _restore_facts(sequence, tokens.facts)
                self._told[sequence.index] = _is_decoding(sequence)
            if tokens.end is not None:
                self._restore_end(sequence, tokens.end)
        for sequence in self._request.sequences:
            sequence.num_recoveries = self._journal.num_deaths
            if not sequence.is_finished:
                if _is_decoding(sequence):
                    sequence.stamps.last_token_ns = self._journal.died_ns
                sequence.stamps.pause(self._journal.died_ns)

    def _restore_end(self, sequence: Sequence, end: End) -> None:
        request, sequence.error, sequence.is_refused = self._request, end.error, end.is_refused
        sequence.finish_reason = (
            None if end.finish_reason is None else FinishReason(end.finish_reason)
        )
        sequence.where = Ended(sequence.workers[-1] if sequence.workers else None)
        request.cancelled_by = end.cancelled_by
        if end.failure is not None:
            request.failure = RequestError(**end.failure)

    def _emitted_of(self, tokens: Tokens) -> TokensEmitted:
        sequence = self._request.sequences[tokens.index]
        return TokensEmitted(sequence, tokens.token_ids, tokens.logprobs, tokens.end is not None)

    def _tokens_of(self, emitted: TokensEmitted) -> Tokens:
        sequence, ids, logprobs = emitted.sequence, emitted.token_ids, emitted.logprobs
        index, num_preemptions = sequence.index, sequence.num_preemptions
        is_told = self._told.get(index)
        if is_told and not emitted.is_last:  # most tokens
            return Tokens(index, ids, logprobs, num_preemptions, None, None)
        facts, end, is_decoding = None, self._end_of(emitted), _is_decoding(sequence)
        if end is not None or is_told is not is_decoding:
            self._told[index] = is_decoding
            facts = Facts(
                sequence.stamps,
                sequence.num_cached_tokens,
                sequence.cache_miss,
                sequence.workers,
                sequence.links,
                sequence.transport,
                sequence.route_reason,
            )
        of_prompt = sequence.prompt_logprobs if is_told is None else []
        return Tokens(index, ids, logprobs, num_preemptions, facts, end, of_prompt)

    def _end_of(self, emitted: TokensEmitted) -> End | None:
        if not emitted.is_last:
            return None
        sequence, failure = emitted.sequence, self._request.failure
        fields = ("what", "code", "param", "status", "kind", "retry_after_ms", "hint")
        return End(
            sequence.finish_reason,
            sequence.error,
            sequence.is_refused,
            self._request.cancelled_by,
            None if failure is None else {name: getattr(failure, name) for name in fields},
        )


def _is_decoding(sequence: Sequence) -> bool:
    """Say whether its second token has been read."""
    return sequence.stamps.second_token_ns is not None


def _restore_prompt(sequence: Sequence, logprobs: list[TokenLogprob]) -> None:
    """Restore what was computed of the prompt; once it is all there, ask no worker again."""
    sequence.prompt_logprobs = logprobs
    if len(logprobs) == sequence.num_prompt_tokens - 1:
        sampling = msgspec.structs.replace(sequence.sampling, prompt_logprobs=None)
        sequence.spec = msgspec.structs.replace(sequence.spec, sampling=sampling)


def _restore_facts(sequence: Sequence, facts: Facts) -> None:
    sequence.stamps, sequence.num_cached_tokens = facts.stamps, facts.num_cached_tokens
    sequence.cache_miss, sequence.transport = facts.cache_miss, facts.transport
    sequence.workers, sequence.links = facts.workers, facts.links
    sequence.route_reason = facts.route_reason
    # A sequence that has been placed is not asked again how much of its prompt is cached.
    sequence.stages = tuple(RouteStage(worker, 0) for worker in facts.workers)
