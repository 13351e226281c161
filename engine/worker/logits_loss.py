"""Measure how much quantised weights or KV change a model's logits on fixed texts.

A small error of a matrix or a key says little about the output, so the output is compared: equal
tokens pass through the weights as stored and as served, or over pools of both dtypes, and the
distributions of the next token are compared, as llama.cpp does for its files.
Invariant: the serving pool is not touched.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.weights_layout import arena_layout
from engine.text.read_models import read_tokenizer
from engine.wire.messages import LogitsLoss
from engine.worker.kv_pool import TORCH_DTYPES, block_shape
from engine.worker.model.attention import StepBatch, WindowTables
from engine.worker.model.transformer import Transformer
from engine.worker.model.weight import Weight
from engine.worker.model.weights import Progress, convert_weights, layout_views, load_weights

TEXTS = (
    "The river rises in the hills above the town. It runs for ninety miles to the sea. In spring "
    "the melting snow doubles its width. The lower fields stand under water until May.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    "
    "return total / len(values)\n\n\nprint(mean([1, 2, 3]))\n",
    "Question: A train leaves at 14:20 and arrives at 17:05. How long is the journey?\nAnswer: "
    "From 14:20 to 17:05 are 2 hours and 45 minutes.",
)
"""Prose, a program, a sum: written for this purpose."""
MAX_TOKENS = 128
"""Maximum tokens of all texts together; more take longer and hardly change the result."""


@torch.inference_mode()
def weights_loss(
    served: Transformer, checkpoint: Checkpoint, dtype: str, heartbeat: Callable[[], None]
) -> LogitsLoss:
    """Compare a model quantised at start with the stored one.

    Args:
        heartbeat: called after each part of it.
    """
    weights = _as_stored(checkpoint, dtype, lambda _done, _total: heartbeat())
    stored = Transformer(checkpoint.config, weights, dtype)
    pairs = []
    for text in _texts(checkpoint):
        pairs.append((_logits(stored, text), _logits(served, text)))
        heartbeat()
    return _loss(pairs)


@torch.inference_mode()
def kv_loss(
    served: Transformer, checkpoint: Checkpoint, kv_dtype: str, heartbeat: Callable[[], None]
) -> LogitsLoss:
    """Compare a model over a pool of another dtype with one over a pool of its own.

    All texts form one, so that later tokens see earlier keys as the pool keeps them.

    Args:
        heartbeat: called after each part of it.
    """
    text = [token for each in _texts(checkpoint) for token in each]
    text = text[: checkpoint.config.max_position_embeddings]
    expected = _logits(served, text)
    heartbeat()
    return _loss([(expected, _logits(served, text, kv_dtype))])


def _texts(checkpoint: Checkpoint) -> list[list[int]]:
    tokenizer = read_tokenizer(checkpoint.folder, has_chats=False)
    vocab_size = checkpoint.config.vocab_size
    texts = [tokenizer.encode(text)[: MAX_TOKENS // len(TEXTS)] for text in TEXTS]
    # a tokenizer may know more tokens than the model has rows for
    return [[token for token in text if token < vocab_size] or [0] for text in texts]


def _loss(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> LogitsLoss:
    """Compare pairs of expected and found logits, float32 [num_tokens, vocab_size] each."""
    divergences, same = [], []
    for pair in pairs:
        expected, found = (torch.log_softmax(logits, -1) for logits in pair)
        divergences.append((expected.exp() * (expected - found)).sum(-1))
        same.append(expected.argmax(-1) == found.argmax(-1))
    kl = torch.cat(divergences)
    ratio = torch.cat(same).double().mean().item()
    return LogitsLoss(len(kl), max(kl.double().mean().item(), 0.0), ratio)


def _as_stored(checkpoint: Checkpoint, dtype: str, progress: Progress) -> dict[str, Weight]:
    """Map weights that the kernels read directly; widen others into temporary memory."""
    if checkpoint.is_mappable:
        return load_weights(checkpoint, dtype, None, None, progress)
    layout = arena_layout(checkpoint, dtype)
    views = layout_views(layout, dtype, torch.empty(layout.num_bytes, dtype=torch.uint8))
    convert_weights(checkpoint, views, progress)
    return {name: Weight.plain(view) for name, view in views.items()}


def _logits(model: Transformer, token_ids: list[int], kv_dtype: str | None = None) -> torch.Tensor:
    """Compute the logits of all tokens of one text, float32 [num_tokens, vocab_size].

    Args:
        kv_dtype: of the pool; None: the model's.
    """
    count = len(token_ids)
    dtype = kv_dtype or str(model.dtype).removeprefix("torch.")
    block_size, num_groups = -(-count // 64) * 64, model.config.kv_groups.num_groups
    shape = (num_groups, *block_shape(model.config, block_size, dtype))
    places = torch.arange(count)
    batch = StepBatch(
        torch.tensor(token_ids),
        places,
        places,
        [count],
        [count],
        [[0]],
        list(range(count)),
        windows=[WindowTables(places + n * block_size, [[n]]) for n in range(1, num_groups)],
    )
    return model.forward(batch, torch.zeros(shape, dtype=TORCH_DTYPES[dtype])).clone()
