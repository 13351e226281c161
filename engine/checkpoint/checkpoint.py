"""Check a model before any worker starts: its configuration and where each weight lies.

Owns: which tensors a model needs; the choice of the serving dtype; where converted and quantised
weights lie in the memory that all workers read; one expert's part of a tensor that holds all.
Invariant: an opened Checkpoint has every tensor its config expects, in the right shape, inside
its file; daemon and workers come to the same layout of that memory.
Never: reads tensor data, imports torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from engine.checkpoint.delta_config import GatedDeltaConfig
from engine.checkpoint.gguf import GgufModel, find_gguf
from engine.checkpoint.gguf_models import named
from engine.checkpoint.json_keys import JsonKeys
from engine.checkpoint.model_config import DTYPE_BYTES, ExpertsConfig, ModelConfig
from engine.checkpoint.packed_layouts import (
    CPU_FORMS,
    FORMS,
    FP8_ROWS,
    form_of,
    packed_shape,
    panels_shape,
)
from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.safetensors_header import read_header
from engine.checkpoint.tensor_info import BLOCKS, TensorInfo
from engine.checkpoint.weights_layout import expert_tensor
from engine.errors import CheckpointError, ConfigError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_NamedShape = tuple[str, tuple[int, ...]]
_CONTINUING = frozenset({"k_proj", "v_proj", "up_proj", "w3"})
"""Projections that read the same input as the one before them."""
ALIGNMENT_BYTES = 64  # a cache line; also what vector loads like best


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
        gguf = find_gguf(folder) if folder.exists() else None
        if gguf is not None:
            return cls._open_gguf(gguf)
        if not folder.is_dir():
            hint = "use owner/model, a short name such as qwen3:0.6b, a folder or a .gguf file"
            what = "not a folder" if folder.exists() else "no model here"
            raise CheckpointError(what, where=str(folder), hint=hint)
        config = ModelConfig.from_folder(folder)
        found: dict[str, TensorInfo] = {}
        source, paths = _weight_files(folder)
        for path in paths:
            _, tensors = read_header(path)
            found.update((tensor.name, tensor) for tensor in _named(tensors, config.family.base))
        quantisation = Quantisation.from_keys(JsonKeys.from_file(folder / "config.json"))
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
            expected[name] = _checked(path, tensor, name, shape, lambda _name: "")
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


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """Where each weight lies in the arena of converted weights."""

    num_bytes: int
    offset_by_name: dict[str, int]
    shape_by_name: dict[str, tuple[int, ...]]
    source_by_packed: dict[str, str] = field(default_factory=dict)
    """The source tensor of each matrix that is packed in pairs."""


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
    checkpoint: Checkpoint,
    cpu_flags: Collection[str] | None = None,
    *,
    has_gpu: bool = False,
    capability: tuple[int, int] | None = None,
) -> str:
    """Choose the dtype; `auto` is bfloat16 if the hardware multiplies it natively.

    Args:
        requested: `auto`, `float32`, `bfloat16` or `float16`.
        checkpoint: on a CPU float32 checkpoints stay float32 under `auto`.
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
    return "bfloat16" if has_bfloat16 and checkpoint.stored_dtype != "float32" else "float32"


def weights_layout(
    checkpoint: Checkpoint, dtype: str, *, can_widen: bool = False
) -> WeightsLayout | None:
    """Lay out the arena for serving in `dtype`; None: the files can be mapped unchanged.

    can_widen: matrices of any dtype can be multiplied with float32; vectors are small, and each
    worker converts its own.
    """
    is_served_as_stored = all(
        tensor.dtype == dtype or (can_widen and (dtype == "float32" or len(tensor.shape) == 1))
        for tensor in checkpoint.tensors.values()
    )
    is_mapped = is_served_as_stored and checkpoint.is_mappable
    return None if is_mapped else arena_layout(checkpoint, dtype)


def arena_layout(checkpoint: Checkpoint, dtype: str) -> WeightsLayout:
    """Lay out all weights of a checkpoint in `dtype`, in the order of a forward pass."""
    return layout_of(((name, tensor.shape) for name, tensor in checkpoint.tensors.items()), dtype)


def layout_of(shapes: Iterable[_NamedShape], dtype: str) -> WeightsLayout:
    """Lay out tensors of these shapes, by name."""
    offset, offset_by_name, shape_by_name = 0, {}, dict(shapes)
    for name, shape in shape_by_name.items():
        if not _continues_matrix(name):
            offset = -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offset_by_name[name] = offset
        offset += math.prod(shape) * DTYPE_BYTES[dtype]
    return WeightsLayout(offset, offset_by_name, shape_by_name)


def packed_layout(checkpoint: Checkpoint, dtype: str) -> WeightsLayout | None:
    """Lay out the arena of all multiplied matrices, packed in pairs; the rest stays in the files.

    A tied output projection is packed under the name that it would have. The embedding stays
    stored, because a step only looks up rows. None: no kernel reads pairs for `dtype`, or a file
    cannot be mapped.
    """
    if dtype != "bfloat16" or not checkpoint.is_mappable:
        return None
    embedding, head = _ends(checkpoint)
    source_by_packed = {
        name: name
        for name, tensor in checkpoint.tensors.items()
        if len(tensor.shape) == 2 and not is_embedding(name)
    }
    source_by_packed.setdefault(head, embedding)
    offset, offset_by_name = 0, {}
    shape_by_name: dict[str, tuple[int, ...]] = {}
    for name, source in source_by_packed.items():
        num_rows, depth = checkpoint.tensors[source].shape
        shape_by_name[name] = packed_shape(num_rows, depth)
        offset_by_name[name] = offset
        offset += math.prod(shape_by_name[name]) * DTYPE_BYTES[dtype]
    return WeightsLayout(offset, offset_by_name, shape_by_name, source_by_packed)


def is_embedding(name: str) -> bool:
    """Return whether a step looks up rows of a tensor."""
    return name.endswith(("model.embed_tokens.weight", "model.embed_tokens_per_layer.weight"))


def _ends(checkpoint: Checkpoint) -> tuple[str, str]:
    """Name the embedding and the output projection."""
    prefix = checkpoint.config.family.prefix
    return f"{prefix}model.embed_tokens.weight", f"{prefix}lm_head.weight"


def _continues_matrix(name: str) -> bool:
    """Say whether a tensor must follow its predecessor without a gap, as one matrix."""
    return name.rsplit(".", 2)[-2] in _CONTINUING


def _weight_files(folder: Path) -> tuple[Path, list[Path]]:
    """Find the file that lists the tensors, and the files that hold them."""
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
    source: Path,
    tensor: TensorInfo | None,
    name: str,
    shape: tuple[int, ...],
    hint_of: Callable[[str], str],
) -> TensorInfo:
    if tensor is None:
        what = f"tensor {name} is missing"
        raise CheckpointError(what, where=str(source), hint=hint_of(name))
    if tensor.shape != shape:
        asks = "its metadata" if source.suffix == ".gguf" else "config.json"
        what = f"tensor {name} has shape {tensor.shape}, but {asks} asks for {shape}"
        hint = f"is {asks} that of these weights? take all files from one download"
        raise CheckpointError(what, where=str(tensor.file), hint=hint)
    served = (*DTYPE_BYTES, *BLOCKS) if source.suffix == ".gguf" else (*DTYPE_BYTES, "mxfp4_pairs")
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


def _layer_hint(found: dict[str, TensorInfo], name: str) -> str:
    """Name what the files hold in place of a missing tensor, if its name tells."""
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


_SMALL_AND_DECISIVE = (
    *(".gate.weight", ".router.weight", ".router.proj.weight", ".shared_expert_gate.weight"),
    *(".in_proj_a.weight", ".in_proj_b.weight", ".in_proj_ba.weight"),
)
"""Matrices that are not quantised at start."""

AS_STORED = "stored"
AT_START = {"q8": ("q8_0", "q8_0"), "q4": ("q4_1", "q8_0"), "int8": ("int8_row", "q8_0")}
"""Forms to which matrices can be quantised at start, by the setting's value: the layers' form, then
the output projection's. The projection's errors are in every logit."""


@dataclass(frozen=True, slots=True)
class Panels:
    """Where one quantised matrix lies in the arena, as panels."""

    offset: int
    """In the arena."""
    source: str
    """The tensor that it is made of."""
    form: str


@dataclass(frozen=True, slots=True)
class PanelsLayout:
    """Where weights lie in an arena of quantised matrices in panels."""

    num_bytes: int
    panels: dict[str, Panels]
    rest_offset: int
    rest: WeightsLayout
    """Layout of widened tensors, after the panels."""
    looked_up: frozenset[str]
    """Tensors that stay in the file, for rows of them are looked up."""


def gpu_layout(checkpoint: Checkpoint, dtype: str, packing: str) -> PanelsLayout | WeightsLayout:
    """Lay out all of a checkpoint's weights in a GPU's arena.

    Args:
        checkpoint: to serve.
        dtype: to serve in.
        packing: `widened`; `panels`: quantised matrices with a form stay quantised; `fp8`: also lay
            out matrices for products of FP8 with FP8.
    """
    if packing == "widened":
        return arena_layout(checkpoint, dtype)
    has_fp8 = packing == "fp8" and dtype == "bfloat16"
    panels = panels_layout(checkpoint, dtype, is_on_gpu=True, has_fp8_products=has_fp8)
    return panels or arena_layout(checkpoint, dtype)


def panels_layout(
    checkpoint: Checkpoint,
    dtype: str,
    weights: str = AS_STORED,
    *,
    is_on_gpu: bool = False,
    has_fp8_products: bool = False,
) -> PanelsLayout | None:
    """Lay out the arena of a quantised checkpoint: panels, then the rest in `dtype`.

    The embedding stays in the file, because a step only looks up rows. A tied output projection is
    packed under the name that it would have. None: the kernels do not know `dtype`, or know no
    matrix's form.

    Args:
        checkpoint: to serve.
        dtype: to serve in.
        weights: `stored`: matrices that are quantised in the files; or one of AT_START: all
            matrices of a checkpoint without quantised ones.
        is_on_gpu: nothing is read from files, and all dtypes are known.
        has_fp8_products: FP8 can be multiplied by FP8.
    """
    if dtype not in ("float32", "bfloat16") and not is_on_gpu:
        return None
    embedding, head = _ends(checkpoint)
    sources = {name: name for name in checkpoint.tensors if not is_embedding(name)}
    if head not in checkpoint.tensors:
        sources[head] = embedding
    offset, panels = 0, {}
    for name, source in sources.items():
        tensor = checkpoint.tensors[source]
        form = _form(tensor, weights, is_head=name == head)
        if form is None or (is_on_gpu and form in CPU_FORMS):
            continue
        if has_fp8_products and _is_of_fp8_products(tensor):
            form = FP8_ROWS
        panels[name] = Panels(offset, source, form)
        num_rows, depth = tensor.shape
        offset += math.prod(panels_shape(form, num_rows, depth))
        offset = -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if not panels:
        return None
    embeddings = {name for name in checkpoint.tensors if is_embedding(name)}
    looked_up = {name for name in embeddings if _stays_in_file(checkpoint.tensors[name])}
    if head not in checkpoint.tensors and head not in panels:
        looked_up -= {embedding}  # the product reads it, too
    if is_on_gpu:
        looked_up = set()
    rest = layout_of(
        (
            (name, tensor.shape)
            for name, tensor in checkpoint.tensors.items()
            if name not in panels and name not in looked_up
        ),
        dtype,
    )
    return PanelsLayout(offset + rest.num_bytes, panels, offset, rest, frozenset(looked_up))


def _form(tensor: TensorInfo, weights: str, *, is_head: bool) -> str | None:
    """Return the form of a matrix in panels; None: it is not packed."""
    if weights == AS_STORED:
        return form_of(tensor)
    if len(tensor.shape) != 2 or tensor.name.endswith(_SMALL_AND_DECISIVE):
        return None
    form = AT_START[weights][is_head]
    return None if tensor.shape[1] % FORMS[form].group else form


def _is_of_fp8_products(tensor: TensorInfo) -> bool:
    is_rounded = tensor.apart is not None and tensor.apart.rounds_inputs
    return is_rounded and tensor.dtype == "fp8" and all(size % 16 == 0 for size in tensor.shape)


def _stays_in_file(tensor: TensorInfo) -> bool:
    """Say whether rows can be read in the file: whole, in order, aligned."""
    if tensor.is_plain:
        return tensor.start % DTYPE_BYTES[tensor.dtype] == 0
    return tensor.is_in_blocks
