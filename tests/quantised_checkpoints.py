"""Quantised safetensors checkpoints made from tiny ones, each with the float32 one that it means.

Codes and scales are laid out as the formats' documents have them, and the values that they mean are
computed here from those documents, apart from the product's own reading.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Made = tuple[Tensors, torch.Tensor]
"""What is stored in place of a matrix, by the end of its name; and the values that it means."""


def _fp8(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_blocks(values: torch.Tensor, size: int = 128) -> Made:
    """DeepSeek's and Qwen's: a scale for each block of size x size."""
    rows, depth = values.shape
    grid = -(-rows // size), -(-depth // size)
    scales = torch.zeros(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            block = values[i * size : (i + 1) * size, j * size : (j + 1) * size]
            scales[i, j] = block.abs().max() / 448
    wide = scales.repeat_interleave(size, 0)[:rows].repeat_interleave(size, 1)[:, :depth]
    codes = _fp8(values / wide)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * wide


def fp8_rows(values: torch.Tensor) -> Made:
    """compressed-tensors': a scale for each row."""
    scales = (values.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = _fp8(values / scales.float())
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def fp8_one(values: torch.Tensor) -> Made:
    """One scale for all, and one for inputs, which is not of weights."""
    scale = values.abs().max() / 448
    codes = _fp8(values / scale)
    stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return stored, codes.float() * scale


def int8_rows(values: torch.Tensor) -> Made:
    """compressed-tensors' W8A8."""
    scales = (values.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (values / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def _grouped(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high of each group, [rows, groups]."""
    return values.view(len(values), -1, group).aminmax(dim=-1)


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes along the last dimension into words of 32 bits, the first lowest."""
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % per_word))
    shifts = torch.arange(0, 32, bits)
    words = (codes.unflatten(-1, (-1, per_word)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def packed(values: torch.Tensor, group: int, bits: int = 4, *, has_zeros: bool = False) -> Made:
    """compressed-tensors' pack-quantized: signed codes, stored half of their range too large."""
    half = 1 << (bits - 1)
    low, high = _grouped(values, group)
    if has_zeros:
        scales = ((high - low) / (2 * half - 1)).half()
        zeros = (-half - low / scales.float()).round().clamp(-half, half - 1)
    else:
        scales = (torch.maximum(high, -low) / (half - 0.5)).half()
        zeros = torch.zeros_like(low)
    wide, zero = (
        each.float().repeat_interleave(group, 1)[:, : values.shape[1]] for each in (scales, zeros)
    )
    codes = (values / wide + zero).round().clamp(-half, half - 1)
    stored = {
        "weight_packed": _words(codes + half, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(values.shape),
    }
    if has_zeros:
        stored["weight_zero_point"] = _words((zeros + half).T, bits).T.contiguous()
    return stored, (codes - zero) * wide


def float4(values: torch.Tensor, whole: str) -> Made:
    """NVFP4: a matrix' scale divides (compressed-tensors) or multiplies (ModelOpt)."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat((table, -table))
    groups = values.view(len(values), -1, 16)
    largest = groups.abs().amax(-1) / 6
    ratio = 448 / largest.max()
    own = ratio if whole == "weight_global_scale" else 1 / ratio
    scales = _fp8(largest * ratio)
    wide = scales.float() / own if whole == "weight_global_scale" else scales.float() * own
    codes = (groups / wide.clamp(min=1e-9)[..., None]).unsqueeze(-1).sub(table).abs().argmin(-1)
    meant = (table[codes] * wide[..., None]).view(values.shape)
    pairs = codes.view(len(values), -1, 2).to(torch.uint8)
    name = "weight_packed" if whole == "weight_global_scale" else "weight"
    stored = {name: pairs[..., 0] | (pairs[..., 1] << 4), "weight_scale": scales}
    return stored | {whole: own.float().reshape(1)}, meant


def gptq(
    values: torch.Tensor, group: int, bits: int = 4, shift: int = 1, *, has_order: bool = False
) -> Made:
    """AutoGPTQ's: words along a column, zeros less `shift`, each column of the group in g_idx."""
    rows, depth = values.shape
    top = (1 << bits) - 1
    order = torch.arange(depth) // group
    if has_order:
        order = order[torch.randperm(depth, generator=torch.Generator().manual_seed(1))]
    scales, zeros = torch.zeros(depth // group, rows), torch.zeros(depth // group, rows)
    for number in range(depth // group):
        low, high = values[:, order == number].aminmax(dim=1)
        scales[number] = ((high - low) / top).half().float()
        zeros[number] = (-low / scales[number]).round().clamp(1, top)
    wide, zero = scales[order].T, zeros[order].T
    codes = (values / wide + zero).round().clamp(0, top)
    stored = {
        "qweight": _words(codes, bits).T.contiguous(),
        "qzeros": _words(zeros - shift, bits),
        "scales": scales.half(),
        "g_idx": order.int(),
    }
    return stored, (codes - zero) * wide


def awq(values: torch.Tensor, group: int) -> Made:
    """AutoAWQ's gemm: words along a row of the matrix on its side, 0 2 4 6 1 3 5 7 in each."""
    low, high = _grouped(values, group)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    wide, zero = scales.float().repeat_interleave(group, 1), zeros.repeat_interleave(group, 1)
    codes = (values / wide + zero).round().clamp(0, 15)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def words(each: torch.Tensor) -> torch.Tensor:
        return _words(each.T.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4)

    stored = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales.T.contiguous()}
    return stored, (codes - zero) * wide


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _rounding(inputs: dict[str, Any]) -> dict[str, Any]:
    """W8A8, with what is said of inputs."""
    config = _compressed("int-quantized", num_bits=8, strategy="channel")
    config["config_groups"]["group_0"]["input_activations"] = inputs
    return config


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Inputs as a token's scale times integers of eight bits; [..., depth]."""
    scales = x.float().abs().amax(-1, keepdim=True) / 127
    return ((x.float() / scales).round() * scales).to(x.dtype)


_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
KINDS: dict[str, tuple[Callable[[torch.Tensor], Made], dict[str, Any]]] = {
    "fp8-blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8-small-blocks": (
        lambda values: fp8_blocks(values, 48),
        {"quant_method": "fp8", "weight_block_size": [48, 48]},
    ),
    "fp8-one": (fp8_one, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-rows": (fp8_rows, _compressed("float-quantized", num_bits=8, strategy="channel")),
    "int8-rows": (int8_rows, _compressed("int-quantized", num_bits=8, strategy="channel")),
    "fp8-tokens": (fp8_rows, _rounding(_TOKENS | {"type": "float"})),
    "int8-tokens": (int8_rows, _rounding(_TOKENS)),
    "int8-static": (int8_rows, _rounding(_TOKENS | {"strategy": "tensor", "dynamic": False})),
    "int4-32": (
        lambda values: packed(values, 32),
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    ),
    "int4-128-zeros": (
        lambda values: packed(values, 128, has_zeros=True),
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=128),
    ),
    "int4-rows": (
        lambda values: packed(values, values.shape[1]),
        _compressed("pack-quantized", num_bits=4, strategy="channel"),
    ),
    "int8-packed": (
        lambda values: packed(values, 128, bits=8),
        _compressed("pack-quantized", num_bits=8, strategy="group", group_size=128),
    ),
    "gptq": (lambda values: gptq(values, 128), _GPTQ),
    "gptq-32": (lambda values: gptq(values, 32), _GPTQ | {"group_size": 32}),
    "gptq-v2": (lambda values: gptq(values, 64, shift=0), _GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq-order": (
        lambda values: gptq(values, 128, has_order=True), _GPTQ | {"desc_act": True}
    ),
    "gptq-8": (lambda values: gptq(values, 128, bits=8), _GPTQ | {"bits": 8}),
    "nvfp4": (
        lambda values: float4(values, "weight_global_scale"),
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
    ),
    "nvfp4-modelopt": (
        lambda values: float4(values, "weight_scale_2"),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    "awq": (lambda values: awq(values, 128), _AWQ),
    "awq-64": (lambda values: awq(values, 64), _AWQ | {"group_size": 64}),
}  # fmt: skip
"""By a name: what becomes of each matrix of a layer, and what config.json says of it."""
ROUNDED = ("int8-tokens",)
"""Those whose inputs are rounded token by token."""
WIDENED = ("fp8-small-blocks", "gptq-order", "gptq-8")
"""Those that the kernels have no form for."""
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
"""Of a tiny checkpoint whose rows hold groups of 128."""


def write_quantised(folder: Path, kind: str, into: Path) -> tuple[Path, Path]:
    """A checkpoint in one of KINDS, and the float32 one that it means, both in a folder.

    Matrices of layers are quantised; embeddings, norms, biases and the output projection are not.
    """
    quantised, meant = (into / f"{kind}{end}" for end in ("", "-meant"))
    make, config = KINDS[kind]
    stored: Tensors = {}
    values: Tensors = {}
    for name, each in load_file(folder / "model.safetensors").items():
        if ".layers." not in name or each.dim() != 2:
            stored[name] = values[name] = each
            continue
        parts, values[name] = make(each.float())
        stem = name.removesuffix("weight")
        stored |= {f"{stem}{end}": part.contiguous() for end, part in parts.items()}
    for target, tensors in ((quantised, stored), (meant, values)):
        shutil.copytree(folder, target)
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
    path = quantised / "config.json"
    keys = json.loads(path.read_text()) | {"quantization_config": config}
    path.write_text(json.dumps(keys))
    return quantised, meant
