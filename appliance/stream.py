"""One open reply: tokens in, text out.

Owns: for each sequence of a request, the text not yet sent: half characters, and what may be the
beginning of a stop string. Called by: generation, for streamed and whole replies alike.
Invariant: the text sent depends on the tokens alone, never on how they were batched; nothing is
sent for a sequence after its finish reason.
Never: writes to a client, or decides anything about a sequence but that its stop string came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from appliance.request import Appliance, Request, TokensEmitted
from engine.detokenizer import Detokenizer
from engine.sequence import FinishReason, Sequence, TokenLogprob


@dataclass(slots=True)
class Delta:
    """What became ready to send for one sequence; the tokens' text may still be held back."""

    sequence: Sequence
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    """Where each token's text begins in the sequence's text; collected only with logprobs."""
    finish_reason: FinishReason | None = None

    def add(self, later: Delta) -> None:
        """Make this the sum of both."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.text_offsets += later.text_offsets
        self.finish_reason = later.finish_reason


class Reply:
    """The deltas of one request, from the first token to the last finish reason."""

    def __init__(
        self, appliance: Appliance, request: Request, stop: tuple[str, ...], is_continuation: bool
    ) -> None:
        """Open a reply.

        Args:
            appliance: told when a stop string has come.
            request: its inbox is read by this reply alone.
            stop: stop strings.
            is_continuation: the text goes on where the prompt ends, so that a leading space
                stays; the answer in a chat begins a text of its own.
        """
        self._request = request
        self._voices = {
            sequence.seq_id: _Voice(appliance, sequence, stop, is_continuation)
            for sequence in request.sequences
        }
        self._num_open = len(request.sequences)

    async def deltas(self, patience_s: float | None = None) -> AsyncIterator[list[Delta]]:
        """Yield what is ready whenever something is, until every sequence has ended.

        Args:
            patience_s: after so long without tokens an empty list is yielded; None: never.
        """
        inbox = self._request.inbox
        while self._num_open:
            try:
                async with asyncio.timeout(patience_s):
                    batch = [await inbox.get()]
            except TimeoutError:
                yield []
                continue
            while not inbox.empty():
                batch.append(inbox.get_nowait())
            ready = self._take(batch)
            if ready:
                yield ready

    def _take(self, batch: list[TokensEmitted]) -> list[Delta]:
        deltas: dict[int, Delta] = {}
        for emitted in batch:
            voice = self._voices[emitted.sequence.seq_id]
            if voice.is_closed:
                continue
            delta = deltas.setdefault(emitted.sequence.seq_id, Delta(emitted.sequence))
            voice.take(emitted, delta)
            self._num_open -= voice.is_closed
        return list(deltas.values())


class _Voice:
    """One sequence's text."""

    def __init__(
        self, appliance: Appliance, sequence: Sequence, stop: tuple[str, ...], continues: bool
    ) -> None:
        self._appliance = appliance
        self._sequence = sequence
        context_ids = sequence.prompt_token_ids[-64:] if continues else []
        self._detokenizer = Detokenizer(appliance.tokenizer, context_ids)
        self._stop = StopMatcher(stop)
        self._num_tokens = 0
        self._num_chars = 0
        self.is_closed = False

    def take(self, emitted: TokensEmitted, delta: Delta) -> None:
        """Add emitted tokens to a delta, up to a stop string."""
        sequence = self._sequence
        for index, token_id in enumerate(emitted.token_ids):
            is_last = emitted.is_last and index == len(emitted.token_ids) - 1
            delta.token_ids.append(token_id)
            if emitted.logprobs:
                delta.logprobs.append(emitted.logprobs[index])
                delta.text_offsets.append(self._num_chars)
            self._num_tokens += 1
            # The worker ended it on this id: an end-of-text or stop id is no text.
            if is_last and sequence.finish_reason is FinishReason.STOP:
                break
            if self._say(self._detokenizer.push(token_id), delta):
                return
        if emitted.is_last and not self._say(self._detokenizer.flush(), delta):
            delta.text += self._stop.flush()
            delta.finish_reason = sequence.finish_reason
            self.is_closed = True

    def _say(self, piece: str, delta: Delta) -> bool:
        """Add a piece's text; True if a stop string has come, and the sequence is closed."""
        self._num_chars += len(piece)
        delta.text += self._stop.push(piece)
        if not self._stop.has_matched:
            return False
        self._appliance.stop_sequence(self._sequence, self._num_tokens)
        delta.finish_reason = FinishReason.STOP
        self.is_closed = True
        return True


class StopMatcher:
    """Lets text through up to the first stop string, holding back what may become one.

    The stop string that is complete first wins, of those the one that began first: that does not
    depend on where pieces end.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.has_matched = False

    def push(self, piece: str) -> str:
        """The text that is safe to send now; nothing after a match."""
        if self.has_matched:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        matches = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if matches:
            self.has_matched = True
            self._held = ""
            return text[: min(matches)[1]]
        size = len(text) - max(_partial_match_chars(text, stop) for stop in self._stops)
        self._held = text[size:]
        return text[:size]

    def flush(self) -> str:
        """What is still held back, at the end."""
        held, self._held = self._held, ""
        return held


def _partial_match_chars(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
