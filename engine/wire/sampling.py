"""Describe how a sequence's tokens are drawn and what is reported of each draw.

Invariant: a record that exists is within the limits that its fields name.
"""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True):
    """How to choose the next token. Crosses to workers in a RunSpec."""

    max_tokens: int
    """Maximum output tokens; at least 1."""
    seed: int
    """0 <= seed < 2**63. The noise of a draw is a hash of seed, output index and token id;
    output_offset is the first index."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the output so far; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time the token is in the output so far; -2 to 2."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by it, or multiplied if negative."""
    logit_bias: dict[int, float] = {}
    """Added to these tokens' logits; -100 to 100."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """Minimum output tokens before an end-of-text or stop id, including output_offset."""
    output_offset: int = 0
    """Last prompt tokens that are an earlier request's output, which this one continues.

    They count as output, except for max_tokens."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only ids to sample; None: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token ids that may not follow each other in the output."""
    grammar: str | None = None
    """The output's grammar, followed by engine.text.grammar_matcher; None: free text."""
    logprobs: int | None = None
    """How many alternatives to report beside the sampled token; None reports nothing."""
    prompt_logprobs: int | None = None
    """Alternatives to report per prompt token, except for the first, which nothing precedes."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one output position, of the model's own distribution.

    They are taken before penalties, temperature and filters, natural logarithm.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
    rank: int | None = None
    """How many tokens were at least as likely, the token itself included, ties aside: 1 is the
    likeliest. None: not counted."""
