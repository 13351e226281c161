"""Write what was read of a model's files, so that another process need not read them again."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.families import FAMILY_BY_ARCHITECTURE
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError


def written(read: Any) -> bytes:
    """Write a Checkpoint, a ModelConfig, or other plain data with paths.

    Raises:
        CheckpointError: a text in it has half a character, which JSON can say and UTF-8 cannot.
    """
    try:
        return _ENCODER.encode(read)
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a text in its files is not Unicode: {error.reason}") from error


def checkpoint_of(data: bytes) -> Checkpoint:
    """Return the checkpoint that was written."""
    found: Checkpoint = _CHECKPOINT.decode(data)
    return replace(found, config=_with_family(found.config))


def memfd_of(checkpoint: Checkpoint) -> int:
    """Make a memfd with what was read of a model's files, which its workers inherit."""
    fd = os.memfd_create("penstock-headers", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(written(checkpoint))
    return fd


def checkpoint_in(fd: int) -> Checkpoint:
    """Return the checkpoint in a memfd, which other processes may read as well."""
    return checkpoint_of(os.pread(fd, os.fstat(fd).st_size, 0))


def config_of(data: bytes) -> ModelConfig:
    """Return the configuration that was written."""
    return _with_family(_CONFIG.decode(data))


def _with_family(config: ModelConfig) -> ModelConfig:
    return replace(config, family=FAMILY_BY_ARCHITECTURE[config.family.architecture])


def _as_bytes(value: Any) -> bytes:
    if not isinstance(value, Path):
        raise NotImplementedError(type(value))
    return os.fsencode(value)


@functools.lru_cache(maxsize=1024)
def _path(name: bytes) -> Path:
    """Make each path once, of thousands of tensors."""
    return Path(os.fsdecode(name))


def as_path(kind: type, value: Any) -> Path:
    """Decode a path, for a decoder of msgspec."""
    if kind is not Path:
        raise NotImplementedError(kind)
    return _path(value)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_as_bytes)
_CHECKPOINT = msgspec.msgpack.Decoder(Checkpoint, dec_hook=as_path)
_CONFIG = msgspec.msgpack.Decoder(ModelConfig, dec_hook=as_path)
