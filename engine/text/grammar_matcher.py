"""Follow a grammar token by token: which tokens may come next.

Invariant: a match's state follows from the output ids alone, so that a sequence can move to another
worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import llguidance

from engine.errors import RequestError
from engine.text.grammar import LIMITS, GrammarError, check_length, shorten, with_deep_stack
from engine.text.tokenizer import Tokenizer

_FORCED_BYTES = 512
"""Tokenized of a forced text, or more where tokens are long; all may take ten milliseconds."""


class GrammarTokenizer:
    """Show a model's tokens to grammars.

    Args:
        vocab_size: of the model's logits; ids missing in one of the two are never allowed.
        eos_token_ids: end an output, allowed where the grammar is complete.

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
    """The tokenizer in llguidance's interface."""

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
        """Encode the beginning of a forced text with the model's own ids, if they spell it.

        It is asked for anew at each step, of which the first token counts. Tokenizers that prepend
        a space do not spell it; then the longest fitting tokens are taken.
        """
        data = _beginning(data, max(_FORCED_BYTES, 4 * self._max_token_bytes))
        try:
            ids = self._tokenizer.encode(data.decode(errors="replace"), add_special_tokens=False)
        except RequestError:  # it takes too much for this text
            ids = []
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


def _beginning(data: bytes, most: int) -> bytes:
    """Cut a text before a character."""
    end = min(most, len(data))
    while most - 4 < end < len(data) and data[end] & 0xC0 == 0x80:
        end -= 1
    return data[:end]


class Matcher:
    """Follow one output through a grammar.

    Raises:
        GrammarError: the grammar does not compile.
    """

    def __init__(self, tokenizer: GrammarTokenizer, grammar: str) -> None:
        check_length(grammar)
        self._matcher = with_deep_stack(
            lambda: llguidance.LLMatcher(tokenizer.compiler, grammar, log_level=0, limits=LIMITS)
        )
        self._num_consumed = 0
        self._draft: list[int] = []
        """Guessed tokens that it has consumed, too."""
        self._check()

    def copy(self) -> Matcher:
        """Make another output's matcher in the present state; cheap beside compiling."""
        other = Matcher.__new__(Matcher)
        other._matcher = self._matcher.deep_copy()
        other._num_consumed, other._draft = self._num_consumed, list(self._draft)
        return other

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        """Compute the tokens that may follow these outputs, as allowed_along() does."""
        return self.allowed_along(output_ids, ())[0]

    def allowed_along(self, output_ids: Sequence[int], draft: Sequence[int]) -> list[bytes]:
        """Compute the tokens that may follow these outputs, and each token of a draft of more.

        Args:
            output_ids: the last call's, and the ids sampled since.
            draft: a guess of the ids after these; the next call's outputs need not have them.

        Returns:
            a bit for each token id in words of 32, the lowest first, 0 where it is forbidden: after
            the outputs, then after each token of the draft, as far as the grammar allows that.

        Raises:
            GrammarError: they do not match the grammar, or the step would take too long.
        """
        self._go_to(output_ids)
        masks = [self._matcher.compute_bitmask()]
        self._check()
        for token_id in draft:
            if not masks[-1][token_id >> 3] >> (token_id & 7) & 1:
                break
            self._matcher.consume_token(token_id)
            self._draft.append(token_id)
            masks.append(self._matcher.compute_bitmask())
            if self._matcher.is_error():  # not an error of the output, which may be another
                self._matcher.reset()
                self._num_consumed, self._draft = 0, []
                return masks[:-1]
        return masks

    def _go_to(self, output_ids: Sequence[int]) -> None:
        """Follow the outputs, back from the draft where they are others."""
        new_ids, draft = list(output_ids[self._num_consumed :]), self._draft
        num_right = len(draft)
        while draft[:num_right] != new_ids[:num_right]:
            num_right -= 1
        if num_right < len(draft):
            self._matcher.rollback(len(draft) - num_right)
        self._num_consumed, self._draft = len(output_ids), []
        if new_ids[num_right:]:
            self._matcher.consume_tokens(new_ids[num_right:])

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(shorten(self._matcher.get_error()))
