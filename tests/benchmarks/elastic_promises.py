"""What elastic roles predict of long prompts, and what comes of it, in daemons freshly started.

usage: python -m tests.benchmarks.elastic_promises [--daemons 20] [--prompts 8] [--model FOLDER]
       [--tree NAME=FOLDER]... [--place 2x1]... [--profile FILE] [--out FILE] [--join FILE]

Each daemon is new, as its predictions are; with --profile it begins with a copy of that file. Two
chats stream all the while, with short rests between replies; then prompts of some 4,100 tokens come
one after the other. For each: the route, what was predicted, when its first token came, and the
median gap of the chats meanwhile over the same chats' median before the first prompt. Several trees
of this repository (each with its own `.venv`), and several numbers of workers, which are forced
onto the cores there are, take turns, daemon by daemon; without any it is this tree, and what it
makes of the machine. The model is the starter model unless another is named.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance.client.address import UnixAddress
from appliance.client.calls import Client, ClientError

QUIET_S = 2.0
QUESTIONS = (
    "Who are you?",
    "What can you do?",
    "Tell me a joke.",
    "What is the capital of France?",
)
FAR = 3.0
"""The chats' gap, over the usual one, that no prompt may cause."""
_PREDICTED = re.compile(r"predicted TTFT (\d+) ms, longest ITL ([\d.]+) ms")
_SAMPLE = Path(__file__).parents[2] / "engine" / "starter" / "sample"


@dataclass
class Prompt:
    """One long prompt."""

    tree: str
    daemon: int
    number: int
    start_s: float
    """From the daemon's first process to /ready."""
    tokens: int
    route: str
    reason: str
    predicted_ttft_ms: float | None
    predicted_gap_ms: float | None
    ttft_ms: float
    usual_gap_ms: float
    max_itl_ms: float | None
    """The chats' median while it was computed; None: fewer than five gaps."""

    @property
    def gap_ratio(self) -> float | None:
        """Over the usual."""
        return None if self.max_itl_ms is None else self.max_itl_ms / self.usual_gap_ms


class Streams:
    """Replies that follow each other, several at once, and the gaps of their tokens.

    Tokens without text count, too: a tokenizer may have text for few of a random model's ids.

    Args:
        ask: the path and the body of a stream's request, by the numbers of both.
        max_rest_s: between two replies.
    """

    def __init__(
        self,
        client: Client,
        count: int,
        ask: Callable[[int, int], tuple[str, dict[str, object]]],
        max_rest_s: float = 0.0,
    ) -> None:
        self._client, self._ask, self._max_rest_s = client, ask, max_rest_s
        self._is_over = threading.Event()
        self._last_s = dict.fromkeys(range(count), 0.0)
        self._gaps: list[tuple[float, float]] = []
        self._threads = [threading.Thread(target=self._stream, args=(n,)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Return when all have begun."""
        while not all(self._last_s.values()):
            time.sleep(0.05)

    def between(self, start_s: float, end_s: float) -> list[float]:
        """Milliseconds of the gaps that ended in this time."""
        return [gap_ms for ended_s, gap_ms in list(self._gaps) if start_s <= ended_s <= end_s]

    def open_gaps(self, end_s: float) -> list[float]:
        """Milliseconds of the gaps that have not ended."""
        return [1e3 * (end_s - last_s) for last_s in self._last_s.values() if last_s]

    def end(self) -> None:
        """Hang up, and wait for all."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _stream(self, number: int) -> None:
        draw = random.Random(number)
        for turn in itertools.count():
            path, body = self._ask(number, turn)
            body["return_token_ids"] = True
            with suppress(ClientError), self._client.stream(path, body) as events:
                for _ in filter(_token_ids, events):
                    if self._is_over.is_set():
                        return
                    now_s, last_s = time.perf_counter(), self._last_s[number]
                    if last_s:
                        self._gaps.append((now_s, (now_s - last_s) * 1e3))
                    self._last_s[number] = now_s
            self._last_s[number] = 0.0  # between two replies nothing is waited for
            # at once, its prompt would always end at the same place in the other's step
            if self._is_over.wait(draw.uniform(0.0, self._max_rest_s)):  # or the daemon has ended
                return


def chats(client: Client) -> Streams:
    """Two chats that ask one question after the other, with rests of up to 100 ms."""

    def ask(number: int, turn: int) -> tuple[str, dict[str, object]]:
        return _CHAT, _chat(QUESTIONS[(number + turn) % len(QUESTIONS)])

    return Streams(client, 2, ask, max_rest_s=0.1)


_CHAT = "/v1/chat/completions"


def _chat(content: str) -> dict[str, object]:
    messages = [{"role": "user", "content": content}]
    # drawn and of full length: a model of random values repeats a token that may have no text
    of_reply = {"temperature": 1, "ignore_eos": True, "max_tokens": 64, "stream": True}
    return {"messages": messages, **of_reply}


def _text(event: dict) -> str:
    """An event's text, of a chat or a completion."""
    choice = event["choices"][0] if event.get("choices") else {}
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


def _token_ids(event: dict) -> list[int]:
    """The ids of an event's tokens."""
    return event["choices"][0].get("token_ids") or [] if event.get("choices") else []


def _pieces(client: Client, content: str) -> tuple[list[str], Iterator[str]]:
    """A streamed reply's id, once there is one, and its pieces."""
    found: list[str] = []

    def pieces() -> Iterator[str]:
        with client.stream(_CHAT, _chat(content)) as events:
            found.append(str(events.request_id))
            yield from filter(None, map(_text, events))

    return found, pieces()


@contextmanager
def daemon(tree: Path, options: list[str], profile: Path | None) -> Iterator[tuple[Client, float]]:
    """A daemon of a tree's own, and the seconds that its start took."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name)
        (folder / "penstock.toml").touch()
        if profile is not None:
            (folder / "state").mkdir()
            shutil.copy(profile, folder / "state" / "profile.db")
        command = [str(tree / ".venv/bin/python"), "-m", "appliance.cli", "serve"]
        command += ["--config", str(folder / "penstock.toml"), "--socket", str(folder / "p.sock")]
        command += ["--state-dir", str(folder / "state"), "--roles", "elastic", *options]
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK", "PYTHON"))}
        started_s = time.perf_counter()
        with (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(command, cwd=tree, stderr=stderr, env=environ)
        client = Client(UnixAddress(folder / "p.sock"), timeout_s=600)
        try:
            while True:
                if process.poll() is not None:
                    raise SystemExit((folder / "stderr").read_text())
                try:
                    client.get("/ready")
                    break
                except ClientError:
                    time.sleep(0.02)
            yield client, time.perf_counter() - started_s
        finally:
            if process.poll() is not None:
                about = (folder / "stderr").read_text(errors="replace")
                print(f"the daemon had ended with {process.returncode}:\n{about}", file=sys.stderr)
            process.send_signal(signal.SIGTERM)
            process.wait()


def one_daemon(
    tree: tuple[str, Path],
    number: int,
    num_prompts: int,
    options: list[str],
    profile: Path | None,
) -> list[Prompt]:
    """Start it, let the chats begin, send the prompts."""
    text = (_SAMPLE / "runbook.txt").read_text("utf-8").strip()
    questions = json.loads((_SAMPLE / "questions.json").read_text("utf-8"))
    prompts = []
    with daemon(tree[1], options, profile) as (client, start_s):
        talks = chats(client)
        talks.wait()
        began_s = time.perf_counter()
        time.sleep(QUIET_S)
        usual_ms = statistics.median(talks.between(began_s, time.perf_counter()))
        for index in range(num_prompts):
            question = questions[index % len(questions)]["question"]
            asked_s = time.perf_counter()
            # each begins otherwise, so that none finds another's prefix cached
            found, pieces = _pieces(client, f"Report {index + 1}.\n\n{text}\n\n{question}")
            next(pieces)
            first_s = time.perf_counter()
            itls_ms = talks.between(asked_s, first_s)
            for _ in pieces:
                pass
            row = client.request(found[0])
            predicted = _PREDICTED.search(row["route_reason"] or "")
            prompts.append(
                Prompt(
                    tree[0], number, index + 1, start_s, row["prompt_tokens"], row["route"],
                    row["route_reason"],
                    float(predicted[1]) if predicted else None,
                    float(predicted[2]) if predicted else None,
                    (first_s - asked_s) * 1e3, usual_ms,
                    statistics.median(itls_ms) if len(itls_ms) >= 5 else None,
                )
            )  # fmt: skip
        talks.end()
    return prompts


def report(prompts: list[Prompt]) -> None:
    """Print what was predicted and what came, prompt by prompt, and the sums of each tree."""
    print(f"{'tree':<10} {'daemon':>6} {'no':>2} {'route':<7} {'reason':<9} {'predicted':>18} "
          f"{'came':>18} {'gap/usual':>9}")  # fmt: skip
    for p in prompts:
        predicted = came = "-"
        if p.predicted_ttft_ms is not None:
            predicted = f"{p.predicted_ttft_ms:.0f} / {p.predicted_gap_ms:.1f}"
        if p.max_itl_ms is not None:
            came = f"{p.ttft_ms:.0f} / {p.max_itl_ms:.1f}"
        ratio = "-" if p.gap_ratio is None else f"{p.gap_ratio:.1f}"
        mark = " <--" if (p.gap_ratio or 0) >= FAR else ""
        reason = re.split(r"[:;]", p.reason)[0]
        print(f"{p.tree:<10} {p.daemon:>6} {p.number:>2} {p.route:<7} {reason:<9} "
              f"{predicted:>18} {came:>18} {ratio:>9}{mark}")  # fmt: skip
    print("\npredicted and came: ms to the first token / ms of the chats' median gap\n")
    for tree in dict.fromkeys(p.tree for p in prompts):
        own = [p for p in prompts if p.tree == tree]
        ratios = [p.gap_ratio for p in own if p.gap_ratio is not None]
        off = [p.ttft_ms / p.predicted_ttft_ms for p in own if p.predicted_ttft_ms]
        starts = sorted({p.start_s for p in own})  # one for each daemon
        print(
            f"{tree}: {len(own)} prompts in {len(starts)} daemons; chats' gap over usual: "
            f"median {statistics.median(ratios):.2f}, largest {max(ratios):.2f}, "
            f"{sum(r >= FAR for r in ratios)} of {FAR:.0f} or more; "
            f"ttft over predicted ({len(off)}): median {statistics.median(off or [0]):.2f}, "
            f"largest {max(off, default=0):.2f}; ttft median "
            f"{statistics.median(p.ttft_ms for p in own):.0f} ms; start "
            f"{statistics.median(starts):.2f} s [{starts[0]:.2f}, {starts[-1]:.2f}]"
        )


def main() -> None:
    """Run the arms in turn and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--daemons", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--place", action="append", default=[], metavar="NxM")
    parser.add_argument("--model", help="a model folder; the starter model if left out")
    parser.add_argument("--profile", type=Path, help="a profile.db for each daemon")
    parser.add_argument("--out", type=Path, help="append each prompt as a line of JSON, too")
    parser.add_argument("--join", type=Path, help="measure nothing: report what --out has written")
    options = parser.parse_args()
    if options.join:
        lines = options.join.read_text("utf-8").splitlines()
        report([Prompt(**json.loads(line)) for line in lines])
        return
    here = [f"this={Path(__file__).parents[2]}"]
    model = ["--model", options.model] if options.model else []
    arms = [
        (
            f"{name} {place}".strip(),
            Path(path),
            model + ["--place", f"{place} forced"] * bool(place),
        )
        for name, _, path in (t.partition("=") for t in options.tree or here)
        for place in options.place or [""]
    ]
    prompts: list[Prompt] = []
    for number in range(1, options.daemons + 1):
        for name, tree, serve in arms[:: 1 if number % 2 else -1]:  # who is first takes turns
            new = one_daemon((name, tree), number, options.prompts, serve, options.profile)
            prompts += new
            print(f"{name} {number}: {[round(p.gap_ratio or 0, 1) for p in new]}", file=sys.stderr)
            if options.out:
                with options.out.open("a", encoding="utf-8") as out:
                    out.writelines(json.dumps(asdict(p)) + "\n" for p in new)
    report(prompts)


if __name__ == "__main__":
    main()
