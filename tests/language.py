"""Find what makes our prose hard to read: `python -m tests.language [ROOM]`."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "appliance", "tui", "migrations")
PAGES = ("README.md", "ARCHITECTURE.md", "docs")
UNREAD = {"docs/measurements-history.md", "docs/peer-suites.md"}
"""Pages that are kept as they were written."""

MAX_MESSAGE_WORDS = 15
MIN_WORDING = 25
"""Characters of a sentence; a test that asserts one has to change with it."""
WORD = re.compile(r"[(`']?(?:a|[A-Za-z][a-z']+)[)`']?[.,;:?]?")
"""A word of a sentence; parts of paths, commands, headers and keys are none."""
BANNED = (
    "too near to call", "what of it", "of those that", "those who", "whoever", "whence", "goes on",
    "gives way", "is none", "as it is now", "what there is", "in whose", "of one's", "of lately",
    "and which nobody", "the way of", "a word to", "says so in", "by turns", "whichever of",
    "with nothing else on it", "beyond doubt", "by way of", "so many", "so much", "let go of",
    "not any more", "and no more",
)  # fmt: skip
"""Phrases that readers stumbled over; say it plainly."""
PERSONS = re.compile(
    r"\b(?:whoever|nobody|somebody|anybody|everybody|whom"
    r"|(?<!users )(?<!operators )(?<!people )(?<!groups )(?<!user )(?<!operator )(?<!person )who"
    r"|(?<![a-z,] )whose|(?<=\b(?:of|in|by|to|on|at) )whose)\b",
    re.I,
)
"""Words for people; most of ours were things. A thing may have a "whose" after its name."""
POINTERS = re.compile(
    r"\blikewise\b|\bas it is\b|\bthe same(?=[.,;:)]|$)|\bwhat of\b"
    r"|\bthose(?: (?:of|that|which|with|whose|to|from|for|by|on|in)\b|[.,;:])",
    re.I,
)
"""Words that send the reader back to an earlier sentence."""
FRAGMENT = re.compile(
    r"(?:Of|That|Whose|By|At|As|To|For|From|Below|Beside|So|And|But|Among|Which|With|In)\b"
)
"""Words that begin half a sentence, where a field or a constant is described."""
NO_VERBS = {
    "a", "after", "all", "also", "an", "and", "any", "are", "as", "at", "before", "both",
    "by", "each", "either", "every", "false", "for", "from", "how", "if", "in", "is", "it",
    "its", "more", "most", "no", "none", "not", "of", "on", "one", "only", "or", "over",
    "same", "so", "some", "that", "the", "their", "there", "these", "they", "this", "those",
    "to", "true", "two", "under", "until", "up", "what", "when", "where", "whether", "which",
    "while", "who", "whose", "with",
}  # fmt: skip
"""Words that do not begin a command: a function's docstring is a verb with its object."""


class Fault(NamedTuple):
    """A place that breaks a rule."""

    room: str
    rule: str
    place: str
    text: str


def room_of(path: str) -> str:
    """Name the room of a file: its folder, or the page itself."""
    if path.endswith(".md"):
        return path
    return path.rpartition("/")[0]


def faults() -> Iterator[Fault]:
    """List every fault of the sources and the pages."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from _of_source(str(path.relative_to(ROOT)), path.read_text())
    for path in sorted((ROOT / "tests").rglob("*.py")):
        yield from _of_test(str(path.relative_to(ROOT)), path.read_text())
    for name in PAGES:
        top = ROOT / name
        for path in sorted(top.rglob("*.md")) if top.is_dir() else [top]:
            where = str(path.relative_to(ROOT))
            if where not in UNREAD:
                yield from _of_page(where, path.read_text())


def _of_page(where: str, text: str) -> Iterator[Fault]:
    prose = re.sub(r"```.*?```|`[^`]*`", " ", text, flags=re.S)
    yield from _words(where, where, " ".join(prose.split()))


def _of_source(where: str, source: str) -> Iterator[Fault]:
    room = room_of(where)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of_docstring(room, where, node, docstrings)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        place = f"{where}:{token.start[0]}"
        if token.type == tokenize.COMMENT:
            if re.match(r"# -{9,}", token.string):
                yield Fault(room, "pasted", place, "a rule between two ideas in a file")
            else:
                yield from _words(room, place, token.string[1:])
    described = set(_descriptions(source))
    for number, text in _messages(source, docstrings):
        place = f"{where}:{number}"
        if number in described and FRAGMENT.match(text):
            yield Fault(room, "fragment", place, text)
        yield from _words(room, place, text)
        for sentence in re.split(r"[.!?;:]\s", text):
            if len(words := sentence.split()) > MAX_MESSAGE_WORDS:
                yield Fault(room, "long", place, " ".join(words))


def _of_test(where: str, source: str) -> Iterator[Fault]:
    """Yield sentences that a test asserts, where a code or a value would do."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            asserted: ast.AST = node.test
        elif isinstance(node, ast.keyword) and node.arg == "match":
            asserted = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize":
            asserted = ast.List(node.args[1:2])
        else:
            continue
        for part in ast.walk(asserted):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                text = " ".join(part.value.split())
                words = [word for word in text.split() if WORD.fullmatch(word)]
                if len(text) >= MIN_WORDING and len(words) >= 4:
                    yield Fault(room_of(where), "wording", f"{where}:{part.lineno}", text)


def _of_docstring(room: str, where: str, node: ast.AST, seen: set[int]) -> Iterator[Fault]:
    text = ast.get_docstring(node)  # type: ignore[arg-type]
    if text is None:
        return
    seen.add(node.body[0].value.lineno)  # type: ignore[attr-defined]
    place = f"{where}:{getattr(node, 'lineno', 1)}"
    yield from _words(room, place, " ".join(text.split()))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        names = {ast.unparse(each) for each in node.decorator_list}
        if not names & {"property", "cached_property", "functools.cached_property"}:
            first = re.match(r"[A-Za-z']+", text)
            if first is None or first[0].lower() in NO_VERBS:
                yield Fault(room, "fragment", place, text.splitlines()[0])


def _messages(source: str, docstrings: set[int]) -> Iterator[tuple[int, str]]:
    """Yield the sentences that a program can say, with their lines; docstrings are left out."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in ast.walk(node) if part is not node}
            parts = [p.value if isinstance(p, ast.Constant) else "X" for p in node.values]
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if id(node) in inside or node.lineno in docstrings:
            continue
        text = " ".join(text.split())
        is_prose = text.count(" ") >= 3 and len(re.findall(r"\b[a-z]+\b", text)) >= 4
        if is_prose and not re.match(r"(SELECT|INSERT|CREATE|UPDATE|DELETE|ALTER)\b", text):
            yield node.lineno, text


def _descriptions(source: str) -> Iterator[int]:
    """Yield the lines of strings that stand alone: docstrings of fields and constants."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value.lineno


def _words(room: str, place: str, text: str) -> Iterator[Fault]:
    low = text.replace("None", "").lower()
    for phrase in BANNED:
        for _ in range(low.count(phrase)):
            yield Fault(room, "banned", place, phrase)
    for rule, pattern in (("person", PERSONS), ("pointer", POINTERS)):
        for found in pattern.finditer(text):
            yield Fault(room, rule, place, text[max(0, found.start() - 40) : found.end() + 40])


if __name__ == "__main__":
    for one in faults():
        if not sys.argv[1:] or one.room == sys.argv[1]:
            print(f"{one.place}: {one.rule}: {one.text}")
