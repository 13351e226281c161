"""Have a model's files read by the process for strangers' texts.

A file may claim anything, so that only a process with limits reads it; what it answers is what
reading the file here would have given.
Owns: how that crosses between the processes.
Never: reads a model's file.
"""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.families import FAMILY_BY_ARCHITECTURE
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.text_model import Kind, TextModelConfig
from engine.errors import CheckpointError, Overran
from engine.text.reading import READER
from engine.text.tokenizer import Tokenizer, TokenizerFiles


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a folder's or GGUF file's configuration and headers, as Checkpoint.open() does.

    Raises:
        CheckpointError: it cannot be served, or reading it takes too much.
        Unavailable: nothing reads it.
    """
    found: Checkpoint = _CHECKPOINT.decode(_read("checkpoint", path))
    return replace(found, config=_with_family(found.config))


def read_config(path: Path) -> ModelConfig:
    """Read a model's configuration, as ModelConfig.from_folder() does.

    Raises:
        CheckpointError: as read_checkpoint().
    """
    return _with_family(_CONFIG.decode(_read("config", path)))


def read_text_model(path: Path, kind: Kind, *, has_weights: bool = True) -> TextModelConfig:
    """Read a model of whole texts, as TextModelConfig.from_folder() does.

    Raises:
        CheckpointError: as read_checkpoint().
    """
    return _TEXT_MODEL.decode(_read("text_model", path, kind, has_weights))


def read_any_config(path: Path) -> ModelConfig | TextModelConfig:
    """Read the configuration of a chat model, or of one of texts, whose weights may be absent.

    Raises:
        CheckpointError: it is neither; why it is no chat model.
    """
    try:
        return read_config(path)
    except CheckpointError:
        texts = find_text_model(path, has_weights=False)
        if texts is None:
            raise
        return texts


def find_text_model(path: Path, *, has_weights: bool = True) -> TextModelConfig | None:
    """Read a folder as a model of whole texts of either kind; None: it is not one."""
    for kind in get_args(Kind):
        with suppress(CheckpointError):
            return read_text_model(path, kind, has_weights=has_weights)
    return None


def read_weight_names(path: Path) -> list[str]:
    """List the files that a folder's index of weights names.

    Raises:
        CheckpointError: as read_checkpoint().
    """
    return _NAMES.decode(_read("weight_names", path))


def read_tokenizer(path: Path, *, has_chats: bool = True, source: str = "") -> Tokenizer:
    """Read a model's tokenizer and chat template, and build here what was built there on trial.

    Args:
        has_chats: False: leave the template out.
        source: the file of a folder that it is made from; empty: the preferred one.

    Raises:
        CheckpointError: as read_checkpoint().
    """
    return Tokenizer.from_files(_FILES.decode(_read("tokenizer", path, has_chats, source)))


def _read(job: str, path: Path, *args: Any) -> bytes:
    try:
        return READER.read_model(job, os.fsencode(path), *args)
    except Overran as error:
        hint = "is it as its maker published it?"
        raise CheckpointError(error.what, where=str(path), hint=hint) from error


def _with_family(config: ModelConfig) -> ModelConfig:
    return replace(config, family=FAMILY_BY_ARCHITECTURE[config.family.architecture])


def written(
    read: Checkpoint | ModelConfig | TextModelConfig | TokenizerFiles | list[str],
) -> bytes:
    """Write what was read of a model's files."""
    return _ENCODER.encode(read)


def _as_bytes(value: Any) -> bytes:
    if not isinstance(value, Path):
        raise NotImplementedError(type(value))
    return os.fsencode(value)


@functools.lru_cache(maxsize=1024)
def _path(name: bytes) -> Path:
    """Make each path once, of thousands of tensors."""
    return Path(os.fsdecode(name))


def _as_path(kind: type, value: Any) -> Path:
    if kind is not Path:
        raise NotImplementedError(kind)
    return _path(value)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_as_bytes)
_CHECKPOINT = msgspec.msgpack.Decoder(Checkpoint, dec_hook=_as_path)
_CONFIG = msgspec.msgpack.Decoder(ModelConfig, dec_hook=_as_path)
_TEXT_MODEL = msgspec.msgpack.Decoder(TextModelConfig, dec_hook=_as_path)
_NAMES = msgspec.msgpack.Decoder(list[str])
_FILES = msgspec.msgpack.Decoder(TokenizerFiles, dec_hook=_as_path)
