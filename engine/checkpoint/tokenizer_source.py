"""Choose which of a model folder's files the tokenizer is made from.

The order is docs/models.md's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

WHOLE, TEKKEN, SENTENCE_PIECE = "tokenizer.json", "tekken.json", "tokenizer.model"
VOCABULARY, MERGES, WORDS = "vocab.json", "merges.txt", "vocab.txt"
SOURCES: tuple[tuple[str, ...], ...] = (
    (WHOLE,), (TEKKEN,), (SENTENCE_PIECE,), (VOCABULARY, MERGES), (WORDS,),
)  # fmt: skip
"""Files that a tokenizer is made from, the preferred ones first."""
_OTHERS = frozenset(
    {"tokenizer.model.v3", VOCABULARY, MERGES, "spiece.model", "sentencepiece.bpe.model"}
    | {"spm.model", "tiktoken.model"}
)
"""What only other programs read, or what is a half."""


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """The files that a tokenizer is made from."""

    files: tuple[str, ...]
    others: tuple[str, ...] = ()
    """Tokenizers that are not used, by the first file of each."""

    @property
    def name(self) -> str:
        """The file with the vocabulary, which names the kind."""
        return self.files[0]


def tokenizer_source(names: Iterable[str], wanted: str = "") -> TokenizerSource | None:
    """Choose among the files of a folder; None: no tokenizer is there.

    Args:
        wanted: the file to take; empty: the preferred one.
    """
    there = frozenset(names)
    found = [files for files in SOURCES if there.issuperset(files) and wanted in ("", files[0])]
    if not found:
        return None
    return TokenizerSource(found[0], tuple(files[0] for files in found[1:]))


def tokenizer_hint(names: Iterable[str]) -> str:
    """Say what makes tokenizer.json out of the tokenizer's files that there are."""
    found = sorted(name for name in names if name in _OTHERS or name.endswith(".tiktoken"))
    if not found:
        return "save the checkpoint with a fast tokenizer (transformers: save_pretrained)"
    return f"make it of {', '.join(found)} (transformers: AutoTokenizer, save_pretrained)"
