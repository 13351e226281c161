"""An output's way through a grammar: which tokens may come next.

Owns: a model's tokens as llguidance sees them, and the state of each match.
Invariant: a matcher's state is a function of the output ids alone, so that a sequence can be moved
or recovered. What a step may use is bounded; a grammar that wants more ends its own sequence.
Never: imports torch, samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import llguidance

from engine.text.grammar import LIMITS, GrammarError, check_length, shorten, with_deep_stack
from engine.text.tokenizer import Tokenizer


class GrammarTokenizer:
    """A model's tokens as grammars see them.

    Args:
        tokenizer: the checkpoint's.
        vocab_size: of the model's logits; ids that only one of the two has are never allowed.
        eos_token_ids: what ends an output, allowed where the grammar is complete.

    Raises:
        GrammarError: the model has no end-of-text id, so that no output could ever end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise GrammarError("this model has no end-of-text id, which a grammar needs to end")
        tokens = [tokenizer.token_bytes(i) or b"" for i in range(vocab_size)]
        special_ids = {i for i in range(vocab_size) if tokenizer.is_silent(i)} | {*eos_token_ids}
        names = _Tokens(tokenizer, tokens, special_ids, eos_token_ids[0])
        self.compiler = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(names), eos_token=[*eos_token_ids]
        )
        """Holds the tokens as a tree."""


class _Tokens:
    """What llguidance asks of a tokenizer, by its names."""

    bos_token_id = None

    def __init__(
        self, tokenizer: Tokenizer, tokens: list[bytes], special_ids: set[int], eos_token_id: int
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = eos_token_id
        self._tokenizer = tokenizer
        self._ids = {token: i for i, token in enumerate(tokens) if i not in special_ids and token}
        self._max_token_bytes = max(map(len, tokens), default=1)

    def __call__(self, data: bytes) -> list[int]:
        """Ids of a text that a grammar leaves no choice in: the model's own, if they spell it.

        Those that put a space in front do not; then the longest tokens that fit are taken.
        """
        ids = self._tokenizer.encode(data.decode(errors="replace"), add_special_tokens=False)
        spelled = b"".join(self.tokens[i] for i in ids if i < len(self.tokens))
        return ids if spelled == data else list(self._longest(data))

    def _longest(self, data: bytes) -> Iterator[int]:
        start = 0
        while start < len(data):
            for end in range(min(start + self._max_token_bytes, len(data)), start, -1):
                if data[start:end] in self._ids:
                    yield self._ids[data[start:end]]
                    break
            else:
                return  # not a byte of it is in the vocabulary: nothing is forced
            start = end


class Matcher:
    """One output's way through a grammar.

    Raises:
        GrammarError: the grammar does not compile.
    """

    def __init__(self, tokenizer: GrammarTokenizer, grammar: str) -> None:
        check_length(grammar)
        self._matcher = with_deep_stack(
            lambda: llguidance.LLMatcher(tokenizer.compiler, grammar, log_level=0, limits=LIMITS)
        )
        self._num_consumed = 0
        self._check()

    def copy(self) -> Matcher:
        """Another output's matcher, at the same place; cheap beside compiling."""
        other = Matcher.__new__(Matcher)
        other._matcher = self._matcher.deep_copy()
        other._num_consumed = self._num_consumed
        return other

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        """One byte per token id, 0 where it may not follow these outputs.

        Args:
            output_ids: those of the last call and what has been sampled since.

        Raises:
            GrammarError: they do not match the grammar, or the step would take too long.
        """
        new_ids = output_ids[self._num_consumed :]
        self._num_consumed = len(output_ids)
        if new_ids:
            self._matcher.consume_tokens(list(new_ids))
        mask = self._matcher.compute_logit_bias()
        self._check()
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(shorten(self._matcher.get_error()))
