"""Read the shape of a model's Gated DeltaNet layers, and size the record that they keep.

Invariant: at least one layer is of full attention, and every layer's kind is one of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.json_keys import JsonKeys

_KINDS = ("linear_attention", "full_attention")
_MAX_CONV_SIZE = 16
"""MAX_TAPS of engine/kernels/delta.c; published models have 4."""
_STATE_BYTES = 4
"""Bytes of a value in a record, which is float32 whatever the pool's dtype."""


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """Heads, convolution and places of Gated DeltaNet layers."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    """Of one head."""
    value_dim: int
    """Of one head."""
    conv_size: int
    """Tokens that the convolution sees, the newest included."""
    layers: frozenset[int]
    projections: tuple[str, ...]
    """The stored projections of a layer: for the heads, then for betas and steps."""
    is_output_tiled: bool = False
    """The output projection takes one value head of each key head in turn.

    Otherwise it takes all of the first key head's, then all of the second's."""

    @classmethod
    def from_keys(
        cls, keys: JsonKeys, num_layers: int, projections: tuple[str, ...]
    ) -> GatedDeltaConfig | None:
        """Read the keys of family.GATED_DELTA.

        Args:
            keys: of config.json.
            num_layers: of the model.
            projections: as the family stores them; none: it has no such layers.

        Raises:
            CheckpointError: a layer is of an unknown kind, or full attention is missing.
        """
        if not projections:
            return None
        kinds = keys.get("layer_types", None)
        if kinds is None:
            interval = keys.integer("full_attention_interval")
            kinds = [_KINDS[(layer + 1) % interval == 0] for layer in range(num_layers)]
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise keys.bad("layer_types", f"a list of {num_layers}")
        for layer, kind in enumerate(kinds):
            if kind not in _KINDS:
                what = f"{' or '.join(_KINDS)} in layer {layer}, which is {kind!r}"
                raise keys.bad("layer_types", what)
        if "full_attention" not in kinds:
            raise keys.bad("layer_types", "of a model with full_attention in at least one layer")
        num_key_heads = keys.integer("linear_num_key_heads")
        num_value_heads = keys.integer("linear_num_value_heads")
        if num_value_heads % num_key_heads:
            raise keys.bad("linear_num_value_heads", f"a multiple of {num_key_heads}")
        return cls(
            num_key_heads=num_key_heads,
            num_value_heads=num_value_heads,
            key_dim=keys.integer("linear_key_head_dim"),
            value_dim=keys.integer("linear_value_head_dim"),
            conv_size=keys.integer("linear_conv_kernel_dim", maximum=_MAX_CONV_SIZE),
            layers=frozenset(i for i, kind in enumerate(kinds) if kind == "linear_attention"),
            projections=("in_proj_qkv", "in_proj_z", *projections[1:])
            if projections[0] == "in_proj_qkvz" and keys.flag("linear_split_qkvz")
            else projections,
            is_output_tiled=keys.flag("linear_output_tiled"),
        )

    @property
    def all_keys(self) -> int:
        """Values of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def all_values(self) -> int:
        """Values of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Values of queries, keys and values together, which the convolution reads."""
        return 2 * self.all_keys + self.all_values

    @property
    def tail_values(self) -> int:
        """Values of the inputs before the next token that a layer's convolution reads."""
        return (self.conv_size - 1) * self.conv_width

    @property
    def state_values(self) -> int:
        """Values of a layer's states, one of [key_dim, value_dim] per value head."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def layer_values(self) -> int:
        """Values that one layer keeps in a record."""
        return self.tail_values + self.state_values

    @property
    def record_bytes(self) -> int:
        """Bytes of one sequence's record."""
        return len(self.layers) * self.layer_values * _STATE_BYTES
