"""A model folder with no model in it: config, header and zeros, made without torch."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from engine.checkpoint.checkpoint import expected_shapes
from engine.checkpoint.model_config import ModelConfig
from tests.tiny_tokenizers import byte_level

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make_model(folder: Path, **changes: object) -> Path:
    """Write a checkpoint that can be opened, with changes to CONFIG; returns its weights' file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (folder / "tokenizer.json").write_text(byte_level().to_str())
    template = {"chat_template": "{% if tools %}<tool_call>{{ tools }}{% endif %}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    header, offset = {}, 0
    for name, shape in expected_shapes(ModelConfig.from_folder(folder)):
        end = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    weights = folder / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(offset))
    return weights
