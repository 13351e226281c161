"""Check a model before any worker starts: its configuration and where each weight lies.

Invariant: an opened Checkpoint has every tensor its config expects, in the right shape, inside
its file.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from engine.checkpoint.delta_config import GatedDeltaConfig
from engine.checkpoint.expert_tensors import expert_tensor
from engine.checkpoint.folder_files import FolderFiles
from engine.checkpoint.gguf import GgufModel, find_gguf
from engine.checkpoint.gguf_tensors import named
from engine.checkpoint.json_keys import ADAPTER_FILE, ADAPTER_HINT, JsonKeys
from engine.checkpoint.model_config import DTYPE_BYTES, ExpertsConfig, ModelConfig
from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.safetensors_header import is_safetensors, read_header
from engine.checkpoint.tensor_info import BLOCKS, TensorInfo
from engine.errors import CheckpointError, ConfigError, reading_model

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OTHER_WEIGHTS = (".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz")
_NamedShape = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder or a GGUF file that can be served."""

    folder: Path
    """Where it lies; of a GGUF model the file, or the first of its parts."""
    config: ModelConfig
    tensors: dict[str, TensorInfo]
    """The tensors that the config expects, in the model's order; others are left out."""
    stored_dtype: str
    """The dtype of most of the weights."""

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read config and headers and check them against each other.

        Raises:
            CheckpointError: naming the file, and the key or tensor that is wrong.
        """
        with reading_model(folder):
            return cls._open(folder)

    @classmethod
    def _open(cls, folder: Path) -> Checkpoint:
        gguf = find_gguf(folder) if folder.exists() else None
        if gguf is not None:
            return cls._open_gguf(gguf)
        if not folder.is_dir():
            hint = "use owner/model, a short name such as qwen3:0.6b, a folder or a .gguf file"
            if is_safetensors(folder):
                hint = f"these are weights; name their folder, {folder.parent}"
            what = "not a folder" if folder.exists() else "no model here"
            raise CheckpointError(what, where=str(folder), hint=hint)
        files = FolderFiles(folder)
        config = ModelConfig.from_files(files)
        source, paths = weight_files(folder)
        found = _stored(paths, config.family.base, is_unlisted=source == folder)
        quantisation = Quantisation.from_keys(files.keys("config.json"))
        names, expected = config.family.experts, {}
        for name, shape in expected_shapes(config):
            tensor = found.get(name)
            if quantisation is not None:
                tensor = quantisation.find(found, name, shape)
            if tensor is None and names is not None and names.stack is not None:
                tensor = expert_tensor(found, names, name)
            tensor = _checked(source, tensor, name, shape, partial(_layer_hint, found))
            expected[name] = _in_order(tensor, config)
        return cls(folder, config, expected, _main_dtype(expected))

    @classmethod
    def _open_gguf(cls, path: Path) -> Checkpoint:
        model = GgufModel.open(path)
        config = ModelConfig.from_gguf(model)
        expected = {}
        for name, shape in expected_shapes(config):
            tensor = named(model, config.family, name)
            expected[name] = _checked(path, tensor, name, shape, lambda _name: "", in_gguf=True)
        return cls(model.path, config, expected, _main_dtype(expected))

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as stored."""
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def pieces(self) -> list[TensorInfo]:
        """The stored tensors that the model's are made of."""
        return [piece for tensor in self.tensors.values() for piece in tensor.pieces.values()]

    @property
    def files(self) -> set[Path]:
        """The files that weights lie in."""
        return {piece.file for piece in self.pieces}

    @property
    def is_plain(self) -> bool:
        """True if all tensors' bytes are their values, in order."""
        return all(tensor.is_plain for tensor in self.tensors.values())

    @property
    def is_mappable(self) -> bool:
        """True if every tensor's values are there as they are, at a multiple of their size."""
        return all(
            tensor.is_plain and tensor.start % DTYPE_BYTES[tensor.dtype] == 0
            for tensor in self.tensors.values()
        )

    @property
    def num_parameters(self) -> int:
        """Weights in the model; a tied output projection counts once."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def expected_shapes(config: ModelConfig) -> Iterator[_NamedShape]:
    """Yield each tensor's name and shape in the order of a forward pass.

    Query, key and value are neighbours, and so are gate and up: the arena's layout follows this
    order, and neighbours in it can be used as one matrix.
    """
    prefix, hidden = config.family.prefix, config.hidden_size
    yield f"{prefix}model.embed_tokens.weight", (config.vocab_size, hidden)
    inputs = config.layer_inputs
    if inputs is not None:
        size, all_sizes = inputs.size, inputs.size * config.num_layers
        yield f"{prefix}model.embed_tokens_per_layer.weight", (inputs.vocab_size, all_sizes)
        yield f"{prefix}model.per_layer_model_projection.weight", (all_sizes, hidden)
        yield f"{prefix}model.per_layer_projection_norm.weight", (size,)
    for layer in range(config.num_layers):
        layer_prefix = f"{prefix}model.layers.{layer}."
        yield from _norm_shapes(config, layer_prefix, "before_attention")
        if config.delta is not None and layer in config.delta.layers:
            yield from _delta_shapes(config, config.delta, f"{layer_prefix}linear_attn.")
        else:
            yield from _attention_shapes(config, f"{layer_prefix}self_attn.", layer)
        yield from _norm_shapes(config, layer_prefix, "after_attention")
        yield from _norm_shapes(config, layer_prefix, "before_mlp")
        experts = config.experts_of(layer)
        if experts is None or experts.names.beside_dense is not None:
            inner = config.intermediate_size_of(layer)
            yield from _mlp_shapes(config, f"{layer_prefix}mlp.", inner)
        if experts is not None:
            yield from _experts_shapes(experts, layer_prefix, config.hidden_size)
        yield from _norm_shapes(config, layer_prefix, "after_mlp")
        if inputs is not None:
            size = inputs.size
            yield f"{layer_prefix}per_layer_input_gate.weight", (size, hidden)
            yield f"{layer_prefix}per_layer_projection.weight", (hidden, size)
            yield f"{layer_prefix}post_per_layer_input_norm.weight", (hidden,)
        if config.family.has_layer_scalar:
            yield f"{layer_prefix}layer_scalar", (1,)
    yield f"{prefix}model.norm.weight", (hidden,)
    if not config.is_tied:
        yield f"{prefix}lm_head.weight", (config.vocab_size, hidden)


def _stored(paths: list[Path], base: str | None, *, is_unlisted: bool) -> dict[str, TensorInfo]:
    """Read the headers of files.

    Args:
        is_unlisted: no index says which files belong together.
    """
    found: dict[str, TensorInfo] = {}
    for path in paths:
        for tensor in _named(read_header(path)[1], base):
            if is_unlisted and (other := found.get(tensor.name)) is not None:
                what = f"tensor {tensor.name} is in {other.file.name}, too"
                hint = "leave one model's files in the folder"
                raise CheckpointError(what, where=str(path), hint=hint)
            found[tensor.name] = tensor
    return found


def _named(tensors: list[TensorInfo], base: str | None) -> list[TensorInfo]:
    """Rename tensors to the family's names."""
    return [
        replace(tensor, name=f"model.{tensor.name.removeprefix(base)}")
        if base is not None and tensor.name.startswith(base)
        else tensor
        for tensor in tensors
    ]


def _norm_shapes(config: ModelConfig, prefix: str, place: str) -> Iterator[_NamedShape]:
    name = getattr(config.family.norms, place)
    if name is not None:
        yield f"{prefix}{name}.weight", (config.hidden_size,)


def _attention_shapes(config: ModelConfig, prefix: str, layer: int) -> Iterator[_NamedShape]:
    hidden, family, heads = config.hidden_size, config.family, config.heads[layer]
    q_size, kv_size = config.num_heads * heads.head_dim, heads.width
    sizes = [q_size, kv_size, kv_size] if len(family.qkv) == 3 else [q_size + 2 * kv_size]
    parts = list(zip(family.qkv, sizes, strict=True))
    stores_kv = config.stores_kv(layer)
    if not stores_kv:
        parts = parts[:1]
    elif config.has_keys_as_values[layer]:
        parts.pop()
    if family.has_gates_in_queries:
        parts[0] = (family.qkv[0], 2 * q_size)
    for part, size in parts:
        yield f"{prefix}{part}.weight", (size, hidden)
    if config.has_qkv_bias:
        for part, size in parts:
            yield f"{prefix}{part}.bias", (size,)
    if family.qk_norm in ("head", "projection"):
        is_per_head = family.qk_norm == "head"
        yield f"{prefix}q_norm.weight", (heads.head_dim if is_per_head else q_size,)
        if stores_kv:
            yield f"{prefix}k_norm.weight", (heads.head_dim if is_per_head else kv_size,)
    if family.has_gated_attention:
        yield f"{prefix}gate_proj.weight", (q_size, hidden)
    yield f"{prefix}o_proj.weight", (hidden, q_size)
    if config.has_output_bias:
        yield f"{prefix}o_proj.bias", (hidden,)
    if family.has_sinks:
        yield f"{prefix}sinks", (config.num_heads,)


def _delta_shapes(
    config: ModelConfig, delta: GatedDeltaConfig, prefix: str
) -> Iterator[_NamedShape]:
    hidden, num_heads, values = config.hidden_size, delta.num_value_heads, delta.all_values
    sizes = {
        "in_proj_qkv": delta.conv_width,
        "in_proj_z": values,
        "in_proj_b": num_heads,
        "in_proj_a": num_heads,
        "in_proj_qkvz": delta.conv_width + values,
        "in_proj_ba": 2 * num_heads,
    }
    for part in delta.projections:
        yield f"{prefix}{part}.weight", (sizes[part], hidden)
    yield f"{prefix}conv1d.weight", (delta.conv_width, 1, delta.conv_size)
    yield f"{prefix}dt_bias", (num_heads,)
    yield f"{prefix}A_log", (num_heads,)
    yield f"{prefix}norm.weight", (delta.value_dim,)
    yield f"{prefix}out_proj.weight", (hidden, values)


def _mlp_shapes(config: ModelConfig, prefix: str, inner: int) -> Iterator[_NamedShape]:
    hidden, parts = config.hidden_size, config.family.gate_up
    rows = 2 * inner // len(parts)
    for part in parts:
        yield f"{prefix}{part}.weight", (rows, hidden)
    if config.has_mlp_bias:
        for part in parts:
            yield f"{prefix}{part}.bias", (rows,)
    yield f"{prefix}down_proj.weight", (hidden, inner)
    if config.has_mlp_bias:
        yield f"{prefix}down_proj.bias", (hidden,)


def _experts_shapes(
    experts: ExpertsConfig, layer_prefix: str, hidden: int
) -> Iterator[_NamedShape]:
    names, inner = experts.names, experts.intermediate_size
    prefix, beside = f"{layer_prefix}{names.block}", names.beside_dense
    if beside is not None:
        for norm in (beside.after_dense, beside.before_experts, beside.after_experts):
            yield f"{layer_prefix}{norm}.weight", (hidden,)
        yield f"{layer_prefix}{beside.router_scale}", (hidden,)
        yield f"{layer_prefix}{beside.share_scale}", (experts.num_experts,)
    if names.has_shared_expert:
        inner_of_shared = experts.shared_size
        yield f"{prefix}shared_expert_gate.weight", (1, hidden)
        yield f"{prefix}shared_expert.gate_proj.weight", (inner_of_shared, hidden)
        yield f"{prefix}shared_expert.up_proj.weight", (inner_of_shared, hidden)
        yield f"{prefix}shared_expert.down_proj.weight", (hidden, inner_of_shared)
    yield f"{prefix}{names.router}.weight", (experts.num_experts, hidden)
    if names.has_bias:
        yield f"{prefix}{names.router}.bias", (experts.num_experts,)
    for expert in range(experts.num_experts):
        own = f"{prefix}experts.{expert}."
        yield f"{own}{names.gate}.weight", (inner, hidden)
        yield f"{own}{names.up}.weight", (inner, hidden)
        if names.has_bias:
            yield f"{own}{names.gate}.bias", (inner,)
            yield f"{own}{names.up}.bias", (inner,)
        yield f"{own}{names.down}.weight", (hidden, inner)
        if names.has_bias:
            yield f"{own}{names.down}.bias", (hidden,)


def choose_dtype(
    requested: str,
    stored_dtype: str,
    cpu_flags: Collection[str] | None = None,
    *,
    has_gpu: bool = False,
    capability: tuple[int, int] | None = None,
) -> str:
    """Choose the dtype; `auto` is bfloat16 if the hardware multiplies it natively.

    Args:
        requested: `auto`, `float32`, `bfloat16` or `float16`.
        stored_dtype: on a CPU float32 checkpoints stay float32 under `auto`.
        cpu_flags: as in /proc/cpuinfo, which is read if None.
        has_gpu: it is served on GPUs.
        capability: of the GPU; before 8.0 they multiply float16 and no bfloat16; None: not known.
    """
    if requested in DTYPE_BYTES:
        return requested
    if requested != "auto":
        hint = f"one of auto, {', '.join(DTYPE_BYTES)}"
        raise ConfigError(f"unknown dtype {requested!r}", where="dtype", hint=hint)
    if has_gpu:
        return "float16" if capability is not None and capability < (8, 0) else "bfloat16"
    flags = _cpu_flags() if cpu_flags is None else cpu_flags
    has_bfloat16 = "amx_bf16" in flags or "avx512_bf16" in flags
    return "bfloat16" if has_bfloat16 and stored_dtype != "float32" else "float32"


def weight_files(folder: Path) -> tuple[Path, list[Path]]:
    """Find the file or folder that lists the tensors, and the files that hold them."""
    index_path = folder / _INDEX
    if (folder / _SINGLE).exists():
        return folder / _SINGLE, [folder / _SINGLE]
    if not index_path.exists():
        return folder, _by_first_bytes(folder)
    keys = JsonKeys.from_file(index_path)
    names = set(keys.section("weight_map").values.values())
    is_plain = all(isinstance(name, str) and name == Path(name).name for name in names)
    if not names or not is_plain:
        raise keys.bad("weight_map", "a map from tensors to file names in this folder")
    return index_path, [folder / name for name in sorted(names)]


def _by_first_bytes(folder: Path) -> list[Path]:
    """List the files with weights in a folder without the usual ones, whatever their names."""
    found = [path for path in sorted(folder.iterdir()) if is_safetensors(path)]
    whole = [path for path in found if not path.name.startswith("adapter_")]
    if not whole:
        others = [path.name for path in sorted(folder.iterdir()) if path.suffix in _OTHER_WEIGHTS]
        found_too = f"it has {', '.join(others[:3])}; " if others else ""
        hint = f"{found_too}convert the weights (transformers: save_pretrained)"
        if (folder / ADAPTER_FILE).exists():
            hint = ADAPTER_HINT
        raise CheckpointError("no weights in safetensors", where=str(folder), hint=hint)
    return whole


def _checked(
    source: Path,
    tensor: TensorInfo | None,
    name: str,
    shape: tuple[int, ...],
    hint_of: Callable[[str], str],
    *,
    in_gguf: bool = False,
) -> TensorInfo:
    if tensor is None:
        what = f"tensor {name} is missing"
        raise CheckpointError(what, where=str(source), hint=hint_of(name))
    if tensor.shape != shape:
        asks = "its metadata" if in_gguf else "config.json"
        what = f"tensor {name} has shape {tensor.shape}, but {asks} asks for {shape}"
        hint = f"is {asks} that of these weights? take all files from one download"
        raise CheckpointError(what, where=str(tensor.file), hint=hint)
    own = tuple(BLOCKS) if in_gguf else ("mxfp4_pairs",)
    served = (*DTYPE_BYTES, *own)
    is_served = tensor.dtype in served or tensor.apart is not None
    if not is_served or (tensor.dtype in BLOCKS and len(shape) != 2):
        what = f"tensor {name} is stored as {tensor.dtype}"
        hint = f"supported: {', '.join(served)}"
        raise CheckpointError(what, where=str(tensor.file), hint=hint)
    return tensor


def _in_order(tensor: TensorInfo, config: ModelConfig) -> TensorInfo:
    """Mark the rows of queries and keys whose order loading must change."""
    is_turned = re.search(r"\.self_attn\.[qk]_proj\.(weight|bias)$", tensor.name) is not None
    rope = next((rope for rope in config.ropes if rope is not None), None)
    if not config.family.turns_neighbours or not is_turned or rope is None:
        return tensor
    return replace(tensor, head_rows=config.head_dim, turned_rows=rope.rotary_dim)


_HEAD = "lm_head.weight"


def _layer_hint(found: dict[str, TensorInfo], name: str) -> str:
    """Name what the files hold in place of a missing tensor, if its name tells."""
    if name.endswith(_HEAD):
        return "config.json may say tie_word_embeddings: true, if the embedding stands for it"
    layer = re.match(r".*\blayers\.\d+\.", name)
    if layer is None:
        return ""
    block = name[: name.index(".", layer.end()) + 1]
    for prefix in (block, layer[0]):
        there = sorted(other for other in found if other.startswith(prefix))
        if there:
            shown = ", ".join(there[:6]) + (", ..." if len(there) > 6 else "")
            return f"the files have {shown}; fused or renamed weights must be converted"
    return ""


def _main_dtype(tensors: dict[str, TensorInfo]) -> str:
    values_by_dtype: Counter[str] = Counter()
    for tensor in tensors.values():
        values_by_dtype[tensor.dtype] += math.prod(tensor.shape)
    return values_by_dtype.most_common(1)[0][0]


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()
