"""Multiply by weights as they are stored, with compiled kernels or torch.

A step of few tokens takes as long as reading the weights. The kernels read them in the dtype of the
checkpoint and widen each value in a register, which is exact, so that float32 needs no second,
larger copy; torch multiplies operands of one dtype only.
Invariant: sums are float32 or better, whatever the weights and inputs are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere

from engine.checkpoint.model_config import ACTIVATIONS, ExpertsConfig
from engine.checkpoint.packed_layouts import PANEL_ROWS
from engine.kernels.cpu import (
    BFLOAT16,
    BFLOAT16_PAIRS,
    EXACT,
    FLOAT16,
    FLOAT32,
    FORMS,
    NOT_GATED,
    Kernels,
    ProductVariants,
)
from engine.worker.model.buffers import Take, fresh
from engine.worker.model.compiled import ELEMENT_TYPES, find_kernels
from engine.worker.model.weight import PLAIN, Weight


class Linear(Protocol):
    """[num_tokens, inputs] to [num_tokens, outputs of all its projections, side by side]."""

    def __call__(self, x: torch.Tensor, num_few: int | None = None) -> torch.Tensor:
        """Multiply; the first num_few rows are what StepBatch counts as few; None: all are."""


_KERNEL_SCHEMES = {
    "float32": FLOAT32,
    "bfloat16": BFLOAT16,
    "float16": FLOAT16,
    "bfloat16_pairs": BFLOAT16_PAIRS,
    **{f"{form}_panels": number for form, number in FORMS.items()},
}

# MKL multiplies a large matrix by few rows in half the time with its operands exchanged.
_FEW_ROWS = 4


@dataclass(frozen=True, slots=True)
class Linears:
    """Multiply all matrices of a model by one backend."""

    name: str
    """The backend's name for people; with a reason if it is not the best."""
    kernels: Kernels | None

    take: Take = fresh
    variants: ProductVariants | None = None
    """How matrices that are packed in pairs are multiplied; None: none is."""

    def make(
        self,
        weights: dict[str, Weight],
        names: list[str],
        *,
        has_bias: bool = False,
        is_kept: bool = False,
        kind: str = "linear",
    ) -> Linear:
        """Make the projections of one input, by their tensors' names without `.weight`.

        What one of them returns lasts until the next of its kind is called, unless it is kept.
        """
        matrices, biases = _tensors(weights, names, has_bias=has_bias)
        if self.kernels is None and any(matrix.scheme not in PLAIN for matrix in matrices):
            # only here is Triton known to be there
            from engine.worker.model.triton_linear import TritonLinear

            return TritonLinear(matrices, biases)
        if self.kernels is None:
            return TorchLinear(matrices, biases)
        take = fresh if is_kept else self.take
        is_packed = all(matrix.scheme == "bfloat16_pairs" for matrix in matrices)
        variants = (self.variants or EXACT) if is_packed else None
        return CompiledLinear(self.kernels, matrices, biases, take, variants, kind)

    def make_gated(
        self,
        weights: dict[str, Weight],
        names: list[str],
        activation: str,
        gated: Callable[[torch.Tensor, str], torch.Tensor],
        *,
        has_bias: bool = False,
    ) -> Linear:
        """Make a gate beside what it multiplies, and their product.

        Args:
            gated: makes the product of both, where the kernel that multiplies cannot.
        """
        matrices, biases = _tensors(weights, names, has_bias=has_bias)
        if self.kernels is not None and _has_halves_in_pairs(matrices):
            how = self.take, self.variants or EXACT, "gated", activation
            return CompiledLinear(self.kernels, matrices, biases, *how)
        linear = self.make(weights, names, has_bias=has_bias)
        return lambda x, num_few=None: gated(linear(x, num_few), activation)

    def make_experts(
        self,
        experts: ExpertsConfig,
        gate_ups: list[Linear],
        downs: list[Linear],
        activation: str,
        share_scale: torch.Tensor | None,
    ) -> CompiledExperts | None:
        """Join a layer's experts into one call; None: use each linear, no kernel fits."""
        if self.kernels is None:
            return None
        ups = [one for one in gate_ups if isinstance(one, CompiledLinear)]
        of_each = [one for one in downs if isinstance(one, CompiledLinear)]
        if len(ups) + len(of_each) < len(gate_ups) + len(downs):
            return None
        return CompiledExperts(
            self.kernels,
            ups,
            of_each,
            num_per_token=experts.num_per_token,
            is_normalized=experts.is_normalized,
            activation=ACTIVATIONS.index(activation),
            share_scale=share_scale,
            take=self.take,
        )


def _tensors(
    weights: dict[str, Weight], names: list[str], *, has_bias: bool
) -> tuple[list[Weight], list[torch.Tensor]]:
    """Find the matrices and biases of some projections."""
    matrices = [weights[f"{name}.weight"] for name in names]
    return matrices, [weights[f"{name}.bias"].values for name in names] if has_bias else []


def _has_halves_in_pairs(matrices: list[Weight]) -> bool:
    """Say whether matrices are packed in pairs, and their second half begins with a panel."""
    rows = [matrix.shape[0] for matrix in matrices]
    is_packed = all(matrix.scheme == "bfloat16_pairs" for matrix in matrices)
    are_halves = rows[0] == rows[1] if len(rows) == 2 else rows[0] % (2 * PANEL_ROWS) == 0
    return is_packed and are_halves


def choose_linears(
    device: str,
    dtype: torch.dtype,
    level: str | None = None,
    take: Take = fresh,
    variants: ProductVariants | None = None,
) -> Linears:
    """Choose compiled kernels if they are built for the dtype, else torch.

    Args:
        device: type of the weights' device.
        level: of the kernels; None: the best that the machine can run.
        take: where results lie.
        variants: how matrices that are packed in pairs are multiplied.
    """
    kernels, name = find_kernels(device, dtype, level)
    return Linears(name if kernels is None else f"compiled {name}", kernels, take, variants)


class CompiledLinear:
    """Weights of one scheme, read in place; inputs and outputs are float32 or bfloat16.

    Args:
        matrices: side by side; all packed in pairs, or none.
        biases: one for each, or none.
        take: where results lie.
        variants: how packed ones are multiplied, whose inputs are bfloat16; None: they are plain.
        kind: of the results, for `take`.
        activation: of gates, the first half of the outputs, which multiply the other; None: there
            are none, as in plain matrices.
    """

    def __init__(
        self,
        kernels: Kernels,
        matrices: list[Weight],
        biases: list[torch.Tensor],
        take: Take = fresh,
        variants: ProductVariants | None = None,
        kind: str = "linear",
        activation: str | None = None,
    ) -> None:
        self._take, self.variants, self._kind = take, variants, kind
        self._activation = NOT_GATED if activation is None else ACTIVATIONS.index(activation)
        self._data = [matrix.data.contiguous() for matrix in matrices]  # alive with the addresses
        self.bias = torch.cat(biases).float() if biases else None
        num_rows = sum(matrix.shape[0] for matrix in matrices)
        self.num_outputs = num_rows if activation is None else num_rows // 2
        parts = [
            (data.data_ptr(), matrix.shape[0], _KERNEL_SCHEMES[matrix.scheme])
            for data, matrix in zip(self._data, matrices, strict=True)
        ]
        self.parts = torch.tensor(parts, dtype=torch.int64)
        self._linear = kernels.linear if variants is None else kernels.linear_pairs
        self._prepared = (
            matrices[0].shape[1],
            self.parts.data_ptr(),
            len(parts),
            0 if self.bias is None else self.bias.data_ptr(),
        )

    def __call__(self, x: torch.Tensor, num_few: int | None = None) -> torch.Tensor:
        """Multiply by all matrices in one call, on as many threads as torch would use."""
        x = x.contiguous()
        num_tokens, num_threads = len(x), torch.get_num_threads()
        out = self._take(self._kind, num_tokens, self.num_outputs, x.dtype)
        places = out.data_ptr(), x.data_ptr()
        if self.variants is None:
            kind = ELEMENT_TYPES[x.dtype]
            self._linear(*places, kind, num_tokens, *self._prepared, num_threads)
        else:
            few = num_tokens if num_few is None else self.variants.num_few(num_tokens, num_few)
            how = self.variants.few, self._activation, num_threads
            self._linear(*places, num_tokens, few, *self._prepared, *how)
        return out


class CompiledExperts:
    """A layer's experts by one kernel, which finds out itself which token goes through which.

    Args:
        gate_ups: of each expert, gate and up side by side.
        downs: the other matrix of each.
        num_per_token: experts that a token goes through.
        is_normalized: their shares are scaled to add up to 1.
        activation: its number in ACTIVATIONS.
        share_scale: factors of each expert's share, float32 [num_experts]; None: there are none.
        take: where results lie.
    """

    def __init__(
        self,
        kernels: Kernels,
        gate_ups: list[CompiledLinear],
        downs: list[CompiledLinear],
        *,
        num_per_token: int,
        is_normalized: bool,
        activation: int,
        share_scale: torch.Tensor | None = None,
        take: Take = fresh,
    ) -> None:
        self._take, self._mixture = take, kernels.mixture
        self._linears = gate_ups, downs, share_scale  # alive with the addresses
        self._size = downs[0].num_outputs
        self._tables = [table for each in (gate_ups, downs) for table in _stacked(each)]
        up, up_bias, down, down_bias = (
            0 if table is None else table.data_ptr() for table in self._tables
        )
        packed = [each[0].variants for each in (gate_ups, downs)]
        self._variants = packed[0] or packed[1] or EXACT
        self._experts = torch.tensor(  # struct experts of engine/kernels/experts.c
            [
                *(len(downs), num_per_token, is_normalized, activation),
                *(self._size, gate_ups[0].num_outputs // 2),
                *(up, len(gate_ups[0].parts), up_bias, down, down_bias),
                *(each is not None for each in packed),
                self._variants.few,
                0 if share_scale is None else share_scale.data_ptr(),
            ],
            dtype=torch.int64,
        )

    def __call__(self, x: torch.Tensor, scores: torch.Tensor, num_few: int) -> torch.Tensor:
        """Compute tokens [num_tokens, hidden_size]; scores are [num_tokens, num_experts]."""
        x, scores = x.contiguous(), scores.contiguous()
        num_few = self._variants.num_few(len(x), num_few)
        out = self._take("experts", len(x), self._size, x.dtype)
        addresses = out.data_ptr(), x.data_ptr(), scores.data_ptr(), self._experts.data_ptr()
        threads = torch.get_num_threads()
        self._mixture(*addresses, ELEMENT_TYPES[x.dtype], len(x), num_few, threads)
        return out


def _stacked(linears: list[CompiledLinear]) -> tuple[torch.Tensor | None, ...]:
    """Stack parts and biases of equal matrices for a mixture's kernel."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    parts = torch.stack([linear.parts for linear in linears])
    return parts, torch.cat(biases) if biases else None


class TorchLinear:
    """Weights in the dtype of the inputs; neighbours in memory are multiplied as one matrix."""

    def __init__(self, matrices: list[Weight], biases: list[torch.Tensor]) -> None:
        values = [matrix.values for matrix in matrices]
        fused = as_one_matrix(values)
        self._matrices = values if fused is None else [fused]
        if not biases:
            self._biases: list[torch.Tensor | None] = [None] * len(self._matrices)
        else:
            self._biases = list(biases) if fused is None else [torch.cat(biases)]

    def __call__(self, x: torch.Tensor, num_few: int | None = None) -> torch.Tensor:
        """Multiply by one matrix after the other."""
        outputs = [_multiply(x, w, b) for w, b in zip(self._matrices, self._biases, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.dtype == torch.float32 and 1 < len(x) <= _FEW_ROWS and x.device.type == "cpu":
        output = torch.mm(weight, x.t()).t().contiguous()
        return output if bias is None else output.add_(bias)
    return F.linear(x, weight, bias)


def as_one_matrix(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """Return one tensor over parts that lie end to end in one storage, else None.

    The parts join along dimension 0. Storages may be neighbours by chance: no tensor reaches from
    one into the next.
    """
    first, end = parts[0], parts[0].storage_offset()
    if len({part.untyped_storage()._cdata for part in parts}) > 1:
        return None
    for part in parts:
        is_next = part.data_ptr() == first.data_ptr() + (end - first.storage_offset()) * (
            first.element_size()
        )
        if not is_next or not part.is_contiguous():
            return None
        end += part.numel()
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
