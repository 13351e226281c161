"""Create and check API keys; the file holds names, roles and hashes.

Invariant: keys are 256 random bits. They cannot be guessed by trial, so one round of SHA-256 hides
them as well as a slow hash would, and checking is cheap.
Never: shows a key twice, or quotes the file in an error.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from appliance.daemon.requests.request import Role
from engine.errors import ConfigError, UsageError
from engine.system.own_files import open_own_target

_KEYS_FILE = "`penstock keys add NAME --file FILE` makes one"
KEY_PREFIX = "penstock-"
KEY_BYTES = 32
MAX_FILE_BYTES = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_ROLES = {role.name.lower(): role for role in Role}
_WRITABLE = 0o022
"""Others could add keys to such a file, even of this user's own group."""
_FORMAT = "a line is NAME ROLE sha256:HEX; `penstock keys add NAME --file FILE` adds one"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One line of the key file: a hash, its name and its role."""

    name: str
    role: Role
    digest: bytes


def new_key(name: str, role: str = "user") -> tuple[str, str]:
    """Make a fresh key, to be shown once, and its line for the file.

    Raises:
        UsageError: the name or the role is invalid.
    """
    if not _NAME.fullmatch(name):
        what = f"{name!r} is no name of a key"
        raise UsageError(what, where="NAME", hint="give 1 to 64 letters, digits, '.', '_' or '-'")
    if role not in _ROLES:
        hint = f"give one of {', '.join(_ROLES)}"
        raise UsageError(f"{role!r} is no role", where="--role", hint=hint)
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return key, f"{name} {role} sha256:{key_digest(key).hex()}"


def add_key(path: Path, name: str, role: str = "user") -> str:
    """Append a fresh key's line to a file, and return the key.

    A new file is readable only by its owner.

    Raises:
        ConfigError: the file cannot be read or written, or has a key of this name already.
        UsageError: as new_key().
    """
    key, line = new_key(name, role)
    try:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        fd = open_own_target(path, flags, denied=_WRITABLE)
        with open(fd, "rb+", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if any(each.name == name for each in read_keys(path)):
                hint = "choose another name, or delete its line first"
                raise ConfigError(f"there is a key named {name!r}", where=str(path), hint=hint)
            before = file.read()
            start = b"" if not before or before.endswith(b"\n") else b"\n"
            added = start + line.encode() + b"\n"
            if file.write(added) < len(added):  # part of a line would make the whole file invalid
                file.truncate(len(before))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise ConfigError(f"cannot add a key: {error.strerror}", where=str(path)) from error
    return key


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read the keys of a file; `#` begins a comment.

    Raises:
        ConfigError: it cannot be read, others may write to it, or a line is wrong.
    """
    try:
        with open(open_own_target(path, os.O_RDONLY, denied=_WRITABLE), "rb") as file:
            text = file.read(MAX_FILE_BYTES + 1).decode()
    except OSError as error:
        hints = {
            errno.EACCES: f"for the unit: chown root:penstock {path}; chmod 640 {path}",
            errno.EPERM: f"root or you must own it, alone: chown, or chmod go-w {error.filename}",
        }
        raise ConfigError(
            f"cannot read the keys: {error.strerror}",
            where=str(path),
            hint=hints.get(error.errno or 0, _KEYS_FILE),
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError("not UTF-8", where=str(path), hint=_FORMAT) from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"larger than {MAX_FILE_BYTES} bytes", where=str(path), hint=_FORMAT)
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        try:
            key = _parse(fields)
            if key.name in keys:
                raise ValueError(f"the name {key.name!r} is taken by a line above")
        except ValueError as error:
            raise ConfigError(str(error), where=f"{path}:{number}", hint=_FORMAT) from error
        keys[key.name] = key
    return tuple(keys.values())


def find_key(keys: Iterable[ApiKey], digest: bytes) -> ApiKey | None:
    """Look up a key by the digest of what was given, in constant time."""
    found = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def _parse(fields: list[str]) -> ApiKey:
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields in place of 3")
    name, role, hashed = fields
    match = _HASH.fullmatch(hashed)
    if not _NAME.fullmatch(name):
        raise ValueError("the name may have 64 letters, digits, '.', '_' or '-'")
    if role not in _ROLES:
        raise ValueError(f"the role is not one of {', '.join(_ROLES)}")
    if match is None:
        raise ValueError("the hash is not sha256: and 64 lower-case hex digits")
    return ApiKey(name, _ROLES[role], bytes.fromhex(match[1]))


def key_digest(key: str) -> bytes:
    """Return what is kept of a key, in files and in journals."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
