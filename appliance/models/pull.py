"""A model from the hub into its cache: only what serving needs, resumed, checked.

`python -m appliance.models.pull NAME` does it in a process of its own and says so in lines of JSON:
the daemon starts that, and keeps neither the library nor the connections.
Owns: the order: what says what the model is, whether it can be served, whether there is room, then
the weights.
Invariant: a branch is known by its name only when all of its files are there.
Never: imports torch.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance.models import cache, hub
from appliance.models.hub import RemoteFile, Repository, small_files, weight_files
from appliance.models.names import HubName, a_model
from engine.errors import ConfigError, PenstockError
from engine.folder.model_config import ModelConfig
from engine.units import size_text

NUM_THREADS = 4
REPORT_S = 0.2
ROOM_BYTES = 64 << 20
"""That stay free on the disk."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pull is."""

    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    """Since it began, without what was there already."""

    @property
    def left_s(self) -> float | None:
        """How long it will take at this rate; None before anything has come."""
        left = self.total_bytes - self.done_bytes
        return left / self.bytes_per_s if self.bytes_per_s > 0 else None


OnProgress = Callable[[Progress], None]


def pull(name: HubName, root: Path, on_progress: OnProgress) -> Path:
    """Bring a model into the cache; returns its folder.

    Args:
        name: which.
        root: the cache.
        on_progress: told a few times a second, from other threads, one at a time.

    Raises:
        HubError: the hub does not give it, or gave wrong bytes.
        CheckpointError: it is no model that could be served.
        ConfigError: the disk is too small.
    """
    repository = hub.look_up(name)
    folder = cache.repository_folder(root, name.repository) / "snapshots" / repository.commit
    weights = weight_files(repository)
    few = small_files(repository) if name.file is None else []
    _check_room(root, repository, [*few, *weights])
    if few:
        _fetch_all(repository, few, root, lambda progress: None)
        ModelConfig.from_folder(folder)  # before gigabytes come that nobody can serve
        if cache.INDEX in {file.path for file in few}:
            weights = weight_files(repository, cache.weight_names(folder))
    _fetch_all(repository, weights, root, on_progress)
    hub.note_revision(repository, root)
    return folder


def _check_room(root: Path, repository: Repository, files: Sequence[RemoteFile]) -> None:
    needed = sum(hub.left_bytes(repository, file, root) for file in files)
    there = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed + ROOM_BYTES > free:
        raise ConfigError(
            f"{size_text(needed)} are to come, and {size_text(free)} are free in {there}",
            where=str(repository.name),
            hint="penstock models rm makes room; HF_HOME puts the cache on another disk",
        )


def _fetch_all(
    repository: Repository, files: Sequence[RemoteFile], root: Path, on_progress: OnProgress
) -> None:
    """All of the files, a few at a time, the largest first; the first failure ends the others."""
    total = sum(file.size_bytes for file in files)
    left = sum(hub.left_bytes(repository, file, root) for file in files)
    meter = _Meter(total - left, total, on_progress)
    meter.report()
    largest_first = sorted(files, key=lambda file: -file.size_bytes)
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pull") as pool:
        try:
            fetching = [
                pool.submit(hub.fetch, repository, file, root, meter.add) for file in largest_first
            ]
            done, _ = wait(fetching, return_when=FIRST_EXCEPTION)
            for each in done:
                each.result()
        finally:
            meter.stop()  # where one has failed, or a signal has come
            pool.shutdown(cancel_futures=True)
    meter.report()


class _Stopped(Exception):
    """Another file has failed."""


class _Meter:
    """Counts bytes of several threads, and says so now and then."""

    def __init__(self, done_bytes: int, total_bytes: int, on_progress: OnProgress) -> None:
        self._done_bytes, self._total_bytes = done_bytes, total_bytes
        self._new_bytes = 0
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._is_stopped = False
        self._since_s = self._said_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """So many more have come; fewer than none where a server has begun again."""
        with self._lock:
            if self._is_stopped:
                raise _Stopped
            self._new_bytes += num_bytes
            now_s = time.monotonic()
            if now_s - self._said_s >= REPORT_S:
                self._said_s = now_s
                self._say(now_s)

    def report(self) -> None:
        """Say where it stands."""
        self._say(time.monotonic())

    def stop(self) -> None:
        """End whoever still adds."""
        with self._lock:
            self._is_stopped = True

    def _say(self, now_s: float) -> None:
        rate = self._new_bytes / max(now_s - self._since_s, 1e-3)
        done = self._done_bytes + self._new_bytes
        self._on_progress(Progress(done, self._total_bytes, max(rate, 0.0)))


def main(argument: str) -> int:
    """Pull, and say so in lines of JSON on stdout: progress, then the folder or an error."""

    def say(content: dict[str, object]) -> None:
        sys.stdout.write(json.dumps(content) + "\n")
        sys.stdout.flush()

    name = a_model(argument)
    assert isinstance(name, HubName), "folders are there already"
    try:
        folder = pull(name, cache.hub_cache(os.environ), lambda each: say(asdict(each)))
    except PenstockError as error:
        words = {"what": error.what, "where": error.where, "hint": error.hint}
        say({"error": words, "exit_code": error.exit_code})
        return 1
    except OSError as error:
        words = {"what": f"cannot write: {error.strerror or error}", "where": str(name), "hint": ""}
        say({"error": words, "exit_code": PenstockError.exit_code})
        return 1
    say({"folder": str(folder)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
