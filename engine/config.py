"""What config.json says of a model, with transformers' defaults for what it leaves out.

Owns: the shape of the supported families: Llama, Mistral, Qwen2, Qwen3.
Called by: checkpoint (expected tensors), the daemon (pool size, model length), engine.model.
Invariant: a ModelConfig is complete and consistent; what cannot be served is a CheckpointError
that names the file and the key.
Never: reads weights, imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.json_keys import JsonKeys
from engine.rope import RopeConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_MAX_LAYERS = 4096

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Defaults of the keys whose default differs by family, as in transformers' config classes.
# None for num_key_value_heads is one per query head; for head_dim, hidden_size / heads.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "qwen3": {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one decoder-only model, complete."""

    family: str
    """`llama`, `mistral`, `qwen2` or `qwen3`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    """Per layer: a query sees that many newest positions, its own included; None sees all."""
    is_tied: bool
    """The output projection is the embedding matrix."""
    has_qkv_bias: bool
    has_output_bias: bool
    """Bias of the attention's output projection."""
    has_mlp_bias: bool
    has_qk_norm: bool
    hidden_act: str
    stored_dtype: str | None
    """What config.json claims; the tensors' own dtype is Checkpoint.stored_dtype."""
    eos_token_ids: tuple[int, ...]
    """End-of-text ids of generation_config.json, else of config.json."""
    bos_token_id: int | None

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read config.json and, where there is one, generation_config.json."""
        keys = JsonKeys.from_file(folder / "config.json")
        family = _family(keys)
        defaults = _FAMILY_DEFAULTS[family]
        if keys.get("quantization_config", None) is not None:
            raise keys.bad("quantization_config", "supported: serve an unquantized checkpoint")
        if keys.get("hidden_act", "silu") != "silu":
            raise keys.bad("hidden_act", "'silu', the only supported activation")
        hidden_size = keys.integer("hidden_size", 4096)
        num_layers = keys.integer("num_hidden_layers", 32, _MAX_LAYERS)
        num_heads = keys.integer("num_attention_heads", 32)
        num_kv_heads, head_dim = _attention_shape(keys, defaults, hidden_size, num_heads)
        max_positions = keys.integer("max_position_embeddings", defaults["max_position_embeddings"])
        has_attention_bias = family in ("llama", "qwen3") and keys.flag("attention_bias")
        return cls(
            family=family,
            vocab_size=keys.integer("vocab_size", defaults["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size", defaults["intermediate_size"]),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_keys(keys, max_positions),
            sliding_windows=_sliding_windows(keys, family, num_layers),
            is_tied=keys.flag("tie_word_embeddings"),
            has_qkv_bias=family == "qwen2" or has_attention_bias,
            has_output_bias=has_attention_bias,
            has_mlp_bias=family == "llama" and keys.flag("mlp_bias"),
            has_qk_norm=family == "qwen3",
            hidden_act="silu",
            stored_dtype=_stated_dtype(keys),
            eos_token_ids=_eos_token_ids(keys, folder, defaults["eos_token_id"]),
            bos_token_id=next(iter(keys.token_ids("bos_token_id", defaults["bos_token_id"])), None),
        )

    def kv_block_bytes(self, block_size: int, dtype: str) -> int:
        """Bytes of one block of all layers: [num_layers, 2, block_size, num_kv_heads, head_dim]."""
        num_values = self.num_layers * 2 * block_size * self.num_kv_heads * self.head_dim
        return num_values * DTYPE_BYTES[dtype]


def _family(keys: JsonKeys) -> str:
    supported = f"one of {', '.join(_ARCHITECTURES.values())}"
    architectures = keys.get("architectures", None)
    model_type = keys.get("model_type", None)
    if architectures:
        by_class = {name: family for family, name in _ARCHITECTURES.items()}
        name = architectures[0] if isinstance(architectures, list) else None
        if not isinstance(name, str) or name not in by_class:
            raise keys.bad("architectures", supported)
        if model_type not in (None, by_class[name]):
            raise keys.bad("model_type", f"{by_class[name]!r} as `architectures` says")
        return by_class[name]
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        raise keys.bad("model_type", f"one of {', '.join(_ARCHITECTURES)}")
    return model_type


def _attention_shape(
    keys: JsonKeys, defaults: dict[str, Any], hidden_size: int, num_heads: int
) -> tuple[int, int]:
    """Key/value heads and head size; null stands for the derived value in either."""
    num_kv_heads = num_heads
    if keys.get("num_key_value_heads", defaults["num_key_value_heads"]) is not None:
        num_kv_heads = keys.integer("num_key_value_heads", defaults["num_key_value_heads"])
    if num_heads % num_kv_heads:
        what = f"num_attention_heads {num_heads} is no multiple of the {num_kv_heads} kv heads"
        raise CheckpointError(what, where=str(keys.path))
    head_dim = hidden_size // num_heads
    if keys.get("head_dim", defaults["head_dim"]) is not None:
        head_dim = keys.integer("head_dim", defaults["head_dim"])
    if head_dim < 2 or head_dim % 2:
        raise CheckpointError(f"head_dim is {head_dim}, not an even number", where=str(keys.path))
    return num_kv_heads, head_dim


def _sliding_windows(keys: JsonKeys, family: str, num_layers: int) -> tuple[int | None, ...]:
    if family == "llama" or (family != "mistral" and not keys.flag("use_sliding_window")):
        window = None
    else:
        is_null = keys.get("sliding_window", 4096) is None
        window = None if is_null else keys.integer("sliding_window", 4096)
    if family in ("llama", "mistral"):
        return (window,) * num_layers
    layer_types = keys.get("layer_types", None)
    if layer_types is None:
        first = keys.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise keys.bad("max_window_layers", "an integer of at least 0")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise keys.bad("layer_types", f"a list of {num_layers}")
    if any(kind not in ("full_attention", "sliding_attention") for kind in layer_types):
        raise keys.bad("layer_types", "made of full_attention and sliding_attention")
    if window is None and "sliding_attention" in layer_types:
        raise keys.bad("layer_types", "possible without use_sliding_window and sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _stated_dtype(keys: JsonKeys) -> str | None:
    dtype = keys.get("dtype", keys.get("torch_dtype", None))
    return dtype if isinstance(dtype, str) and dtype in DTYPE_BYTES else None


def _eos_token_ids(keys: JsonKeys, folder: Path, default: int | None) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    if path.exists():
        ids = JsonKeys.from_file(path).token_ids("eos_token_id", None)
        if ids:
            return ids
    return keys.token_ids("eos_token_id", default)
