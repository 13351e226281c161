"""The starter model: the network that learns, its first weights, and the folder that it becomes.

Owns: its shape, and its forward pass over whole conversations; first weights that make it a reader
that looks up before it has learned to; what is written beside the weights.
Invariant: parameter names are those of Hugging Face's Llama without `model.`.
Never: serves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from tests.starter.lessons import (
    ASSISTANT,
    ATTRIBUTES,
    BEGIN,
    CHAT_TEMPLATE,
    END,
    FIRST_NAMES,
    KINDS,
    UNKNOWN,
    VOCAB_SIZE,
)

HIDDEN, INNER, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 384, 320, 4, 3, 128
# Two thirds of the rotary pairs hardly turn within the context, so that words can be matched over
# any distance; the first few turn fast enough to count single tokens.
ROPE_THETA = 1e20
NORM_EPS = 1e-6
MAX_POSITIONS = 10_240


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, NUM_HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, NUM_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, NUM_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(NUM_HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, time, HIDDEN] to the same."""
        batch, time, _ = x.shape
        q, k, v = (
            projection(x).view(batch, time, NUM_HEADS, HEAD_DIM).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = nn.functional.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, time, NUM_HEADS * HEAD_DIM))


class Mlp(nn.Module):
    """A Llama layer's feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, HIDDEN] to the same."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each after a norm and beside the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, NORM_EPS)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, NORM_EPS)
        self.mlp = Mlp()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, time, HIDDEN] to the same."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Network(nn.Module):
    """The model, with input and output embeddings tied.

    Args:
        vocab_size: tokens.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, HIDDEN)
        self.each_layer = [Layer() for _ in range(NUM_LAYERS)]
        self.layers = nn.ModuleList(self.each_layer)
        self.norm = nn.RMSNorm(HIDDEN, NORM_EPS)
        angles = torch.arange(MAX_POSITIONS)[:, None] * frequencies()
        self.cos, self.sin = (
            nn.Buffer(wave, persistent=False)
            for wave in (
                torch.cat((angles, angles), -1).cos(),
                torch.cat((angles, angles), -1).sin(),
            )
        )

    def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Logits [len(rows), vocab_size] at `rows` of the flattened ids [batch, time]."""
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.each_layer:
            x = layer(x, cos, sin)
        return nn.functional.linear(self.norm(x.flatten(0, 1)[rows]), self.embed_tokens.weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def frequencies() -> Tensor:
    """Radians per position of each rotary pair."""
    return ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)


# The starter model as a checkpoint folder in Hugging Face's format.
# Invariant: the folder is an ordinary Llama checkpoint, in bfloat16.
# Never: trains, or overwrites a file of another kind.


def export(network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, weights, tokenizer, chat template and generation defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": parameter.detach().to("cpu", torch.bfloat16).contiguous()
        for name, parameter in network.named_parameters()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    tokenizer.save(str(folder / "tokenizer.json"))
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    _write(folder / "config.json", {**_SHAPE, "bos_token_id": begin, "eos_token_id": end})
    _write(
        folder / "generation_config.json",
        {"bos_token_id": begin, "eos_token_id": end, "do_sample": False},
    )
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": NORM_EPS,
    "rope_theta": ROPE_THETA,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}


# How the starter model's weights begin: as a reader that looks up before it has learned to.
# From plain random weights most of the training goes by before a head attends to anything, and
# names of three parts are not told apart within the hour. So the residual stream is cut into slots,
# and heads begin as what a reader needs: layer 1 writes the two tokens before, each into a slot of
# its own; layer 2 gathers, at every token, the parts of the last name and the last attribute;
# layers 3 and 4 attend to where name, attribute and the token before are those that stand here, and
# say what stands there. Trained models have been found to do the same: "In-context Learning and
# Induction Heads", Olsson et al., 2022.
# Invariant: all follows from torch's generator and the vocabulary; every weight is then trained.
# Never: holds weights fixed, or knows an answer.


_WIDTHS = {
    "const": 1,  # the same for every token
    "is_number": 1,  # the last part of a name
    "is_attribute": 1,
    "is_begin": 1,  # what a value may begin with
    "is_asked": 1,  # the assistant's turn: a value shall begin
    "is_first": 1,  # the token before all others, to attend to when nothing matches
    "introduces": 1,  # a value may follow
    "noun": 36,  # what the token is, by the parts of a fact; other words lie across all of them
    "number": 30,
    "kind": 12,
    "attribute": 10,
    "other": 8,
    "before": 20,  # the token before, roughly
    "before_kind": 12,
    "before_2": 20,  # the token two before, roughly
    "before_noun": 36,  # of the token two before
    "introduced": 1,  # the token before introduces
    "last_noun": 36,  # of the last name
    "last_number": 30,
    "last_kind": 12,
    "last_attribute": 10,
}
_ENDS = dict(zip(_WIDTHS, accumulate(_WIDTHS.values()), strict=True))
_SLOTS = {name: range(_ENDS[name] - width, _ENDS[name]) for name, width in _WIDTHS.items()}
_TOKEN = range(_SLOTS["noun"].start, _SLOTS["other"].stop)
_MATCHED = {
    "last_noun": (28, 0.84),
    "last_number": (24, 0.76),
    "last_kind": (12, 0.84),
    "last_attribute": (10, 0.68),
}
"""How many of a head's dimensions each part of a match gets, and the norm of what it sees."""
_INTRODUCERS = {" ", "is", ":", "=", *ATTRIBUTES}
_COUNTING = range(10)
"""Rotary pairs that tell one token from the next."""
_RECENT = range(3, 14)
"""Those whose sum falls with distance, from one token to the whole context."""
_STILL = range(14, HEAD_DIM // 2)
"""Those that hardly turn within the context: words are matched over any distance."""
_NOISE = 1e-4
_FLAG = 0.5
_SLOT = 0.7
_EMBEDDING_NORM = 1.3
_NORM_2, _NORM_3 = 1.8, 2.4
"""Of the residual stream as layer 2 and layers 3 and 4 find it."""
# found by measuring what is looked up before anything is learned
_COUNT, _RECENCY, _TYPE = 1.8, 4.0, 5.0
_UNIT = 1.4
_ASKED = 1.5
"""What not being a value's beginning costs, in units of what one wrong part of a fact costs."""
_FOLLOWS = {"token": 1.3, "before": 0.7}
"""What following the same token gains, and the same token before that."""
_NOTHING = 1.5
"""What attending to nothing costs."""
_SAY = (0.1, 2.5)
"""How loud each layer says what it found: the first does not drown the token in the second."""


@torch.no_grad()
def begin(network: Network, vocabulary: Mapping[str, int]) -> None:
    """Wire a network whose tokens are these."""
    _embed(network.embed_tokens.weight, vocabulary)
    for layer in network.each_layer:
        nn.init.normal_(layer.mlp.gate_proj.weight, std=0.05)
        nn.init.normal_(layer.mlp.up_proj.weight, std=0.05)
        nn.init.zeros_(layer.mlp.down_proj.weight)
        for weight in layer.self_attn.parameters():
            nn.init.normal_(weight, std=_NOISE)
    roughly = (len(_TOKEN) / _WIDTHS["before"]) ** 0.5 * _directions(_WIDTHS["before"], len(_TOKEN))
    look_back, gather, *match = (layer.self_attn for layer in network.each_layer)
    _wire_layer_1(look_back, roughly)
    _wire_layer_2(gather)
    for attention, loudness in zip(match, _SAY, strict=True):
        for index in range(NUM_HEADS):
            head = _Head(attention, index, _NORM_3)
            _look_up(head, roughly)
            head.carry(_TOKEN, _TOKEN, loudness)


def _wire_layer_1(attention: Attention, roughly: Tensor) -> None:
    last, last_but_one = (_Head(attention, index, _EMBEDDING_NORM) for index in range(2))
    _look_back(last, 1)
    last.carry(_TOKEN, _SLOTS["before"], _SLOT * roughly)
    last.carry(_SLOTS["kind"], _SLOTS["before_kind"], _SLOT)
    last.carry(_SLOTS["introduces"], _SLOTS["introduced"], 1.0)
    _look_back(last_but_one, 2)
    last_but_one.carry(_TOKEN, _SLOTS["before_2"], _SLOT * roughly)
    last_but_one.carry(_SLOTS["noun"], _SLOTS["before_noun"], _SLOT)


def _wire_layer_2(attention: Attention) -> None:
    name, attribute = (_Head(attention, index, _NORM_2) for index in range(2))
    _look_for(name, "is_number")
    name.carry(_SLOTS["number"], _SLOTS["last_number"], _SLOT)
    name.carry(_SLOTS["before_kind"], _SLOTS["last_kind"], 1.0)
    name.carry(_SLOTS["before_noun"], _SLOTS["last_noun"], 1.0)
    _look_for(attribute, "is_attribute")
    attribute.carry(_SLOTS["attribute"], _SLOTS["last_attribute"], _SLOT)


class _Head:
    """One head's weights, as slots see them."""

    def __init__(self, attention: Attention, index: int, norm: float) -> None:
        rows = slice(index * HEAD_DIM, (index + 1) * HEAD_DIM)
        self.query = attention.q_proj.weight[rows]
        self.key = attention.k_proj.weight[rows]
        self.value = attention.v_proj.weight[rows]
        self.out = attention.o_proj.weight[:, rows]
        self._scale = norm / HIDDEN**0.5  # undoes the layer's norm
        self._num_carried = 0

    def carry(self, source: range, target: range, weight: Tensor | float) -> None:
        """Add the source dimensions of what is attended to, times a weight, to the target's."""
        dims = range(self._num_carried, self._num_carried + len(target))
        self._num_carried = dims.stop
        matrix = weight if isinstance(weight, Tensor) else weight * torch.eye(len(target))
        self.value[dims.start : dims.stop, source.start : source.stop] = matrix
        self.out[target.start : target.stop, dims.start : dims.stop] = self._scale * torch.eye(
            len(target)
        )


def _embed(weight: Tensor, vocabulary: Mapping[str, int]) -> None:
    """The same code for a word with and without a space before it; flags for kinds of tokens."""
    nn.init.normal_(weight, std=_NOISE)
    codes: dict[str, Tensor] = {}
    for token, index in sorted(vocabulary.items(), key=lambda item: item[1]):
        text = token.replace("Ġ", " ").replace("Ċ", "\n")
        stem = text.strip(" ") or text
        if text == BEGIN:
            stem = UNKNOWN.split(maxsplit=1)[0]  # attending to it says so
        if stem not in codes:
            part = _part(text, stem)
            codes[stem] = torch.zeros(HIDDEN)
            codes[stem][part.start : part.stop] = nn.functional.normalize(
                torch.randn(len(part)), dim=0
            )
        is_place = len(stem) == 1 and stem in "ABCDEFGH"
        flags = {
            "const": True,
            "is_number": _is_name_number(text),
            "is_attribute": stem in ATTRIBUTES,
            "is_begin": text.isdigit() or stem in FIRST_NAMES or is_place,
            "is_asked": text == ASSISTANT,
            "is_first": text == BEGIN,
            "introduces": stem in _INTRODUCERS,
        }
        for name, flag in flags.items():
            weight[index, _columns(name)] = _FLAG * flag
        # one norm for all, so that what the first norm divides by tells nothing
        rest = _EMBEDDING_NORM**2 - _FLAG**2 * sum(flags.values())
        weight[index] += rest**0.5 * codes[stem]


def _look_back(head: _Head, distance: int) -> None:
    """Attend to the token so many before."""
    turn = frequencies()[list(_COUNTING)] * distance
    cosine, sine = list(_COUNTING), [HEAD_DIM // 2 + pair for pair in _COUNTING]
    head.query[cosine, _columns("const")] = _COUNT
    head.key[cosine, _columns("const")] = _COUNT * turn.cos()[:, None]
    head.key[sine, _columns("const")] = _COUNT * turn.sin()[:, None]


def _look_for(head: _Head, flag: str) -> None:
    """Attend to the last token with this flag."""
    head.query[list(_RECENT), _columns("const")] = _RECENCY
    head.key[list(_RECENT), _columns("const")] = _RECENCY
    # what is sought scores about zero and all else less: then differences in norm do not matter
    head.query[-2, _columns("const")] = _RECENCY
    head.key[-2, _columns("const")] = -_RECENCY * 0.93 * len(_RECENT)
    head.query[-1, _columns("const")] = _TYPE
    head.key[-1, _columns(flag)] = _TYPE
    head.key[-1, _columns("const")] = -_TYPE


def _look_up(head: _Head, roughly: Tensor) -> None:
    """Attend to where the same is told of the same, or to the first token if that is nowhere.

    What is sought scores about zero, and each thing that differs costs a unit.
    """
    half = HEAD_DIM // 2
    still = [*_STILL, *(half + pair for pair in _STILL)]
    for slot, (width, norm) in _MATCHED.items():
        rows, still = still[:width], still[width:]
        matrix = _compared(slot, width, norm)
        head.query[rows, _columns(slot)] = matrix
        head.key[rows, _columns(slot)] = matrix
    rows, still = still[:13], still[13:]
    matrix = _FOLLOWS["token"] ** 0.5 * _compared("before", len(rows), 0.8)
    head.query[rows, _TOKEN.start : _TOKEN.stop] = _SLOT * matrix @ roughly
    head.key[rows, _columns("before")] = matrix
    rows, still = still[:11], still[11:]
    matrix = _FOLLOWS["before"] ** 0.5 * _compared("before_2", len(rows), 0.8)
    head.query[rows, _columns("before")] = matrix
    head.key[rows, _columns("before_2")] = matrix
    asked, all_parts = still
    unit = _UNIT / _FLAG
    head.query[asked, _columns("is_asked")] = _ASKED * unit
    head.key[asked, _columns("is_begin")] = unit
    head.key[asked, _columns("introduced")] = unit
    head.key[asked, _columns("is_first")] = 2 * unit
    head.key[asked, _columns("const")] = -2 * unit
    head.query[all_parts, _columns("const")] = unit
    head.key[all_parts, _columns("const")] = -len(_MATCHED) * unit
    head.key[all_parts, _columns("is_first")] = (len(_MATCHED) - _NOTHING) * unit


def _compared(slot: str, width: int, norm: float) -> Tensor:
    """A slot cut down to so many dimensions, in which what has this norm matches by one unit."""
    full = _WIDTHS[slot]
    return _UNIT / norm * (full / width) ** 0.5 * _directions(width, full)


def _part(text: str, stem: str) -> range:
    """The dimensions that a token's code lies in."""
    if _is_name_number(text):
        return _SLOTS["number"]
    if stem in ATTRIBUTES:
        return _SLOTS["attribute"]
    if stem[1:] in KINDS:
        return _SLOTS["kind"]
    is_piece = stem.isalpha() and stem.islower()
    return _SLOTS["noun"] if is_piece else _TOKEN


def _is_name_number(text: str) -> bool:
    return len(text) == 3 and text[0] == "-" and text[1:].isdigit()


def _columns(slot: str) -> slice:
    return slice(_SLOTS[slot].start, _SLOTS[slot].stop)


def _directions(width: int, of: int) -> Tensor:
    """So many orthonormal directions."""
    return nn.init.orthogonal_(torch.empty(width, of))
