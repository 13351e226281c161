"""Download what serving needs of a model from a hub, and verify it.

The door to huggingface_hub. `python -m appliance.hub.download NAME` pulls in its own process and
reports in lines of JSON. HF_ENDPOINT, HF_TOKEN (or the token of `hf auth login`), HF_HUB_CACHE and
HF_HUB_OFFLINE are the library's own, and apply here. The library restarts a broken download from
zero in a new process, and compares only sizes. So bytes are fetched here, by ranges, and their
checksums compared.

Invariant: a complete blob has the checksum in its name; no listed path leads outside the cache, and
no file grows beyond its listed size.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
    logging,
)

from appliance.hub import cache
from appliance.hub.hub_http import RemoteFile, Repository, small_files, weight_files
from appliance.hub.names import HubName, a_model
from engine.checkpoint.model_file import open_model_file
from engine.errors import ConfigError, PenstockError
from engine.system.own_files import existing_part, open_file, why_not_writable
from engine.text.read_models import read_any_config
from engine.units import size_text

logging.set_verbosity(logging.ERROR)  # what goes wrong is said here

MAX_FRUITLESS_TRIES = 5
"""Maximum tries in a row without a single byte."""
RETRY_PAUSE_S = 0.5
_READ_BYTES = 1 << 20
_SUM = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
"""Matches git's hash of a commit or a file, or SHA-256."""


class HubError(PenstockError):
    """The hub did not give what was asked for."""


class HubUnreachable(HubError):
    """The hub does not answer, or the machine is set offline."""

    exit_code = 3


class HubRefuses(HubError):
    """The hub denies this user the file."""

    exit_code = 4


class NotOnHub(HubError):
    """The model does not exist or is private: a hub does not say which."""

    exit_code = 5


def look_up(name: HubName) -> Repository:
    """List the hub's files of a model.

    Raises:
        HubError: it cannot be reached, does not have it, or does not give it to this user.
    """
    try:
        with _in_words(name):
            info = HfApi().model_info(
                name.repository,
                revision=name.revision,
                files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
    except HFValidationError as error:
        raise HubError(str(error), where=str(name)) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = "the hub's reply is no list of a model's files"
        raise HubError(what, where=str(name), hint=_endpoint_hint()) from error
    if not _is_sum(info.sha):
        raise HubError("the hub names no commit", where=str(name), hint=_endpoint_hint())
    files = {}
    for each in info.siblings or ():
        sha256 = None if each.lfs is None else each.lfs.sha256
        size = each.size if each.size is not None else (each.lfs.size if each.lfs else 0)
        file = RemoteFile(each.rfilename, size, sha256, each.blob_id or "")
        if not _is_file(file):
            what = f"the hub lists an invalid file name: {str(file.path)[:200]!r}"
            raise HubError(what, where=str(name), hint=_endpoint_hint())
        files[file.path] = file
    return Repository(name, str(info.sha), files)


def _is_sum(given: Any) -> bool:
    return isinstance(given, str) and _SUM.fullmatch(given) is not None


def _is_file(file: RemoteFile) -> bool:
    """Say whether path and checksum are safe file names: they stay inside the cache."""
    if not isinstance(file.path, str) or not isinstance(file.size_bytes, int):
        return False
    path = PurePosixPath(file.path)
    is_inside = str(path) == file.path and not path.is_absolute() and ".." not in path.parts
    return is_inside and file.path.isprintable() and file.size_bytes >= 0 and _is_sum(file.blob)


def fetch(
    repository: Repository, file: RemoteFile, root: Path, on_bytes: Callable[[int], None]
) -> Path:
    """Bring one file into the cache, resuming an earlier try.

    Args:
        on_bytes: takes the number of new bytes, without the resumed ones. It may raise.

    Returns:
        The file in its snapshot, a link to its bytes.

    Raises:
        HubError: it is unavailable, or arrived with another checksum than listed.
    """
    folder = cache.repository_folder(root, repository.name.repository)
    blob = folder / "blobs" / file.blob
    blob.parent.mkdir(parents=True, exist_ok=True)
    if not blob.exists():
        with open(_partial(blob), "ab", opener=_open_partial) as part:
            fcntl.flock(part, fcntl.LOCK_EX)  # wait for another process that pulls it
            if not blob.exists():
                _fetch_into(part, repository, file, on_bytes)
                os.replace(part.name, blob)
    pointer = folder / "snapshots" / repository.commit / file.path
    if not pointer.exists():
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.unlink(missing_ok=True)
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    return pointer


def left_bytes(repository: Repository, file: RemoteFile, root: Path) -> int:
    """Return the bytes still to download."""
    blob = cache.repository_folder(root, repository.name.repository) / "blobs" / file.blob
    if blob.exists():
        return 0
    part = _partial(blob)
    return file.size_bytes - (min(part.stat().st_size, file.size_bytes) if part.exists() else 0)


def note_revision(repository: Repository, root: Path) -> None:
    """Record the branch's or tag's commit, once all its files are here."""
    name = repository.name
    if name.revision == repository.commit:
        return
    ref = cache.repository_folder(root, name.repository) / "refs" / name.revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    written = ref.with_name(f"{ref.name}.{os.getpid()}")
    written.write_text(repository.commit)
    os.replace(written, ref)


def _partial(blob: Path) -> Path:
    return blob.with_name(blob.name + cache.INCOMPLETE)


def _open_partial(path: str, flags: int) -> int:
    """Open a file that another program could have put there, which may be a pipe."""
    return open_file(Path(path), flags, 0o666)


def _fetch_into(
    part: IO[bytes], repository: Repository, file: RemoteFile, on_bytes: Callable[[int], None]
) -> None:
    """Append the missing bytes, and compare the checksum of the whole file."""
    if part.tell() > file.size_bytes:
        part.truncate(0)
    num_fruitless = 0
    while (start := part.tell()) < file.size_bytes:
        try:
            with _in_words(repository.name):
                _read_on(part, repository, file, on_bytes)
        except _Cut as cut:
            num_fruitless = 0 if part.tell() > start else num_fruitless + 1
            if num_fruitless >= MAX_FRUITLESS_TRIES:
                about = f"{file.path}: {cut}; {part.tell()} of {file.size_bytes} bytes are kept"
                hint = "try again: the download resumes"
                raise HubError(about, where=str(repository.name), hint=hint) from cut
            time.sleep(RETRY_PAUSE_S * (num_fruitless + 1))
    part.flush()
    found = _sum(Path(part.name), file)
    if found != file.blob:
        part.truncate(0)
        what = f"{file.path} came with the sum {found[:12]}..., not {file.blob[:12]}..."
        hint = "it was deleted; try again, and check proxies and mirrors"
        raise HubError(what, where=str(repository.name), hint=hint)
    os.fsync(part.fileno())


class _Cut(Exception):
    """The connection ended before the file did."""


def _read_on(
    part: IO[bytes], repository: Repository, file: RemoteFile, on_bytes: Callable[[int], None]
) -> None:
    """Request the rest of a file; redirects are followed without the token."""
    name, start = repository.name, part.tell()
    url = hf_hub_url(name.repository, file.path, revision=repository.commit)
    headers = {**build_hf_headers(), "accept-encoding": "identity"}
    if start:
        headers["range"] = f"bytes={start}-"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    try:
        with http_stream_backoff(
            "GET", url, headers=headers, timeout=timeout, retry_on_exceptions=()
        ) as reply:
            hf_raise_for_status(reply)
            if start and reply.status_code != httpx2.codes.PARTIAL_CONTENT:
                part.truncate(0)  # a server without ranges begins again
                on_bytes(-start)
            for chunk in reply.iter_bytes():  # as they come: a cut loses none
                part.write(chunk)
                on_bytes(len(chunk))
                if part.tell() > file.size_bytes:
                    break  # it may have no end, and the disk has one
    except HfHubHTTPError as error:
        is_beyond = error.response.status_code == httpx2.codes.REQUESTED_RANGE_NOT_SATISFIABLE
        if not is_beyond:
            raise
        part.truncate(0)
        on_bytes(-start)
        raise _Cut("the hub's file is shorter than it says") from error
    except httpx2.TransportError as error:
        if not part.tell() and isinstance(error, httpx2.ConnectError):
            raise  # no server answers
        raise _Cut(f"the connection ended ({error})") from error
    if part.tell() < file.size_bytes:
        raise _Cut("the connection was cut off")
    if part.tell() > file.size_bytes:
        on_bytes(-part.tell())
        part.truncate(0)
        raise _Cut("more bytes arrived than the hub lists")


def _sum(path: Path, file: RemoteFile) -> str:
    """Return the SHA-256 of a large file, git's hash of a small one."""
    if file.sha256 is not None:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)
    with open_model_file(path) as whole:
        while piece := whole.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _in_words(name: HubName) -> Iterator[None]:
    """Turn the library's errors into ours."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise _unreachable(name, "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE to pull") from error
    except GatedRepoError as error:
        raise HubRefuses(
            "it is gated: request access from its owner", where=str(name),
            hint=f"ask on {constants.ENDPOINT}/{name.repository}, then {_token_hint()}",
        ) from error  # fmt: skip
    except RevisionNotFoundError as error:
        what = f"the repository has no revision {name.revision}"
        raise NotOnHub(what, where=str(name), hint="leave it out for its main branch") from error
    except RepositoryNotFoundError as error:
        raise NotOnHub(
            f"{constants.ENDPOINT} has no such model, or not for you",
            where=str(name), hint=f"check the name; for a private model  {_token_hint()}",
        ) from error  # fmt: skip
    except HfHubHTTPError as error:
        status = error.response.status_code
        what = f"the hub answers {status}"
        if status in (401, 403):
            raise HubRefuses(what, where=str(name), hint=_token_hint()) from error
        raise HubError(what, where=str(name), hint="try again later") from error
    except (httpx2.TooManyRedirects, httpx2.DecodingError) as error:
        about = f"the hub's reply cannot be read ({error or type(error).__name__})"
        raise HubError(about, where=str(name), hint=_endpoint_hint()) from error
    except httpx2.TransportError as error:
        about = f"{constants.ENDPOINT} cannot be reached ({error or type(error).__name__})"
        raise _unreachable(name, about) from error


def _unreachable(name: HubName, about: str, remedy: str = "") -> HubUnreachable:
    there = cache.in_words(cache.hub_cache(os.environ))
    hint = f"{remedy}; else {there}" if remedy else there
    return HubUnreachable(f"not on this machine, and {about}", where=str(name), hint=hint)


def _token_hint() -> str:
    if get_token() is None:
        return "set HF_TOKEN, or run hf auth login"
    return "check that your token (HF_TOKEN or hf auth login) may read it"


def _endpoint_hint() -> str:
    return f"is {constants.ENDPOINT} a hub? HF_ENDPOINT says where it is"


NUM_THREADS = 4
REPORT_S = 0.2
ROOM_BYTES = 64 << 20
"""Bytes of the disk that stay free."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a pull."""

    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    """The rate since it began, without resumed bytes."""

    @property
    def left_s(self) -> float | None:
        """The remaining seconds at this rate; None: nothing has come yet."""
        left = self.total_bytes - self.done_bytes
        return left / self.bytes_per_s if self.bytes_per_s > 0 else None


OnProgress = Callable[[Progress], None]


def pull(name: HubName, root: Path, on_progress: OnProgress) -> Path:
    """Bring a model into the cache; return its folder.

    Args:
        on_progress: called a few times a second, from other threads, one at a time.

    Raises:
        HubError: the hub does not give it, or gave wrong bytes.
        CheckpointError: the model cannot be served.
        ConfigError: the disk is too small, or no file can be made there.
    """
    repository = look_up(name)
    folder = cache.repository_folder(root, name.repository) / "snapshots" / repository.commit
    weights = weight_files(repository)
    few = small_files(repository) if name.file is None else []
    _check_room(root, repository, [*few, *weights])
    if few:
        _fetch_all(repository, few, root, lambda progress: None)
        read_any_config(folder)  # before downloading gigabytes of an unsupported model
        if cache.INDEX in {file.path for file in few}:
            weights = weight_files(repository, cache.weight_names(folder))
    _fetch_all(repository, weights, root, on_progress)
    note_revision(repository, root)
    return folder


def _check_room(root: Path, repository: Repository, files: Sequence[RemoteFile]) -> None:
    needed = sum(left_bytes(repository, file, root) for file in files)
    there = existing_part(root)
    if why := why_not_writable(there):
        hint = "name another folder for models by HF_HOME"
        raise ConfigError(f"no file can be made in {there}: {why}", where=str(root), hint=hint)
    free = shutil.disk_usage(there).free
    if needed + ROOM_BYTES > free:
        raise ConfigError(
            f"{size_text(needed)} are needed, but {size_text(free)} are free in {there}",
            where=str(repository.name),
            hint="penstock rm makes room; HF_HOME puts the cache on another disk",
        )


def _fetch_all(
    repository: Repository, files: Sequence[RemoteFile], root: Path, on_progress: OnProgress
) -> None:
    """Fetch files in parallel, the largest first; the first failure ends the others."""
    total = sum(file.size_bytes for file in files)
    left = sum(left_bytes(repository, file, root) for file in files)
    meter = _Meter(total - left, total, on_progress)
    meter.report()
    largest_first = sorted(files, key=lambda file: -file.size_bytes)
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pull") as pool:
        try:
            fetching = [
                pool.submit(fetch, repository, file, root, meter.add) for file in largest_first
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
    """Count the bytes of several threads, and report them now and then."""

    def __init__(self, done_bytes: int, total_bytes: int, on_progress: OnProgress) -> None:
        self._done_bytes, self._total_bytes = done_bytes, total_bytes
        self._new_bytes = 0
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._is_stopped = False
        self._since_s = self._said_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count new bytes; negative where a server has restarted the file."""
        with self._lock:
            if self._is_stopped:
                raise _Stopped
            self._new_bytes += num_bytes
            now_s = time.monotonic()
            if now_s - self._said_s >= REPORT_S:
                self._said_s = now_s
                self._say(now_s)

    def report(self) -> None:
        self._say(time.monotonic())

    def stop(self) -> None:
        """Make every later add() raise."""
        with self._lock:
            self._is_stopped = True

    def _say(self, now_s: float) -> None:
        rate = self._new_bytes / max(now_s - self._since_s, 1e-3)
        done = self._done_bytes + self._new_bytes
        self._on_progress(Progress(done, self._total_bytes, max(rate, 0.0)))


def main(argument: str) -> int:
    """Pull a model, and print lines of JSON: progress, then the folder or an error."""

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
