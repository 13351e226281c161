"""The embedded default model: a small Llama with random weights, in Hugging Face format.

It says nothing sensible; it lets a fresh install answer, and be watched and measured, without a
download. Its bytes are the same on every machine.
Owns: what `serve` without `--model` serves until a trained starter exists.
Called by: boot at first start, as `python -m engine.model.starter FOLDER`.
Invariant: the folder appears complete or not at all.
Never: uses the network, overwrites a folder.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.checkpoint import expected_shapes
from engine.config import ModelConfig

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
_SEED = 20240607
_SCALE = 2.0**-18  # of 16-bit integers: uniform in [-1/8, 1/8)


def make_starter(folder: Path) -> None:
    """Write the model unless the folder exists; safe to call from several processes at once."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        temporary.chmod(0o755)
        write_tokenizer(temporary)
        _write_json(temporary / "config.json", _config())
        _write_json(temporary / "generation_config.json", _generation_config())
        config = ModelConfig.from_folder(temporary)
        save_file(_weights(config), temporary / "model.safetensors", {"format": "pt"})
        os.rename(temporary, folder)
    except OSError:
        if not folder.exists():  # otherwise another process was faster, with the same bytes
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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


def _tokenizer() -> dict[str, Any]:
    ids = vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": ids[token], "content": token, **plain, "special": True}
            for token in SPECIAL_TOKENS
        ],
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


def _config() -> dict[str, Any]:
    ids = vocabulary()
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(ids),
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": ids[SPECIAL_TOKENS[0]],
        "eos_token_id": ids[SPECIAL_TOKENS[1]],
    }


def _generation_config() -> dict[str, Any]:
    begin, end, _, turn_end = (vocabulary()[token] for token in SPECIAL_TOKENS)
    return {"bos_token_id": begin, "eos_token_id": [end, turn_end]}


def _weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Random weights, with channel 0 kept constant so that readable tokens can be preferred."""
    generator = random.Random(_SEED)
    weights = {}
    for name, shape in expected_shapes(config):
        if len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        rows, columns = shape
        noise = torch.frombuffer(
            bytearray(generator.randbytes(2 * rows * columns)), dtype=torch.int16
        )
        weights[name] = (noise.float() * _SCALE).view(shape).to(torch.bfloat16)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name][0] = 0  # nothing is ever added to channel 0
    weights["model.embed_tokens.weight"] *= 8
    weights["model.embed_tokens.weight"][:, 0] = 4
    readable = torch.tensor([_is_readable(token) for token in vocabulary()])
    weights["lm_head.weight"][:, 0] = torch.where(readable, 1.0, -8.0)
    return weights


def _is_readable(token: str) -> bool:
    text = token.replace("Ġ", " ")
    return text.isascii() and text.isprintable() and token not in SPECIAL_TOKENS


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    """Write the starter model into the folder given on the command line."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m engine.model.starter FOLDER\n")
        return 2
    make_starter(Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
