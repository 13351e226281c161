"""Read a model's configuration, with transformers' defaults for missing keys.

Invariant: a ModelConfig is complete and consistent; what cannot be served is a CheckpointError
that names the file and the key.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from engine.checkpoint.delta_config import GatedDeltaConfig
from engine.checkpoint.end_tokens import end_tokens
from engine.checkpoint.families import FAMILY_BY_ARCHITECTURE, FAMILY_BY_NAME, reason
from engine.checkpoint.family import ExpertNames, Family
from engine.checkpoint.folder_files import FolderFiles
from engine.checkpoint.gguf import GgufModel, find_gguf
from engine.checkpoint.gguf_models import config_keys, sampling_keys
from engine.checkpoint.json_keys import JsonKeys
from engine.checkpoint.kv_groups import KvGroups, divide, one_group
from engine.checkpoint.layer_heads import LayerHeads, kv_layers, layer_heads
from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.rope import RopeConfig
from engine.checkpoint.sampling_defaults import sampling_defaults
from engine.errors import WHAT_IS_SERVED, CheckpointError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
INT8_KV = "int8"
"""A pool's dtype: codes of a byte, with a scale for each token and head."""
SCALE_BYTES = 4

_MAX_LAYERS = 4096
_MAX_EXPERTS = 65536
_MAX_LAYER_INPUT = 65536
_OUTER_KEYS = ("bos_token_id", "eos_token_id", "tie_word_embeddings")  # beside a family's section
_GENERATION = "generation_config.json"
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "clamped_swiglu", "sigmoid")
"""Numbered by the kernels in this order. The third is gpt-oss's, whatever its file calls it; the
last opens gates that models have elsewhere."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of the feed-forward."""

    names: ExpertNames
    num_experts: int
    num_per_token: int
    intermediate_size: int
    """Size of one expert."""
    is_normalized: bool
    """The weights of a token's experts are scaled to add up to 1."""
    shared_size: int
    """Inner size of the expert that every token goes through; 0: no such expert."""
    layers: frozenset[int]
    """Layers with experts; the others are dense."""


class LayerInputsConfig(NamedTuple):
    """Sizes of what each layer reads beside the stream."""

    size: int
    """Values of a token and a layer."""
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one decoder-only model, complete."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of dense layers."""
    is_double_wide: bool
    """Layers that store no keys and values have a feed-forward of twice that size."""
    layer_inputs: LayerInputsConfig | None
    """Inputs of each layer beside the stream; None: it has none."""
    num_layers: int
    delta: GatedDeltaConfig | None
    """The shape of its Gated DeltaNet layers; None: it has no such layers."""
    kv_layers: tuple[int | None, ...]
    """Per layer: the layer of the KV pool that it reads, its own or an earlier one's; None: it
    keeps a state in the sequence's record instead."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """The widest layer's, as num_kv_heads; the KV pool has this size for each layer."""
    heads: tuple[LayerHeads, ...]
    """Per layer."""
    has_keys_as_values: tuple[bool, ...]
    """Per layer: values are made by the projection of the keys."""
    max_position_embeddings: int
    rms_norm_eps: float
    post_norm_eps: float
    """Norms behind attention and feed-forward have an epsilon of their own."""
    ropes: tuple[RopeConfig | None, ...]
    """Per layer; None: queries and keys are not rotated."""
    sliding_windows: tuple[int | None, ...]
    """Per layer: a query sees that many newest positions, its own included; None sees all."""
    experts: ExpertsConfig | None
    is_tied: bool
    """The output projection is the embedding matrix."""
    has_qkv_bias: bool
    has_output_bias: bool
    """Bias of the attention's output projection."""
    has_mlp_bias: bool
    hidden_act: str
    """One of ACTIVATIONS."""
    attention_scale: float
    """Factor of the product of query and key."""
    attention_softcap: float | None
    """Scores are bent by tanh so as to stay within this; None: as they are."""
    logit_softcap: float | None
    embedding_scale: float
    residual_scale: float
    """Factor of what attention and feed-forward add."""
    logit_divisor: float
    stored_dtype: str | None
    """What config.json claims; the tensors' own dtype is Checkpoint.stored_dtype."""
    bos_token_id: int | None
    sampling: Mapping[str, int | float]
    """What generation_config.json asks for where a request says nothing, by the API's names."""
    divided: KvGroups | None = None
    """How the KV pool's layers are divided between blocks; None: each block has all layers."""
    eos_token_ids: tuple[int, ...] = ()
    """The tokens that end a reply, of all files that say one."""
    end_sources: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The same by the place that says so."""
    unknown_ends: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Ids that a place says and no token has, such as -1 for none."""

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read config.json and, where there is one, generation_config.json.

        Of a GGUF file, or a folder that has only such a one, the same out of its metadata.
        """
        gguf = find_gguf(folder)
        if gguf is not None:
            return cls.from_gguf(GgufModel.open(gguf))
        return cls.from_files(FolderFiles(folder))

    @classmethod
    def from_files(cls, files: FolderFiles) -> ModelConfig:
        """Read what from_folder() does of a folder without such a file."""
        keys, generation = files.keys("config.json"), _generation(files)
        own = _keys_of_family(keys, _family(keys))
        stated = {
            each.path.name: each.token_ids("eos_token_id", None) for each in (generation, own)
        }
        usual = {} if _states_ends(keys, own) else {keys.path.name: stated.pop(keys.path.name)}
        return cls._from_keys(keys, generation)._ended_by(end_tokens(files, stated), usual)

    @classmethod
    def from_gguf(cls, model: GgufModel) -> ModelConfig:
        """Read a GGUF file's metadata."""
        keys = JsonKeys(config_keys(model), model.path)
        config = cls._from_keys(keys, JsonKeys(sampling_keys(model), model.path))
        return config._ended_by({"metadata": keys.token_ids("eos_token_id", None)}, {})

    def _ended_by(
        self, by_place: Mapping[str, tuple[int, ...]], usual: Mapping[str, tuple[int, ...]]
    ) -> ModelConfig:
        """Add the tokens that end a reply, the usual ones if no place has any."""
        said = self._ids(by_place, is_known=True) or self._ids(usual, is_known=True)
        ids = dict.fromkeys(one for each in said.values() for one in each)
        unknown = self._ids(by_place, is_known=False)
        return replace(self, eos_token_ids=tuple(ids), end_sources=said, unknown_ends=unknown)

    def _ids(
        self, by_place: Mapping[str, tuple[int, ...]], *, is_known: bool
    ) -> dict[str, tuple[int, ...]]:
        """Choose the ids that a step can draw, or the others."""
        chosen = {
            place: tuple(one for one in ids if (0 <= one < self.vocab_size) is is_known)
            for place, ids in by_place.items()
        }
        return {place: ids for place, ids in chosen.items() if ids}

    @classmethod
    def _from_keys(cls, file_keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
        family = _family(file_keys)
        keys = _keys_of_family(file_keys, family)
        hidden_size = keys.integer("hidden_size")
        num_layers = keys.integer("num_hidden_layers", maximum=_MAX_LAYERS)
        num_heads = keys.integer("num_attention_heads")
        has_bias = keys.flag("use_bias")  # of some families, for all matrices
        has_attention_bias = keys.flag("attention_bias", has_bias)
        rotated = _rotated_layers(keys, num_layers)
        delta = GatedDeltaConfig.from_keys(keys, num_layers, family.delta_projections)
        recurrent = delta.layers if delta is not None else frozenset[int]()
        windows = (None,) * num_layers if delta else _sliding_windows(keys, family, rotated)
        if family.is_rotated_in_windows_only and keys.get("sliding_window", None) is not None:
            rotated = [window is not None for window in windows]
        usual = _attention_shape(keys, hidden_size, num_heads)
        heads = layer_heads(keys, usual, num_heads, windows)
        num_kv_heads, head_dim = max(heads, key=lambda each: each.width)
        return cls(
            family=family,
            vocab_size=keys.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size"),
            is_double_wide=keys.flag("use_double_wide_mlp"),
            layer_inputs=_layer_inputs(keys),
            num_layers=num_layers,
            delta=delta,
            kv_layers=kv_layers(keys, windows, heads, recurrent),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            heads=heads,
            has_keys_as_values=tuple(
                keys.flag("attention_k_eq_v") and window is None for window in windows
            ),
            max_position_embeddings=keys.integer("max_position_embeddings"),
            rms_norm_eps=keys.number("rms_norm_eps"),
            post_norm_eps=keys.number("post_norm_eps", keys.number("rms_norm_eps")),
            ropes=_ropes(keys, family, heads, rotated, windows),
            sliding_windows=windows,
            experts=_experts(keys, family.experts, num_layers),
            is_tied=keys.flag("tie_word_embeddings"),
            has_qkv_bias=family.has_qkv_bias or has_attention_bias,
            has_output_bias=keys.flag("attention_out_bias", has_attention_bias),
            has_mlp_bias=keys.flag("mlp_bias", has_bias),
            hidden_act=family.activation or _activation(keys),
            attention_scale=_attention_scale(keys, head_dim),
            attention_softcap=keys.number_or_none("attn_logit_softcapping"),
            logit_softcap=keys.number_or_none("final_logit_softcapping"),
            embedding_scale=(
                math.sqrt(hidden_size)
                if family.has_root_scaled_embedding
                else keys.number("embedding_multiplier", 1.0)
            ),
            residual_scale=keys.number("residual_multiplier", 1.0),
            logit_divisor=keys.number("logits_scaling", 1 / keys.number("output_multiplier", 1.0)),
            stored_dtype=_stated_dtype(file_keys, family),
            sampling=sampling_defaults(generation),
            bos_token_id=next((i for i in keys.token_ids("bos_token_id", None) if i >= 0), None),
        )

    def in_groups(self) -> ModelConfig:
        """Divide the KV pool's layers, so that window blocks can be given to others."""
        layers = [self.kv_layers.index(layer) for layer in range(self.num_kv_layers)]
        windows = [self.sliding_windows[layer] for layer in layers]
        return replace(self, divided=divide(windows, self.max_position_embeddings))

    @property
    def kv_groups(self) -> KvGroups:
        """The layers of the KV pool by the block that holds them."""
        return self.divided or one_group(self.num_kv_layers)

    def kv_block_bytes(self, block_size: int, dtype: str) -> int:
        """Compute the bytes of one block: keys and values of one group of layers."""
        return self.kv_groups.num_layers * 2 * self.kv_plane_bytes(block_size, dtype)

    def kv_plane_bytes(self, block_size: int, dtype: str) -> int:
        """Compute the bytes of a layer's keys, or values, in one block; the widest layer counts.

        Args:
            dtype: of the pool, [block_size, num_kv_heads, head_dim]; INT8_KV adds scales behind
                them, float32 [num_kv_heads, block_size].
        """
        if dtype == INT8_KV:
            widths = [each.num_kv_heads * (each.head_dim + SCALE_BYTES) for each in self.heads]
            return block_size * max(widths)
        return block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    @property
    def num_kv_layers(self) -> int:
        """Layers of the KV pool."""
        return max(layer for layer in self.kv_layers if layer is not None) + 1

    def record_blocks(self, block_size: int, dtype: str) -> int:
        """Blocks of the pool that a record takes; 0: the model keeps none."""
        if self.delta is None:
            return 0
        return -(-self.delta.record_bytes // self.kv_block_bytes(block_size, dtype))

    def stores_kv(self, layer: int) -> bool:
        """Return whether a layer computes keys and values, or reads an earlier layer's."""
        kept_in = self.kv_layers[layer]
        return kept_in is not None and self.kv_layers.index(kept_in) == layer

    def intermediate_size_of(self, layer: int) -> int:
        """Return the size of a layer's dense feed-forward."""
        is_wide = self.is_double_wide and not self.stores_kv(layer)
        return self.intermediate_size * (2 if is_wide else 1)

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """Return the mixture in a layer; None: its feed-forward is dense."""
        return self.experts if self.experts and layer in self.experts.layers else None


def _family(keys: JsonKeys) -> Family:
    architectures = keys.get("architectures", None)
    model_type = keys.get("model_type", None)
    if architectures:
        name = architectures[0] if isinstance(architectures, list) else None
        if not isinstance(name, str) or name not in FAMILY_BY_ARCHITECTURE:
            _refuse(name, keys)
            raise keys.bad("architectures", f"one of {', '.join(FAMILY_BY_ARCHITECTURE)}")
        family = FAMILY_BY_ARCHITECTURE[name]
        if model_type not in (None, family.name):
            raise keys.bad("model_type", f"{family.name!r} as `architectures` says")
        return family
    if not isinstance(model_type, str) or model_type not in FAMILY_BY_NAME:
        _refuse(model_type, keys)
        raise keys.bad("model_type", f"one of {', '.join(FAMILY_BY_NAME)}")
    return FAMILY_BY_NAME[model_type]


def _refuse(name: object, keys: JsonKeys) -> None:
    """Say why, where a name is known and not served."""
    why = reason(name) if isinstance(name, str) else None
    if why is not None:
        what = f"{name} is not served: {why}"
        raise CheckpointError(what, where=str(keys.path), hint=WHAT_IS_SERVED)


def _keys_of_family(file_keys: JsonKeys, family: Family) -> JsonKeys:
    """Keep the keys that the family knows, each with a value."""
    sections = [file_keys]
    if family.section is not None:
        sections.append(file_keys.section(family.section))
    quantisation = Quantisation.from_keys(file_keys)
    has_columns = family.experts is not None and family.experts.stack == "columns"
    if quantisation is not None and (quantisation.method == "mxfp4") != has_columns:
        raise file_keys.bad("quantization_config", f"supported of {family.name}")
    stated = sections[-1].values
    if family.section is not None and stated.get("model_type", None) not in (None, family.language):
        raise sections[-1].bad("model_type", repr(family.language))
    if family.section is not None:
        outer = {key: file_keys.values[key] for key in _OUTER_KEYS if key in file_keys.values}
        stated = outer | stated
    own = {key: value for key, value in stated.items() if key in family.defaults}
    keys = JsonKeys(dict(family.defaults) | own, file_keys.path)
    if keys.get("use_bidirectional_attention", None) not in (None, False, "vision"):
        raise keys.bad("use_bidirectional_attention", "false: replies are written left to right")
    if keys.get("clip_qkv", None) is not None:
        raise keys.bad("clip_qkv", "null: values as they are")
    for key in ("swiglu_alpha", "swiglu_limit"):
        if key in keys.values and keys.get(key, None) != family.defaults[key]:
            raise keys.bad(key, f"{family.defaults[key]}, which the kernels have")
    return keys


def _attention_shape(keys: JsonKeys, hidden_size: int, num_heads: int) -> LayerHeads:
    """Read key/value heads and head size; null stands for the derived value."""
    num_kv_heads = num_heads
    if keys.get("num_key_value_heads", None) is not None:
        num_kv_heads = keys.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        what = f"num_attention_heads {num_heads} is no multiple of the {num_kv_heads} kv heads"
        raise CheckpointError(what, where=str(keys.path), hint=WHAT_IS_SERVED)
    head_dim = hidden_size // num_heads
    if keys.get("head_dim", None) is not None:
        head_dim = keys.integer("head_dim")
    if head_dim < 2 or head_dim % 2:
        what = f"head_dim is {head_dim}, not an even number: RoPE turns pairs"
        raise CheckpointError(what, where=str(keys.path), hint=WHAT_IS_SERVED)
    return LayerHeads(num_kv_heads, head_dim)


def _activation(keys: JsonKeys) -> str:
    key = "hidden_act" if "hidden_act" in keys.values else "hidden_activation"
    name = keys.get(key, None)
    if not isinstance(name, str) or name not in ACTIVATIONS[:2]:
        raise keys.bad(key, f"one of {', '.join(ACTIVATIONS[:2])}")
    return name


def _attention_scale(keys: JsonKeys, head_dim: int) -> float:
    root = keys.number("query_pre_attn_scalar", head_dim) ** -0.5
    root *= keys.number("qk_scale_factor", 1.0)  # of queries, which are normed before
    return keys.number("attention_multiplier", root)


def _rotated_layers(keys: JsonKeys, num_layers: int) -> list[bool]:
    """Say for each layer whether it rotates queries and keys; most families rotate all."""
    listed = keys.get("no_rope_layers", None)  # 1 where there is rotation, whatever its name says
    if listed is not None:
        if not isinstance(listed, list) or len(listed) < num_layers:
            raise keys.bad("no_rope_layers", f"a list of {num_layers}")
        if any(is_rotated not in (0, 1) for is_rotated in listed):
            raise keys.bad("no_rope_layers", "made of 0 and 1")
        return [bool(is_rotated) for is_rotated in listed[:num_layers]]
    if "layer_rope_theta" in keys.values:
        thetas = keys.get("layer_rope_theta", None)
        usual = {keys.number("rope_theta"), keys.section("rope_parameters").get("rope_theta", 0)}
        if not isinstance(thetas, list) or len(thetas) != num_layers:
            raise keys.bad("layer_rope_theta", f"a list of {num_layers}")
        if len(set(thetas) - {0}) > 1 or set(thetas) - {0} - usual:
            raise keys.bad("layer_rope_theta", "made of 0 and rope_theta")
        return [theta != 0 for theta in thetas]
    if "no_rope_layer_interval" not in keys.values:
        return [True] * num_layers
    interval = keys.integer("no_rope_layer_interval")
    return [(layer + 1) % interval != 0 for layer in range(num_layers)]


def _sliding_windows(keys: JsonKeys, family: Family, rotated: list[bool]) -> tuple[int | None, ...]:
    window = None
    if keys.flag("use_sliding_window", True) and keys.get("sliding_window", None) is not None:
        window = keys.integer("sliding_window")
    num_layers = len(rotated)
    if "layer_types" not in keys.values:
        return (window,) * num_layers
    layer_types = keys.get("layer_types", None)
    if layer_types is None:
        return _usual_windows(keys, family, rotated, window)
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise keys.bad("layer_types", f"a list of {num_layers}")
    for layer, kind in enumerate(layer_types):
        if kind not in ("full_attention", "sliding_attention"):
            what = f"full_attention or sliding_attention in layer {layer}, which is {kind!r}"
            raise keys.bad("layer_types", what)
    if window is None and "sliding_attention" in layer_types:
        raise keys.bad("layer_types", "possible without use_sliding_window and sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _usual_windows(
    keys: JsonKeys, family: Family, rotated: list[bool], window: int | None
) -> tuple[int | None, ...]:
    """Set windows without layer_types: later layers, unrotated ones, or all but each nth."""
    num_layers = len(rotated)
    if "max_window_layers" in keys.values:
        first = keys.get("max_window_layers", None)
        if type(first) is not int or first < 0:
            raise keys.bad("max_window_layers", "an integer of at least 0")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if "no_rope_layers" in keys.values:
        return tuple(None if is_rotated else window for is_rotated in rotated)
    if family.window_period is None:
        return (window,) * num_layers
    period = keys.integer("sliding_window_pattern", family.window_period)
    return tuple(window if (layer + 1) % period else None for layer in range(num_layers))


def _layer_inputs(keys: JsonKeys) -> LayerInputsConfig | None:
    size_key, vocab_key = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
    if not keys.get(size_key, None):
        return None
    vocab_size = keys.integer(vocab_key)
    if vocab_size < keys.integer("vocab_size"):
        raise keys.bad(vocab_key, "at least vocab_size")
    return LayerInputsConfig(keys.integer(size_key, maximum=_MAX_LAYER_INPUT), vocab_size)


def _ropes(
    keys: JsonKeys,
    family: Family,
    heads: tuple[LayerHeads, ...],
    rotated: list[bool],
    windows: tuple[int | None, ...],
) -> tuple[RopeConfig | None, ...]:
    @functools.cache  # a list of factors is kept once, not for each layer
    def read(is_local: bool, head_dim: int) -> RopeConfig:
        from_keys = RopeConfig.local_from_keys if is_local else RopeConfig.from_keys
        return from_keys(keys, family, head_dim)

    def of(window: int | None, head_dim: int) -> RopeConfig:
        return read(family.has_local_rope and window is not None, head_dim)

    return tuple(
        of(window, own.head_dim) if is_rotated else None
        for is_rotated, window, own in zip(rotated, windows, heads, strict=True)
    )


def _experts(keys: JsonKeys, names: ExpertNames | None, num_layers: int) -> ExpertsConfig | None:
    if names is None or not keys.flag("enable_moe_block", True):
        return None
    is_newer = keys.get("num_local_experts", None) is not None
    num_experts = keys.integer("num_local_experts" if is_newer else "num_experts", 1, _MAX_EXPERTS)
    step = keys.integer("decoder_sparse_step", 1)
    dense = keys.get("mlp_only_layers", None) or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise keys.bad("mlp_only_layers", "a list of layer numbers")
    count_key, size_key = "top_k_experts", "moe_intermediate_size"
    if count_key not in keys.values:
        count_key = "num_experts_per_tok"
    return ExpertsConfig(
        names=names,
        num_experts=num_experts,
        num_per_token=keys.integer(count_key, maximum=num_experts),
        intermediate_size=keys.integer(
            size_key if size_key in keys.values else "intermediate_size"
        ),
        is_normalized=keys.flag("norm_topk_prob", True),
        shared_size=(
            keys.integer("shared_expert_intermediate_size") if names.has_shared_expert else 0
        ),
        layers=frozenset(
            layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense
        ),
    )


def _stated_dtype(keys: JsonKeys, family: Family) -> str | None:
    owners = [keys] if family.section is None else [keys, keys.section(family.section)]
    for owner in owners:
        dtype = owner.get("dtype", owner.get("torch_dtype", None))
        if isinstance(dtype, str) and dtype in DTYPE_BYTES:
            return dtype
    return None


def _generation(files: FolderFiles) -> JsonKeys:
    path = files.path / _GENERATION
    return JsonKeys(files.object(_GENERATION) if path.exists() else {}, path)


def _states_ends(file_keys: JsonKeys, keys: JsonKeys) -> bool:
    """Say whether config.json names an end token, rather than the family's usual one."""
    sections = [file_keys.values, *(v for v in file_keys.values.values() if isinstance(v, dict))]
    return "eos_token_id" in keys.values and any("eos_token_id" in each for each in sections)
