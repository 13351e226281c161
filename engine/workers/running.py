"""A sequence as the worker that runs it knows it.

Owns: the tokens and progress of one admit. Called by: the loop and the runner.
Invariant: num_computed_tokens grows by what a step scheduled, and only when it is collected.
Never: outlives its admit; whatever comes after is a new Running.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages import Admit
from engine.sequence import FinishReason, SamplingParams


@dataclass(slots=True, eq=False)
class Running:
    """One admitted sequence."""

    seq_id: int
    generation: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_table: list[int]
    sampling: SamplingParams
    until_output: int
    num_stored_blocks: int | None
    admitted_ns: int
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def of(cls, admit: Admit, eos_token_ids: tuple[int, ...], now_ns: int) -> Running:
        """Take over an admit."""
        eos = () if admit.sampling.ignore_eos else eos_token_ids
        return cls(
            seq_id=admit.seq_id,
            generation=admit.generation,
            token_ids=admit.token_ids,
            num_prompt_tokens=admit.num_prompt_tokens,
            num_computed_tokens=admit.num_computed_tokens,
            block_table=admit.block_table,
            sampling=admit.sampling,
            until_output=admit.until_output,
            num_stored_blocks=admit.num_stored_blocks,
            admitted_ns=now_ns,
            stop_token_ids=frozenset(eos) | frozenset(admit.sampling.stop_token_ids),
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_complete(self) -> bool:
        """True if it has all the output tokens that this admit is for."""
        return self.num_output_tokens >= self.until_output

    def append(self, token_id: int) -> FinishReason | None:
        """Take a sampled token; returns why it ends the sequence, or None."""
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if self.num_output_tokens >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def num_storable_blocks(self, block_size: int) -> int:
        """Blocks that will not change any more: the full ones; at the end all."""
        if self.is_complete:
            return -(-self.num_computed_tokens // block_size)
        return self.num_computed_tokens // block_size
