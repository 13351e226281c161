"""Tiny checkpoints of models of whole texts, made at test time, and what transformers computes.

Sentence-transformers is not installed: its files are written by hand, and its pooling is done here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.checkpoints import use_one_thread

VOCABULARY = 300
CLS, SEP = 2, 3
EMBEDDING_FAMILIES = (
    "bert",
    "roberta",
    "xlm-roberta",
    "modernbert",
    "nomic_bert",
    "camembert",
    "gte",
    "qwen3",
    "gemma3_text",
)
RERANK_FAMILIES = (
    "bert",
    "roberta",
    "xlm-roberta",
    "modernbert",
    "camembert",
    "gte",
    "qwen3",
    "qwen3_classifier",
)
_TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": 1,
    "bos_token_id": CLS,
    "eos_token_id": SEP,
}
_DECODER = {"num_key_value_heads": 2, "head_dim": 32}
_OWN: dict[str, dict[str, Any]] = {
    "xlm-roberta": {"type_vocab_size": 1, "max_position_embeddings": 514},
    "modernbert": {
        "local_attention": 16,
        "norm_bias": True,
        "cls_token_id": CLS,
        "sep_token_id": SEP,
        "classifier_pooling": "mean",
    },
    "qwen3": _DECODER,
    "gemma3_text": {
        **_DECODER,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 24,
        "use_bidirectional_attention": True,
    },
}


def _auto_class(kind: str, family: str) -> Any:
    import transformers

    if kind == "embedding":
        return transformers.AutoModel
    if family == "qwen3":
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForSequenceClassification


def make_text_checkpoint(
    folder: Path, family: str, kind: str = "embedding", dtype: str = "float32", **changes: Any
) -> Path:
    """Write config and weights of random values; returns the folder."""
    import torch
    from transformers import AutoConfig

    use_one_thread()
    base = family.removesuffix("_classifier")
    keys = _TINY | _OWN.get(base, {}) | changes
    if kind == "rerank" and family != "qwen3":
        keys["num_labels"] = 1
    config = AutoConfig.for_model(base, **keys)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _auto_class(kind, family).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.3)
                elif parameter.dim() == 1:
                    parameter.normal_(mean=0.0 if base == "gemma3_text" else 1.0, std=0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def add_modules(
    folder: Path,
    *,
    pooling: dict[str, Any] | None = None,
    dense: tuple[int, ...] = (),
    has_tanh: bool = True,
    is_normalized: bool = True,
    **limits: Any,
) -> None:
    """Write sentence-transformers' files beside a checkpoint.

    Args:
        pooling: of the pooling's config.json; None: the mean.
        dense: outputs of products behind it.
        has_tanh: each has a bias, and tanh after it.
        limits: of sentence_bert_config.json.
    """
    import torch
    from safetensors.torch import save_file

    of = "sentence_transformers.models"
    modules = [("", f"{of}.Transformer"), ("1_Pooling", f"{of}.Pooling")]
    modules += [(f"{i}_Dense", f"{of}.Dense") for i in range(2, 2 + len(dense))]
    modules += [("9_Normalize", f"{of}.Normalize")] * is_normalized
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(modules)
    ]
    _write(folder / "modules.json", listed)
    _write(folder / "1_Pooling/config.json", pooling or {"pooling_mode_mean_tokens": True})
    _write(folder / "sentence_bert_config.json", limits)
    prompts = {"query": "query: ", "document": ""}
    _write(folder / "config_sentence_transformers.json", {"prompts": prompts})
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    for i, rows in enumerate(dense, 2):
        keys = {"in_features": size, "out_features": rows, "bias": has_tanh}
        name = "activation.Tanh" if has_tanh else "linear.Identity"
        activation = {"activation_function": f"torch.nn.modules.{name}"}
        _write(folder / f"{i}_Dense/config.json", keys | activation)
        generator = torch.Generator().manual_seed(i)
        tensors = {
            "linear.weight": torch.randn(rows, size, generator=generator) * 0.1,
            "linear.bias": torch.randn(rows, generator=generator) * 0.1,
        }
        if not has_tanh:
            del tensors["linear.bias"]
        save_file(tensors, folder / f"{i}_Dense/model.safetensors")
        size = rows


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def load_text_oracle(folder: Path, family: str, kind: str = "embedding") -> Any:
    """The checkpoint as transformers loads it, in float32."""
    import torch

    use_one_thread()
    model = _auto_class(kind, family).from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def hidden_states(oracle: Any, ids: list[int]) -> Any:
    """The last layer's states of one text, [num_tokens, hidden_size]."""
    import torch

    with torch.no_grad():
        return oracle(torch.tensor([ids])).last_hidden_state[0]


def pooled(family: str, states: Any) -> Any:
    """What a family makes of the states of a text, where no file says how."""
    match family:
        case "qwen3":
            return states[-1]
        case "gte":
            return states[0]
    return states.mean(0)


def score(oracle: Any, ids: list[int], *, compared: tuple[int, int] | None = None) -> float:
    """The score of one pair of texts before the sigmoid."""
    import torch

    inputs = {"input_ids": torch.tensor([ids])}
    if oracle.config.model_type == "bert":
        first = ids.index(SEP) + 1
        inputs["token_type_ids"] = torch.tensor([[0] * first + [1] * (len(ids) - first)])
    with torch.no_grad():
        logits = oracle(**inputs).logits[0]
    if compared is None:
        return float(logits[0])
    yes, no = compared
    return float(logits[-1, yes] - logits[-1, no])
