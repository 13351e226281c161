"""Find the tensors that form each quantised matrix.

In safetensors files a matrix is stored as codes, scales, and perhaps zeros, each a tensor of its
own, in the way that config.json names. Which of a model's matrices are quantised, and how finely,
is what the tensors themselves say, beside the shape that the model asks for: config.json says it in
too many ways.

Invariant: every part of a matrix has the shape and dtype that the matrix asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.checkpoint.json_keys import MAX_INTEGER, JsonKeys
from engine.checkpoint.tensor_info import SeparateTensors, TensorInfo
from engine.errors import CheckpointError

METHODS = ("fp8", "compressed-tensors", "gptq", "awq", "mxfp4", "modelopt")
_FLOATS = ("float32", "bfloat16", "float16")
_WORD_BITS = 32

_Found = Mapping[str, TensorInfo]
_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What config.json says of a checkpoint's quantised matrices."""

    method: str
    """A name of METHODS."""
    block: tuple[int, int] | None = None
    """Rows and columns with one scale; None: of codes of 8 bits whole rows have one, or groups."""
    zero_shift: int = 0
    """What is added to stored zeros."""
    has_order: bool = False
    """A column may be of any group, as a tensor of numbers says."""
    inputs: str | None = None
    """What inputs are rounded to, with a scale for each token, found when it comes: `int8` or
    `fp8`; None: they are not."""

    @classmethod
    def from_keys(cls, keys: JsonKeys) -> Quantisation | None:
        """Read `quantization_config` of config.json; None: the model is not quantised.

        Raises:
            CheckpointError: the method is not served, or a key of it is wrong.
        """
        for owner in (keys, keys.section("text_config")):
            for key in ("quantization_config", "compression_config"):
                if owner.get(key, None) is not None:
                    return _of_section(owner.section(key))
        return None

    def find(self, found: _Found, name: str, shape: _Shape) -> TensorInfo | None:
        """Find a stored tensor, or make it of its parts; None: it is absent.

        Raises:
            CheckpointError: a part is missing, or has not the shape or dtype that it has to have.
        """
        plain, stem = found.get(name), name.removesuffix("weight")
        if stem == name or len(shape) != 2:
            return plain
        if plain is not None and plain.dtype in ("F8_E4M3", "I8"):
            return self._of_bytes(_Parts(found, stem, plain), shape)
        if plain is not None and plain.dtype == "U8" and f"{stem}weight_scale_2" in found:
            return _of_float4(_Parts(found, stem, plain), shape, "weight_scale_2")
        if f"{stem}weight_global_scale" in found and f"{stem}weight_packed" in found:
            parts = _Parts(found, stem, found[f"{stem}weight_packed"])
            return _of_float4(parts, shape, "weight_global_scale")
        if f"{stem}weight_packed" in found:
            return _of_packed(_Parts(found, stem, found[f"{stem}weight_packed"]), shape)
        if f"{stem}qweight" in found:
            return self._of_words(_Parts(found, stem, found[f"{stem}qweight"]), shape)
        return plain

    def _of_bytes(self, parts: _Parts, shape: _Shape) -> TensorInfo:
        """Make a matrix whose codes are bytes: integers or small floats."""
        (rows, depth), kind = shape, "int8" if parts.codes.dtype == "I8" else "fp8"
        parts.codes_are(parts.codes.dtype, shape)
        inverse = "weight_scale_inv" if kind == "fp8" and parts.has("weight_scale_inv") else None
        scales = parts.add("scales", inverse or "weight_scale", _FLOATS)
        group, scale_rows = depth, 1
        if scales.shape in ((), (1,), (1, 1)):
            scale_rows = rows
        elif scales.shape not in ((rows,), (rows, 1)):
            if self.block is not None:
                scale_rows, group = self.block
                _check_shape(scales, (-(-rows // scale_rows), -(-depth // group)))
            else:
                group = _group(scales, rows, depth)
        if parts.has("weight_zero_point"):
            _check_shape(parts.add("zeros", "weight_zero_point", ("I8",)), scales.shape)
        is_known = "zeros" not in parts.parts and (group == depth or group % 128 == 0)
        form = f"{kind}_128" if is_known else None
        is_rounded = is_known and group == depth and self.inputs == kind
        if is_rounded and kind == "int8":
            form = "int8_row"
        apart = SeparateTensors(
            kind, 8, group, scale_rows, parts.parts, form, rounds_inputs=is_rounded
        )
        return parts.matrix(kind, shape, apart)

    def _of_words(self, parts: _Parts, shape: _Shape) -> TensorInfo:
        """Make a matrix of words: GPTQ packs a row's codes, AWQ the codes of eight rows."""
        rows, depth = shape
        if self.method not in ("gptq", "awq"):
            what = f"tensor {parts.codes.name} is of no matrix that {self.method} stores"
            raise CheckpointError(what, where=str(parts.codes.file))
        is_awq = self.method == "awq"
        bits = 4 if is_awq else _bits(parts.codes, depth, 0)
        per_word = _WORD_BITS // bits
        words = (depth, -(-rows // per_word)) if is_awq else (depth // per_word, rows)
        parts.codes_are("I32", words)
        scales = parts.add("scales", "scales", _FLOATS)
        group = _group(scales, rows, depth, is_on_side=True)
        zeros = parts.add("zeros", "qzeros", ("I32",))
        _check_shape(zeros, (scales.shape[0], -(-rows // per_word)))
        if parts.has("g_idx"):
            _check_shape(parts.add("order", "g_idx", ("I32", "I64")), (depth,))
        form = None if self.has_order or bits != 4 else _int4(group, depth)
        apart = SeparateTensors(self.method, bits, group, 1, parts.parts, form, self.zero_shift)
        return parts.matrix(f"{self.method}_int{bits}", shape, apart)


class _Parts:
    """The tensors of one matrix, as they are found."""

    def __init__(self, found: _Found, stem: str, codes: TensorInfo) -> None:
        self._found, self._stem, self.codes = found, stem, codes
        self.parts = {"codes": codes}

    def has(self, suffix: str) -> bool:
        """Say whether the files have such a part."""
        return f"{self._stem}{suffix}" in self._found

    def codes_are(self, dtype: str, shape: _Shape) -> None:
        """Refuse codes that are not."""
        _check_dtype(self.codes, (dtype,))
        _check_shape(self.codes, shape)

    def add(self, part: str, suffix: str, dtypes: Sequence[str]) -> TensorInfo:
        """Add a part by the end of its name; its dtype must be one of `dtypes`."""
        tensor = self._found.get(f"{self._stem}{suffix}")
        if tensor is None:
            what = f"tensor {self._stem}{suffix} is missing: {self.codes.name} is quantised"
            raise CheckpointError(what, where=str(self.codes.file))
        _check_dtype(tensor, dtypes)
        self.parts[part] = tensor
        return tensor

    def matrix(self, dtype: str, shape: _Shape, apart: SeparateTensors) -> TensorInfo:
        """Join the tensors of one matrix (codes, scales, zeros) to one of the model."""
        codes = self.codes
        name = f"{self._stem}weight"
        return TensorInfo(name, codes.file, dtype, shape, codes.start, codes.num_bytes, apart=apart)


def _of_float4(parts: _Parts, shape: _Shape, whole: str) -> TensorInfo:
    """Read NVFP4: two codes in a byte, a scale in FP8 for each 16, and one for the matrix.

    The matrix' scale divides in compressed-tensors' files, and multiplies in ModelOpt's.
    """
    rows, depth = shape
    parts.codes_are("U8", (rows, depth // 2))
    _check_shape(parts.add("scales", "weight_scale", ("F8_E4M3",)), (rows, depth // 16))
    role = "divisor" if whole == "weight_global_scale" else "factor"
    scale = parts.add(role, whole, ("float32",))
    if scale.shape not in ((), (1,)):
        _check_shape(scale, (1,))
    return parts.matrix("nvfp4", shape, SeparateTensors("nvfp4", 4, 16, 1, parts.parts, "nvfp4"))


def _of_packed(parts: _Parts, shape: _Shape) -> TensorInfo:
    """Codes of a row one after the other in words, each too large by half of its range."""
    rows, depth = shape
    bits = _bits(parts.codes, depth, 1)
    parts.codes_are("I32", (rows, depth * bits // _WORD_BITS))
    scales = parts.add("scales", "weight_scale", _FLOATS)
    group = _group(scales, rows, depth)
    if parts.has("weight_zero_point"):
        zeros = parts.add("zeros", "weight_zero_point", ("I32",))
        _check_shape(zeros, (-(-rows * bits // _WORD_BITS), scales.shape[1]))
    if parts.has("weight_g_idx"):
        _check_shape(parts.add("order", "weight_g_idx", ("I32", "I64")), (depth,))
    form = _int4(group, depth) if bits == 4 else None
    if bits == 8 and "zeros" not in parts.parts and (group == depth or group % 128 == 0):
        form = "int8_128"
    if "order" in parts.parts:
        form = None
    apart = SeparateTensors("packed", bits, group, 1, parts.parts, form, 1 << (bits - 1))
    return parts.matrix(f"packed_int{bits}", shape, apart)


def _of_section(keys: JsonKeys) -> Quantisation:
    method = keys.get("quant_method", "compressed-tensors" if "format" in keys.values else None)
    if method not in METHODS:
        error = keys.bad("quant_method", f"one of {', '.join(METHODS)}")
        hint = "serve another quantisation of the model, or an unquantized checkpoint"
        raise CheckpointError(error.what, where=error.where, hint=hint)
    if method == "fp8":
        is_dynamic = keys.get("activation_scheme", None) == "dynamic"
        inputs = "fp8" if is_dynamic else None
        return Quantisation(method, block=_block(keys, "weight_block_size"), inputs=inputs)
    if method == "compressed-tensors":
        return _of_compressed(keys)
    if method == "awq":
        if str(keys.get("version", "gemm")).lower() != "gemm":
            raise keys.bad("version", "gemm: codes in another order are not served")
        if keys.get("bits", 4) != 4:
            raise keys.bad("bits", "4")
        return Quantisation(method)
    if method == "modelopt":
        if keys.get("quant_algo", None) != "NVFP4":
            raise keys.bad("quant_algo", "NVFP4")
        return Quantisation(method)
    if method == "mxfp4":  # of stacked experts, which engine.checkpoint.checkpoint finds
        return Quantisation(method)
    form = keys.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise keys.bad("checkpoint_format", "gptq or gptq_v2")
    if keys.get("bits", 4) not in (4, 8):
        raise keys.bad("bits", "4 or 8")
    shift = 1 if form == "gptq" else 0  # the first format has zeros less one
    return Quantisation(method, zero_shift=shift, has_order=keys.flag("desc_act"))


def _of_compressed(keys: JsonKeys) -> Quantisation:
    if keys.section("transform_config").values:
        raise keys.bad("transform_config", "empty: inputs would have to be rotated")
    sparsity = keys.section("sparsity_config")
    if sparsity.get("format", None) not in ("dense", None):
        raise sparsity.bad("format", "dense")
    block, groups = None, keys.section("config_groups")
    for name in groups.values:
        block = _block(groups.section(name).section("weights"), "block_structure") or block
    found = {_inputs_of(groups.section(name)) for name in groups.values}
    inputs = found.pop() if len(found) == 1 else None
    return Quantisation("compressed-tensors", block=block, inputs=inputs)


def _inputs_of(group: JsonKeys) -> str | None:
    """Return the form to which a group's inputs are rounded; None: they are not."""
    inputs = {"symmetric": True} | group.section("input_activations").values
    asked = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    if any(inputs.get(key) != value for key, value in asked.items()):
        return None
    return {"int": "int8", "float": "fp8"}.get(str(inputs.get("type")))


def _block(keys: JsonKeys, key: str) -> tuple[int, int] | None:
    sizes = keys.get(key, None)
    if sizes is None:
        return None
    is_pair = isinstance(sizes, list) and len(sizes) == 2
    if not is_pair or not all(type(size) is int and 0 < size <= MAX_INTEGER for size in sizes):
        raise keys.bad(key, "two sizes: rows and columns with one scale")
    return sizes[0], sizes[1]


def _bits(codes: TensorInfo, depth: int, dimension: int) -> int:
    """Compute the bits of a code in words that hold `depth` codes a row."""
    words = codes.shape[dimension] if len(codes.shape) == 2 else 0
    for bits in (4, 8):
        if words * _WORD_BITS == depth * bits:
            return bits
    what = f"tensor {codes.name} of shape {codes.shape} has neither 4 nor 8 bits"
    raise CheckpointError(f"{what} for each of {depth} values", where=str(codes.file))


def _group(scales: TensorInfo, rows: int, depth: int, *, is_on_side: bool = False) -> int:
    """Values of a row that share a scale: [rows, groups], or on its side [groups, rows]."""
    shape = scales.shape[::-1] if is_on_side else scales.shape
    is_right = len(shape) == 2 and shape[0] == rows and shape[1] > 0 and depth % shape[1] == 0
    if not is_right:
        asked = f"scales of {rows} rows in equal groups of {depth} values"
        what = f"tensor {scales.name} has shape {scales.shape}, which are no {asked}"
        raise CheckpointError(what, where=str(scales.file))
    return depth // shape[1]


def _int4(group: int, depth: int) -> str | None:
    """Choose the form of four-bit codes whose groups divide these; None: no form does."""
    if group == depth or group % 128 == 0:
        return "int4_128"
    return "int4_32" if group % 32 == 0 else None


def _check_dtype(tensor: TensorInfo, dtypes: Sequence[str]) -> None:
    if tensor.dtype not in dtypes:
        what = f"tensor {tensor.name} is stored as {tensor.dtype}"
        hint = f"supported: {', '.join(dtypes)}"
        raise CheckpointError(what, where=str(tensor.file), hint=hint)


def _check_shape(tensor: TensorInfo, shape: _Shape) -> None:
    if tensor.shape != shape:
        what = f"tensor {tensor.name} has shape {tensor.shape}, but its matrix asks for {shape}"
        raise CheckpointError(what, where=str(tensor.file))
