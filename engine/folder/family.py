"""What a row of the table of families can say: where a model departs from Llama.

Owns: the fields of a row. What a number says is a key of config.json, and no field.
Invariant: None is "the family has no such part".
Never: names a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """A layer's norms, by where they stand; None where there is none."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Tensor names of a mixture: `layers.L.{block}.{router}`, `layers.L.{block}.experts.E.{up}`."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    has_bias: bool = False
    """The router has one, and each matrix of each expert."""
    is_stacked: bool = False
    """A checkpoint has one tensor for all experts, as engine.folder.stacked_experts reads it."""


_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one model family apart from Llama: a row of the table in engine.folder.families."""

    name: str
    """`model_type` of config.json."""
    architecture: str
    """The class that config.json names."""
    defaults: Mapping[str, Any] = field(repr=False)
    norms: NormNames = NormNames()
    norm_offset: float = 0.0
    """Added to each stored norm weight."""
    has_wide_norms: bool = False
    """Norms multiply by their weight before they round to the serving dtype, not after."""
    qk_norm: Literal["head", "projection"] | None = None
    """Queries and keys are normed per head, or over all heads at once."""
    has_qkv_bias: bool = False
    """Whatever `attention_bias` says."""
    qkv: tuple[str, ...] = _QKV
    """The stored projections, whose outputs side by side are query, key and value."""
    gate_up: tuple[str, ...] = _GATE_UP
    experts: ExpertNames | None = None
    activation: str | None = None
    """Whatever `hidden_act` says."""
    has_sinks: bool = False
    """Each head has a score of its own beside those of its keys: `self_attn.sinks`."""
    has_root_scaled_embedding: bool = False
    """Embeddings are multiplied by the square root of their size."""
    has_local_rope: bool = False
    """Windowed layers rotate by `rope_local_base_freq`, without scaling."""
    has_partial_rotary: bool = False
    turns_neighbours: bool = False
    """Dimensions 0 and 1 of a head turn together, not 0 and the middle one: loading puts rows of
    queries and keys into that order, which changes no product of the two."""
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
    """Of every tensor's name."""
