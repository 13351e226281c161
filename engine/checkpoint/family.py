"""Describe how a model family may differ from Llama.

Invariant: None is "the family has no such part".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Keys that families share, with Llama's defaults. Null for num_key_value_heads is one per query
head; for head_dim, hidden_size / heads."""


@dataclass(frozen=True, slots=True)
class NormNames:
    """A layer's norms by position; None: the layer has no norm there."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class BesideDense:
    """Tensor names, within a layer, of what joins a mixture with a dense feed-forward."""

    after_dense: str = "post_feedforward_layernorm_1"
    before_experts: str = "pre_feedforward_layernorm_2"
    after_experts: str = "post_feedforward_layernorm_2"
    router_scale: str = "router.scale"
    """Factors of the norm that the router reads, times hidden_size ** -0.5."""
    share_scale: str = "router.per_expert_scale"
    """Factors of each expert's share."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Tensor names of a mixture: `layers.L.{block}{router}`, `layers.L.{block}experts.E.{up}`."""

    block: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    has_bias: bool = False
    """The router has one, and each matrix of each expert."""
    stack: Literal["rows", "columns"] | None = None
    """A checkpoint has one tensor for all experts: gate's rows before up's, or gate and up in
    alternate columns of the transposed matrix; None: each expert has tensors of its own."""
    beside_dense: BesideDense | None = None
    """The layer adds a dense feed-forward to the mixture; None: it has the mixture alone."""
    has_shared_expert: bool = False
    """Every token also goes through `shared_expert`, scaled by `shared_expert_gate`."""


GATED_DELTA: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_output_tiled": False,
    "linear_split_qkvz": False,
}
"""Keys of families whose layers are partly Gated DeltaNet: `linear_attention` in layer_types."""


_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one model family apart from Llama: a row of the table of families."""

    name: str
    """`model_type` of config.json."""
    architecture: str
    """The class that config.json names."""
    defaults: Mapping[str, Any] = field(repr=False)
    norms: NormNames = NormNames()
    norm_offset: float = 0.0
    """Added to each stored norm weight."""
    has_offset_last: bool = True
    """The model's last norm has the offset, too."""
    has_wide_norms: bool = False
    """Norms multiply by their weight before they round to the serving dtype, not after."""
    qk_norm: Literal["head", "projection", "unweighted"] | None = None
    """How queries and keys are normed: per head, over all heads, per head without a weight."""
    has_gated_attention: bool = False
    """Attention's output is multiplied by the sigmoid of `self_attn.gate_proj`."""
    has_qkv_bias: bool = False
    """Whatever `attention_bias` says."""
    qkv: tuple[str, ...] = _QKV
    """The stored projections, whose outputs side by side are query, key and value."""
    gate_up: tuple[str, ...] = _GATE_UP
    experts: ExpertNames | None = None
    activation: str | None = None
    """Whatever `hidden_act` says."""
    has_sinks: bool = False
    """Each head has a learnt score beside its keys' scores: `self_attn.sinks`."""
    has_root_scaled_embedding: bool = False
    """Embeddings are multiplied by the square root of their size."""
    has_normed_embedding: bool = False
    """Embeddings are normed, by no weight."""
    has_local_rope: bool = False
    """Windowed layers rotate by `rope_local_base_freq`, without scaling."""
    has_partial_rotary: bool = False
    turns_neighbours: bool = False
    """RoPE rotates dimensions 0 and 1 together, not 0 and the middle one.

    Loading reorders rows of queries and keys, which changes no product."""
    delta_projections: tuple[str, ...] = ()
    """The stored projections of a Gated DeltaNet layer; empty: the family has no such layers."""
    has_gates_in_queries: bool = False
    """`q_proj` also makes, behind each head's query, the gate of that head's output."""
    has_growing_queries: bool = False
    """Queries far into a text are multiplied, as `llama_4_scaling_beta` says."""
    is_rotated_in_windows_only: bool = False
    """Where some layers have windows, the others do not rotate."""
    window_period: int | None = 2
    """Without `layer_types` each layer of that number sees all, the others have windows; None: all
    have."""
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    """Old names of RoPE kinds, as this family used them."""
    has_value_norm: bool = False
    """Values are normed per head, by no weight."""
    has_layer_scalar: bool = False
    """The stream of tokens is multiplied at the end of each layer: `layers.L.layer_scalar`."""
    base: str | None = None
    """What a file's names have in place of `model.`; None: just that."""
    section: str | None = None
    """Where config.json keeps the language model's keys; None: at the top."""
    language: str | None = None
    """The `model_type` that is said there."""
    prefix: str = ""
    """Prefix of every tensor's name."""


_GEMMA2: dict[str, Any] = {key: value for key, value in COMMON.items() if key != "hidden_act"} | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_bidirectional_attention": None,
    "sliding_window": 4096,
    "layer_types": None,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

_GEMMA3_TEXT = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _GEMMA2
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    norms=NormNames(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    norm_offset=1.0,
    has_wide_norms=True,
    qk_norm="head",
    has_root_scaled_embedding=True,
    has_local_rope=True,
)

_GEMMA4_TEXT = replace(
    _GEMMA3_TEXT,
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    defaults={
        key: value
        for key, value in _GEMMA2.items()
        if key not in ("query_pre_attn_scalar", "attn_logit_softcapping")
    }
    | {
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "final_logit_softcapping": None,
        "attention_multiplier": 1.0,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "per_layer_config": None,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    },
    norm_offset=0.0,
    experts=ExpertNames("", router="router.proj", stack="rows", beside_dense=BesideDense()),
    window_period=6,
    has_value_norm=True,
    has_layer_scalar=True,
)

_GEMMA4_UNIFIED_TEXT = replace(
    _GEMMA4_TEXT,
    name="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    defaults={
        key: value
        for key, value in _GEMMA4_TEXT.defaults.items()
        if "per_layer_input" not in key and "expert" not in key and "moe" not in key
    }
    | {"max_position_embeddings": 262144, "sliding_window": 1024},
    experts=None,
)

GEMMAS = (
    Family(
        "gemma",
        "GemmaForCausalLM",
        COMMON
        | {
            "vocab_size": 256000,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "use_bidirectional_attention": None,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        norm_offset=1.0,
        has_wide_norms=True,
        has_root_scaled_embedding=True,
    ),
    replace(
        _GEMMA3_TEXT,
        name="vaultgemma",
        architecture="VaultGemmaForCausalLM",
        defaults=_GEMMA2,
        norms=NormNames(before_mlp="pre_feedforward_layernorm"),
        qk_norm=None,
        has_local_rope=False,
    ),
    replace(
        _GEMMA3_TEXT,
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        defaults=_GEMMA2,
        qk_norm=None,
        has_local_rope=False,
    ),
    _GEMMA3_TEXT,
    replace(  # the language model of a checkpoint that also sees; its eyes are left out
        _GEMMA3_TEXT,
        name="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        language="gemma3_text",
        section="text_config",
        prefix="language_model.",
    ),
    _GEMMA4_TEXT,
    replace(
        _GEMMA4_TEXT,
        name="gemma4",
        architecture="Gemma4ForConditionalGeneration",
        language="gemma4_text",
        section="text_config",
        base="model.language_model.",
    ),
    _GEMMA4_UNIFIED_TEXT,
    replace(
        _GEMMA4_UNIFIED_TEXT,
        name="gemma4_unified",
        architecture="Gemma4UnifiedForConditionalGeneration",
        language="gemma4_unified_text",
        section="text_config",
        base="model.language_model.",
    ),
)
