"""Plan how weights lie in memory: mapped, widened, packed or quantised.

Invariant: the choice is reported with its bytes, unless files are served unchanged.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from appliance.configuration.settings import ServeConfig
from appliance.fleet.gpu_placement import packing_on
from appliance.fleet.placement import Placement
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.packed_layouts import FP8_ROWS
from engine.checkpoint.weights_layout import (
    AS_STORED,
    PanelsLayout,
    WeightsLayout,
    arena_layout,
    gpu_layout,
    packed_layout,
    panels_layout,
    weights_layout,
)
from engine.errors import ConfigError
from engine.kernels.cpu import WIDENED, ProductVariants, has_kernels
from engine.kernels.product_choice import AS_STORED as PRODUCTS_AS_STORED
from engine.kernels.product_choice import ProductChoice, products_here
from engine.units import size_text
from engine.wire.messages import LogitsLoss, WeightsSpec

log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    """The layout of weights that are not mapped directly from the files."""

    layout: WeightsLayout | PanelsLayout | None
    """None: the files are mapped, or each worker makes its own memory on its GPU."""
    variants: ProductVariants | None
    """How matrices packed in pairs are multiplied; None: none is packed."""
    weights: str
    """The setting `weights`."""
    packing: str
    """The layout of quantised matrices on GPUs."""
    words: str
    """A description of the weights in memory; empty: unchanged from the files."""
    choice: ProductChoice
    """How bfloat16 is multiplied on cores."""

    @property
    def variants_text(self) -> str:
        """How products are computed, if that changes their bits; empty: exactly."""
        attention = (
            "" if self.choice.attention == WIDENED else f"; attention {self.choice.attention}"
        )
        return f"{self.variants or ''}{attention}"

    def spec(
        self, fd: int, index: int, count: int, *, is_file: bool = False, is_filled: bool = False
    ) -> WeightsSpec:
        """Return the arena's spec for worker `index` of `count`."""
        assert self.layout is not None
        return WeightsSpec(
            fd,
            self.layout.num_bytes,
            index,
            count,
            is_filled=is_filled,
            is_file=is_file,
            is_packed=self.variants is not None or isinstance(self.layout, PanelsLayout),
            variant=None if self.variants is None else self.variants.few,
            has_tiles=self.variants is not None and self.variants.has_tiles,
            weights=self.weights,
        )


def plan_weights(
    checkpoint: Checkpoint,
    dtype: str,
    config: ServeConfig,
    placement: Placement,
) -> WeightsPlan:
    """Plan the layout of a checkpoint's weights.

    Args:
        config: the quantisation at start, which check_weights() has accepted, and `exact`.
        placement: of workers; workers on GPUs have memory of their own.
    """
    weights, on_gpu = config.weights, [plan.gpu is not None for plan in placement.workers]
    layout: WeightsLayout | PanelsLayout | None = None
    choice = PRODUCTS_AS_STORED
    if not all(on_gpu) and dtype == "bfloat16":
        choice = products_here(is_bitwise=config.exact == "bitwise")
    variants = None
    if weights == AS_STORED and choice.variants is not None:
        layout = packed_layout(checkpoint, dtype)
        variants = choice.variants if layout is not None else None
    if not all(on_gpu) and layout is None:
        layout = panels_layout(checkpoint, dtype, weights) if has_kernels() else None
        layout = layout or weights_layout(checkpoint, dtype, can_widen=has_kernels())
        if layout is None and len({plan.node for plan in placement.workers}) > 1:
            layout = arena_layout(checkpoint, dtype)  # of files that are mapped there is one copy
    gpus = [plan.gpu for plan in placement.workers if plan.gpu is not None]
    packing, fault = "widened", None
    if gpus and not checkpoint.is_plain:
        packing, fault = packing_on(gpus, is_safe=config.safe_kernels)
    words = ""
    if not checkpoint.is_plain or weights != AS_STORED:  # a GPU's worker makes its own arena
        there = layout or gpu_layout(checkpoint, dtype, packing)
        words = _words(checkpoint, there, dtype, weights)
        words += f": {fault}" if fault else ""
    return WeightsPlan(layout, variants, weights, packing, words, choice)


def weights_text(words: str, loss: LogitsLoss | None) -> str | None:
    """Describe the weights in memory and their loss; None: unchanged from the files."""
    if loss is None:
        return words or None
    return f"{words}; against the weights as stored, {_loss_text(loss)}"


def kv_text(dtype: str, kv_dtype: str, loss: LogitsLoss | None = None) -> str | None:
    """Describe the KV dtype of the pools and its loss; None: the serving dtype.

    Args:
        kv_dtype: of the pools, from the settings.
        loss: None: not measured yet.
    """
    if kv_dtype == "auto":
        return None
    words = f"KV is {kv_dtype}, with a scale for each token and head"
    return words if loss is None else f"{words}; against KV in {dtype}, {_loss_text(loss)}"


def _loss_text(loss: LogitsLoss) -> str:
    return (
        f"over {loss.num_tokens} tokens: "
        f"KL divergence of the logits {loss.kl_nats:.4f} nats, equal top token "
        f"{loss.same_top_ratio:.0%}"
    )


def check_weights(checkpoint: Checkpoint, dtype: str, weights: str, *, is_on_gpu: bool) -> None:
    """Refuse weights that cannot be quantised at start.

    Raises:
        ConfigError: naming why.
    """
    if weights == AS_STORED:
        return
    where, hint = "weights", "leave out --weights"
    if is_on_gpu:
        raise ConfigError("weights are quantised at start only on CPUs", where=where, hint=hint)
    if not has_kernels():
        raise ConfigError("the compiled kernels that read them are missing", where=where, hint=hint)
    if dtype == "float16":
        what = "the kernels do not compute in float16"
        raise ConfigError(what, where=where, hint="--dtype auto")
    quantised = sorted({t.dtype for t in checkpoint.tensors.values() if t.is_quantised})
    if quantised:
        what = f"the checkpoint's weights are quantised already, as {', '.join(quantised)}"
        raise ConfigError(what, where=where, hint=hint)
    if panels_layout(checkpoint, dtype, weights) is None:
        what = "no matrix has rows of a multiple of 32 values"
        raise ConfigError(what, where=where, hint=hint)


def _words(
    checkpoint: Checkpoint, layout: WeightsLayout | PanelsLayout, dtype: str, weights: str
) -> str:
    file = f"weights are mostly {checkpoint.stored_dtype} in the file, "
    file += f"{size_text(checkpoint.num_bytes)}; "
    if isinstance(layout, WeightsLayout):
        return f"{file}{size_text(layout.num_bytes)} in memory, widened to {dtype} at start"
    how = "quantised as they are" if weights == AS_STORED else f"quantised to {weights} at start"
    packed = f"{file}{size_text(layout.num_bytes)} in memory, {how}"
    if any(panels.form in ("int8_row", FP8_ROWS) for panels in layout.panels.values()):
        packed += ", inputs rounded to 8 bits token by token"
    widened = checkpoint.tensors.keys() & layout.rest.shape_by_name.keys()
    if weights == AS_STORED:
        widened = {name for name in widened if checkpoint.tensors[name].is_quantised}
    else:
        widened = {name for name in widened if len(checkpoint.tensors[name].shape) == 2}
    if widened:
        kinds = ", ".join(sorted({checkpoint.tensors[name].dtype for name in widened}))
        packed += f"; {len(widened)} matrices in {kinds} are served in {dtype}"
    return packed
