"""Describe folders of models that make vectors or scores of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from appliance.hub.facts import facts_of_texts
from appliance.hub.fits import MemoryNeed
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.text_model import TextModelConfig
from engine.errors import CheckpointError
from engine.text.read_models import find_text_model, read_checkpoint, read_tokenizer
from engine.text.tokenizer_fit import misfits

MODULES = "modules.json"
"""What only models of vectors have; some of them are chat models by their configuration."""
_KINDS = {"embedding": "--embedding-model", "rerank": "--rerank-model"}


def read_any_model(folder: Path) -> Checkpoint | TextModelConfig:
    """Read a chat model, or one of texts.

    Raises:
        CheckpointError: it is neither; why it is no chat model.
    """
    texts = find_text_model(folder) if (folder / MODULES).exists() else None
    if texts is not None:
        return texts
    try:
        return read_checkpoint(folder)
    except CheckpointError:
        texts = find_text_model(folder)
        if texts is None:
            raise
        return texts


def basics(config: TextModelConfig) -> dict[str, Any]:
    """Describe it as a row of `models list`."""
    facts = facts_of_texts(config)
    return {
        "family": f"{facts.family} ({config.kind})",
        "num_parameters": facts.num_parameters,
        "dtype": facts.dtype,
        "size_bytes": facts.size_bytes,
        "max_model_len": config.max_tokens,
    }


def detail(config: TextModelConfig) -> tuple[dict[str, Any], MemoryNeed, list[str]]:
    """Describe it for `models show`; estimate the memory to serve it; say what does not fit."""
    row, tokenizer = basics(config), read_tokenizer(config.folder, has_chats=False)
    about = {
        **row,
        "serve_with": f"{_KINDS[config.kind]}, beside a chat model",
        "layers": len(config.layers),
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_dimensions": config.num_dimensions if config.kind == "embedding" else None,
        "pooling": ", ".join(config.pooling),
        "normalised": config.is_normalized,
        "prompts": ", ".join(config.prompts) or None,
        "vocabulary": config.vocab_size,
        "tokenizer_vocabulary": tokenizer.vocab_size,
    }
    need = MemoryNeed(row["num_parameters"], config.num_bytes, None, config.max_tokens)
    return about, need, misfits(tokenizer, config.vocab_size)
