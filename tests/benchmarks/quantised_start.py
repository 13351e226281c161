"""From `penstock serve` to the first token of a model in a file, and what its processes hold then.

usage: python -m tests.benchmarks.quantised_start MODEL [MODEL ...] [--rounds 3]

Models take turns, each round a new daemon, files in the page cache. Memory is proportional (PSS):
what workers share, as the arena of the weights, is counted once. Prints medians and extremes.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from tests.daemons import Daemon

TEXT = "The capital of France is"


def pss_bytes(pid: int) -> tuple[str, int]:
    """A process's name, and its share of memory."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    fields = next(line for line in lines if line.startswith("Pss:")).split()
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return "worker" if b"engine.workers" in words else "other", int(fields[1]) << 10


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    text = "".join(
        path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children") if path.exists()
    )
    return [pid, *(each for child in text.split() for each in family(int(child)))]


def run(model: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        started_s = time.monotonic()
        daemon = Daemon(Path(name), "--dtype", "bfloat16", model=model).wait_ready()
        ready_s = time.monotonic() - started_s
        next(event for event in daemon.stream(TEXT, max_tokens=2) if event["choices"])
        first_s = time.monotonic() - started_s
        daemon.complete(TEXT, max_tokens=32)
        held = [pss_bytes(pid) for pid in family(daemon.process.pid)]
        assert daemon.stop() == 0
    return {
        "ready, s": ready_s,
        "first token, s": first_s,
        "workers, MB": sum(size for what, size in held if what == "worker") / 1e6,
        "all processes, MB": sum(size for _, size in held) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[Path, list[dict[str, float]]] = {model: [] for model in options.models}
    for _ in range(options.rounds):
        for model in options.models:
            found[model].append(run(model))
    for model, rounds in found.items():
        files = [model] if model.is_file() else model.glob("*.safetensors")
        print(f"{model.name}: {sum(file.stat().st_size for file in files) / 1e6:.0f} MB of weights")
        for what in rounds[0]:
            figures = [each[what] for each in rounds]
            middle = statistics.median(figures)
            print(f"  {what}: {middle:.2f} ({min(figures):.2f}-{max(figures):.2f})", flush=True)


if __name__ == "__main__":
    main()
