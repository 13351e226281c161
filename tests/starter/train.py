"""Trains the starter model: `python -m tests.starter.train FOLDER`.

Owns: the recipe.
Invariant: seeded; it can be stopped at any time and goes on where it was, from FOLDER/state.pt.
Never: runs while serving, or reads any data.

28 minutes on two CPU cores. The learning rate falls to nothing over the time given, so that a
shorter time gives a whole, lesser model.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

from tests.starter.lessons import Curriculum, Lesson, Teacher, train_tokenizer
from tests.starter.network import Network, begin, export

STEP_TOKENS = 4096
# what begins wired needs small steps, or noise drowns what the wiring tells apart
LEARNING_RATES = {"self_attn": 2e-4, "mlp": 1e-3, "norm": 1e-3, "embed": 3e-4}
WARMUP_STEPS = 50
SAVE_EVERY_STEPS = 50
HELD_OUT_EVERY_STEPS = 300
HELD_OUT_SIZES = ((2, 40), (20, 20), (80, 12), (300, 4), (600, 2))


@dataclass(frozen=True, slots=True)
class _Learned:
    """What one thread makes of its lessons."""

    loss: float
    gradients: tuple[Tensor, ...]
    is_right: list[bool]


class Training:
    """A run: everything that state.pt holds."""

    def __init__(self, folder: Path, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        self.folder, self.seed, self.device = folder, seed, device
        self.num_threads = torch.get_num_threads() if device == "cpu" else 1
        self.pool = ThreadPoolExecutor(
            self.num_threads, initializer=lambda: torch.set_num_threads(1)
        )
        self.tokenizer = train_tokenizer()
        vocabulary = self.tokenizer.get_vocab()
        self.network = Network(len(vocabulary)).to(device)
        begin(self.network, vocabulary)
        self.curriculum = Curriculum()
        self.random = Random(seed)
        self.num_steps = self.num_tokens = 0
        self.elapsed_s = 0.0
        groups = [
            {
                "params": [p for name, p in self.network.named_parameters() if part in name],
                "peak": lr,
            }
            for part, lr in LEARNING_RATES.items()
        ]
        self.optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98))

    def step(self, rate: float) -> float:
        """Learn from one step's lessons; the loss."""
        teacher = Teacher(self.tokenizer, self.random)
        lessons, is_largest = self.curriculum.lessons(teacher, self.random, STEP_TOKENS)
        # one thread and a share of the lessons for each core: torch's own threads gain far less
        shares = [
            share for i in range(self.num_threads) if (share := lessons[i :: self.num_threads])
        ]
        results = list(self.pool.map(self._learned, shares))
        rate *= min(1.0, (self.num_steps + 1) / WARMUP_STEPS)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        for parameter, *gradients in zip(
            self.network.parameters(), *(result.gradients for result in results), strict=True
        ):
            parameter.grad = sum(gradients) / len(gradients)
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        if is_largest:
            self.curriculum.note([answer for result in results for answer in result.is_right])
        self.num_steps += 1
        self.num_tokens += sum(len(lesson.ids) for lesson in lessons)
        return sum(result.loss for result in results) / len(results)

    def _learned(self, lessons: list[Lesson]) -> _Learned:
        """Loss and gradients of a share of a step's lessons."""
        ids, rows, targets = _batch(lessons, self.device)
        logits = self.network(ids, rows)
        loss = nn.functional.cross_entropy(logits, targets)
        gradients = torch.autograd.grad(loss, list(self.network.parameters()))
        right = _answers_right(lessons, (logits.argmax(-1) == targets).tolist())
        is_right = [is_right for skill, is_right in right if skill != "talk"]
        return _Learned(loss.item(), gradients, is_right)

    @torch.no_grad()
    def held_out(self) -> str:
        """Accuracy over what is never taught, by number of facts; greedy, told the right past."""
        teacher = Teacher(self.tokenizer, Random(self.seed), held_out=True)
        parts = []
        for num_facts, num_lessons in HELD_OUT_SIZES:
            if num_facts > self.curriculum.num_facts:
                break
            right: dict[str, list[bool]] = {}
            for _ in range(num_lessons):
                lessons = [teacher.lesson(num_facts, 16, 5, lookups=False)]
                ids, rows, targets = _batch(lessons, self.device)
                found = (self.network(ids, rows).argmax(-1) == targets).tolist()
                for skill, is_right in _answers_right(lessons, found):
                    right.setdefault(skill, []).append(is_right)
            shares = (f"{skill} {sum(of) / len(of):.1%}" for skill, of in sorted(right.items()))
            parts.append(f"{num_facts} facts: {', '.join(shares)}")
        return "; ".join(parts)

    def save(self) -> None:
        """Make this the state to go on from; the checkpoint beside it can be served."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_facts": self.curriculum.num_facts,
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "elapsed_s": self.elapsed_s,
        }
        torch.save(state, self.folder / "state.new")
        (self.folder / "state.new").replace(self.folder / "state.pt")
        export(self.network, self.tokenizer, self.folder / "checkpoint")

    def resume(self) -> None:
        """Go on from state.pt if there is one."""
        path = self.folder / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.curriculum.num_facts = state["num_facts"]
        self.num_steps, self.num_tokens = state["num_steps"], state["num_tokens"]
        self.elapsed_s = state["elapsed_s"]
        self.random.seed(self.seed + self.num_steps)


def _batch(lessons: list[Lesson], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [lessons, longest], rows that predict answers, and their targets."""
    longest = max(len(lesson.ids) for lesson in lessons)
    ids = torch.zeros(len(lessons), longest, dtype=torch.int64)
    rows: list[int] = []
    targets: list[int] = []
    for index, lesson in enumerate(lessons):
        ids[index, : len(lesson.ids)] = torch.tensor(lesson.ids)
        for answer in lesson.answers:
            rows += range(index * longest + answer.start - 1, index * longest + answer.end - 1)
            targets += lesson.ids[answer.start : answer.end]
    return (
        ids.to(device),
        torch.tensor(rows, device=device),
        torch.tensor(targets, device=device),
    )


def _answers_right(lessons: list[Lesson], found: list[bool]) -> list[tuple[str, bool]]:
    """Each answer's skill, and whether all of its tokens were found."""
    right, at = [], 0
    for lesson in lessons:
        for answer in lesson.answers:
            end = at + answer.end - answer.start
            right.append((answer.skill, all(found[at:end])))
            at = end
    return right


def main() -> int:
    """Train for the time given, from where it was left."""
    parser = argparse.ArgumentParser(description="Train the starter model.")
    parser.add_argument("folder", type=Path, help="for state.pt and checkpoint/")
    parser.add_argument("--minutes", type=float, default=28, help="of training in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    training = Training(args.folder, args.seed, args.device)
    training.resume()
    while training.elapsed_s < args.minutes * 60:
        started = time.monotonic()
        left = 1 - training.elapsed_s / (args.minutes * 60)
        loss = training.step(rate=left)
        if training.num_steps % 20 == 0:
            _print(
                f"{training.elapsed_s / 60:5.1f} min, {training.num_tokens / 1e6:.2f}M tokens, "
                f"{training.curriculum.num_facts:.0f} facts, loss {loss:.3f}, "
                f"right {training.curriculum.accuracy:.1%}"
            )
        if training.num_steps % HELD_OUT_EVERY_STEPS == 0:
            _print(f"held out: {training.held_out()}")
        training.elapsed_s += time.monotonic() - started
        if training.num_steps % SAVE_EVERY_STEPS == 0:
            training.save()
    training.save()
    _print(f"held out: {training.held_out()}")
    return 0


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
