"""Compute rotary frequencies from a model's configuration.

Invariant: every field that the kind uses is set; old and new spellings give the same object.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from engine.checkpoint.family import Family
from engine.checkpoint.json_keys import REQUIRED, JsonKeys


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding; a kind ignores the fields that it has no use for."""

    kind: str
    """`default`, `linear`, `llama3`, `yarn`, `longrope` or `proportional`."""
    theta: float
    rotary_dim: int
    """Leading dimensions of a head that turn; the others pass."""
    attention_factor: float = 1.0
    """Multiplies cosine and sine; 1 except for yarn and longrope."""
    factor: float = 1.0
    original_max_position_embeddings: float = 0.0
    """Length trained before stretching; llama3, yarn and longrope."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    num_turned_pairs: int = 0
    """The first, which alone turn, at the pace that they would have if all did; proportional."""
    query_growth: float = 0.0
    """Beta of the factor 1 + beta * log(1 + floor(position / original_max_position_embeddings)).

    Queries are multiplied by it after the rotation; yarn."""
    short_factors: tuple[float, ...] = ()
    """One per pair of dimensions, as long_factors; longrope."""
    long_factors: tuple[float, ...] = ()

    def factors(self, max_model_len: int) -> tuple[float, ...]:
        """Return longrope's factors for the longest request; empty: no longrope."""
        is_long = max_model_len > self.original_max_position_embeddings
        return self.long_factors if is_long else self.short_factors

    @classmethod
    def from_keys(cls, keys: JsonKeys, family: Family, head_dim: int) -> RopeConfig:
        """Read the old `rope_scaling` and `rope_theta` keys or the newer `rope_parameters`."""
        rope = keys.section("rope_scaling")
        if not rope.values:
            rope = keys.section("rope_parameters")
            if family.has_local_rope:
                rope = rope.section("full_attention")
        return cls._from_section(rope, keys, family, head_dim, "rope_theta")

    @classmethod
    def local_from_keys(cls, keys: JsonKeys, family: Family, head_dim: int) -> RopeConfig:
        """Read the rotation of a family's windowed layers, if it differs."""
        rope = keys.section("rope_parameters").section("sliding_attention")
        return cls._from_section(rope, keys, family, head_dim, "rope_local_base_freq")

    @classmethod
    def _from_section(
        cls, rope: JsonKeys, keys: JsonKeys, family: Family, head_dim: int, theta_key: str
    ) -> RopeConfig:
        theta = rope.number("rope_theta") if "rope_theta" in rope.values else keys.number(theta_key)
        if theta <= 1:
            raise keys.bad(theta_key, "a number above 1")
        if rope.get("rope_type", None) == "proportional":
            share = rope.number("partial_rotary_factor", 1.0)
            if share > 1:
                raise rope.bad("partial_rotary_factor", "a share of at most 1")
            num_pairs = int(share * head_dim // 2)
            factor = rope.number("factor", 1.0)
            return cls("proportional", theta, head_dim, factor=factor, num_turned_pairs=num_pairs)
        dim = _rotary_dim(rope, keys, family, head_dim)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if isinstance(kind, str):
            kind = family.rope_aliases.get(kind, kind)
        if kind == "default":
            nested = [key for key, value in rope.values.items() if isinstance(value, dict)]
            if nested:
                raise rope.bad(nested[0], "supported: one RoPE must serve all layers")
            return cls("default", theta, dim)
        if kind == "linear":
            return cls("linear", theta, dim, factor=rope.number("factor"))
        max_positions = keys.integer("max_position_embeddings")
        length_key = "original_max_position_embeddings"
        original = (keys if length_key in keys.values else rope).number(length_key, max_positions)
        if kind == "llama3":
            if rope.number("high_freq_factor") <= rope.number("low_freq_factor"):
                raise rope.bad("high_freq_factor", "above low_freq_factor")
            return cls(
                "llama3",
                theta,
                dim,
                factor=rope.number("factor"),
                original_max_position_embeddings=original,
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
            )
        if kind == "yarn":
            yarn = cls._yarn(rope, theta, dim, original, max_positions)
            growth = rope.number_or_none("llama_4_scaling_beta") or 0.0
            return replace(yarn, query_growth=growth) if family.has_growing_queries else yarn
        if kind == "longrope":
            return cls._longrope(rope, theta, dim, original, max_positions)
        key = "rope_type" if "rope_type" in rope.values else "type"
        raise rope.bad(key, "one of default, linear, llama3, yarn, longrope")

    @classmethod
    def _yarn(
        cls, rope: JsonKeys, theta: float, dim: int, original: float, max_positions: int
    ) -> RopeConfig:
        has_factor = rope.get("factor", REQUIRED) is not None
        factor = rope.number("factor") if has_factor else max_positions / original
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
            dim,
            attention_factor=attention_factor,
            factor=factor,
            original_max_position_embeddings=original,
            # transformers reads null and 0 as absent here
            beta_fast=rope.number("beta_fast") if rope.get("beta_fast", None) else 32.0,
            beta_slow=rope.number("beta_slow") if rope.get("beta_slow", None) else 1.0,
            truncate=rope.flag("truncate", True),
        )

    @classmethod
    def _longrope(
        cls, rope: JsonKeys, theta: float, dim: int, original: float, max_positions: int
    ) -> RopeConfig:
        factor = rope.number_or_none("factor") or max_positions / original
        attention_factor = rope.number_or_none("attention_factor")
        if attention_factor is None:
            attention_factor = 1.0
            if factor > 1:
                if original <= 1:
                    raise rope.bad("original_max_position_embeddings", "above 1")
                attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
        return cls(
            "longrope",
            theta,
            dim,
            attention_factor=attention_factor,
            original_max_position_embeddings=original,
            short_factors=rope.numbers("short_factor", dim // 2),
            long_factors=rope.numbers("long_factor", dim // 2),
        )


def _rotary_dim(rope: JsonKeys, keys: JsonKeys, family: Family, head_dim: int) -> int:
    key = "partial_rotary_factor"
    owner = rope if rope.get(key, None) is not None else keys
    share = owner.number_or_none(key)
    if share is None or share == 1:
        return head_dim
    dim = int(head_dim * share)
    if not family.has_partial_rotary:
        raise owner.bad(key, f"1 ({family.name} rotates whole heads)")
    if not 2 <= dim < head_dim or dim % 2:
        raise owner.bad(key, f"a share that leaves an even part of the {head_dim} dimensions")
    return dim


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
