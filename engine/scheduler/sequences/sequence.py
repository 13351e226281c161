"""Describe a sequence: its tokens, where it stands, and when each stage began.

Its route is a list of stages, each a worker and how many output tokens it is to have there. Static
roles give it two, (prefill worker, 1) and (decode worker, max_tokens); one worker that does all of
it is one stage. Where it is at this moment is said in one place, `where`.

Invariant: `num_computed_tokens <= num_tokens`; stamps only move from None to a value, once; a
sequence is said to be where its container is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import NamedTuple

from engine.scheduler.cache.hashes import PrefixChain
from engine.scheduler.cache.prefix_misses import CacheMiss
from engine.scheduler.sequences.draft_counts import DraftCounts
from engine.wire.finish_reason import FinishReason
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams, TokenLogprob


class Phase(StrEnum):
    """Where a sequence is, for people. Chunk progress is a number, not a phase."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    PAUSED = "paused"
    DECODING = "decoding"
    FINISHED = "finished"


class RouteStage(NamedTuple):
    """A part of a sequence's route: a worker, and the output tokens at which it ends."""

    worker: str
    until_output: int


def route_of(workers: Iterable[str]) -> str:
    """Name a route: its only worker, or `move` if there are two."""
    first, *others = dict.fromkeys(workers)
    return "move" if others else first


class Waiting(NamedTuple):
    """For a worker: in the queue and without blocks, or with blocks, for the worker of a stage."""

    stage: RouteStage | None = None


class Paused(NamedTuple):
    """Preempted: it has no blocks, and is placed before its owner's new ones."""


class On(NamedTuple):
    """Admitted to the worker of this stage."""

    stage: RouteStage


class Moving(NamedTuple):
    """Between two workers: the first has released it, the second does not have it yet."""

    source: RouteStage
    target: RouteStage


class Ended(NamedTuple):
    """The sequence is over, and has a finish reason."""

    worker: str | None = None
    """Where it was, or went, in the end; None: it was nowhere."""


PROMPT_PER_OUTPUT = 8
"""Tokens that are computed again in the time of an output token, roughly."""

Where = Waiting | Paused | On | Moving | Ended
QUEUED = Waiting()


class KeptRecord(NamedTuple):
    """The record at the last border, which is not written before the next border."""

    place: int
    """Its place among the sequence's records."""
    num_tokens: int


@dataclass(slots=True)
class Stamps:
    """CLOCK_MONOTONIC nanoseconds; None is a stage not reached (appliance.observe.frame.latency).

    A pause takes a sequence's blocks away. One before token 1 takes `started_ns` back, for then the
    sequence is in the queue again; one after it is counted, until the next token, in `paused_ns`.
    """

    arrived_ns: int
    tokenized_ns: int | None = None
    started_ns: int | None = None
    """Start of the first step that contained the sequence."""
    first_token_ns: int | None = None
    """Time when the daemon read token 1; second_token_ns and last_token_ns are times of later
    tokens."""
    attached_ns: int | None = None
    """When the decode worker took it over; None where there was no handoff."""
    decode_started_ns: int | None = None
    """Start of the first step that computed a position after the prompt."""
    second_token_ns: int | None = None
    last_token_ns: int | None = None
    finished_ns: int | None = None
    paused_ns: int | None = None
    """Sum of all finished pauses, not a point in time."""
    restored_ns: int | None = None
    """No point in time either: how long it waited in the queue for blocks from the disk; None: it
    never did."""
    paused_at_ns: int | None = None
    """When the pause began that is not over; None: it is not paused."""

    def token(self, now_ns: int) -> None:
        """Note that the daemon has read a token."""
        self._go_on(now_ns)
        self.last_token_ns = now_ns
        if self.first_token_ns is None:
            self.first_token_ns = now_ns
        elif self.second_token_ns is None:
            self.second_token_ns = now_ns

    def decoding(self, started_ns: int, admitted_ns: int | None) -> None:
        """Note that a step computed a position after the prompt.

        Args:
            started_ns: of that step.
            admitted_ns: when its worker took the sequence over; None: it was never handed over.
        """
        if self.decode_started_ns is None:
            if admitted_ns is not None:
                self.attached_ns = max(admitted_ns, self.first_token_ns or 0)
            self.decode_started_ns = max(started_ns, self.attached_ns or 0)

    def pause(self, now_ns: int) -> None:
        """Note that its blocks were taken."""
        if self.first_token_ns is None:
            self.started_ns = None
            return
        if self.decode_started_ns is None:  # whatever it was waiting for is over
            self.decode_started_ns = now_ns
        if self.paused_at_ns is None:
            self.paused_at_ns = now_ns

    def restored(self, elapsed_ns: int) -> None:
        """Add a wait for the disk; after token 1 it is a part of the pause."""
        if self.first_token_ns is None:
            self.restored_ns = (self.restored_ns or 0) + elapsed_ns

    def finish(self, now_ns: int) -> None:
        """Note its end, perhaps in a pause."""
        self._go_on(now_ns)
        self.finished_ns = now_ns

    def _go_on(self, now_ns: int) -> None:
        if self.paused_at_ns is not None:
            self.paused_ns = (self.paused_ns or 0) + now_ns - self.paused_at_ns
            self.paused_at_ns = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and what has been generated for it."""

    seq_id: int
    request_id: str
    index: int
    """Position among the request's sequences; the `index` of its choice in the reply."""
    prompt_token_ids: list[int]
    spec: RunSpec
    """What is wanted of it; every admit has it unchanged."""
    stamps: Stamps
    prefix: PrefixChain | None = None
    """The hashes of its full blocks; None: it neither finds others' blocks nor leaves its own."""
    branches: tuple[int, ...] = ()
    """Numbers of prompt tokens after which other prompts may continue differently."""
    num_cached_tokens: int = 0
    """Prompt tokens found computed when it was first placed; before that, at the last lookup."""
    num_restored_tokens: int = 0
    """Cached tokens that were loaded from the disk for it."""
    num_published_blocks: int = 0
    """Blocks of its current table that other sequences have been able to find."""
    where: Where = QUEUED
    stages: tuple[RouteStage, ...] = ()
    """Chosen when its blocks are reserved."""
    generation: int = 0
    """Grows with every admit; messages of older generations are dropped."""
    route_reason: str | None = None
    """Why these stages, in words; the first is a reason of engine.scheduler.routing.elastic."""
    restore_reason: str | None = None
    """What was decided about its blocks on disk, in words; None: there were none."""
    cache_miss: CacheMiss | None = None
    """Why its cached prefix ended where it did; None: nothing was missed."""
    max_chunk_tokens: int | None = None
    """Maximum prompt tokens in one step; None: the step's limit."""
    spares_streams_at: str | None = None
    """Where its placement considered the sequences that decode; None: at no worker."""
    output_token_ids: list[int] = field(default_factory=list)
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """What speculation has guessed for it."""
    num_computed_tokens: int = 0
    """Positions whose KV is written and acknowledged."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of computed prompt tokens 1, 2, ...; empty unless asked for."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    is_refused: bool = False
    """Whether the request is at fault, so that only its client can mend it."""
    num_recoveries: int = 0
    num_preemptions: int = 0
    """Times that its blocks were taken away for others."""
    lost_blocks_ns: int | None = None
    """When they were taken last; None: never."""
    keeps_blocks_until: int = 0
    """Number of tokens until which its owner's last blocks stay, if they are its own."""
    num_failed_copies: int = 0
    """Handoffs of its blocks that failed."""
    num_suspicions: int = 0
    """Deaths of a worker for which it may be to blame."""
    has_begun: bool = False
    """Whether its worker has reported that it has this suspect."""
    is_on_probation: bool = False
    """Under suspicion, and without progress since: no other such sequence runs beside it."""
    handoff_bytes: int = 0
    """Bytes that moved in the handoff; 0 when the pool is shared."""
    handoff_blocks: int = 0
    valid_record: int = 0
    """The place of the record that holds, among its records where it is computed."""
    snapshots_at: tuple[int, ...] = ()
    """Numbers of computed tokens at which its record is kept for others."""
    frozen_records: set[int] = field(default_factory=set)
    """Places of records that its worker does not write any more."""
    keeps_records: bool = False
    """Whether its worker keeps the record at each border until the next border."""
    kept_record: KeptRecord | None = None
    """The record at the last border; None: there is no such record yet."""
    computed_in: tuple[str, int] | None = None
    """The pool that its computed positions are in, and the life of that pool; None: nowhere."""
    transport: str | None = None
    """`alias`, `peer` or `shm` once it was handed over; None before, or if it never moves."""
    workers: list[str] = field(default_factory=list)
    """Where it has run, in order."""
    links: list[str] = field(default_factory=list)
    """How its KV came to each of them but the first: a transport, or `none` where it was there
    already, or was computed again."""

    def runs_at(self, worker: str, transport: str | None) -> None:
        """Record its worker and transport; None: new, or after a pause or a death."""
        if transport is None and self.workers[-1:] == [worker]:
            return
        if self.workers:
            self.links.append(transport or "none")
        self.workers.append(worker)

    def forget_computed(self, num_kept_tokens: int = 0) -> None:
        """Forget computed positions after the kept ones; they go into the same blocks again.

        If prompt tokens are reported on, forget all: each is reported on once.
        """
        if self.sampling.prompt_logprobs is not None:
            num_kept_tokens, self.prompt_logprobs = 0, []
        self.num_computed_tokens = num_kept_tokens
        self.kept_record = None

    def moved_to(self, here: tuple[str, int]) -> None:
        """Note the pool, and its life, with what it has computed; a copied record is the first."""
        if self.computed_in != here:
            self.computed_in, self.valid_record, self.kept_record = here, 0, None

    def lose_blocks(self, now_ns: int) -> None:
        """Others have got them: everything is to be computed again."""
        self.forget_computed()
        self.computed_in = None
        self.num_preemptions += 1
        self.lost_blocks_ns = now_ns
        self.stamps.pause(now_ns)

    def come_back(self) -> None:
        """Note that it has blocks again, and gains more than it costs until it may lose them."""
        self.keeps_blocks_until = self.num_tokens + self.num_tokens // PROMPT_PER_OUTPUT + 1

    @property
    def phase(self) -> Phase:
        """Where the sequence is, in a word for people."""
        match self.where:
            case Waiting():
                return Phase.QUEUED
            case Paused():
                return Phase.PAUSED if self.output_token_ids else Phase.QUEUED
            case Moving():
                return Phase.HANDING_OFF
            case Ended():
                return Phase.FINISHED
        return Phase.PREFILLING if self.num_prefill_tokens_left else Phase.DECODING

    @property
    def num_prefill_tokens_left(self) -> int:
        """Known tokens to compute before it decodes: prompt, and outputs if it lost its blocks."""
        known = max(self.num_prompt_tokens, self.num_tokens - 1)
        return max(known - self.num_computed_tokens, 0)

    @property
    def route(self) -> str | None:
        """Its route in a word, as route_of() has it; None until it is placed."""
        return route_of(stage.worker for stage in self.stages) if self.stages else None

    @property
    def worker(self) -> str | None:
        """Where it is, or goes; None while it waits and when it has ended."""
        match self.where:
            case On(stage) | Moving(_, stage):
                return stage.worker
        return None

    @property
    def last_worker(self) -> str | None:
        return self.where.worker if isinstance(self.where, Ended) else self.worker

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are drawn."""
        return self.spec.sampling

    @property
    def owner(self) -> str:
        """The owner that it is charged to in the queue."""
        return self.spec.owner

    @property
    def waits_since_ns(self) -> int:
        """When it came, or lost its blocks."""
        return self.lost_blocks_ns or self.stamps.arrived_ns

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_uncached_tokens(self) -> int:
        """Tokens in the prompt that are to be computed, as far as that is known."""
        return len(self.prompt_token_ids) - self.num_cached_tokens

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Tokens at positions from start to before end."""
        num_prompt = len(self.prompt_token_ids)
        outputs = self.output_token_ids[max(start - num_prompt, 0) : max(end - num_prompt, 0)]
        return self.prompt_token_ids[start:end] + outputs

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and kept."""
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def is_finished(self) -> bool:
        """True once it has a finish reason; blocks may still be draining."""
        return self.finish_reason is not None


@dataclass(slots=True)
class Counters:
    """Since the daemon started; read by telemetry."""

    handoffs: int = 0
    handoff_bytes: int = 0
    failed_handoffs: int = 0
    """Handoffs with blocks that failed or were lost, and were computed again."""
    prefix_cache_queries: int = 0
    """Prompt tokens of sequences that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Looked up prompt tokens that were not computed."""
    prefix_cache_fetches: int = 0
    """Tokens whose blocks were copied to where a prompt was about to compute them again."""
    prefix_cache_ns: int = 0
    """Time spent in hashing, finding and publishing blocks."""
    stale_messages: int = 0
    recovered_sequences: int = 0
    preemptions: int = 0
    """Times that a sequence's blocks were taken away for others."""
    drafts: DraftCounts = field(default_factory=DraftCounts)

    def go_on_from(self, earlier: Counters) -> None:
        """Count on where another router's numbers have ended: a daemon's never fall."""
        for each in fields(self):
            setattr(self, each.name, getattr(earlier, each.name))
