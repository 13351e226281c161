"""Translate a GGUF file of a model of vectors into config.json's keys, and its tensors' names.

Invariant: an architecture that is not in the table is refused by name.
"""

from __future__ import annotations

from typing import Any

from engine.checkpoint.gguf import GgufModel
from engine.checkpoint.gguf_models import SHAPE_KEYS
from engine.checkpoint.tensor_info import TensorInfo
from engine.checkpoint.text_families import TextFamily

_ARCHITECTURES = {"bert": "BertModel", "nomic-bert": "NomicBertModel", "qwen3": "Qwen3Model"}
"""The format's name, and config.json's."""
_KEYS = SHAPE_KEYS | {"layer_norm_eps": "attention.layer_norm_epsilon"}
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
_OUTER = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "emb_ln": "token_embd_norm",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}
_PARTS = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "mlp.fc2": "ffn_down",
    "norm2": "layer_output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""A layer's tensors, of all families: no name of one means another thing elsewhere."""


def text_keys(model: GgufModel) -> dict[str, Any]:
    """Translate the metadata to config.json's keys.

    Raises:
        CheckpointError: its architecture is not served.
    """
    arch = model.text("general.architecture") or ""
    if arch not in _ARCHITECTURES:
        needed = f"one of {', '.join(_ARCHITECTURES)} makes vectors"
        raise model.bad("general.architecture", needed)
    keys: dict[str, Any] = {"architectures": [_ARCHITECTURES[arch]]}
    for key, suffix in _KEYS.items():
        value = model.metadata.get(f"{arch}.{suffix}")
        if value is not None:  # a float32 as it was meant: 1e-12
            keys[key] = float(f"{value:.7g}") if isinstance(value, float) else value
    if (scaling := model.metadata.get(f"{arch}.rope.scaling.type")) not in (None, "none"):
        keys["rope_scaling"] = {"type": scaling}
    tables = {"vocab_size": "token_embd.weight", "type_vocab_size": "token_types.weight"}
    for key, name in tables.items():
        keys[key] = model.tensors[name].shape[0] if name in model.tensors else 0
    return keys


def pooling_of(model: GgufModel) -> tuple[str, ...]:
    """Read how vectors are pooled; empty: the file does not say."""
    key = f"{model.text('general.architecture')}.pooling_type"
    number = model.integer(key) or 0
    if number and number not in _POOLINGS:
        raise model.bad(key, "0 to 3: none, mean, first and last token")
    return (_POOLINGS[number],) if number else ()


def named(model: GgufModel, family: TextFamily, name: str) -> TensorInfo | None:
    """Find a tensor by the family's name for it; None: it is absent."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith(family.layer):
        number, _, part = stem.removeprefix(family.layer).partition(".")
        return model.tensors.get(f"blk.{number}.{_PARTS[part]}.{kind}")
    return model.tensors.get(f"{_OUTER[stem]}.{kind}")
