"""Tokenizers of the two kinds that checkpoints have, small and made on the spot."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_WITH_CALLS = (
    "{# <think> #}{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "[{{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(*marks: str) -> Tokenizer:
    """Like Llama 3 and Qwen: 256 bytes, some merges, special tokens at the end, `marks` last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o")]
    merges += [("ð", "Ł"), ("ðŁ", "ĺ"), ("Ġ", "Ġ"), ("1", "2")]
    vocab = {token: index for index, token in enumerate(alphabet)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?[^\s\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A",
        pair="<|begin|> $A $B",
        special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))],
    )
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """Like Llama 2 and Mistral: spaces as U+2581, bytes as fallback, one leading space stripped."""
    words = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "▁w"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in [*words, "\ufffd"]:
        vocab[word] = len(vocab)
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "w")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: object) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json, as a checkpoint has them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def lowering_charsmap() -> bytes:
    """Replacements as SentencePiece compiles them: A becomes a, all else stays.

    A trie of units that name a byte and where the next one is, and the texts that it leads to.
    """
    label, leaf = ord("A"), 0x80
    units = [0] * 256
    units[label] = label | 1 << 8 | (leaf ^ label) << 10
    return struct.pack("<I256I", 4 * len(units), *units) + b"a\0"


def xlm_roberta_like() -> Tokenizer:
    """Like XLM-RoBERTa: the likeliest pieces, of which some characters have none."""
    pieces = {"▁": -3.0, "▁hello": -4.0, "▁wor": -5.0, "ld": -6.0, "▁a": -4.5, "xy": -20.0}
    pieces |= {"yz": -2.0, "z": -15.0} | dict.fromkeys("abcdefhlorw1,.", -9.5)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    listed = [*((token, 0.0) for token in special), *pieces.items(), ("<mask>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(listed, 3, False))
    tokenizer.normalizer = normalizers.Precompiled(lowering_charsmap())
    space = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), space])
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (*special, "<mask>")])
    return tokenizer
