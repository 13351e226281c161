"""Find reasoning and tool calls in a model's text while it streams.

Invariant: the parts do not depend on how the text was cut; a call is reported once it is known
to be of one of the request's functions, and text that is no such call stays text, marks
included.
"""

from __future__ import annotations

import re
from functools import partial

from appliance.api.core.tools import Tools
from appliance.api.formats.call_readers import read_json
from appliance.api.formats.format_choice import OutputFormat
from appliance.api.formats.text_reading import (
    CallDelta,
    Part,
    Step,
    TextReading,
    partial_match_chars,
)
from appliance.daemon.survival.journal import Replayed

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.\-]+)")
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


class OutputParser:
    """Finds reasoning and tool calls in one sequence's text while it comes.

    Args:
        output_format: how the model writes calls and reasoning.
        tools: that may be called; None: nothing is a call.
        replayed: gives calls their ids.
        is_reasoning: the prompt ends within the reasoning.
        is_free: the output need not match a grammar from its beginning on, which leaves no room
            for reasoning.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        tools: Tools | None,
        replayed: Replayed,
        *,
        is_reasoning: bool = False,
        is_free: bool = True,
    ) -> None:
        self._format = output_format.tools if tools else None
        self._thoughts = output_format.thoughts if is_free else None
        self._is_parallel = tools is None or tools.is_parallel
        self._is_forced = tools is not None and tools.is_required
        self._reading = TextReading(
            tools.schemas if tools else {},
            partial(replayed, output_format.tools.new_call_id),
            is_reasoning=is_reasoning and self._thoughts is not None,
        )
        has_channels = output_format.tools.is_harmony and (is_free or self._is_forced)
        self._steps = self._harmony() if has_channels else self._run()
        self.is_done = False
        """Nothing more is read: the one call that was allowed is complete."""

    @property
    def num_calls(self) -> int:
        """How many tool calls have begun."""
        return self._reading.num_calls

    @property
    def is_reasoning(self) -> bool:
        """What comes now is reasoning, as far as is known."""
        return self._reading.is_reasoning

    @property
    def has_all_calls(self) -> bool:
        """The calls that must come are complete: what is missing, if anything, are their marks."""
        is_between = self.is_done or self._reading.is_after_call
        return self._is_forced and is_between and self._reading.has_whole_arguments

    def push(self, text: str) -> list[Part]:
        """Take more text; returns what is certain by now."""
        if self.is_done:
            return []
        self._reading.text += text
        next(self._steps, None)
        return self._reported()

    def flush(self) -> list[Part]:
        """Return what is still held back, at the end."""
        if self.is_done:
            return []
        self._reading.is_ended = True
        next(self._steps, None)
        return self._reported()

    def _reported(self) -> list[Part]:
        parts, self._reading.parts = self._reading.parts, []
        if self._is_forced:  # whatever else there is, is the markup of a call that was cut off
            return [part for part in parts if isinstance(part, CallDelta)]
        return parts

    def _run(self) -> Step[None]:
        """Parse all but Harmony: text, in which marks begin reasoning and calls."""
        reading = self._reading
        while not self.is_done:
            if reading.is_after_call and (yield from self._skip_closer()):
                continue
            if (yield from self._begin_reasoning()):
                continue
            if (at := (yield from self._loose_call())) is not None:
                yield from self._call(at, "")
                continue
            mark = yield from self._say_until(self._marks())
            if mark is None:
                return
            space = len(reading.text) - len(reading.text.lstrip())
            if reading.is_reasoning and self._thoughts and mark in self._thoughts.ends:
                yield from self._turn(space + len(mark), is_reasoning=False)
            else:
                yield from self._call(space, mark)

    def _begin_reasoning(self) -> Step[bool]:
        """Reasoning begins before the answer does; later its mark is what the answer speaks of."""
        reading, thoughts = self._reading, self._thoughts
        if thoughts is None or reading.has_text or reading.is_reasoning:
            return False
        at = yield from reading.skip_space(0)
        mark = yield from reading.starts(at, *thoughts.begins)
        if mark is not None:
            yield from self._turn(at + len(mark), is_reasoning=True)
        return mark is not None

    def _turn(self, size: int, *, is_reasoning: bool) -> Step[None]:
        """Skip a mark that begins or ends reasoning, with the space around it."""
        self._reading.consume(size)
        self._reading.is_reasoning = is_reasoning
        self._reading.consume((yield from self._reading.skip_space(0)))

    def _marks(self) -> tuple[str, ...]:
        """List what would begin a call, or end the reasoning, here."""
        marks = self._format.marks if self._format else ()
        is_reasoning = self._reading.is_reasoning and self._thoughts is not None
        return (*marks, *self._thoughts.ends) if is_reasoning and self._thoughts else marks

    def _say_until(self, marks: tuple[str, ...]) -> Step[str | None]:
        """Report text up to a mark. Space is held back: around calls and reasoning it is cut."""
        reading = self._reading
        while True:
            text = reading.text
            hits = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
            if hits:
                reading.say(reading.consume(len(text[: min(hits)[0]].rstrip())))
                return min(hits)[1]
            held = max((partial_match_chars(text, mark) for mark in marks), default=0)
            # Without marks nothing can come before which space would be none.
            safe = text[: len(text) - held]
            reading.say(reading.consume(len(safe.rstrip()) if marks else len(safe)))
            if not (yield from reading.more()):
                self._say_rest()
                return None

    def _say_rest(self) -> None:
        reading = self._reading
        rest = reading.consume(len(reading.text))
        closers = self._format.closers if self._format else ()
        is_closer = any(one.startswith(rest.strip()) for one in closers)
        if not (reading.is_after_call and is_closer):
            reading.say(rest)

    def _skip_closer(self) -> Step[bool]:
        """Drop one mark that ends or parts calls."""
        reading, closers = self._reading, self._format.closers if self._format else ()
        at = yield from reading.skip_space(0)
        found = yield from reading.starts(at, *closers)
        if found is not None:
            reading.consume(at + len(found))
        elif reading.is_ended and any(one.startswith(reading.text[at:]) for one in closers):
            reading.consume(len(reading.text))  # the beginning of one, cut off
        return found is not None

    def _loose_call(self) -> Step[int | None]:
        """Find where a call may begin without a mark."""
        reading, tool_format = self._reading, self._format
        if tool_format is None or not tool_format.loose or reading.is_reasoning:
            return None
        is_first = not reading.has_text and tool_format.is_bare
        is_next = reading.is_after_call and (tool_format.is_bare or tool_format.is_list)
        if not is_first and not is_next:
            return None
        at = yield from reading.skip_space(0)
        return at if reading.text[at : at + 1] == tool_format.loose else None

    def _call(self, at: int, mark: str) -> Step[None]:
        """Parse a call, or text that looked like the beginning of one."""
        assert self._format is not None
        reading = self._reading
        read = self._format.read if mark or self._format.is_bare else read_json
        size = yield from read(reading, at + len(mark))
        if size is None:
            reading.is_after_call = True
            self.is_done = not self._is_parallel
        else:
            reading.say(reading.consume(size))

    def _harmony(self) -> Step[None]:
        """Read gpt-oss's messages in channels, each with a head that tells its kind."""
        reading, begins = self._reading, ("<|start|>", "<|channel|>", "to=")
        while not self.is_done:
            at = yield from reading.skip_space(0)
            found = yield from reading.starts(at, *begins, *_HARMONY_ENDS)
            if found in begins:
                head: list[str] = []
                if (yield from reading.pass_until(("<|message|>",), head.append)) is None:
                    return  # cut off in a head, which is no text
                reading.consume(len("<|message|>"))
                yield from self._message("".join(head))
            elif found is not None:
                reading.consume(at + len(found))
            elif (yield from reading.pass_until(_HARMONY_ENDS, reading.say)) is None:
                return

    def _message(self, head: str) -> Step[None]:
        """Parse one message, after its head."""
        reading = self._reading
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        name = recipient[1] if recipient else ""
        if name not in reading.schemas:
            reading.is_reasoning = channel is not None and channel[1] == "analysis"
            yield from reading.pass_until(_HARMONY_ENDS, reading.say)
            reading.is_reasoning = False
            return
        reading.begin_call(name, 0)
        at = yield from reading.skip_space(0)
        if reading.text[at : at + 1] == "{":
            reading.consume(at)
            yield from reading.pass_object(reading.argue)
        elif reading.text:
            reading.argue("{}")
        self.is_done = not self._is_parallel
