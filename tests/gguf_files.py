"""GGUF files made from tiny checkpoints, as llama.cpp's own converter makes them.

Names and blocks come from the format's own package, which the product does not use.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "gpt_oss": "gpt-oss",
    "gemma4_text": "gemma4",
    "ministral3": "mistral3",
    "glm": "chatglm",
    "glm4": "glm4",
    "ernie4_5": "ernie4_5",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
"""By family. Only what the format can say of each can be converted."""
_ENCODERS = {
    "bert": "bert",
    "roberta": "bert",
    "xlm-roberta": "bert",
    "nomic_bert": "nomic-bert",
}
"""Families that make vectors alone."""
_GATED_DELTA = ("qwen3next", "qwen35", "qwen35moe")
_SHIFTED = ("gemma", "gemma2", "gemma3", "gemma-embedding")
_INTERLEAVED = ("llama", "smollm3", "granite", "mistral3")
_NUMBERS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "context_length": "max_position_embeddings",
    "attention.sliding_window": "sliding_window",
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_FLOATS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}


def write_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    *,
    is_early: bool = False,
    answers: tuple[int, int] | None = None,
    **metadata: Any,
) -> Path:
    """Write a checkpoint's config, weights and tokenizer as one file; returns its path.

    Args:
        folder: in Hugging Face form, of one safetensors file.
        path: of the file to write.
        kind: of matrices, by the format's name; vectors are F32.
        is_early: as the first converters of Qwen3-Next wrote it, which kept `in_proj_qkvz` whole.
        answers: token ids that the head has alone, as of Qwen3's rerankers.
        metadata: more of it, by keys with `__` for `.`; None leaves a key out.
    """
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    arch = (ARCHITECTURES | _ENCODERS)[config["model_type"]]
    if config.get("use_bidirectional_attention"):
        arch = "gemma-embedding"
    writer = gguf.GGUFWriter(path, arch)
    said = _config(config, arch) | _tokenizer(folder, config)
    if arch == "gemma4":
        said |= _gemma4_config(config)
    if arch in _GATED_DELTA:
        inner = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        said |= {f"{arch}.ssm.inner_size": inner}
    if arch == "mistral3":
        said |= _mistral3_config(config["rope_parameters"])
    said |= {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in said.items():
        _add(writer, key, value)
    stored = load_file(folder / "model.safetensors")
    tensors = {name: each.float().numpy() for name, each in stored.items()}
    if arch in _ENCODERS.values():
        tensors = _as_encoder(tensors, config)
    if arch in ("qwen3", "gemma-embedding"):  # a decoder that was saved without its head
        tensors = {
            name if name.startswith(("model.", "lm_head.")) else f"model.{name}": each
            for name, each in tensors.items()
        }
    if arch in _GATED_DELTA:
        tensors = _as_gated_delta(tensors, config, arch, is_early=is_early)
    for name in [name for name in tensors if "gate_up_proj" in name and "mlp.experts." in name]:
        _unstack(tensors, name)
    named = _named(tensors, config, arch)
    for number in (2, 3) if arch == "gemma-embedding" else ():
        dense = load_file(folder / f"{number}_Dense/model.safetensors")
        named[f"dense_{number}.weight"] = dense["linear.weight"].numpy()
    if answers is not None:
        head = named.pop("output.weight", named["token_embd.weight"])
        named["cls.output.weight"] = head[list(answers)]
    if arch == "chatglm":
        _join(named, config["num_hidden_layers"])
    for name, values in named.items():
        _add_tensor(writer, name, values, kind)
    if arch == "gemma4":
        _add_tensor(writer, "rope_freqs.weight", _gemma4_factors(config), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_encoder(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Without the model's name, its pooler and the positions of padding."""
    found = {}
    for name, values in tensors.items():
        name = name.removeprefix("bert.").removeprefix("roberta.")
        if name.startswith("embeddings.position_embeddings"):
            values = values[_num_padding(config) :]
        if name.startswith("classifier.") and config["model_type"] == "bert":
            name = name.replace("classifier.", "classifier.out_proj.")
        if not name.startswith("pooler."):
            found[name] = values
    return found


def _num_padding(config: dict[str, Any]) -> int:
    """Positions before that of a text's first token."""
    has_padding = config["model_type"] in ("roberta", "xlm-roberta")
    return config["pad_token_id"] + 1 if has_padding else 0


def _as_gated_delta(
    tensors: dict[str, np.ndarray], config: dict[str, Any], arch: str, *, is_early: bool
) -> dict[str, np.ndarray]:
    """Write decays as they are used, and norms from 1 on; reorder the heads.

    In Qwen 3.5 the value heads are in turn, one of each key head. Qwen3-Next has the queries of all
    heads, then their keys, values and output gates, where checkpoints have these head by head.
    """
    num_keys = config["linear_num_key_heads"]
    all_keys = 2 * num_keys * config["linear_key_head_dim"]

    def in_turn(values: np.ndarray, size: int) -> np.ndarray:
        if arch == "qwen3next":
            return values
        heads = values.reshape(num_keys, -1, size, *values.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(values.shape)

    found, size = {}, config["linear_value_head_dim"]
    for name, values in tensors.items():
        name = name.replace("model.language_model.", "model.")
        stem, _, part = name.partition("linear_attn.")
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            values = values.squeeze()
            values = np.concatenate([values[:all_keys], in_turn(values[all_keys:], size)])
        elif part == "in_proj_z.weight":
            values = in_turn(values, size)
        elif part == "out_proj.weight":
            values = np.ascontiguousarray(in_turn(values.T, size).T)
        elif part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            values = in_turn(values, 1)
        elif part == "in_proj_qkvz.weight" and not is_early:
            by_head = values.reshape(num_keys, -1, values.shape[-1])
            sizes = [config["linear_key_head_dim"]] * 2
            sizes.append(size * config["linear_num_value_heads"] // num_keys)
            parts = np.split(by_head, np.cumsum(sizes), 1)
            *qkv, values = (each.reshape(-1, values.shape[-1]) for each in parts)
            found[f"{stem}linear_attn.in_proj_qkv.weight"] = np.concatenate(qkv)
            name = f"{stem}linear_attn.in_proj_z.weight"
        if part == "A_log":
            values = -np.exp(values)
        if part == "dt_bias":
            name = name.replace("dt_bias", "dt_proj.bias")
        if name.endswith("norm.weight") and part != "norm.weight":
            values = values + 1
        found[name] = values
    return found


def _unstack(tensors: dict[str, np.ndarray], name: str) -> None:
    """gpt-oss's experts, whose gate and up are one tensor, as experts by number."""
    stem, suffix = name.split("gate_up_proj")
    kind = "bias" if suffix else "weight"
    stack, down = tensors.pop(name), tensors.pop(f"{stem}down_proj{suffix}")
    parts = {"gate_proj": stack[..., ::2], "up_proj": stack[..., 1::2], "down_proj": down}
    for part, values in parts.items():
        for number, own in enumerate(values):
            tensors[f"{stem}{number}.{part}.{kind}"] = np.ascontiguousarray(own.T)


def _join(tensors: dict[str, np.ndarray], num_layers: int) -> None:
    """Make queries, keys and values one tensor, as the first GLM checkpoints have them."""
    for layer in range(num_layers):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"blk.{layer}.attn_{side}.{kind}") for side in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)


def split_gguf(path: Path, count: int) -> list[Path]:
    """The same model in so many parts, beside it; the first has the metadata."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    parts = []
    for number in range(count):
        part = path.with_name(f"{path.stem}-{number + 1:05}-of-{count:05}.gguf")
        writer = gguf.GGUFWriter(part, arch)
        for name, field in reader.fields.items() if number == 0 else ():
            if not name.startswith(("GGUF.", "general.architecture")):
                _add(writer, name, field.contents())
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(part)
    return parts


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    is_matrix = values.ndim > 1 and not name.endswith("bias")
    wanted = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    if values.shape[-1] % block:
        wanted = gguf.GGMLQuantizationType.F16
    writer.add_tensor(name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)


def _config(config: dict[str, Any], arch: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, name in _NUMBERS.items():
        names = name if isinstance(name, tuple) else (name,)
        values = [config[each] for each in names if config.get(each)]
        found[f"{arch}.{key}"] = values[0] if values else None
    for key, name in _FLOATS.items():
        found[f"{arch}.{key}"] = float(config[name]) if config.get(name) else None
    if padding := _num_padding(config):
        found[f"{arch}.context_length"] -= padding
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    found[f"{arch}.rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found[f"{arch}.rope.dimension_count"] = int(head * rope.get("partial_rotary_factor", 1))
    if arch.startswith("qwen35"):  # text has one position for all, which llama.cpp divides in three
        turned = found[f"{arch}.rope.dimension_count"] // 2
        found[f"{arch}.rope.dimension_sections"] = [
            turned - 2 * (turned // 3),
            *2 * [turned // 3],
            0,
        ]
    if rope.get("rope_type") in ("linear", "yarn"):
        found[f"{arch}.rope.scaling.type"] = rope["rope_type"]
        found[f"{arch}.rope.scaling.factor"] = float(rope["factor"])
        found[f"{arch}.rope.scaling.original_context_length"] = rope.get(
            "original_max_position_embeddings"
        )
    return found


def _mistral3_config(rope: dict[str, Any]) -> dict[str, Any]:
    """What no other family's rotation says."""
    return {
        "mistral3.rope.scaling.yarn_log_multiplier": float(rope["mscale_all_dim"]),
        "mistral3.attention.temperature_scale": float(rope["llama_4_scaling_beta"]),
    }


def _gemma4_config(config: dict[str, Any]) -> dict[str, Any]:
    """What differs between its layers, one value for each where converters write one."""
    layers = [config["per_layer_config"].get(str(i), {}) for i in range(len(config["layer_types"]))]
    usual = {key: config[key] for key in ("head_dim", "num_key_value_heads")}
    layers = [usual | layer for layer in layers]
    shared, size = config["num_kv_shared_layers"], config["intermediate_size"]
    sizes = [size] * (len(layers) - shared) + [2 * size] * shared
    is_local = [kind == "sliding_attention" for kind in config["layer_types"]]
    full = is_local.index(False)
    said = {
        "attention.key_length": layers[full]["head_dim"],
        "attention.value_length": layers[full]["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.head_count_kv": [layer["num_key_value_heads"] for layer in layers],
        "attention.sliding_window_pattern": is_local,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "feed_forward_length": sizes if config["use_double_wide_mlp"] else size,
        "expert_used_count": config["top_k_experts"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "rope.dimension_count": layers[full]["head_dim"],
    }
    return {f"gemma4.{key}": value for key, value in said.items()}


def _gemma4_factors(config: dict[str, Any]) -> np.ndarray:
    """Of the layers that see all: 1 of pairs that turn, 1e30 of the others."""
    dims = config["per_layer_config"].values()
    pairs = max((layer.get("head_dim", 0) for layer in dims), default=config["head_dim"]) // 2
    turned = int(pairs * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    return np.array([1.0] * turned + [1e30] * (pairs - turned), dtype=np.float32)


def _tokenizer(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    spec = json.loads((folder / "tokenizer.json").read_text())
    added = {each["id"]: each for each in spec["added_tokens"]}
    listed = spec["model"]["vocab"]
    if isinstance(listed, list):
        listed = {token: number for number, (token, _) in enumerate(listed)}
    vocab = listed | {each["content"]: i for i, each in added.items()}
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [(3 if added[i]["special"] else 4) if i in added else 1 for i in range(len(tokens))]
    if spec["model"]["type"] == "Unigram":
        return _unigram(spec, config)
    if spec["model"]["type"] == "WordPiece":
        return _word_piece(tokens, kinds)
    merges = [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": config.get("bos_token_id"),
        "tokenizer.ggml.eos_token_id": config.get("eos_token_id"),
        "tokenizer.chat_template": settings.get("chat_template"),
    }


def _unigram(spec: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Pieces with their scores, as converters write XLM-RoBERTa's."""
    added = {each["id"]: 2 if each["content"] == "<unk>" else 3 for each in spec["added_tokens"]}
    pieces = spec["model"]["vocab"]
    charsmap = (spec["normalizer"] or {}).get("precompiled_charsmap")
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _ in pieces],
        "tokenizer.ggml.scores": [float(score) for _, score in pieces],
        "tokenizer.ggml.token_type": [added.get(i, 1) for i in range(len(pieces))],
        "tokenizer.ggml.precompiled_charsmap": charsmap and base64.b64decode(charsmap),
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
    }


def _word_piece(tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """What begins a word is marked in place of what continues it."""
    ids = {"unknown": "[UNK]", "cls": "[CLS]", "seperator": "[SEP]", "padding": "[PAD]"}
    marked = [
        token if kind == 3 else token[2:] if token.startswith("##") else f"\u2581{token}"
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": marked,
        "tokenizer.ggml.token_type": kinds,
        **{f"tokenizer.ggml.{key}_token_id": tokens.index(token) for key, token in ids.items()},
    }


def _named(
    tensors: dict[str, np.ndarray], config: dict[str, Any], arch: str
) -> dict[str, np.ndarray]:
    """Under the format's names, experts as one tensor, rows and norms as it has them."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[arch], config["num_hidden_layers"])
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if arch in _INTERLEAVED and ".q_proj." in name:
            values = _interleaved(values, config["num_attention_heads"])
        if arch in _INTERLEAVED and ".k_proj." in name:
            values = _interleaved(values, config["num_key_value_heads"])
        if arch in _SHIFTED and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith(("router.scale", "per_expert_scale")):
            part = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
            found[f"blk.{name.split('.')[2]}.{part}.scale"] = values
            continue
        if name.endswith((".sinks", "layer_scalar")) or (values.ndim == 3 and arch == "gemma4"):
            name += ".weight"
        if ".mlp.experts." in name or ".block_sparse_moe.experts." in name:
            before, _, after = name.partition(".experts.")
            number, _, part = after.partition(".")
            experts.setdefault(f"{before}.experts.{part}", {})[int(number)] = values
        else:
            found[str(names.get_name(name, (".weight", ".bias")))] = values
    for name, values_by_number in experts.items():
        stacked = np.stack([values_by_number[i] for i in range(len(values_by_number))])
        found[str(names.get_name(name, (".weight", ".bias")))] = stacked
    assert "None" not in found
    return found


def _interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    halves = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_pieces(path: Path, words: list[str]) -> Path:
    """Write a file with SentencePiece's words alone, without a model."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", *words])
    writer.add_token_scores([-float(each) for each in range(len(words) + 1)])
    writer.add_token_types([2, *[1] * len(words)])
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
