"""Texts for comparing tokenizers: words, digits, signs, scripts, white space, marks and odd bytes.

Invariant: a seed always gives the same texts, as files of expected ids rely on it.
"""

from __future__ import annotations

import random

_PLAIN = (
    "the of Hello world HTTPServer don't we'll I'M a b s ing tion ed x 0 1 42 2026 3.14 1234567"
)
_SCRIPTS = "naïve straße é Ω Ġ ł 中文 日本語 かな 한국어 русский עברית हिन्दी \ufb01 \u2460 \uff21"
_SIGNS = (
    "- -- ... !? /* */ == :// _ $ € # @ \\ \" ' ` < > | ▁ ▁▁ \U0001f600 \ufeff \u200b \x00 \ufffd"
)
_MARKS = "<s> </s> <unk> <0x0A> <tag> </tag> <|im_start|> [INST] ## [CLS] [MASK]"
_SPACES = (" ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "    ", "\u00a0")
PARTS = (*" ".join((_PLAIN, _SCRIPTS, _SIGNS, _MARKS)).split(" "), *_SPACES)


def random_texts(seed: int, count: int, parts: tuple[str, ...] = PARTS) -> list[str]:
    """Join up to a dozen parts, and now and then any characters at all."""
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        pieces = [parts[draw.randrange(len(parts))] for _ in range(draw.randrange(13))]
        if draw.randrange(8) == 0:
            codes = [draw.randrange(1, 0x2FFFF) for _ in range(draw.randrange(6))]
            pieces += [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
        texts.append("".join(pieces))
    return texts
