"""Derive the key and model identity that KV block hashes are made with.

KV blocks of equal tokens are equal only if weights, rotation, dtype and layout are equal. Weights
are identified by their bytes, not by a file's name or time. Reading them all takes a while, so a
file's digest is remembered while its size, its times and a sample of its bytes stay unchanged.
Invariant: only this user can read the key; a changed file is read again.
Never: reveals the key.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
from _thread import start_new_thread
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue

from appliance.configuration.settings import ServeConfig
from appliance.fleet.boot import BootPlan
from appliance.fleet.file_identity import about_file
from engine.checkpoint.model_file import MAX_WHOLE_BYTES, open_model_file
from engine.errors import CheckpointError, ConfigError
from engine.kernels.cpu import load_kernels
from engine.scheduler.cache.hashes import KEY_BYTES, PrefixHasher
from engine.system.own_files import open_own

log = logging.getLogger("penstock")

KEY_NAME = "prefix.key"
WEIGHTS_NAME = "weights.json"
LAYOUT_VERSION = 3
"""Increase it whenever the bytes of a block change their meaning or rounding."""
MAX_REMEMBERED = 1024
_PART_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_NUM_THREADS = 2


def make_hasher(config: ServeConfig, plan: BootPlan) -> PrefixHasher | None:
    """Make the hasher of the model's prefix cache; None: the cache is off.

    Raises:
        ConfigError: the state folder or the weights cannot be read.
    """
    if not config.prefix_cache:
        return None
    try:
        key, extra = load_key(config.state_dir), identity(plan, config.state_dir)
    except OSError as error:
        raise ConfigError(
            f"no prefix cache can be kept: {error.strerror}",
            where=str(error.filename or config.state_dir),
            hint="it needs the state folder and the weights; or set --prefix-cache off",
        ) from error
    isolates_users = config.cache_isolation == "user"
    return PrefixHasher(key, extra, plan.placement.block_size, isolates_users=isolates_users)


def identity(plan: BootPlan, state_dir: Path) -> bytes:
    """Digest everything besides tokens that the bytes of a block depend on.

    Raises:
        OSError: the weights cannot be read.
    """
    checkpoint, placement = plan.checkpoint, plan.placement
    ropes = {rope for rope in checkpoint.config.ropes if rope is not None}
    parts = {
        "layout": LAYOUT_VERSION,
        "kernels": _kernels_level(),
        "config": _config_sum(checkpoint.folder),
        "weights": fingerprint(checkpoint.files, state_dir),
        "dtype": plan.dtype,
        "quantised_at_start": plan.weights,
        "rope": sorted(rope.factors(placement.max_model_len) for rope in ropes),
        "block_size": placement.block_size,
    }
    if placement.windows.num_each:
        parts["groups"] = 1 + placement.windows.num_each
    if plan.product_variants:
        parts["products"] = plan.product_variants
    if plan.kv_dtype != "auto":
        parts["kv_dtype"] = plan.kv_dtype
    return json.dumps(parts, sort_keys=True).encode()


def _kernels_level() -> str:
    """Name what computes on this CPU: each level of the kernels rounds in its own way."""
    try:
        return load_kernels()[1]
    except ImportError:
        return "torch"


def _config_sum(folder: Path) -> str:
    """Digest the model's config.json; a GGUF file includes its configuration."""
    path = folder / "config.json"
    if not folder.is_dir():
        return ""
    with open_model_file(path) as file:
        return blake2b(file.read(MAX_WHOLE_BYTES)).hexdigest()


def load_key(state_dir: Path) -> bytes:
    """Read the daemon's key; make a new one if it is missing or others can read it.

    Raises:
        OSError: it cannot be written.
    """
    path = state_dir / KEY_NAME
    try:
        with open(open_own(path, os.O_RDONLY, denied=0o077), "rb") as file:
            key = file.read(KEY_BYTES + 1)
        if len(key) == KEY_BYTES:
            return key
    except FileNotFoundError:
        return _make_key(path)
    except OSError as error:
        log.warning("%s cannot be used: %s", path, error.strerror)
    log.warning("%s is not a key readable only by this user; a new one is made", path)
    path.unlink()
    return _make_key(path)


def _make_key(path: Path) -> bytes:
    key = secrets.token_bytes(KEY_BYTES)
    _write_private(path, key)
    return key


def fingerprint(files: Iterable[Path], state_dir: Path) -> str:
    """Digest the bytes of weight files in the order of their names.

    Raises:
        OSError: a file cannot be read.
    """
    path = state_dir / WEIGHTS_NAME
    known = _remembered(path)
    digests, is_new = [], False
    for file in sorted(files, key=lambda each: each.name):
        key, about = os.path.realpath(file), about_file(file)
        found = known.pop(key, None)
        if found is None or found[:-1] != about:
            found, is_new = [*about, _digest(file, int(about[2]))], True
        known[key] = found  # to the end: what is used last is forgotten last
        digests.append(found[-1])
    if is_new:
        newest = dict(list(known.items())[-MAX_REMEMBERED:])
        _write_private(path, json.dumps(newest, indent=1).encode())
    return blake2b(json.dumps(digests).encode(), digest_size=32).hexdigest()


def _digest(file: Path, num_bytes: int) -> str:
    """Digest a file as the digest of its parts' digests, reading several parts at once.

    The calling thread keeps using CPU time while parts are read, which shows that the disk
    responds.
    """
    is_reading = SimpleQueue[None]()

    def digest_part(start: int, tell: Callable[[None], None]) -> bytes:
        digest = blake2b(digest_size=32)
        with open_model_file(file) as opened:
            opened.seek(start)
            left = min(_PART_BYTES, num_bytes - start)
            while left and (data := opened.read(min(left, _READ_BYTES))):
                digest.update(data)
                left -= len(data)
                tell(None)
        return digest.digest()

    starts = range(0, num_bytes, _PART_BYTES)
    parts, left = [b""] * len(starts), iter(enumerate(starts))
    errors: list[OSError | CheckpointError] = []

    def digest_parts(tell: Callable[[None], None]) -> None:
        try:
            for index, start in left:
                parts[index] = digest_part(start, tell)
        except (OSError, CheckpointError) as error:
            errors.append(error)
        except MemoryError:
            errors.append(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(file)))
        finally:
            tell(None)

    # no pool: its threads would hold up the daemon's exit where the disk hangs;
    # no Thread: its start would wait without end for one that has no memory to begin
    for _ in range(_NUM_THREADS - 1):
        with contextlib.suppress(RuntimeError, MemoryError):  # the parts are read without it
            start_new_thread(digest_parts, (is_reading.put,))
    digest_parts(lambda _: None)
    while not (errors or all(parts)):
        is_reading.get()
    if errors:
        raise errors[0]
    whole = blake2b(num_bytes.to_bytes(8, "little"), digest_size=32)
    for part in parts:
        whole.update(part)
    return whole.hexdigest()


def _remembered(path: Path) -> dict[str, list[object]]:
    """Read the remembered digests; empty if the file cannot be read."""
    try:
        with open(open_own(path, os.O_RDONLY), "rb") as file:
            known = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {
        name: found
        for name, found in known.items()
        if isinstance(found, list) and len(found) == 7 and isinstance(found[-1], str)
    }


def _write_private(path: Path, data: bytes) -> None:
    """Write a file that only this user can read, whole or not at all."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with open(open_own(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
