"""Feed changed bytes to every parser of foreign bytes: only documented errors may come out.

python -m tests.fuzz --inputs 1000000              # all parsers, by their shares
python -m tests.fuzz gguf --inputs 50000 --seed 7
python -m tests.fuzz gguf --seed 7 --at 4711       # one input again, as a failure says
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import time
import traceback
import tracemalloc
from pathlib import Path
from random import Random

from engine.errors import CheckpointError
from tests.fuzz.mutations import mutated
from tests.fuzz.parsers import PARSERS, Parser

MAX_INPUT_S = 5.0
"""CPU seconds for one input."""
MAX_GROWTH_BYTES = 300 << 20
MAX_BYTES_PER_BYTE = 64
"""Of memory that Python allocates for a byte of a model's file, beyond what any file takes."""
ANY_FILE_BYTES = 16 << 20
MAX_SHOWN = 5


def feed(parser: Parser, data: bytes) -> str | None:
    """Parse one input; say what was wrong, beginning with where it was."""
    began_s = time.thread_time()
    if parser.is_measured:
        tracemalloc.start()
    try:
        parser.parse(data)
    except parser.may_raise as error:
        if is_unforeseen(error):
            return f"unforeseen: {error}"
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        shown = "".join(traceback.format_exception(error)[-6:])
        return f"{type(error).__name__} at {place.filename}:{place.lineno}\n{shown}"
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if peak_bytes > ANY_FILE_BYTES + MAX_BYTES_PER_BYTE * max(len(data), parser.file_bytes):
        return f"too large\n{len(data)} bytes took {peak_bytes >> 20} MiB"
    took_s = time.thread_time() - began_s
    return f"too slow\ntook {took_s:.1f} s of CPU" if took_s > MAX_INPUT_S else None


def is_unforeseen(error: BaseException) -> bool:
    """Say whether nothing but reading_model() has made sense of what was raised."""
    cause = error.__cause__
    return isinstance(error, CheckpointError) and f" {type(cause).__name__}: " in error.what


def input_at(name: str, parser: Parser, seed: int, at: int) -> bytes:
    """Make one input again."""
    rng = Random(f"{name} {seed} {at}")
    return mutated(rng, parser.examples, parser.fragments, is_json=parser.is_json)


def fuzz(name: str, parser: Parser, seed: int, count: int) -> int:
    """Feed so many inputs; print what was wrong; return how many failed."""
    for example in parser.examples:  # valid ones, or what is made of them would show little
        parser.parse(example)
    began_s, before = time.monotonic(), _peak_bytes()
    wrong: dict[str, int] = {}
    slowest_s = 0.0
    for at in range(count):
        data = input_at(name, parser, seed, at)
        began_input_s = time.thread_time()
        problem = feed(parser, data)
        slowest_s = max(slowest_s, time.thread_time() - began_input_s)
        if problem is not None:
            where = problem.partition("\n")[0]
            wrong[where] = wrong.get(where, 0) + 1
            if wrong[where] == 1 and len(wrong) <= MAX_SHOWN:
                print(
                    f"python -m tests.fuzz {name!r} --seed {seed} --at {at}\n{problem}", flush=True
                )
    if (grown := _peak_bytes() - before) > MAX_GROWTH_BYTES:
        wrong["memory"] = 1
        print(f"{name}: grew by {grown >> 20} MiB")
    took_s, num_wrong = time.monotonic() - began_s, sum(wrong.values())
    print(
        f"{name:24} {count:8} inputs {num_wrong:6} wrong, {took_s:7.1f} s, "
        f"slowest {1e3 * slowest_s:6.0f} ms, grew {grown >> 20} MiB",
        flush=True,
    )
    return num_wrong


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parser", nargs="*", choices=[[], *PARSERS], metavar="parser")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at", type=int)
    parser.add_argument("--save", type=Path, help="write the input of --at here")
    options = parser.parse_args()
    logging.disable()
    chosen = {name: PARSERS[name]() for name in options.parser or PARSERS}
    if options.at is not None:
        ((name, only),) = chosen.items()
        data = input_at(name, only, options.seed, options.at)
        if options.save:
            options.save.write_bytes(data)
        print(f"{len(data)} bytes: {data[:400]!r}")
        problem = feed(only, data)
        print(problem or "nothing wrong")
        return int(problem is not None)
    shares = sum(one.share for one in chosen.values())
    counts = {name: -(-options.inputs * one.share // shares) for name, one in chosen.items()}
    num_wrong = sum(fuzz(name, chosen[name], options.seed, count) for name, count in counts.items())
    print(f"{sum(counts.values())} inputs, {num_wrong} wrong")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
