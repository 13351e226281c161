"""Compile grammars and compute their masks beside the steps, on two threads.

llguidance releases the interpreter while it works, so a mask costs the step nothing as long as the
forward pass takes longer. Compilation has a thread of its own, so that masks do not wait for it. It
stands back from the steps, for which others wait.

Invariant: a matcher is used by one thread at a time: first the compiler's, then the one for masks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from engine.system.priority import lower_priority
from engine.text.grammar import GrammarError
from engine.text.grammar_matcher import GrammarTokenizer, Matcher
from engine.worker.worker_request import WorkerRequest

_MAX_COMPILED = 16
COMPILER_NICE = 10

Mask = bytes | None
Masks = list[Mask] | GrammarError
"""The masks of one sequence: for its next token, then after each token of its draft."""


class Grammars:
    """Hold the grammars of one worker.

    Args:
        load_tokenizer: called with the first grammar; it takes a moment and some memory.
    """

    def __init__(self, load_tokenizer: Callable[[], GrammarTokenizer]) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: GrammarTokenizer | None = None
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler", _stand_back)
        self._follower = ThreadPoolExecutor(1, "grammar-masks")

    def compile(self, grammar: str) -> Future[Matcher]:
        """Compile a grammar to a matcher at its beginning."""
        return self._compiler.submit(self._compile, grammar)

    def masks(self, sequences: Sequence[WorkerRequest]) -> Future[list[Masks]]:
        """Compute each sequence's allowed ids: a bit for each; None: any."""
        return self._follower.submit(lambda: [_masks(sequence) for sequence in sequences])

    def _compile(self, grammar: str) -> Matcher:
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        if grammar not in self._compiled:
            matcher = Matcher(self._tokenizer, grammar)
            matcher.allowed(())  # copies have its tables: of many choices they take 30 ms
            self._compiled[grammar] = matcher
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar].copy()


def _stand_back() -> None:
    """Give this thread, of all of the process, less of a core than steps that want it."""
    lower_priority(COMPILER_NICE)


def _masks(sequence: WorkerRequest) -> Masks:
    if sequence.matcher is None:
        return [None] * (1 + len(sequence.draft))
    try:
        return [*sequence.matcher.result().allowed_along(sequence.output_ids, sequence.draft)]
    except GrammarError as error:
        return error
