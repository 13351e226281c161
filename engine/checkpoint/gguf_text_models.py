"""Translate a GGUF file of a model of texts into config.json's keys, and its tensors' names.

Invariant: an architecture that is not in the table is refused by name, and a file without a part
of its model by that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.checkpoint.gguf import GgufModel
from engine.checkpoint.gguf_models import SHAPE_KEYS
from engine.checkpoint.tensor_info import TensorInfo
from engine.checkpoint.text_families import HeadStep, TextFamily
from engine.errors import CheckpointError

_ARCHITECTURES = ("bert", "nomic-bert", "qwen3", "gemma-embedding")
_BERT_BY_TOKENIZER = {"bert": "Bert", "gpt2": "Roberta", "t5": "XLMRoberta"}
"""BERT's kinds have one architecture in the format, and each its own tokenizer."""
_KEYS = SHAPE_KEYS | {
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
}
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
_SCORES = 4
"""The `pooling_type` of models that make scores; some of them do not say it."""
_SCORE = "cls.output.weight"
_DENSE = {"gemma-embedding": ("dense_2", "dense_3")}
"""Products behind the pooling, which converters leave out unless they are told."""
_ANSWERS = ["yes", "no"]
_OUTER = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "emb_ln": "token_embd_norm",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
    "dense_2": "dense_2",
    "dense_3": "dense_3",
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
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""A layer's tensors, of all families: no name of one means another thing elsewhere."""
_AFTER_ATTENTION = "post_attention_layernorm"
"""A norm: in some families of attention's result, in others before the next part."""


def makes_scores(model: GgufModel) -> bool:
    """Say whether a file has the head of a model of scores."""
    return _SCORE in model.tensors or _pooling_type(model) == _SCORES


def text_keys(model: GgufModel) -> dict[str, Any]:
    """Translate the metadata to config.json's keys.

    Raises:
        CheckpointError: its architecture is not served, or it lacks a part.
    """
    arch = _arch(model)
    if arch not in _ARCHITECTURES:
        needed = f"one of {', '.join(_ARCHITECTURES)} makes vectors or scores"
        raise model.bad("general.architecture", needed)
    keys: dict[str, Any] = {"architectures": [_architecture(model, arch)]}
    for key, suffix in _KEYS.items():
        value = model.metadata.get(f"{arch}.{suffix}")
        if value is not None:  # a float32 as it was meant: 1e-12
            keys[key] = float(f"{value:.7g}") if isinstance(value, float) else value
    if (scaling := model.metadata.get(f"{arch}.rope.scaling.type")) not in (None, "none"):
        keys["rope_scaling"] = {"type": scaling}
    tables = {"vocab_size": "token_embd.weight", "type_vocab_size": "token_types.weight"}
    for key, name in tables.items():
        keys[key] = model.tensors[name].shape[0] if name in model.tensors else 0
    if arch == "gemma-embedding":
        keys |= {"use_bidirectional_attention": True, "query_pre_attn_scalar": keys.get("head_dim")}
    return keys


def _architecture(model: GgufModel, arch: str) -> str:
    """Name the architecture as config.json does."""
    is_classifier = makes_scores(model)
    if arch == "bert":
        tokenizer = model.text("tokenizer.ggml.model") or ""
        if tokenizer not in _BERT_BY_TOKENIZER:
            known = ", ".join(_BERT_BY_TOKENIZER)
            raise model.bad("tokenizer.ggml.model", f"one of {known} belongs to BERT's kinds")
        kind = _BERT_BY_TOKENIZER[tokenizer]
        if is_classifier and kind == "Bert":
            raise _incomplete(model, "the pooler of BERT's scores is not in such files")
        return f"{kind}ForSequenceClassification" if is_classifier else f"{kind}Model"
    if arch == "qwen3":
        labels = model.metadata.get("qwen3.classifier.output_labels")
        if is_classifier and (_SCORE not in model.tensors or labels not in (None, _ANSWERS)):
            raise model.bad("qwen3.classifier.output_labels", "a head of yes and no is served")
        return "Qwen3ForCausalLM" if is_classifier else "Qwen3Model"
    if is_classifier:
        raise _incomplete(model, f"{arch} makes no scores")
    for name in _DENSE.get(arch, ()):
        if f"{name}.weight" not in model.tensors:
            raise _incomplete(model, f"its dense layer {name} was left out")
    return "NomicBertModel" if arch == "nomic-bert" else "Gemma3TextModel"


def _incomplete(model: GgufModel, what: str) -> CheckpointError:
    hint = "serve the folder that the file was made of"
    return CheckpointError(what, where=str(model.path), hint=hint)


def as_stored(family: TextFamily) -> TextFamily:
    """Return a family as the format has it: without a place for padding, and with whole norms."""
    norm = "rms" if family.norm == "rms_from_1" else family.norm
    return replace(family, counts_from_padding=False, norm=norm)


def pooling_of(model: GgufModel) -> tuple[str, ...]:
    """Read how vectors are pooled; empty: the file does not say."""
    number = _pooling_type(model)
    if number and number not in (*_POOLINGS, _SCORES):
        needed = "0 to 4: none, mean, first token, last token, score"
        raise model.bad(f"{_arch(model)}.pooling_type", needed)
    return (_POOLINGS[number],) if number in _POOLINGS else ()


def head_of(model: GgufModel) -> tuple[HeadStep, ...]:
    """List the products behind the pooling."""
    return tuple(map(HeadStep, _DENSE.get(_arch(model), ())))


def named(model: GgufModel, family: TextFamily, name: str) -> TensorInfo | None:
    """Find a tensor by the family's name for it; None: it is absent."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith(family.layer):
        number, _, part = stem.removeprefix(family.layer).partition(".")
        if part == _AFTER_ATTENTION:
            is_result = family.attention_norms.after == part
            own = "post_attention_norm" if is_result else "ffn_norm"
        else:
            own = _PARTS[part]
        return model.tensors.get(f"blk.{number}.{own}.{kind}")
    if stem == "lm_head" and _SCORE in model.tensors:
        return model.tensors[_SCORE]
    return model.tensors.get(f"{_OUTER[stem]}.{kind}")


def _arch(model: GgufModel) -> str:
    return model.text("general.architecture") or ""


def _pooling_type(model: GgufModel) -> int:
    return model.integer(f"{_arch(model)}.pooling_type") or 0
