"""Describe a model from its files: format, family, size, parameters, layers.

Invariant: every value is read from the files; nothing is guessed from a name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reading checkpoints costs every verb of the CLI 20 ms
    from engine.checkpoint.checkpoint import Checkpoint
    from engine.checkpoint.text_model import TextModelConfig


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of a model from its files."""

    file_format: str
    """`safetensors` or `gguf`."""
    family: str
    """The `model_type` of config.json; of a model of texts, its architecture."""
    size_bytes: int
    """Bytes of its weights, as stored."""
    num_parameters: int
    dtype: str
    """The stored dtype of most of its weights: `bfloat16`, `q4_k`."""
    context_length: int
    """Tokens that it was trained for; fewer may be served."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    modified: int
    """Unix seconds of its oldest file of weights."""


def facts_of(checkpoint: Checkpoint) -> ModelFacts:
    """Take the facts from a checkpoint that was opened."""
    config = checkpoint.config
    return ModelFacts(
        file_format="gguf" if checkpoint.folder.is_file() else "safetensors",
        family=config.family.name,
        size_bytes=checkpoint.num_bytes,
        num_parameters=checkpoint.num_parameters,
        dtype=checkpoint.stored_dtype,
        context_length=config.max_position_embeddings,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        vocab_size=config.vocab_size,
        modified=int(min(file.stat().st_mtime for file in checkpoint.files)),
    )


def facts_of_texts(config: TextModelConfig) -> ModelFacts:
    """Take the facts from the configuration of a model of whole texts."""
    tensors = config.tensors.values()
    return ModelFacts(
        file_format="gguf" if config.folder.is_file() else "safetensors",
        family=config.family.architectures[0].removesuffix("Model").lower(),
        size_bytes=config.num_bytes,
        num_parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        dtype=config.stored_dtype,
        context_length=config.max_tokens,
        hidden_size=config.hidden_size,
        num_layers=len(config.layers),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        vocab_size=config.vocab_size,
        modified=int(min(file.stat().st_mtime for file in {tensor.file for tensor in tensors})),
    )
