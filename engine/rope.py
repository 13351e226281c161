"""How positions turn into rotations: the RoPE scaling kinds of the supported families.

Owns: the parameters of rotary position embedding as config.json states them.
Called by: config (reads them), engine.model.layers (computes frequencies from them).
Invariant: every field that the kind uses is set; old and new spellings give the same object.
Never: computes a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.json_keys import REQUIRED, JsonKeys


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding; a kind ignores the fields that it has no use for."""

    kind: str
    """`default`, `linear`, `llama3` or `yarn`."""
    theta: float
    attention_factor: float = 1.0
    """Multiplies cosine and sine; 1 except for yarn."""
    factor: float = 1.0
    original_max_position_embeddings: float = 0.0
    """Of the training before stretching; llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def from_keys(cls, keys: JsonKeys, max_position_embeddings: int) -> RopeConfig:
        """Read the old `rope_scaling` and `rope_theta` keys or the newer `rope_parameters`."""
        rope = keys.section("rope_scaling")
        if not rope.values:
            rope = keys.section("rope_parameters")
        theta = (rope if "rope_theta" in rope.values else keys).number("rope_theta", 10000.0)
        if theta <= 1:
            raise keys.bad("rope_theta", "a number above 1")
        kind = rope.get("rope_type", rope.get("type", "default"))
        for owner in (rope, keys):
            if owner.get("partial_rotary_factor", None) not in (None, 1, 1.0):
                raise owner.bad("partial_rotary_factor", "1 (only full rotation is supported)")
        if kind == "default":
            nested = [key for key, value in rope.values.items() if isinstance(value, dict)]
            if nested:
                raise rope.bad(nested[0], "supported: one RoPE must serve all layers")
            return cls("default", theta)
        if kind == "linear":
            return cls("linear", theta, factor=rope.number("factor"))
        length_key = "original_max_position_embeddings"
        owner = keys if length_key in keys.values else rope
        original = owner.number(length_key, max_position_embeddings)
        if kind == "llama3":
            if rope.number("high_freq_factor") <= rope.number("low_freq_factor"):
                raise rope.bad("high_freq_factor", "above low_freq_factor")
            return cls(
                "llama3",
                theta,
                factor=rope.number("factor"),
                original_max_position_embeddings=original,
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
            )
        if kind == "yarn":
            return cls._yarn(rope, theta, original, max_position_embeddings)
        key = "rope_type" if "rope_type" in rope.values else "type"
        raise rope.bad(key, "one of default, linear, llama3, yarn")

    @classmethod
    def _yarn(
        cls, rope: JsonKeys, theta: float, original: float, max_position_embeddings: int
    ) -> RopeConfig:
        has_factor = rope.get("factor", REQUIRED) is not None
        factor = rope.number("factor") if has_factor else max_position_embeddings / original
        mscale, mscale_all_dim = rope.get("mscale", None), rope.get("mscale_all_dim", None)
        if rope.get("attention_factor", None) is not None:
            attention_factor = rope.number("attention_factor")
        elif mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, rope.number("mscale")) / _yarn_mscale(
                factor, rope.number("mscale_all_dim")
            )
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
        return cls(
            "yarn",
            theta,
            attention_factor=attention_factor,
            factor=factor,
            original_max_position_embeddings=original,
            # transformers reads null and 0 as absent here
            beta_fast=rope.number("beta_fast") if rope.get("beta_fast", None) else 32.0,
            beta_slow=rope.number("beta_slow") if rope.get("beta_slow", None) else 1.0,
            truncate=rope.flag("truncate", True),
        )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
