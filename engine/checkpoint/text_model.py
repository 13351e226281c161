"""Read a model that makes vectors or scores of whole texts, from its folder and its parts' folders.

Invariant: every tensor of TextModelConfig is there, with the shape that the configuration asks for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from engine.checkpoint.checkpoint import weight_files
from engine.checkpoint.gguf import GgufModel, find_gguf
from engine.checkpoint.gguf_text_models import (
    as_stored,
    head_of,
    makes_scores,
    named,
    pooling_of,
    text_keys,
)
from engine.checkpoint.json_keys import JsonKeys
from engine.checkpoint.model_config import DTYPE_BYTES
from engine.checkpoint.model_file import read_model_text
from engine.checkpoint.safetensors_header import read_header
from engine.checkpoint.tensor_info import BLOCKS, TensorInfo
from engine.checkpoint.text_families import (
    TEXT_FAMILY_BY_ARCHITECTURE,
    HeadStep,
    TextFamily,
)
from engine.errors import CheckpointError, reading_model

Kind = Literal["embedding", "rerank"]

ACTIVATIONS_OF_TEXTS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swiglu")
_POOLINGS = ("cls", "mean", "max", "lasttoken", "mean_sqrt_len_tokens", "weightedmean")
_MODE_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_DENSE_ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu"}
MAX_LAYERS = 1024
"""Published models have fewer than 100."""
MAX_MODULES = 64
MAX_DIMENSIONS = 1 << 16
"""Maximum of numbers in a vector; published models have some thousands."""
MAX_PROMPT_CHARS = 1 << 16
"""Maximum of all prompts together: each text of a request may get one."""
NUM_ANSWERS = 2
"""Rows of a head that has `yes` and `no` alone, in this order."""
LINEAR = "linear"
"""What a part's folder calls its product."""


@dataclass(frozen=True, slots=True)
class TextLayer:
    """How one layer turns queries and keys, and how far it reads."""

    theta: float | None
    """The base of the rotation; None: positions are learned."""
    window: int | None
    """Tokens that it reads on each side; None: all."""
    stretch: float = 1.0
    """What positions are divided by."""


@dataclass(frozen=True, slots=True)
class TextModelConfig:
    """A model of whole texts: shape, pooling, head, and where its tensors lie."""

    folder: Path
    """The folder of the tokenizer and the weights, or the GGUF file with both."""
    kind: Kind
    family: TextFamily
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    activation: str
    eps: float
    scale: float
    """What products of queries and keys are multiplied by."""
    max_tokens: int
    """Tokens of the longest text."""
    first_position: int
    num_token_types: int
    layers: tuple[TextLayer, ...]
    pooling: tuple[str, ...]
    """Ways whose results lie side by side."""
    head: tuple[HeadStep, ...]
    is_normalized: bool
    compares_tokens: bool
    """Whether the score compares the logits of `yes` and `no` as the next token."""
    lowers_case: bool
    """Whether texts are put in lower case before they are tokenized."""
    prompts: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    """The tensors by name, without the family's prefixes; optional ones may be absent."""
    default_prompt: str | None = None
    """The name of the prompt of texts for which none is named."""
    pools_prompt: bool = True
    """Whether pooling takes in the tokens of a prompt."""

    @property
    def num_dimensions(self) -> int:
        """Numbers of a vector; 1: a score."""
        if self.compares_tokens:
            return 1
        if self.head:
            return self.tensors[f"{self.head[-1].name}.weight"].shape[0]
        return self.hidden_size * len(self.pooling)

    @property
    def has_answers(self) -> bool:
        """Whether the head has rows for `yes` and `no` alone, in this order."""
        output = self.tensors.get("lm_head.weight") if self.compares_tokens else None
        return output is not None and output.shape[0] == NUM_ANSWERS

    @property
    def stored_dtype(self) -> str:
        """The dtype of the table of words, which is that of the others."""
        return self.tensors[f"{self.family.words}.weight"].dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in memory: as stored, or widened where they are quantised."""
        tensors = self.tensors.values()
        wide = [4 * math.prod(tensor.shape) for tensor in tensors if tensor.is_quantised]
        return sum(tensor.num_bytes for tensor in tensors if not tensor.is_quantised) + sum(wide)

    def scratch_bytes(self, step_tokens: int, dtype: str) -> int:
        """Count what one step computes with, whose longest may be a single text."""
        num_tokens = max(step_tokens, self.max_tokens)
        # queries, their results, and keys and values, once more with as many heads as queries
        heads = (4 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        row = 2 * self.hidden_size + heads
        inner = step_tokens * 3 * self.intermediate_size
        return (num_tokens * row + inner) * DTYPE_BYTES[dtype]

    @classmethod
    def from_folder(cls, folder: Path, kind: Kind, *, has_weights: bool = True) -> TextModelConfig:
        """Read a folder in the format of transformers or sentence-transformers, or a GGUF file.

        Args:
            has_weights: False: they are not there yet, and no tensor is named.

        Raises:
            CheckpointError: it is not served; `where` names the file.
        """
        with reading_model(folder):
            config, modules = _read(folder, kind)
            return replace(config, tensors=_tensors(config, modules)) if has_weights else config


def _read(folder: Path, kind: Kind) -> tuple[TextModelConfig, _Modules]:
    if (path := find_gguf(folder)) is not None:
        modules = _Modules.of_gguf(GgufModel.open(path), kind)
    else:
        modules = _Modules.read(folder) if kind == "embedding" else _Modules(folder, folder)
    keys = modules.keys()
    family, architecture = _family(keys)
    if modules.gguf is not None:
        family = as_stored(family)
    is_classifier = architecture in family.classifiers
    if kind == "embedding" and is_classifier:
        raise keys.bad("architectures", "a model that makes vectors; it makes scores")
    compares_tokens = kind == "rerank" and family.is_causal and not is_classifier
    if kind == "rerank" and not (is_classifier or compares_tokens):
        raise keys.bad("architectures", "a model that makes scores; it makes vectors")
    for name, other in family.aliases:
        if name not in keys.values and other in keys.values:
            keys.values[name] = keys.values[other]
    _check_switches(keys, family)
    config = _shape(keys, family, kind, modules)
    if is_classifier:
        pooling = keys.get(family.pooling_key or "", family.classifier_pooling)
        if pooling not in _POOLINGS:
            raise keys.bad(str(family.pooling_key), f"one of {', '.join(_POOLINGS)}")
        config = replace(config, head=family.head, pooling=(pooling,))
    if compares_tokens:
        config = replace(config, pooling=("lasttoken",), compares_tokens=True)
    return config, modules


def _family(keys: JsonKeys) -> tuple[TextFamily, str]:
    names = keys.get("architectures", None) or []
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in TEXT_FAMILY_BY_ARCHITECTURE:
            return TEXT_FAMILY_BY_ARCHITECTURE[name], name
    served = sorted(TEXT_FAMILY_BY_ARCHITECTURE)
    raise keys.bad("architectures", f"one of {', '.join(served)}")


def _check_switches(keys: JsonKeys, family: TextFamily) -> None:
    for key in family.must_be_on:
        if not keys.get(key, None):
            raise keys.bad(key, "true")
    for key in family.must_be_off:
        if keys.get(key, None):
            raise keys.bad(key, "off")
    for key in family.must_be_1:
        if keys.get(key, 1) != 1:
            raise keys.bad(key, "1")
    for key, text in family.must_be:
        if keys.get(key, text) != text:
            raise keys.bad(key, text)


def _shape(keys: JsonKeys, family: TextFamily, kind: Kind, modules: _Modules) -> TextModelConfig:
    hidden, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    num_kv_heads = keys.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise keys.bad("num_key_value_heads", f"a divisor of {num_heads}")
    head_dim = keys.integer("head_dim", hidden // num_heads)
    if family.theta is not None and head_dim % 2:
        raise keys.bad("head_dim", "even, as rotations need")
    activation = keys.get(*family.activation)
    if activation not in ACTIVATIONS_OF_TEXTS:
        raise keys.bad(family.activation[0], f"one of {', '.join(ACTIVATIONS_OF_TEXTS)}")
    positions = keys.integer("max_position_embeddings")
    first = 0
    if family.counts_from_padding:
        padding = keys.get("pad_token_id", 1)
        if type(padding) is not int or not 0 <= padding < positions - 1:
            raise keys.bad("pad_token_id", "a token id below max_position_embeddings")
        first = padding + 1
    scale_of = head_dim if family.scale_key is None else keys.number(family.scale_key)
    longest = positions - first
    limit = modules.max_tokens or _tokenizer_limit(modules.base)
    return TextModelConfig(
        folder=modules.base,
        kind=kind,
        family=family,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.integer("intermediate_size"),
        activation=activation,
        eps=keys.number(*family.eps),
        scale=scale_of**-0.5,
        max_tokens=min(longest, limit or longest),
        first_position=first,
        num_token_types=_num_token_types(keys, family),
        layers=_layers(keys, family, head_dim),
        pooling=modules.pooling or (family.pooling,),
        head=modules.head,
        is_normalized=modules.is_normalized,
        compares_tokens=False,
        lowers_case=modules.lowers_case,
        prompts=modules.prompts,
        tensors={},
        default_prompt=modules.default_prompt,
        pools_prompt=modules.pools_prompt,
    )


def _num_token_types(keys: JsonKeys, family: TextFamily) -> int:
    """Read how many types of tokens have vectors of their own."""
    has_none = family.token_types is None or keys.get("type_vocab_size", None) == 0
    return 0 if has_none else keys.integer("type_vocab_size", 2)


def _layers(keys: JsonKeys, family: TextFamily, head_dim: int) -> tuple[TextLayer, ...]:
    numbers = range(keys.integer("num_hidden_layers", maximum=MAX_LAYERS))
    if family.theta is None:
        return tuple(TextLayer(None, None) for _ in numbers)
    theta, stretch = _rotation(keys, family, head_dim, "full_attention", *family.theta)
    if family.every is None or family.local_theta is None or family.window is None:
        return tuple(TextLayer(theta, None, stretch) for _ in numbers)
    own, _ = _rotation(keys, family, head_dim, "sliding_attention", *family.local_theta)
    local = TextLayer(own, keys.integer(family.window) // 2)
    kinds = keys.get("layer_types", None)
    if kinds is None:
        key, default, first = family.every
        named = key if key in keys.values else key.removeprefix("_")
        every = keys.integer(named, default)
        full = {number for number in numbers if number % every == first % every}
    elif isinstance(kinds, list) and len(kinds) == len(numbers):
        full = {number for number in numbers if kinds[number] == "full_attention"}
    else:
        raise keys.bad("layer_types", "a kind for each layer")
    return tuple(TextLayer(theta, None) if number in full else local for number in numbers)


def _rotation(
    keys: JsonKeys, family: TextFamily, head_dim: int, layer_kind: str, key: str, default: float
) -> tuple[float, float]:
    """Read the base of a rotation, and what it divides positions by."""
    rope = keys.section("rope_parameters")
    nested = rope.section(layer_kind) if layer_kind in rope.values else rope
    is_nested = "rope_theta" in nested.values
    theta = nested.number("rope_theta") if is_nested else keys.number(key, default)
    for section in (nested, keys.section("rope_scaling")):
        kind = section.get("rope_type", section.get("type", "default"))
        if kind == "ntk" and family.has_ntk:
            if section.get("mixed_b", None) is not None:
                raise section.bad("mixed_b", "absent")
            factor = section.number("factor")
            return theta * factor, factor ** (2 / head_dim)
        if kind != "default":
            raise section.bad("rope_type", "default or ntk" if family.has_ntk else "default")
    return theta, 1.0


@dataclass(frozen=True, slots=True)
class _Modules:
    """What sentence-transformers' files say beside the model's."""

    root: Path
    base: Path
    """The model's own folder: the root, or a folder in it."""
    pooling: tuple[str, ...] = ()
    head: tuple[HeadStep, ...] = ()
    pools_prompt: bool = True
    is_normalized: bool = False
    max_tokens: int | None = None
    lowers_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    dense: tuple[str, ...] = ()
    """The folders of the head's products."""
    gguf: GgufModel | None = None
    """The file that says all of it; None: a folder does."""

    def keys(self) -> JsonKeys:
        """Read the model's own configuration."""
        if self.gguf is not None:
            return JsonKeys(text_keys(self.gguf), self.base)
        return JsonKeys.from_file(self.base / "config.json")

    @classmethod
    def of_gguf(cls, model: GgufModel, kind: Kind) -> _Modules:
        """Take what a file says; its vectors are normalised, as by all that read the format.

        Raises:
            CheckpointError: it is of the other kind.
        """
        pooling, is_embedding = pooling_of(model), kind == "embedding"
        if is_embedding and makes_scores(model):
            raise CheckpointError("it makes scores, no vectors", where=str(model.path))
        if not is_embedding and pooling:
            raise CheckpointError("it makes vectors, no scores", where=str(model.path))
        head = head_of(model)
        return cls(model.path, model.path, pooling, head, is_normalized=is_embedding, gguf=model)

    @classmethod
    def read(cls, folder: Path) -> _Modules:
        """Read modules.json and what it names; without it, a plain folder."""
        where = folder / "modules.json"
        if not os.path.lexists(where):
            return cls(folder, folder)
        prompts, default_prompt = _prompts(folder)
        found = cls(folder, folder, prompts=prompts, default_prompt=default_prompt)
        for kind, path in _listed(where):
            match kind:
                case "Transformer":
                    base = folder / path
                    most, lowers_case = _limits(base)
                    found = replace(found, base=base, max_tokens=most, lowers_case=lowers_case)
                case "Pooling":
                    modes, pools_prompt = _pooling(folder / path)
                    found = replace(found, pooling=modes, pools_prompt=pools_prompt)
                case "Dense" if not found.is_normalized:
                    step = HeadStep(f"{path}.{LINEAR}", _dense_activation(folder / path))
                    found = replace(found, head=(*found.head, step), dense=(*found.dense, path))
                case "Normalize":
                    found = replace(found, is_normalized=True)
                case _:
                    what = f"the module {kind} is not served"
                    hint = "served: Transformer, Pooling, Dense, Normalize, in this order"
                    raise CheckpointError(what, where=str(where), hint=hint)
        return found


def _listed(where: Path) -> Iterator[tuple[str, str]]:
    """Yield each module's kind and folder, which lies in the model's or is that."""
    try:
        entries = json.loads(read_model_text(where))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON: {error}", where=str(where)) from None
    for entry in entries if isinstance(entries, list) and len(entries) <= MAX_MODULES else [None]:
        kind, path = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (0, 0)
        is_plain = isinstance(path, str) and path in ("", Path(path).name) and path != ".."
        if not isinstance(kind, str) or not is_plain:
            what = f"not a list of at most {MAX_MODULES} modules, each a type and a folder's name"
            raise CheckpointError(what, where=str(where))
        yield kind.rpartition(".")[2], str(path)


def _tokenizer_limit(base: Path) -> int | None:
    """Read the longest text that a model's tokenizer makes; None: it has no limit."""
    where = base / "tokenizer_config.json"
    if not os.path.lexists(where):
        return None
    most = JsonKeys.from_file(where).get("model_max_length", None)
    return most if type(most) is int and most > 0 else None


def _limits(base: Path) -> tuple[int | None, bool]:
    """Read how long a text may be, and whether it is put in lower case."""
    where = base / "sentence_bert_config.json"
    if not os.path.lexists(where):
        return None, False
    keys = JsonKeys.from_file(where)
    is_limited = keys.get("max_seq_length", None) is not None
    most = keys.integer("max_seq_length") if is_limited else None
    return most, keys.flag("do_lower_case", False)


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Read the prompts by name, and the name of the one that is put before texts unasked."""
    where = folder / "config_sentence_transformers.json"
    if not os.path.lexists(where):
        return {}, None
    keys = JsonKeys.from_file(where)
    found: dict[str, Any] = keys.section("prompts").values
    if not all(isinstance(text, str) for text in found.values()):
        raise keys.bad("prompts", "a text for each name")
    if sum(map(len, (*found, *found.values()))) > MAX_PROMPT_CHARS:
        raise keys.bad("prompts", f"at most {MAX_PROMPT_CHARS} characters")
    default = keys.get("default_prompt_name", None)
    if default is not None and not (isinstance(default, str) and default in found):
        raise keys.bad("default_prompt_name", "the name of a prompt")
    return found, default


def _pooling(folder: Path) -> tuple[tuple[str, ...], bool]:
    """Read how vectors are pooled, and whether of the prompt's tokens, too."""
    keys = JsonKeys.from_file(folder / "config.json")
    if (mode := keys.get("pooling_mode", None)) is not None:
        modes = tuple(mode) if isinstance(mode, list) else (mode,)
    else:
        modes = tuple(name for key, name in _MODE_KEYS.items() if keys.flag(key))
    if not modes or any(mode not in _POOLINGS or modes.count(mode) > 1 for mode in modes):
        raise keys.bad("pooling_mode", f"one of {', '.join(_POOLINGS)}, or several")
    return modes, keys.flag("include_prompt", True)


def _dense_activation(folder: Path) -> str | None:
    keys = JsonKeys.from_file(folder / "config.json")
    named = str(keys.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = named.rpartition(".")[2]
    if name not in _DENSE_ACTIVATIONS:
        raise keys.bad("activation_function", f"one of {', '.join(_DENSE_ACTIVATIONS)}")
    return _DENSE_ACTIVATIONS[name]


def _tensors(config: TextModelConfig, modules: _Modules) -> dict[str, TensorInfo]:
    """Find each tensor in the files, and check its shape."""
    gguf = modules.gguf
    stored = {} if gguf is not None else _stored(modules.base, config.family.prefixes)
    for path in modules.dense:
        found = _stored(modules.root / path, ())
        stored |= {f"{path}.{name}": tensor for name, tensor in found.items()}
    tensors = {}
    for name, shape, is_needed in _expected(config):
        tensor = stored.get(name) if gguf is None else named(gguf, config.family, name)
        if tensor is None and not is_needed:
            continue
        if tensor is None:
            raise CheckpointError(f"tensor {name} is missing", where=str(modules.base))
        if not _fits(tensor.shape, shape):
            raise _misshapen(tensor, shape)
        if tensor.dtype not in DTYPE_BYTES and tensor.dtype not in BLOCKS:
            what = f"tensor {name} is stored as {tensor.dtype}"
            hint = f"supported: {', '.join(DTYPE_BYTES)}"
            raise CheckpointError(what, where=str(tensor.file), hint=hint)
        tensors[name] = replace(tensor, name=name)
    _check_sizes(config, tensors)
    return tensors


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    is_of_size = all(size in (-1, own) for own, size in zip(shape, wanted, strict=False))
    return len(shape) == len(wanted) and is_of_size


def _misshapen(tensor: TensorInfo, shape: tuple[int, ...]) -> CheckpointError:
    what = f"tensor {tensor.name} has shape {tensor.shape}, but config.json asks for {shape}"
    return CheckpointError(what, where=str(tensor.file))


def _check_sizes(config: TextModelConfig, tensors: Mapping[str, TensorInfo]) -> None:
    """Check the sizes that follow from other tensors: products read as far as these say."""
    size = config.hidden_size * len(config.pooling)
    for step in config.head:
        weight, bias = (tensors.get(f"{step.name}.{part}") for part in ("weight", "bias"))
        assert weight is not None
        rows = weight.shape[0]
        if weight.shape[1] != size:
            raise _misshapen(weight, (rows, size))
        if bias is not None and bias.shape != (rows,):
            raise _misshapen(bias, (rows,))
        size = rows
    if not 1 <= size <= MAX_DIMENSIONS:
        what = f"its vectors have {size} numbers, at most {MAX_DIMENSIONS} are served"
        raise CheckpointError(what, where=str(config.folder))
    output = tensors.get("lm_head.weight")
    if output is not None and output.shape[0] not in (config.vocab_size, NUM_ANSWERS):
        raise _misshapen(output, (config.vocab_size, config.hidden_size))
    if config.family.positions is not None:
        table = tensors[f"{config.family.positions}.weight"]
        needed = config.first_position + config.max_tokens
        if table.shape[0] < needed:
            raise _misshapen(table, (needed, config.hidden_size))


def _stored(folder: Path, prefixes: tuple[str, ...]) -> dict[str, TensorInfo]:
    found = {}
    for path in weight_files(folder)[1]:
        for tensor in read_header(path)[1]:
            name = tensor.name
            for prefix in prefixes:
                name = name.removeprefix(prefix)
            name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
            found[name.replace("LayerNorm.beta", "LayerNorm.bias")] = tensor
    return found


_Expected = tuple[str, tuple[int, ...], bool]
"""A tensor's name and shape (-1: any size), and whether it must be there."""


def _expected(config: TextModelConfig) -> Iterator[_Expected]:
    family, hidden = config.family, config.hidden_size
    yield f"{family.words}.weight", (config.vocab_size, hidden), True
    if family.positions is not None:
        yield f"{family.positions}.weight", (-1, hidden), True
    if config.num_token_types:
        yield f"{family.token_types}.weight", (config.num_token_types, hidden), True
    yield from _norm(config, family.embedding_norm)
    for number in range(len(config.layers)):
        yield from _layer(config, number)
    yield from _norm(config, family.final_norm)
    if config.compares_tokens:
        yield "lm_head.weight", (-1, hidden), False
    for step in config.head:
        rows = 1 if config.kind == "rerank" and step is config.head[-1] else -1
        yield f"{step.name}.weight", (rows, -1), True
        yield f"{step.name}.bias", (rows,), False
        yield from _norm(config, step.norm)


def _layer(config: TextModelConfig, number: int) -> Iterator[_Expected]:
    family, hidden, before = config.family, config.hidden_size, f"{config.family.layer}{number}."
    q_size, kv_size = (num * config.head_dim for num in (config.num_heads, config.num_kv_heads))
    sizes = (q_size, kv_size, kv_size) if len(family.qkv) == 3 else (q_size + 2 * kv_size,)
    inner = config.intermediate_size * (2 if family.is_gated else 1) // len(family.gate_up)
    products = [*((name, size, hidden) for name, size in zip(family.qkv, sizes, strict=True))]
    products += [(family.output, hidden, q_size)]
    products += [(name, inner, hidden) for name in family.gate_up]
    products += [(family.down, hidden, config.intermediate_size)]
    for name, rows, depth in products:
        yield f"{before}{name}.weight", (rows, depth), True
        yield f"{before}{name}.bias", (rows,), family.has_bias
    for name in family.qk_norms or ():
        yield f"{before}{name}.weight", (config.head_dim,), True
    for norms in (family.attention_norms, family.mlp_norms):
        for norm in (norms.before, norms.after, norms.joined):
            # the first layer's input has been normed already in some families
            is_needed = not (number == 0 and norm == "attn_norm")
            yield from _norm(config, norm, before, is_needed=is_needed)


def _norm(
    config: TextModelConfig, name: str | None, before: str = "", *, is_needed: bool = True
) -> Iterator[_Expected]:
    if name is not None:
        yield f"{before}{name}.weight", (config.hidden_size,), is_needed
        yield f"{before}{name}.bias", (config.hidden_size,), config.family.has_bias
