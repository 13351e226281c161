"""Describe a sequence as its worker sees it.

Invariant: num_computed_tokens grows by the tokens that a step scheduled, and only when it is
collected.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.text.grammar_matcher import Matcher
from engine.wire.cache_scope import CacheScope
from engine.wire.finish_reason import FinishReason
from engine.wire.messages import Admit, Records
from engine.wire.sampling import SamplingParams
from engine.worker.model.logit_rules import bits_of
from engine.worker.model.records import RecordBlocks
from engine.worker.model.sampler import draw_of

_MAX_PROMPT_LOGPROBS = 128
"""Maximum positions per step with kept logits: each has a float per vocabulary id."""


@dataclass(slots=True, eq=False)
class WorkerRequest:
    """A sequence that the daemon has admitted to this worker, with its tokens and blocks."""

    seq_id: int
    generation: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_table: list[int]
    sampling: SamplingParams
    until_output: int
    admitted_ns: int
    window_tables: list[list[int]] = field(default_factory=list)
    """Tables of the layers with windows, by group; empty: all layers are in one block."""
    max_chunk_tokens: int | None = None
    max_chunk_beside: int | None = None
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    dropped_for: str = "ended"
    """The daemon's reason for dropping it."""
    matcher: Future[Matcher] | None = None
    """Its state in its grammar, once compiled; None: free text."""
    records: Records | None = None
    """Its records, as they were admitted; None: its steps keep no recurrent states."""
    valid_record: int = 0
    frozen_records: set[int] = field(default_factory=set)
    kept_record: int | None = None
    allowed_bits: bytes | None = None
    """The only tokens that may be sampled, by bits_of(); None: all may."""
    known_ids: array[int] = field(default_factory=lambda: array("q"))
    """The first of its tokens, which ids_with() has been asked for."""
    owner: str = ""
    scope: CacheScope | None = None
    prediction: list[int] = field(default_factory=list)
    """What its request expects of its output."""
    draft: list[int] = field(default_factory=list)
    """Guessed next tokens, which the current step computes, too."""
    drafter: str = ""
    """Where the draft came from."""

    @classmethod
    def of(
        cls,
        admit: Admit,
        eos_token_ids: tuple[int, ...],
        now_ns: int,
        matcher: Future[Matcher] | None = None,
    ) -> WorkerRequest:
        """Make the worker's record of a sequence from its admit."""
        # a grammar allows an end of text only where it is complete, so that is no end to ignore
        sampling = admit.spec.sampling
        is_endless = sampling.ignore_eos and matcher is None
        eos = () if is_endless else eos_token_ids
        only = sampling.allowed_token_ids
        return cls(
            seq_id=admit.seq_id,
            generation=admit.generation,
            token_ids=admit.token_ids,
            num_prompt_tokens=admit.num_prompt_tokens,
            num_computed_tokens=admit.num_computed_tokens,
            block_table=admit.block_table,
            window_tables=admit.window_tables,
            sampling=sampling,
            until_output=admit.until_output,
            admitted_ns=now_ns,
            max_chunk_tokens=admit.max_chunk_tokens,
            max_chunk_beside=admit.max_chunk_beside,
            stop_token_ids=frozenset(eos) | frozenset(sampling.stop_token_ids),
            matcher=matcher,
            records=admit.records,
            valid_record=0 if admit.records is None else admit.records.valid,
            frozen_records=set(() if admit.records is None else admit.records.frozen),
            kept_record=None if admit.records is None else admit.records.kept,
            owner=admit.spec.owner,
            scope=admit.spec.scope,
            prediction=admit.spec.prediction,
            allowed_bits=None if only is None else bits_of(only),
        )

    @classmethod
    def dummy(
        cls,
        num_tokens: int,
        block_table: list[int],
        num_computed_tokens: int,
        temperature: float,
        top_k: int = 0,
        num_groups: int = 1,
    ) -> WorkerRequest:
        """Make a prompt for a trial step, of which `num_computed_tokens` count as computed.

        All groups of layers use the same blocks.
        """
        return cls(
            seq_id=0,
            generation=0,
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            num_computed_tokens=num_computed_tokens,
            block_table=block_table,
            window_tables=[block_table] * (num_groups - 1),
            sampling=SamplingParams(max_tokens=1, seed=0, temperature=temperature, top_k=top_k),
            until_output=1,
            admitted_ns=0,
        )

    @property
    def num_tokens(self) -> int:
        """Known prompt and output tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Known tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_ids(self) -> list[int]:
        """A new list of the prompt without earlier output; see output_offset."""
        return self.token_ids[: self.num_prompt_tokens - self.sampling.output_offset]

    @property
    def output_ids(self) -> list[int]:
        """A new list of the output, including earlier output."""
        return self.token_ids[self.num_prompt_tokens - self.sampling.output_offset :]

    def ids_with(self, draft: list[int]) -> array[int]:
        """Return prompt, output and a guess of what follows, as the kernels read them."""
        self.known_ids.extend(self.token_ids[len(self.known_ids) :])
        return self.known_ids + array("q", draft) if draft else self.known_ids

    @property
    def next_index(self) -> int:
        """The index of the next output among all outputs; its draw depends on it."""
        return self.num_output_tokens + self.sampling.output_offset

    @property
    def is_ready(self) -> bool:
        """False while its grammar is being compiled."""
        return self.matcher is None or self.matcher.done()

    @property
    def is_decoding(self) -> bool:
        """Whether all but its last token are computed, so that the next one follows."""
        return self.num_computed_tokens + 1 == len(self.token_ids)

    @property
    def next_record(self) -> int:
        """The place of the record that its next step writes."""
        assert self.records is not None
        taken = {self.valid_record, self.kept_record, *self.frozen_records}
        return next(place for place in range(len(self.records.blocks)) if place not in taken)

    @property
    def record_blocks(self) -> RecordBlocks:
        """The records that its next step reads and writes."""
        if self.records is None:
            return RecordBlocks()
        blocks = self.records.blocks
        read = blocks[self.valid_record] if self.num_computed_tokens else ()
        return RecordBlocks(read, blocks[self.next_record])

    def record_blocks_ahead(self) -> RecordBlocks:
        """Return the records of the step after its next, which computes one token."""
        later = copy.copy(self)
        later.frozen_records = set(self.frozen_records)
        later.computed(1)
        return later.record_blocks

    def computed(self, num_new_tokens: int) -> None:
        """Count the tokens of a step, whose record holds from now on."""
        self.num_computed_tokens += num_new_tokens
        if self.records is not None:
            self.valid_record = self.next_record
            every = self.records.keeps_every
            if self.num_computed_tokens in self.records.snapshots_at:
                self.frozen_records.add(self.valid_record)
            elif every and self.num_computed_tokens % every == 0:
                self.kept_record = self.valid_record

    def room(self, block_size: int) -> int:
        """Count the positions after the computed ones that it has blocks for."""
        table = self.window_tables[0] if self.window_tables else self.block_table
        return len(table) * block_size - self.num_computed_tokens

    @property
    def is_complete(self) -> bool:
        return self.num_output_tokens >= self.until_output

    def num_prompt_logprobs(self, num_new_tokens: int) -> int:
        """Count the positions of its next step that report on a prompt token."""
        if self.sampling.prompt_logprobs is None:
            return 0
        last = self.num_prompt_tokens - 1
        return max(0, min(num_new_tokens, last - self.num_computed_tokens))

    def until_border(self, num_new_tokens: int, every: int = 0) -> int:
        """Limit a step's tokens to the next snapshot, and to a multiple of `every` in the text."""
        computed = self.num_computed_tokens
        ends = [] if self.records is None else [*self.records.snapshots_at]
        if every:
            ends.append(computed - computed % every + every)
        return min([num_new_tokens, *(end - computed for end in ends if end > computed)])

    def capped(self, num_new_tokens: int) -> int:
        """Limit a step's tokens for prompt log-probabilities, or to spare others' ITL."""
        num_tokens = min(num_new_tokens, self.max_chunk_tokens or num_new_tokens)
        num_tokens = self.until_border(num_tokens)
        if self.num_prompt_logprobs(num_tokens) > _MAX_PROMPT_LOGPROBS:
            return _MAX_PROMPT_LOGPROBS
        return num_tokens

    def take(self, token_ids: list[int]) -> tuple[int, FinishReason | None]:
        """Append tokens up to one that ends it; return their number and the finish reason."""
        for count, token_id in enumerate(token_ids, 1):
            self.token_ids.append(token_id)
            if token_id in self.stop_token_ids:
                return count, FinishReason.STOP
            if self.num_output_tokens >= self.sampling.max_tokens:
                return count, FinishReason.LENGTH
        return len(token_ids), None


def draws_of(sequences: Sequence[WorkerRequest], ahead: int = 0) -> list[tuple[float, ...]]:
    """Describe the draws of a step: each sequence's next token, then one after each guess.

    Args:
        ahead: how many more tokens each has than is known.
    """
    return [
        draw_of(r.sampling, r.next_index + ahead + place)
        for r in sequences
        for place in range(1 + len(r.draft))
    ]
