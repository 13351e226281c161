"""Turn a reply's tokens into text, reasoning and tool calls.

Invariant: the text sent depends on the tokens alone, never on how they were batched; nothing is
sent for a sequence after its finish reason.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from appliance.api.core.appliance import Appliance
from appliance.api.core.ask import Ask
from appliance.api.core.output_parser import OutputParser
from appliance.api.formats.text_reading import CallDelta, Part, ReasoningDelta, partial_match_chars
from appliance.daemon.requests.request import Request, TokensEmitted
from appliance.daemon.survival.journal import Replayed
from engine.scheduler.sequences.sequence import Sequence
from engine.text.tokenizer import Detokenizer
from engine.wire.finish_reason import FinishReason
from engine.wire.sampling import TokenLogprob

_HIDDEN = 0xD800
"""Special tokens in stop strings are written as lone surrogates, which no decoded text has."""
_HIDDEN_CHARACTERS = re.compile("[\ud800-\udfff]")
_CONTEXT_TOKENS = 64
"""Before a text, that tell a decoder where it stands."""


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """A prompt's text, as a completion repeats it."""

    text: str
    offsets: list[int]
    """Where each token's text begins; empty unless log-probabilities were asked for."""


@dataclass(slots=True)
class Delta:
    """What became ready to send for one sequence; the tokens' text may still be held back."""

    sequence: Sequence
    text: str = ""
    reasoning: str = ""
    """What the model thought before it answered."""
    calls: list[CallDelta] = field(default_factory=list)
    """Parts of tool calls, at most one of each call."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    """Where each token's text begins in the sequence's text; collected only with logprobs."""
    echo: PromptEcho | None = None
    """The text begins with it."""
    num_tokens: int = 0
    """Output tokens of the sequence so far."""
    num_reasoning_tokens: int = 0
    """Output tokens up to the end of the reasoning."""
    has_called: bool = False
    """The sequence has begun a tool call, here or before."""
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    """The stop string that has ended the sequence."""

    def num_logprobs(self, *, has_prompt: bool = False) -> int:
        """Count the log-probabilities that it tells, with alternatives.

        Args:
            has_prompt: count the prompt's, too, as an echo has them.
        """
        has_prompt = has_prompt or self.echo is not None
        told = [*self.logprobs, *(self.sequence.prompt_logprobs if has_prompt else ())]
        return sum(1 + len(entry.top_ids) for entry in told)

    def add(self, later: Delta) -> None:
        """Make this the sum of both."""
        self.text += later.text
        self.reasoning += later.reasoning
        for call in later.calls:
            self.add_part(call)
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.text_offsets += later.text_offsets
        self.echo = self.echo or later.echo
        self.num_tokens = later.num_tokens
        self.num_reasoning_tokens = later.num_reasoning_tokens
        self.has_called = later.has_called
        self.finish_reason, self.stop_text = later.finish_reason, later.stop_text

    def apart(self, *, tells_tokens: bool) -> list[Delta]:
        """Split the delta into deltas of one call each, and the end alone, as clients read them.

        Args:
            tells_tokens: ids or log-probabilities are told, so that they are news without a text.
        """
        is_said = self.reasoning or self.text or self.calls or (tells_tokens and self.token_ids)
        if self.finish_reason is not None and is_said:  # some clients read nothing else in an end
            end = Delta(
                self.sequence,
                num_tokens=self.num_tokens,
                num_reasoning_tokens=self.num_reasoning_tokens,
                has_called=self.has_called,
                finish_reason=self.finish_reason,
                stop_text=self.stop_text,
            )
            said = dataclasses.replace(self, finish_reason=None, stop_text=None)
            return [*said.apart(tells_tokens=tells_tokens), end]
        num_kinds = bool(self.reasoning) + bool(self.text) + len(self.calls)
        if num_kinds > 1 and self.reasoning:
            first = Delta(self.sequence, reasoning=self.reasoning, num_tokens=self.num_tokens)
            rest = dataclasses.replace(self, reasoning="")
            return [first, *rest.apart(tells_tokens=tells_tokens)]
        if len(self.calls) < 2:
            return [self]
        deltas = [
            Delta(self.sequence, calls=[call], num_tokens=self.num_tokens, has_called=True)
            for call in self.calls
        ]
        deltas[0].text = self.text
        rest = dataclasses.replace(self, text="", calls=[])
        return [*deltas, rest] if tells_tokens and self.token_ids else deltas

    def add_part(self, part: Part) -> None:
        """Add text, reasoning, or a part of a call."""
        if isinstance(part, str):
            self.text += part
        elif isinstance(part, ReasoningDelta):
            self.reasoning += part.text
        elif self.calls and self.calls[-1].index == part.index:
            self.calls[-1].arguments += part.arguments
        else:
            self.calls.append(dataclasses.replace(part))


class OpenReply:
    """The deltas of one request, from the first token to the last finish reason."""

    def __init__(
        self,
        appliance: Appliance,
        request: Request,
        ask: Ask,
        replayed: Replayed,
        echoes: list[PromptEcho] | None = None,
    ) -> None:
        """Open a reply.

        Args:
            appliance: told when a stop string has come.
            request: its inbox is read by this reply alone.
            echoes: what each prompt's choices begin with.
        """
        self._request = request
        self._outputs = {
            sequence.seq_id: _SequenceText(
                appliance,
                sequence,
                ask,
                replayed,
                echoes[sequence.index // ask.num_choices] if echoes else None,
                request.prompt_text or "",
            )
            for sequence in request.sequences
        }
        self._num_open = len(request.sequences)

    async def deltas(self, patience_s: float | None = None) -> AsyncIterator[list[Delta]]:
        """Yield what is ready whenever something is, until every sequence has ended.

        Args:
            patience_s: after so long without tokens an empty list is yielded; None: never.
        """
        inbox = self._request.inbox
        try:
            while self._num_open:
                emitted = await inbox.next_batch(patience_s)
                ready = self._take(emitted)
                if ready or not emitted:
                    yield ready
        finally:
            inbox.close()

    def _take(self, batch: list[TokensEmitted]) -> list[Delta]:
        deltas: dict[int, Delta] = {}
        for emitted in batch:
            voice = self._outputs[emitted.sequence.seq_id]
            if voice.is_closed:
                continue
            delta = deltas.setdefault(emitted.sequence.seq_id, Delta(emitted.sequence))
            voice.add(emitted, delta)
            self._num_open -= voice.is_closed
        return list(deltas.values())


class _SequenceText:
    """The text of one sequence of a reply, as far as it has come."""

    def __init__(
        self,
        appliance: Appliance,
        sequence: Sequence,
        ask: Ask,
        replayed: Replayed,
        echo: PromptEcho | None,
        prompt_text: str,
    ) -> None:
        tokenizer = appliance.tokenizer
        self._appliance = appliance
        self._sequence = sequence
        self._echo = echo
        self._is_mute = ask.max_tokens == 0
        prompt_ids = sequence.prompt_token_ids
        start = len(prompt_ids) - sequence.sampling.output_offset
        earlier_ids = prompt_ids[start:]
        # what is held back of a text is no longer than a stop string, and half a character
        num_held = max(map(len, ask.stop), default=0) + _CONTEXT_TOKENS
        num_said = len(earlier_ids)
        while num_said and num_held:  # silent tokens within it are no part of it
            num_said -= 1
            num_held -= not tokenizer.is_silent(earlier_ids[num_said])
        end = start + num_said
        context_ids = prompt_ids[max(end - _CONTEXT_TOKENS, 0) : end]
        if not ask.is_continuation:
            context_ids = []
        self._detokenizer = Detokenizer(tokenizer, context_ids)
        self._shown = tokenizer if ask.shows_special else None
        self._parser = _parser(appliance, sequence, ask, replayed, prompt_text)
        marks = appliance.model.output_format.tokens if self._parser else ()
        self._marks = {one: text for text, one in tokenizer.special_ids(marks).items()}
        """Special tokens that have a text here: it tells where calls and reasoning begin."""
        hidden = {} if self._shown else tokenizer.special_texts_in(ask.stop)
        self._hidden = {
            one: chr(_HIDDEN + place)
            for place, (text, one) in enumerate(hidden.items())
            if one not in self._marks
        }
        """Special tokens of stop strings: they end a reply, and are no text in it."""
        names = {text: self._hidden[one] for text, one in hidden.items() if one in self._hidden}
        self._stop = StopMatcher(ask.stop, names, is_shown=ask.shows_stop)
        self._num_reasoning_tokens = 0
        self._num_tokens = 0
        self._num_chars = len(echo.text) if echo else 0
        self.is_closed = False
        self._go_on_with(earlier_ids[num_said:], num_said)

    def add(self, emitted: TokensEmitted, delta: Delta) -> None:
        """Add emitted tokens to a delta, up to a stop string."""
        if self._echo and self._has_prompt_logprobs():
            delta.text, delta.echo, self._echo = self._echo.text, self._echo, None
        for index in range(0 if self._is_mute else len(emitted.token_ids)):
            if self._take_token(emitted, index, delta):
                return
        if emitted.is_last and not self._say(self._detokenizer.flush(), delta):
            self._pass(self._stop.flush(), delta)
            self._close(self._sequence.finish_reason, delta)

    def _has_prompt_logprobs(self) -> bool:
        """Tell whether all that was asked for is there."""
        sequence = self._sequence
        is_asked = sequence.sampling.prompt_logprobs is not None
        return not is_asked or len(sequence.prompt_logprobs) == sequence.num_prompt_tokens - 1

    def _take_token(self, emitted: TokensEmitted, index: int, delta: Delta) -> bool:
        """Add one token; true if nothing may follow it."""
        token_id = emitted.token_ids[index]
        delta.token_ids.append(token_id)
        if emitted.logprobs:
            delta.logprobs.append(emitted.logprobs[index])
            delta.text_offsets.append(self._num_chars)
        self._num_tokens += 1
        delta.num_tokens = self._num_tokens
        is_last = emitted.is_last and index == len(emitted.token_ids) - 1
        if is_last and self._sequence.finish_reason is FinishReason.STOP:
            return False  # the worker ended it on this id: an end-of-text or stop id is no text
        return self._say(self._text_of(token_id), delta)

    def _text_of(self, token_id: int) -> str:
        """Take a token, and return the text that it completes."""
        if token_id in self._marks:
            return self._detokenizer.flush() + self._marks[token_id]
        if token_id in self._hidden:
            return self._detokenizer.flush() + self._hidden[token_id]
        if self._shown is not None and self._shown.is_silent(token_id):
            return self._detokenizer.flush() + self._shown.token_text(token_id)
        return self._detokenizer.push(token_id)

    def _go_on_with(self, token_ids: list[int], num_before: int) -> None:
        """Take what an earlier request has output, for what it held back of the text of that.

        Args:
            num_before: how many there were before these.
        """
        for index, token_id in enumerate(token_ids, num_before + 1):
            text = self._text_of(token_id)
            if index > self._sequence.sampling.min_tokens:
                self._num_chars += len(visible(text)) - len(self._stop.push(text))

    def _say(self, piece: str, delta: Delta) -> bool:
        """Add a piece's text; True if that was all, and the sequence is closed."""
        self._num_chars += len(visible(piece))
        num_tokens = self._num_tokens + self._sequence.sampling.output_offset
        may_stop = num_tokens > self._sequence.sampling.min_tokens
        self._pass(self._stop.push(piece) if may_stop else visible(piece), delta)
        if not (self._stop.has_matched or (self._parser and self._parser.is_done)):
            return False
        self._appliance.stop_sequence(self._sequence, self._num_tokens)
        self._close(FinishReason.STOP, delta)
        return True

    def _pass(self, text: str, delta: Delta) -> None:
        """Text that no stop string has cut off, to the parser if there is one."""
        if self._parser is None:
            delta.text += text
            return
        was_reasoning = self._parser.is_reasoning
        for part in self._parser.push(text):
            delta.add_part(part)
        if was_reasoning or self._parser.is_reasoning:
            self._num_reasoning_tokens = self._num_tokens
        delta.num_reasoning_tokens = self._num_reasoning_tokens
        delta.has_called = self._parser.num_calls > 0

    def _close(self, reason: FinishReason | None, delta: Delta) -> None:
        for part in self._parser.flush() if self._parser else ():
            delta.add_part(part)
        if reason is FinishReason.LENGTH and self._parser and self._parser.has_all_calls:
            reason = FinishReason.STOP  # the limit has cut off marks, and nothing of what they mark
        delta.num_reasoning_tokens = self._num_reasoning_tokens
        delta.finish_reason, delta.stop_text = reason, self._stop.matched
        self.is_closed = True


def _parser(
    appliance: Appliance, sequence: Sequence, ask: Ask, replayed: Replayed, prompt_text: str
) -> OutputParser | None:
    """Make what finds reasoning and calls; None where neither is wanted, as in completions."""
    if not ask.is_chat:
        return None
    output_format = appliance.model.output_format
    if not (ask.tools or output_format.thoughts or output_format.tools.is_harmony):
        return None
    must_call = ask.tools is not None and ask.tools.is_required
    return OutputParser(
        output_format,
        ask.tools,
        replayed,
        is_reasoning=output_format.begins_reasoning(prompt_text),
        is_free=ask.constraint is None and not (must_call and sequence.sampling.grammar),
    )


class StopMatcher:
    """Lets text through up to the first stop string, holding back what may become one.

    The stop string that is complete first wins, of those the one that began first: that does not
    depend on where pieces end.

    Args:
        stops: as the client wrote them.
        hidden: the character that stands for a special token in pieces, by the token's text; it
            matches that text, and is never let through.
        is_shown: whether a stop string that was found is let through.
    """

    def __init__(
        self,
        stops: tuple[str, ...],
        hidden: dict[str, str] | None = None,
        *,
        is_shown: bool = False,
    ) -> None:
        self._written = {stop: stop for stop in stops}
        for stop in stops:
            as_pushed = stop
            for text, character in (hidden or {}).items():
                as_pushed = as_pushed.replace(text, character)
            self._written[as_pushed] = stop
        self._stops = tuple(self._written)
        self._is_shown = is_shown
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    @property
    def has_matched(self) -> bool:
        """True if a stop string was found; nothing is let through any more."""
        return self.matched is not None

    def push(self, piece: str) -> str:
        """Return the text that is safe to send now; nothing after a match."""
        if self.has_matched:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        matches = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if matches:
            end, start = min(matches)
            self.matched, self._held = self._written[text[start:end]], ""
            return visible(text[:start]) + (self.matched if self._is_shown else "")
        size = len(text) - max(partial_match_chars(text, stop) for stop in self._stops)
        self._held = text[size:]
        return visible(text[:size])

    def flush(self) -> str:
        """Return what is still held back, at the end."""
        held, self._held = self._held, ""
        return visible(held)


def visible(text: str) -> str:
    """Leave out what stands for special tokens."""
    return text if text.isascii() else _HIDDEN_CHARACTERS.sub("", text)
