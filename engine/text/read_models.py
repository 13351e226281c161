"""Have a model's files read by the process for strangers' texts.

A file may claim anything, so that only a process with limits reads it; what it answers is what
reading the file here would have given.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgspec

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.text_model import Kind, TextModelConfig
from engine.checkpoint.written_models import as_path, checkpoint_of, config_of
from engine.errors import CheckpointError, Overran, TooSlow, Unavailable
from engine.text.encoder import Encoder, channel
from engine.text.reading import READER
from engine.text.tokenizer import Tokenizer, TokenizerFiles
from engine.text.tokenizer_expressions import with_expressions


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a folder's or GGUF file's configuration and headers, as Checkpoint.open() does.

    Raises:
        CheckpointError: it cannot be served, or reading it takes too much.
        Unavailable: nothing reads it.
    """
    return checkpoint_of(_read("checkpoint", path))


def read_config(path: Path) -> ModelConfig:
    """Read a model's configuration, as ModelConfig.from_folder() does.

    Raises:
        CheckpointError: as read_checkpoint().
    """
    return config_of(_read("config", path))


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

    The process in which it was tried tokenizes from then on.

    Args:
        has_chats: False: leave the template out.
        source: the file of a folder that it is made from; empty: the preferred one.

    Raises:
        CheckpointError: as read_checkpoint().
    """
    ours, theirs = channel()
    try:
        with theirs:
            files = _tokenizer_files(path, theirs, has_chats, source)
    except BaseException:
        ours.close()
        raise
    digest = files.digest()

    def start_again(kept: socket.socket) -> None:
        try:
            is_same = _tokenizer_files(path, kept, has_chats, source).digest() == digest
        except CheckpointError as error:
            raise _not_there(error.what) from error
        if not is_same:
            raise _not_there("its files have changed since")

    return Tokenizer.from_files(files, Encoder(ours, start_again))


def _tokenizer_files(path: Path, kept: socket.socket, *args: Any) -> TokenizerFiles:
    try:
        return _FILES.decode(_read("tokenizer", path, *args, kept=kept))
    except CheckpointError as error:
        if not isinstance(error.__cause__, TooSlow):
            raise
        expressions = _read("expressions", path, *args).decode()
        what = with_expressions(error.__cause__, expressions)
        raise CheckpointError(what, where=error.where, hint=error.hint) from error


def _not_there(why: str) -> Unavailable:
    return Unavailable(f"the model's tokenizer cannot be read again: {why}", code="busy")


def _read(job: str, path: Path, *args: Any, kept: socket.socket | None = None) -> bytes:
    try:
        return READER.read_model(job, os.fsencode(path), *args, kept=kept)
    except Overran as error:
        hint = "is it as its maker published it?"
        raise CheckpointError(error.what, where=str(path), hint=hint) from error


_TEXT_MODEL = msgspec.msgpack.Decoder(TextModelConfig, dec_hook=as_path)
_NAMES = msgspec.msgpack.Decoder(list[str])
_FILES = msgspec.msgpack.Decoder(TokenizerFiles, dec_hook=as_path)
