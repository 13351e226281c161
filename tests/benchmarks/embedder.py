"""Make an embedding model of random values in a published model's shape, and texts for it."""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path

from tests.text_checkpoints import add_modules, make_text_checkpoint
from tests.wordpiece_tokenizer import CLS, PAD, SEP, vocabulary, write_wordpiece

SHAPES = {"minilm": 6, "bge-small": 12}
"""Layers; both are BERT of 12 heads and a size of 384."""
LONGEST = 2048
"""The published models have 512 positions."""
_VOCABULARY = 30522
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
WORDS = ["".join(each) for each in itertools.product(_SYLLABLES, repeat=3)]
WORDS = WORDS[: _VOCABULARY - len(vocabulary(()))]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which model: a folder, or what one is made of."""
    parser.add_argument("--embedder", type=Path, metavar="FOLDER", help="made where none is")
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")


def embedder(options: argparse.Namespace, scratch: Path) -> Path:
    """The folder that was named, or one in `scratch`; made if it is not there."""
    folder: Path = options.embedder or scratch / options.shape
    if not (folder / "config.json").exists():
        make_text_checkpoint(
            folder, "bert", dtype=options.dtype, vocab_size=_VOCABULARY, hidden_size=384,
            intermediate_size=1536, num_hidden_layers=SHAPES[options.shape],
            num_attention_heads=12, max_position_embeddings=LONGEST, initializer_range=0.05,
            pad_token_id=PAD, bos_token_id=CLS, eos_token_id=SEP,
        )  # fmt: skip
        add_modules(folder, max_seq_length=LONGEST)
        write_wordpiece(folder, WORDS)
    return folder.resolve()


def texts(count: int, num_tokens: int, draw: random.Random) -> list[str]:
    """Texts of words that are a token each, between the two special tokens."""
    return [" ".join(draw.choices(WORDS, k=num_tokens - 2)) for _ in range(count)]
