"""Run a process of a group that is not its first: load some shards, compute its part of each step.

Started as `python -P -m engine.worker.rank --link-fd N --memory-fd N --cpus 0,1`; the rest comes
with Setup, from the first process.
Invariant: never outlives the daemon, nor the first process (the closed link).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from engine.errors import NotFinite, PenstockError, WorkerUnfit
from engine.wire.messages import Failed, Setup, WeightsLoaded
from engine.worker.links import Link
from engine.worker.process import load_torch, prepare, set_name


def main() -> int:
    """Run one process; the exit code is 0 after the first has ended, 1 on failure."""
    parser = argparse.ArgumentParser(prog="python -m engine.worker.rank")
    parser.add_argument("--link-fd", type=int, required=True)
    parser.add_argument("--memory-fd", type=int, required=True)
    parser.add_argument("--cpus", required=True)
    parser.add_argument("--stacks-fd", type=int)
    options = parser.parse_args()
    prepare(options.cpus, options.stacks_fd)
    load_torch()
    link = Link(options.link_fd)
    try:
        setup = link.receive()
        assert isinstance(setup, Setup)
        assert setup.group is not None
        set_name(f"{setup.worker}+{setup.group.rank}")
        _compute(link, setup, options.memory_fd)
    except (EOFError, ConnectionError):
        return 0
    except PenstockError as error:
        is_lasting = isinstance(error, WorkerUnfit | NotFinite)
        _tell(link, Failed(error.what, error.where, error.hint, is_lasting))
        return 1
    except Exception as error:  # noqa: BLE001  # the process border: the first must hear of it
        traceback.print_exc()
        _tell(link, Failed(f"{type(error).__name__}: {error}", "worker", "see the traceback"))
        return 1


def _tell(link: Link, failed: Failed) -> None:
    with contextlib.suppress(OSError):  # the first process has ended meanwhile
        link.send(failed)


def _compute(link: Link, setup: Setup, memory_fd: int) -> NoReturn:
    from engine.checkpoint.written_models import checkpoint_in
    from engine.text.read_models import read_checkpoint
    from engine.worker.affinity import use_cores
    from engine.worker.group import follow, load_part
    from engine.worker.kv_pool import map_pool
    from engine.worker.model.transformer import Transformer

    use_cores(setup.cpus)
    if setup.checkpoint_fd is None:
        checkpoint = read_checkpoint(Path(setup.model_dir))
    else:
        checkpoint = checkpoint_in(setup.checkpoint_fd)
    part = load_part(checkpoint, setup, memory_fd, link.progress)
    config = checkpoint.config.in_groups() if setup.has_window_blocks else checkpoint.config
    pool = map_pool(setup.pool, config, setup.block_size, setup.pool_dtype)
    shape = setup.dtype, setup.max_model_len, setup.block_size
    how = (part.variants, setup.attention_variant)
    transformer = Transformer(config, part.weights, *shape, *how, shards=part.shards)
    link.send(WeightsLoaded())
    part.prove()
    follow(link, transformer, part.shards, pool)


if __name__ == "__main__":
    # nothing is left to tidy up, and taking torch apart politely costs a second or two
    code = main()
    sys.stderr.flush()
    os._exit(code)
