"""A model folder, checked before any worker starts: its config and where every weight lies.

Owns: which tensors a model needs, the choice of the serving dtype, and the layout of the arena
that holds converted weights.
Called by: the daemon (sizes, fingerprint, errors to show), engine.model.weights.
Invariant: an opened Checkpoint has every tensor its config expects, in the right shape, inside
its file.
Never: reads tensor data, imports torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.config import DTYPE_BYTES, ModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.json_keys import JsonKeys
from engine.safetensors_header import TensorInfo, read_header

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ALIGNMENT_BYTES = 64  # a cache line; also what vector loads like best


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that can be served."""

    folder: Path
    config: ModelConfig
    tensors: dict[str, TensorInfo]
    """The tensors that the config expects, in the model's order; others are left out."""
    stored_dtype: str
    """The dtype of most of the weights' bytes."""
    fingerprint: str
    """Changes when config, headers, file sizes or times do; names KV that outlives a run."""

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read config and headers and check them against each other.

        Raises:
            CheckpointError: naming the file, and the key or tensor that is wrong.
        """
        if not folder.is_dir():
            hint = "give the path of a folder in Hugging Face format"
            what = "not a folder" if folder.exists() else "no such model folder"
            raise CheckpointError(what, where=str(folder), hint=hint)
        config = ModelConfig.from_folder(folder)
        found: dict[str, TensorInfo] = {}
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        source, paths = _weight_files(folder)
        for path in paths:
            header, tensors = read_header(path)
            stat = path.stat()
            digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
            digest.update(header)
            found.update((tensor.name, tensor) for tensor in tensors)
        expected = {
            name: _checked(source, found.get(name), name, shape)
            for name, shape in expected_shapes(config)
        }
        return cls(folder, config, expected, _main_dtype(expected), digest.hexdigest())

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as stored."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def num_parameters(self) -> int:
        """Weights in the model; a tied output projection counts once."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """Where each weight lies in the arena of converted weights."""

    num_bytes: int
    offset_by_name: dict[str, int]


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the model and its shape, in the order in which a forward pass reads them.

    Query, key and value are neighbours, and so are gate and up: the arena's layout follows this
    order, and neighbours in it can be used as one matrix.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv_sizes = {"q": q_size, "k": kv_size, "v": kv_size}
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        for part, size in qkv_sizes.items():
            yield f"{prefix}self_attn.{part}_proj.weight", (size, hidden)
        if config.has_qkv_bias:
            for part, size in qkv_sizes.items():
                yield f"{prefix}self_attn.{part}_proj.bias", (size,)
        if config.has_qk_norm:
            yield f"{prefix}self_attn.q_norm.weight", (config.head_dim,)
            yield f"{prefix}self_attn.k_norm.weight", (config.head_dim,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, q_size)
        if config.has_output_bias:
            yield f"{prefix}self_attn.o_proj.bias", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        for part in ("gate", "up"):
            yield f"{prefix}mlp.{part}_proj.weight", (inner, hidden)
        if config.has_mlp_bias:
            for part in ("gate", "up"):
                yield f"{prefix}mlp.{part}_proj.bias", (inner,)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
        if config.has_mlp_bias:
            yield f"{prefix}mlp.down_proj.bias", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config.is_tied:
        yield "lm_head.weight", (config.vocab_size, hidden)


def choose_dtype(
    requested: str, checkpoint: Checkpoint, cpu_flags: Collection[str] | None = None
) -> str:
    """The dtype to serve in; `auto` is bfloat16 where this CPU multiplies it natively.

    Args:
        requested: `auto`, `float32`, `bfloat16` or `float16`.
        checkpoint: float32 checkpoints stay float32 under `auto`.
        cpu_flags: as in /proc/cpuinfo, which is read if None.
    """
    if requested in DTYPE_BYTES:
        return requested
    if requested != "auto":
        hint = f"one of auto, {', '.join(DTYPE_BYTES)}"
        raise ConfigError(f"unknown dtype {requested!r}", where="--dtype", hint=hint)
    flags = _cpu_flags() if cpu_flags is None else cpu_flags
    has_bfloat16 = "amx_bf16" in flags or "avx512_bf16" in flags
    return "bfloat16" if has_bfloat16 and checkpoint.stored_dtype != "float32" else "float32"


def weights_layout(checkpoint: Checkpoint, dtype: str) -> WeightsLayout | None:
    """The arena for serving in `dtype`; None where the files can be mapped as they are."""
    item_bytes = DTYPE_BYTES[dtype]
    if all(
        tensor.dtype == dtype and tensor.start % item_bytes == 0
        for tensor in checkpoint.tensors.values()
    ):
        return None
    offset, offset_by_name = 0, {}
    for name, tensor in checkpoint.tensors.items():
        if not _continues_matrix(name):
            offset = -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        offset_by_name[name] = offset
        offset += math.prod(tensor.shape) * item_bytes
    return WeightsLayout(offset, offset_by_name)


def _continues_matrix(name: str) -> bool:
    """True if no gap may lie before this tensor, so that it and the one before are one matrix."""
    return name.rsplit(".", 2)[-2] in ("k_proj", "v_proj", "up_proj")


def _weight_files(folder: Path) -> tuple[Path, list[Path]]:
    """The file that lists the tensors, and the files that hold them."""
    index_path = folder / _INDEX
    if (folder / _SINGLE).exists() or not index_path.exists():
        return folder / _SINGLE, [folder / _SINGLE]
    keys = JsonKeys.from_file(index_path)
    names = set(keys.section("weight_map").values.values())
    is_plain = all(isinstance(name, str) and name == Path(name).name for name in names)
    if not names or not is_plain:
        raise keys.bad("weight_map", "a map from tensors to file names in this folder")
    return index_path, [folder / name for name in sorted(names)]


def _checked(
    source: Path, tensor: TensorInfo | None, name: str, shape: tuple[int, ...]
) -> TensorInfo:
    if tensor is None:
        raise CheckpointError(f"tensor {name} is missing", where=str(source))
    if tensor.shape != shape:
        what = f"tensor {name} has shape {tensor.shape}, but config.json asks for {shape}"
        raise CheckpointError(what, where=str(tensor.file))
    if tensor.dtype not in DTYPE_BYTES:
        what = f"tensor {name} is stored as {tensor.dtype}"
        hint = f"supported: {', '.join(DTYPE_BYTES)}"
        raise CheckpointError(what, where=str(tensor.file), hint=hint)
    return tensor


def _main_dtype(tensors: dict[str, TensorInfo]) -> str:
    bytes_by_dtype = dict.fromkeys(DTYPE_BYTES, 0)
    for tensor in tensors.values():
        bytes_by_dtype[tensor.dtype] += tensor.num_bytes
    return max(bytes_by_dtype, key=bytes_by_dtype.__getitem__)


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()
