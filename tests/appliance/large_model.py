"""A checkpoint of a size that GPUs are for, and of no size on the disk: its file is a hole."""

from __future__ import annotations

import json
import math
from pathlib import Path

from engine.checkpoint.checkpoint import expected_shapes
from engine.checkpoint.model_config import ModelConfig

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def make_large(folder: Path, **changes: object) -> Path:
    """A folder that looks like Llama-3.1-8B until somebody reads its weights, which are zeros."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | changes))
    header, offset = {}, 0
    for name, shape in expected_shapes(ModelConfig.from_folder(folder)):
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return folder
