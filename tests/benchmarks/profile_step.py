"""Where a step's time goes: with torch, with the kernels, with their calls replayed, in a worker.

usage: python -m tests.benchmarks.profile_step MODEL [--dtype float32] [--threads 2] [--rounds 5]

One process, no daemon, one pool; a worker's step has its batch and sampling, too. The arms take
turns step by step; figures are medians in ms, the parts of the step with the median total.
`outside` is the share of plan and rest, where no kernel runs.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.model import transformer
from engine.model.attention import StepBatch
from engine.model.backend import TorchBackend
from engine.model.linear import Linears
from engine.model.weight import Weight
from engine.model.weights import load_weights
from engine.text.grammar import GrammarTokenizer
from engine.workers.runner import Runner
from engine.workers.worker_request import Grammars, WorkerRequest
from tests.engine.model.test_attention import batch_of

BLOCK_SIZE = 16
ARMS = "torch", "kernels", "replayed", "worker"
CASES = {  # name: sequences, tokens before, new tokens of each
    "decode 1 x 512": (1, 512, 1),
    "decode 1 x 2048": (1, 2048, 1),
    "decode 8 x 128": (8, 128, 1),
    "prefill 512": (1, 0, 512),
}
PARTS = {"norm": "small", "norm_rows": "small", "gated": "small", "place": "small"}


class Timed:
    """A backend or Linears whose calls are added up by part."""

    def __init__(self, of: Any, spent_s: Counter[str]) -> None:
        self._of, self._spent_s = of, spent_s

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        if name == "make":
            return lambda *args, **kw: self._timed("linears", found(*args, **kw))
        return self._timed(PARTS.get(name, name), found) if callable(found) else found

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **keywords)
            self._spent_s[part] += time.perf_counter() - start
            return result

        return timed


class Arm:
    """A model of its own weights, and where its time went."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, name: str) -> None:
        self.spent_s: Counter[str] = Counter()
        weights = load_weights(checkpoint, dtype, None, None, lambda *_: None)
        backend, linears = transformer.choose_backend, transformer.choose_linears
        if name == "torch":
            to = getattr(torch, dtype)
            weights = {name: Weight.plain(w.values.to(to)) for name, w in weights.items()}
            backend = lambda *_: TorchBackend()  # noqa: E731
            linears = lambda *_, **__: Linears("torch", None)  # noqa: E731
        before = transformer.choose_backend, transformer.choose_linears
        self.is_recorded = name in ("replayed", "worker")
        if not self.is_recorded:
            timed = lambda choose: lambda *a, **k: Timed(choose(*a, **k), self.spent_s)  # noqa: E731
            transformer.choose_backend, transformer.choose_linears = map(timed, (backend, linears))
        self.model = transformer.Transformer(checkpoint.config, weights, dtype)
        transformer.choose_backend, transformer.choose_linears = before
        model = self.model
        if not self.is_recorded:
            model._graphs = None  # nothing to time in a decode graph
        elif model._graphs is not None:  # but all of it, and what comes behind
            model._graphs._kernels = Timed(model._graphs._kernels, self.spent_s)
            model._backend = Timed(model._backend, self.spent_s)
            model._head = Timed(None, self.spent_s)._timed("linears", model._head)
        config = checkpoint.config
        shape = (1280, config.num_kv_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.kv = torch.randn(shape).to(getattr(torch, dtype))
        self.runner = None
        if name == "worker":
            self.runner = Runner(model, self.kv, BLOCK_SIZE, Grammars(_no_tokenizer))

    def _run_of(self, batch: StepBatch) -> Callable[[], object]:
        if self.runner is None:
            return lambda: self.model.forward(batch, self.kv)
        sequences = zip(batch.seq_lens, batch.query_lens, batch.block_tables, strict=True)
        planned = [
            (WorkerRequest.dummy(length, table, length - new, 0.0), new)
            for length, new, table in sequences
        ]
        runner = self.runner
        return lambda: runner.collect(runner.launch(planned))

    def step(self, batch: StepBatch) -> Counter[str]:
        """ms by part, `total` among them."""
        run = self._run_of(batch)
        self.spent_s.clear()
        start = time.perf_counter()
        run()
        total_s = time.perf_counter() - start
        parts = Counter({part: s * 1e3 for part, s in self.spent_s.items()})
        parts["rest"] = total_s * 1e3 - parts.total()
        parts["total"] = total_s * 1e3
        return parts


def _no_tokenizer() -> GrammarTokenizer:
    raise AssertionError("no step here has a grammar")


def step_of(num_sequences: int, before: int, new: int) -> StepBatch:
    """Sequences side by side in the pool, each of which wants its next token."""
    per_sequence = -(-(before + new) // BLOCK_SIZE)
    tables = [list(range(i * per_sequence, (i + 1) * per_sequence)) for i in range(num_sequences)]
    batch = batch_of([(before, new)] * num_sequences, tables, BLOCK_SIZE)
    rows = [(i + 1) * new - 1 for i in range(num_sequences)]
    return replace(batch, input_ids=torch.randint(5, 8000, batch.positions.shape), logit_rows=rows)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    checkpoint = Checkpoint.open(args.model)
    arms = {name: Arm(checkpoint, args.dtype, name) for name in ARMS}
    columns = ("linears", "attend", "small", "replay", "plan", "rest", "total")
    print(f"{'':26}" + "".join(f"{column:>10}" for column in (*columns, "outside")))
    for case, shape in CASES.items():
        batch = step_of(*shape)
        steps: dict[str, list[Counter[str]]] = {name: [] for name in arms}
        for _ in range(args.rounds):
            for name, arm in arms.items():
                steps[name].append(arm.step(batch))
        for name, taken in steps.items():
            middle = sorted(taken, key=lambda parts: parts["total"])[len(taken) // 2]
            cells = "".join(f"{middle[column]:10.2f}" for column in columns)
            outside = (middle["plan"] + middle["rest"]) / middle["total"]
            of_it = f"{outside:10.1%}" if middle["replay"] or not arms[name].is_recorded else ""
            print(f"{case:17}{name:9}{cells}{of_it}", flush=True)


if __name__ == "__main__":
    main()
