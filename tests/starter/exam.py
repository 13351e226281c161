"""The starter model's exam, through a real server: `python -m tests.starter.exam`.

Invariant: documents, names and values are of the split that training never saw; an answer is right
if it is so to the last character.
Never: looks at the model; everything goes over the socket, as any client's requests do.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from appliance.client.address import find
from appliance.client.calls import Client
from appliance.client.ephemeral import daemon
from engine.errors import PenstockError
from tests.starter.documents import Document, Turn, Writer

LENGTHS = (256, 1024, 4096, 8000)
NUM_CLIENTS = 2
TURNS = 4
_TOKENS_PER_FACT = 12.5
_MAX_TOKENS = 64


@dataclass(slots=True)
class ExamScore:
    """Right answers by (skill, tokens of document), and some wrong ones to look at."""

    num_right: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    num_asked: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    wrong: list[tuple[Turn, str]] = field(default_factory=list)

    def add(self, skill: str, length: int, turn: Turn, answer: str) -> None:
        """Count one answer as right or wrong."""
        self.num_asked[skill, length] += 1
        if answer == turn.answer:
            self.num_right[skill, length] += 1
        else:
            self.wrong.append((turn, answer))

    def ratio(self, skill: str, length: int) -> float:
        """Share of answers that were right."""
        return self.num_right[skill, length] / self.num_asked[skill, length]


@dataclass(frozen=True, slots=True)
class ExamConversation:
    """One conversation: a document and questions, each asked after the right answers so far."""

    skill: str
    length: int
    document: Document
    turns: list[Turn]


def papers(
    client: Client, lengths: tuple[int, ...], num_questions: int, seed: int
) -> Iterator[ExamConversation]:
    """Everything that is asked; half as many unknowns, and a quarter as many conversations."""
    writer = Writer(Random(seed), held_out=True)
    talk = [writer.talk() for _ in range(num_questions)]
    yield from (ExamConversation("talk", 0, Document("", []), [turn]) for turn in talk)
    for length in lengths:
        for index in range(num_questions):
            document = _document(client, writer, length)
            yield ExamConversation("lookup", length, document, [writer.lookup(document)])
            if index % 2 == 0:
                yield ExamConversation("unknown", length, document, [writer.unknown(document)])
            if index % 4 == 0:
                turns = [writer.lookup(document) for _ in range(TURNS)]
                yield ExamConversation("turns", length, document, turns)


def take(client: Client, paper: ExamConversation) -> list[str]:
    """The answers to one paper's questions.

    Raises:
        ClientError: the server could not answer.
    """
    messages: list[dict[str, str]] = []
    answers = []
    opening = f"{paper.document.text}\n\n" if paper.document.text else ""
    for turn in paper.turns:
        messages.append({"role": "user", "content": opening + turn.question})
        answers.append(ask(client, messages))
        messages.append({"role": "assistant", "content": turn.answer})
        opening = ""
    return answers


def ask(client: Client, messages: list[dict[str, str]]) -> str:
    """Ask the daemon, greedily; the answer's text."""
    body: dict[str, Any] = {"messages": messages, "max_tokens": _MAX_TOKENS, "temperature": 0}
    reply = client.post("/v1/chat/completions", body)
    return str(reply["choices"][0]["message"]["content"])


def _document(client: Client, writer: Writer, length: int) -> Document:
    """A document of about so many tokens: at most that, and not less than 95 % of it."""
    num_facts = length / _TOKENS_PER_FACT
    while True:
        document = writer.document(max(1, round(num_facts)))
        body = {"prompt": document.text, "add_special_tokens": False}
        num_tokens = int(client.post("/tokenize", body)["count"])
        if 0.95 * length <= num_tokens <= length:
            return document
        # styles differ by half in length, so the next one may need another number of facts
        num_facts = max(1, len(document.facts)) * 0.98 * length / num_tokens


def _table(marks: ExamScore) -> str:
    lengths = sorted({length for _, length in marks.num_asked if length})
    lines = ["skill     " + "".join(f"{f'{length:,} tokens':>22}" for length in lengths)]
    for skill in ("lookup", "unknown", "turns"):
        cells = (
            f"{marks.ratio(skill, length):.1%} ({marks.num_right[skill, length]}"
            f"/{marks.num_asked[skill, length]})"
            for length in lengths
        )
        lines.append(f"{skill:10}" + "".join(f"{cell:>22}" for cell in cells))
    right, asked = marks.num_right["talk", 0], marks.num_asked["talk", 0]
    return "\n".join([*lines, f"{'talk':10}{f'{right / asked:.1%} ({right}/{asked})':>22}"])


def examine(client: Client, lengths: tuple[int, ...], num_questions: int, seed: int) -> ExamScore:
    """Ask everything, a few at a time.

    Raises:
        ClientError: the server could not answer.
    """
    marks = ExamScore()
    every = list(papers(client, lengths, num_questions, seed))
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = pool.map(partial(take, client), every)
        for paper, given in zip(every, answers, strict=True):
            for turn, answer in zip(paper.turns, given, strict=True):
                marks.add(paper.skill, paper.length, turn, answer)
    return marks


def main() -> int:
    """Examine the model that a server serves, or the starter on a daemon of our own."""
    parser = argparse.ArgumentParser(prog="python -m tests.starter.exam", description=__doc__)
    parser.add_argument("--host", help="a running server; without it one is started")
    parser.add_argument("--questions", type=int, default=100, help="look-ups for each length")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="in tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show-wrong", type=int, default=0, metavar="N", help="wrong answers")
    args = parser.parse_args()
    options = (tuple(args.lengths), args.questions, args.seed)
    started = time.monotonic()
    try:
        if args.host is not None:
            marks = examine(Client(find(args.host), timeout_s=600), *options)
        else:
            with daemon() as where:
                marks = examine(Client(where, timeout_s=600), *options)
    except PenstockError as error:
        sys.stderr.write(f"exam: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{_table(marks)}\n")
    for turn, answer in marks.wrong[: args.show_wrong]:
        sys.stdout.write(f"{turn.question}\n  right: {turn.answer}\n  given: {answer}\n")
    sys.stdout.write(f"in {time.monotonic() - started:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
