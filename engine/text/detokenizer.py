"""From token ids to text while they come, a piece per token.

Owns: the text that is not yet complete.
Invariant: never half a character; the pieces add up to what the whole would decode to (of a run
of SentencePiece byte tokens that turns invalid, what was valid so far is already out and stays).
Never: keeps more than a bounded window, so the cost per token does not grow.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_UNFINISHED_TOKENS = 3
"""An unfinished character in UTF-8."""
MAX_HELD_TOKENS = 8
"""Tokens held back at most. A longer run that ends in U+FFFD is cut before what may yet become a
character, where its parts, decoded alone, show that no finished character spans the cut."""


class Detokenizer:
    """One sequence's way from token ids to text, a piece per token.

    Decoders are not free of context: SentencePiece ones strip the space before the first token,
    and a character may span tokens. So the new tokens are decoded behind the last piece's tokens,
    and a piece that ends in U+FFFD waits for its rest. Each push decodes a bounded window.

    Args:
        tokenizer: the model's.
        context_ids: what comes before, if the text continues it (a prompt to complete); otherwise
            the text begins a document of its own.
    """

    def __init__(self, tokenizer: Tokenizer, context_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []
        spoken = [token_id for token_id in context_ids if not tokenizer.is_silent(token_id)]
        self._move_context(spoken[-MAX_HELD_TOKENS:])

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        if self._tokenizer.is_context_free and not self._held:
            piece = self._tokenizer.piece(token_id)
            if not piece.endswith(REPLACEMENT):
                return piece
        if self._tokenizer.is_silent(token_id):
            return ""
        self._held.append(token_id)
        text = self._text_of(self._held)
        if not text.endswith(REPLACEMENT):
            return self._emit(len(self._held), text)
        if len(self._held) < MAX_HELD_TOKENS:
            return ""
        size = self._settled_size()
        return self._emit(size, self._text_of(self._held[:size]))

    def flush(self) -> str:
        """What is left at the end; an unfinished character becomes U+FFFD."""
        return self._emit(len(self._held), self._text_of(self._held)) if self._held else ""

    def _text_of(self, token_ids: list[int]) -> str:
        whole = self._tokenizer.decode(self._context + token_ids)
        if whole.startswith(self._context_text):
            return whole[len(self._context_text) :]
        # A byte-fallback decoder judges a run of byte tokens as a whole; what is out is out.
        return self._tokenizer.decode(token_ids)

    def _emit(self, size: int, text: str) -> str:
        done, self._held = self._held[:size], self._held[size:]
        self._move_context(done)
        return text

    def _move_context(self, token_ids: list[int]) -> None:
        tokenizer = self._tokenizer
        if not tokenizer.is_context_free:
            self._context = token_ids
            is_one = len(token_ids) == 1
            self._context_text = (
                tokenizer.piece(token_ids[0]) if is_one else tokenizer.decode(token_ids)
            )

    def _settled_size(self) -> int:
        """How many held tokens, from the front, no later token can change."""
        whole = self._text_of(self._held)
        for size in range(len(self._held) - MAX_UNFINISHED_TOKENS, 0, -1):
            tail = self._tokenizer.decode(self._held[size:])
            if self._text_of(self._held[:size]) + tail == whole:
                return size
        return len(self._held)
