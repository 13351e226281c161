"""Grammars compiled and followed beside the steps, on two threads.

llguidance lets go of the interpreter while it works, so that a mask costs the step nothing as long
as the forward pass takes longer; a compilation has a thread of its own, for masks not to wait.
Owns: the threads, the model's tokens as grammars see them, and the last grammars compiled.
Invariant: a matcher is used by one thread at a time: the compiler's until it is there, then the
one for masks.
Never: ends a sequence; an error is handed to the step that needs the mask.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from engine.text.grammar import GrammarError
from engine.text.matcher import GrammarTokenizer, Matcher
from engine.workers.running import Running

_MAX_COMPILED = 16

Mask = bytes | GrammarError | None


class Grammars:
    """The grammars of one worker.

    Args:
        load_tokenizer: called with the first grammar; it takes a moment and some memory.
    """

    def __init__(self, load_tokenizer: Callable[[], GrammarTokenizer]) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: GrammarTokenizer | None = None
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._follower = ThreadPoolExecutor(1, "grammar-masks")

    def compile(self, grammar: str) -> Future[Matcher]:
        """A matcher at the grammar's beginning, as soon as it is there."""
        return self._compiler.submit(self._compile, grammar)

    def masks(self, sequences: Sequence[Running]) -> Future[list[Mask]]:
        """What each may go on with: one byte per token id, or why there is none; None: anything."""
        return self._follower.submit(lambda: [_mask(sequence) for sequence in sequences])

    def _compile(self, grammar: str) -> Matcher:
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        if grammar not in self._compiled:
            self._compiled[grammar] = Matcher(self._tokenizer, grammar)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar].copy()


def _mask(sequence: Running) -> Mask:
    if sequence.matcher is None:
        return None
    try:
        return sequence.matcher.result().allowed(sequence.output_ids)
    except GrammarError as error:
        return error
