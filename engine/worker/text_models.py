"""Load the models of whole texts that a worker holds beside the served one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from engine.checkpoint.text_model import TextModelConfig
from engine.kernels.cpu import ProductVariants
from engine.kernels.product_choice import products_here
from engine.text.read_models import read_text_model
from engine.wire.messages import TextModelSpec
from engine.worker.model.finite import check_finite
from engine.worker.model.linear import Linears, choose_linears
from engine.worker.model.stored_tensors import Stored
from engine.worker.model.text_transformer import TextTransformer
from engine.worker.model.weight import Weight, packed_in_pairs
from engine.worker.model.weights import map_files


def load_text_models(
    specs: list[TextModelSpec], device: torch.device, alive: Callable[[], None]
) -> dict[str, TextTransformer]:
    """Load the models by name.

    Args:
        device: where they compute.
        alive: called after each part.
    """
    return {spec.name: _load(spec, device, alive) for spec in specs}


def _load(spec: TextModelSpec, device: torch.device, alive: Callable[[], None]) -> TextTransformer:
    config = read_text_model(Path(spec.model_dir), spec.kind)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    linears = choose_linears(device.type, dtype)
    variants = None
    if linears.kernels is not None and dtype == torch.bfloat16:
        variants = products_here().variants
        linears = replace(linears, variants=variants)
    mapped = map_files(config.tensors, _ignore)
    stored = {name: _values(each) for name, each in mapped.items()}
    multiplied = _multiplied(config)
    weights = {
        name: _weight(values, linears, variants if name in multiplied else None, dtype, device)
        for name, values in stored.items()
    }
    alive()
    return TextTransformer(config, weights, dtype, linears, device, spec.compared)


def _values(stored: Stored) -> torch.Tensor:
    """Return a tensor's values, widened where they are quantised."""
    if not stored.info.is_quantised:
        check_finite(stored.values, stored.info)
        return stored.values
    return stored.rows(0, stored.num_rows).view(stored.info.shape)


def _multiplied(config: TextModelConfig) -> set[str]:
    """Name the matrices of products; the others are tables."""
    family = config.family
    tables = {family.words, family.positions, family.token_types, "lm_head"}
    return {
        name
        for name, tensor in config.tensors.items()
        if len(tensor.shape) == 2 and name.removesuffix(".weight") not in tables
    }


def _weight(
    values: torch.Tensor,
    linears: Linears,
    variants: ProductVariants | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Weight:
    if linears.kernels is None:  # torch multiplies values of one dtype
        return Weight.plain(values.to(device, dtype))
    weight = Weight.plain(values)
    return weight if variants is None else packed_in_pairs(weight)


def _ignore(_done: int, _total: int) -> None:
    """Drop the progress: mapping takes no time."""
