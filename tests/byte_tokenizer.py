"""A tokenizer of 300 tokens for tiny checkpoints; its chat template renders tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = r"""{% if tools %}
<|im_start|>system
You may call these functions:
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools>
To call one, write its name and its arguments:
<tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|im_end|>
{% endif %}
{% for message in messages %}
<|im_start|>{{ message.role }}
{% if message.role == 'tool' %}
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}
{{ message.content }}
{%- for call in message.tool_calls %}
{{ '\n' if message.content or not loop.first }}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
"""ChatML, with tools and calls in the manner of Hermes."""
# Frequent pairs of English, so that a token is not always one byte; Ġ is the leading space.
_MERGES = """Ġ t|h e|i n|Ġ a|r e|Ġt he|o n|e r|Ġ s|a t|Ġ w|n d|Ġ o|i s|o u|Ġ c|Ġ f|o r|e n|in g
Ġ b|e d|a n|Ġ m|Ġ p|e s|a l|Ġ d|Ġ i|a r|i t|Ġo f|Ġa nd|a s|Ġt o|Ġi n|l e|s t|Ġ h|o m"""


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: 300 tokens, every text is encodable."""
    _write_json(folder / "tokenizer.json", _tokenizer())
    begin, end = SPECIAL_TOKENS[:2]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def vocabulary() -> dict[str, int]:
    """Token strings to ids: 256 bytes, the merges, then the special tokens."""
    merged = [left + right for left, right in _merges()]
    return {token: i for i, token in enumerate([*_byte_symbols(), *merged, *SPECIAL_TOKENS])}


def _merges() -> list[tuple[str, str]]:
    pairs = (pair.split(" ") for line in _MERGES.splitlines() for pair in line.split("|"))
    return [(left, right) for left, right in pairs]


def _byte_symbols() -> Iterator[str]:
    """The printable stand-in of each byte that byte-level BPE uses, in the order of the bytes."""
    unprintable = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield chr(byte)
        else:
            yield chr(256 + unprintable)
            unprintable += 1


def head(special: Mapping[str, int]) -> dict[str, Any]:
    """How a tokenizer.json begins that has these special tokens."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": token, **plain, "special": True} for token, i in special.items()]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}


def _tokenizer() -> dict[str, Any]:
    ids = vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        **head({token: ids[token] for token in SPECIAL_TOKENS}),
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for token, i in ids.items() if token not in SPECIAL_TOKENS},
            "merges": [f"{left} {right}" for left, right in _merges()],
        },
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
