"""The compiled CPU kernels that this machine can run, and how it multiplies best, found by trying.

setup.py compiles the same C files once per instruction set, each into a module of its own. The
functions take addresses, sizes and strides, and trust them: a wrong one is memory overwritten.

Owns: the choice of the instruction set; the trials at start and what follows from them; the least
that each kernel has to read and to multiply, against which a measured time is a fraction.
Invariant: one level is chosen once, at start. Never: compiles, imports torch.
"""

from __future__ import annotations

import importlib
import math
import mmap
import struct
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Protocol, cast

from engine.folder.checkpoint import expected_shapes
from engine.folder.model_config import ModelConfig
from engine.folder.quantisation import packed_shape
from engine.units import with_figures

# What a kernel has to move and to multiply at least, from its shapes.
# Invariant: bytes that must cross the device's memory once, no more; products and sums as two
# operations.
# Never: measures.


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call of a kernel moves and computes at least."""

    num_bytes: int
    num_flops: int = 0

    def is_bound_by_bytes(self, bytes_per_s: float, flops_per_s: float) -> bool:
        """True if moving takes longer than multiplying."""
        return self.num_bytes / bytes_per_s >= self.num_flops / flops_per_s


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and widths of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    window: int | None = None


def attention_cost(heads: AttentionShape, sequences: Sequence[tuple[int, int]]) -> Cost:
    """Cost of attention over (tokens before, new tokens) pairs: each visible key is read once."""
    num_keys = num_pairs = num_queries = 0
    for context, new in sequences:
        window = heads.window or context + new
        num_keys += min(context + new, window + new - 1)
        num_pairs += sum(min(position + 1, window) for position in range(context, context + new))
        num_queries += new
    keys_and_values = 2 * num_keys * heads.num_kv_heads
    queries_and_results = 2 * num_queries * heads.num_heads
    return Cost(
        (keys_and_values + queries_and_results) * heads.head_dim * heads.itemsize,
        4 * num_pairs * heads.num_heads * heads.head_dim,
    )


def place_cost(heads: AttentionShape, num_tokens: int) -> Cost:
    """Cost of rotating queries and keys in place and writing keys and values to the pool."""
    read = heads.num_heads + 2 * heads.num_kv_heads
    written = read + 2 * heads.num_kv_heads
    return Cost((read + written) * num_tokens * heads.head_dim * heads.itemsize)


def norm_cost(num_tokens: int, dim: int, itemsize: int) -> Cost:
    """Cost of adding to the residual stream, keeping the sum, and normalising it."""
    return Cost(4 * num_tokens * dim * itemsize)


def gated_cost(num_tokens: int, width: int, itemsize: int) -> Cost:
    """Cost of activation(gate) * up: both halves read, one written."""
    return Cost(3 * num_tokens * width * itemsize)


def sample_cost(num_rows: int, vocab_size: int) -> Cost:
    """Cost of greedy sampling: float32 logits read once."""
    return Cost(num_rows * vocab_size * 4)


def product_cost(num_tokens: int, num_rows: int, depth: int, itemsize: int) -> Cost:
    """Cost of multiplying tokens by a matrix [num_rows, depth]."""
    num_values = num_rows * depth + num_tokens * (num_rows + depth)
    return Cost(num_values * itemsize, 2 * num_tokens * num_rows * depth)


@dataclass(frozen=True, slots=True)
class StepValues:
    """A model's weights by how a step uses them; vectors count for nothing."""

    dense: int
    """In matrices that every token is multiplied by."""
    experts: int
    """In those of all experts."""
    expert_share: float
    """Of an expert's layer's, how much one token is multiplied by."""
    head: int
    """In the projection to logits: once for each sequence. An embedding table is looked up in."""

    def read(self, batch: int) -> int:
        """Values that a decode step reads at least: of the experts as many as it can need."""
        return self.dense + self.head + round(self.experts * min(1.0, batch * self.expert_share))

    def prefill_flops(self, num_tokens: int) -> int:
        """Operations of the products for a prompt, which has logits for its last token."""
        of_each = self.dense + self.experts * self.expert_share
        return round(2 * (of_each * num_tokens + self.head))


def step_values(config: ModelConfig) -> StepValues:
    """What one step needs at least, by the model's shape."""
    sizes = {name: math.prod(shape) for name, shape in expected_shapes(config) if len(shape) > 1}
    ends = {
        n: size
        for n, size in sizes.items()
        if n.endswith(("embed_tokens.weight", "lm_head.weight"))
    }
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    mixture = config.experts
    share = 0.0 if mixture is None else mixture.num_per_token / mixture.num_experts
    dense = sum(sizes.values()) - sum(ends.values()) - experts
    return StepValues(dense, experts, share, config.vocab_size * config.hidden_size)


# --------------------------------------------------------------------------------------------------


FLOAT32, BFLOAT16, FLOAT16 = range(3)
"""The types of elements, as the kernels number them."""
INT8 = 16
"""Codes of keys and values in a pool, whose scales lie behind them."""
BFLOAT16_PAIRS = 3
"""The scheme of matrices that `pack_pairs` has packed."""
FORMS = {
    "q4_0": 4, "q4_1": 5, "q4_k": 6, "q5_0": 7, "q5_1": 8, "q5_k": 9, "q6_k": 10, "q8_0": 11,
    "mxfp4": 12, "int4_32": 13, "int4_128": 14, "int8_128": 15, "int8_row": 16, "fp8_128": 17,
}  # fmt: skip
"""Of quantised matrices in panels, by their names in engine.folder.quantisation."""
WIDENED, DOTS, TILES = range(3)
"""Ways in which `linear_pairs` multiplies: exact products, dots of pairs, matrix tiles."""
WAY_NAMES = ("widened", "dots", "tiles")


class Kernels(Protocol):
    """The functions of one level; the C files say what each argument is."""

    def supported(self) -> tuple[str, ...]:
        """Levels that this processor can run, best first."""

    def rms_norm(self, *arguments: float) -> None:
        """Norm rows by their root mean squares, after adding to them."""

    def gated(self, *arguments: float) -> None:
        """Multiply one half of rows by the activation of the other."""

    def place(self, *arguments: float) -> None:
        """Rotate queries and keys; write keys and values to the pool."""

    def attend(self, *arguments: float) -> None:
        """Attention of a step's queries over the pool."""

    def linear(self, *arguments: float) -> None:
        """Multiply rows by matrices in the dtype in which these are stored."""

    def linear_pairs(self, *arguments: float) -> None:
        """Multiply bfloat16 rows by packed matrices, in one of the ways."""

    def pack_pairs(self, *arguments: float) -> None:
        """Pack panels of a bfloat16 matrix."""

    def mixture(self, *arguments: float) -> None:
        """Rows through those experts that their router's scores choose."""

    def grow(self, *arguments: float) -> None:
        """Multiply rows by numbers of their own, in place."""

    def record(self) -> None:
        """Write down every call from now on."""

    def recorded(self) -> bytes:
        """The calls since record(); no more are written down."""

    def replay(self, calls: bytes) -> None:
        """Make a tape's recorded kernel calls again, in order."""


def has_kernels() -> bool:
    """True if the workers of this machine will find kernels."""
    try:
        load_kernels()
    except ImportError:
        return False
    return True


def load_kernels(level: str | None = None) -> tuple[Kernels, str]:
    """The kernels of a level, or of the best there is, and the level's name.

    Raises:
        ImportError: nothing was built, or not this level; the text says what to do.
    """
    try:
        portable = _module("portable")
    except ImportError:
        raise ImportError("not built: install again with a C compiler") from None
    for supported in portable.supported():
        if level in {None, supported}:
            try:
                return _module(supported), supported
            except ImportError:
                continue  # the compiler did not know this level
    raise ImportError(f"no {level} kernels here")


def _module(level: str) -> Kernels:
    return cast("Kernels", importlib.import_module(f"engine.kernels._{level}"))


# How bfloat16 matrices are best multiplied on this machine, found by trying.
# The kernels read matrices as the checkpoint stores them, or packed in pairs, which a processor's
# dots of pairs and its matrix tiles want. What an instruction is called says little about its speed
# (dots are twice as fast as widening on some processors, and less than half as fast on others), so
# all ways are timed once, on few inputs and on many, and checked against each other.
# Invariant: a way that computes anything else than the first one is not chosen, and that is said.
# Never: imports torch; times anything but at start.


LEVELS = {"avx512bf16": (WIDENED, DOTS), "amx": (WIDENED, DOTS, TILES)}
"""Those with instructions for bfloat16, and the ways that their packed matrices can be read."""
NUM_INPUTS = (1, 4, 16, 64, 256)
"""Tried; from each of them on, up to the next, its best way is used."""
AGAIN = "a start while the machine is idle may find out"
"""What is said where rounds differ by too much, as they do beside other work."""
GAIN = 1.5
"""Packing costs memory and a part of the start, and a trial beside other work is noisy, so that it
has to bring this at 256 inputs..."""
LOSS = 0.8
"""...and may not cost more than this at any other number."""
_STORED = "used as they are stored"
_DEPTH = 1024
_ROWS = {1: 16384, 4: 16384, 16: 2048, 64: 2048, 256: 1024}
"""Few inputs are bound by reading: more than the caches hold."""
_TOLERANCE = 2**-6
_ATTENTION_TOLERANCE = 2**-5
"""Of outputs that are means of values of about 1, with weights of eight bits."""
_ROUNDS = 3
_WAY_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class MeasuredRatio:
    """A ratio measured in several rounds."""

    low: float
    median: float
    high: float
    """The ends without the outermost round on either side, where there are four or more."""

    @classmethod
    def of(cls, ratios: Iterable[float]) -> MeasuredRatio:
        """Over rounds, in each of which both sides were measured one after the other."""
        found = sorted(ratios)
        cut = len(found) >= 4  # a round that something else ran beside
        return cls(found[cut], found[len(found) // 2], found[-1 - cut])

    def __str__(self) -> str:
        low, mid, high = (f"{each:.2f}" for each in (self.low, self.median, self.high))
        return mid if low == high else f"{mid} ({low} to {high})"


@dataclass(frozen=True, slots=True)
class ProductWays:
    """The way for each number of inputs: ways[i] from starts[i] inputs on."""

    starts: tuple[int, ...]
    ways: tuple[int, ...]

    def way_of(self, num_inputs: int) -> int:
        """What linear_pairs is told for so many."""
        return self.ways[bisect_right(self.starts, num_inputs) - 1]

    def __str__(self) -> str:
        changes = [
            (start, way)
            for i, (start, way) in enumerate(zip(self.starts, self.ways, strict=True))
            if i == 0 or way != self.ways[i - 1]
        ]
        return ", ".join(f"{WAY_NAMES[way]} from {start}" for start, way in changes)


@dataclass(frozen=True, slots=True)
class AttentionTrial:
    """How prompts' queries meet keys and values, and what that was chosen by."""

    way: int
    why: str
    """For people; empty: there was nothing to choose."""


def find_attention_way(kernels: Kernels, level: str) -> AttentionTrial:
    """Try attention of a prompt's chunk by tiles where the level has them, for 0.1 s of a core."""
    if TILES not in LEVELS.get(level, ()):
        return AttentionTrial(WIDENED, "")
    return judge_attention(*try_attention(kernels))


def judge_attention(is_right: bool, widened_s: float, tiled_s: float) -> AttentionTrial:
    """What follows: tiles where they compute the right thing, and sooner."""
    if not is_right:
        return AttentionTrial(WIDENED, "attention by tiles computes wrongly, and is not used")
    gain = widened_s / tiled_s
    way = TILES if gain > 1 else WIDENED
    said = "by tiles" if way == TILES else "without tiles"
    why = with_figures(f"attention of prompts {said}", f"tiles are {gain:.2g}x as fast at it")
    return AttentionTrial(way, why)


def try_attention(kernels: Kernels, num_tokens: int = 512) -> tuple[bool, float, float]:
    """A chunk of 4 heads of 64 over itself: if both ways agree, and the seconds of each."""
    num_heads, head_dim, block_size = 4, 64, 64
    width, num_blocks = num_heads * head_dim, -(-num_tokens // block_size)
    random = Random(0)  # the same numbers every time
    values = array("f", [random.gauss(0, 1) for _ in range(8191)])
    noise = b"".join(bits[2:] for bits in _each(values.tobytes(), 4))
    sizes = [num_tokens * width * 2, num_blocks * block_size * 2 * width * 2]
    memories = [mmap.mmap(-1, size) for size in (*sizes, *sizes[:1], *sizes[:1])]
    for memory, size in zip(memories, sizes, strict=False):
        memory.write((noise * (size // len(noise) + 1))[:size])
    q, kv, *outs = (addressof(c_char.from_buffer(memory)) for memory in memories)
    sequence, table = array("q", [0, num_tokens, num_tokens]), array("q", range(num_blocks))
    best = [inf, inf]
    for _ in range(_ROUNDS):
        for number, way in enumerate((WIDENED, TILES)):
            started_s = time.perf_counter()
            kernels.attend(
                outs[number], q, kv, sequence.buffer_info()[0], table.buffer_info()[0], 0,
                BFLOAT16, 1, num_blocks, width, num_heads, num_heads, head_dim, block_size, 1, 0, 0,
                BFLOAT16, block_size * width * 2, way, 1, head_dim**-0.5, 0.0,
            )  # fmt: skip
            best[number] = min(best[number], time.perf_counter() - started_s)
    expected, found = (_floats(memory[-16 * width * 2 :]) for memory in memories[2:])
    pairs = zip(expected, found, strict=True)
    return all(abs(a - b) <= _ATTENTION_TOLERANCE for a, b in pairs), best[0], best[1]


def _floats(bfloat16: bytes) -> tuple[float, ...]:
    halves = _each(bfloat16, 2)
    return struct.unpack(f"{len(halves)}f", b"".join(b"\0\0" + half for half in halves))


EXACT = ProductWays((1,), (WIDENED,))
"""Exact products, however many inputs."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What the trial has shown."""

    ways: ProductWays | None
    """None: matrices stay as they are stored, which is as fast or faster."""
    why: str
    """For people."""


def find_ways(kernels: Kernels, level: str) -> TrialResult:
    """Try all ways that the level has; takes 0.4 s of a core, and nothing where it has none."""
    if level not in LEVELS:
        return TrialResult(None, f"{_STORED}: this CPU has no instructions for bfloat16")
    trial = _Trial(kernels)
    right = [way for way in LEVELS[level] if trial.is_right(way)]
    wrong = [WAY_NAMES[way] for way in LEVELS[level] if way not in right]
    times_s = {count: trial.seconds(count, (None, *right)) for count in NUM_INPUTS}
    return judge(times_s, wrong)


def judge(
    times_s: Mapping[int, Mapping[int | None, Sequence[float]]], wrong: list[str]
) -> TrialResult:
    """What follows from seconds by number of inputs, way and round; None is as stored.

    Args:
        times_s: of ways that computed the right thing.
        wrong: names of those that did not.
    """
    best: list[int] = []
    gains: list[MeasuredRatio] = []
    for by_way in times_s.values():
        packed = {way: min(seconds) for way, seconds in by_way.items() if way is not None}
        if not packed:
            break
        best.append(min(packed, key=packed.__getitem__))
        rounds = zip(by_way[None], by_way[best[-1]], strict=True)
        gains.append(MeasuredRatio.of(stored / there for stored, there in rounds))
    said = "".join(f"; {name} compute wrongly, and are not used" for name in wrong)
    if not gains:
        return TrialResult(None, f"{_STORED}{said}")
    counts = tuple(times_s)
    figures = (
        f"rearranged they are {gains[0]}x as fast for {counts[0]} token at a time, "
        f"{gains[-1]}x for {counts[-1]}"
    )
    if gains[-1].low >= GAIN and min(gain.low for gain in gains) >= LOSS:
        ways = ProductWays(counts, tuple(best))
        how = f"rearranged at start for this CPU's bfloat16 instructions, {ways} tokens at a time"
        return TrialResult(ways, with_figures(f"{how}{said}", figures))
    if gains[-1].high >= GAIN and min(gain.high for gain in gains) >= LOSS:
        why = "undecided if they should be rearranged for this CPU's bfloat16 instructions"
        said += f"; {AGAIN}"
    else:
        why = "rearranged for this CPU's bfloat16 instructions they gain too little for prompts"
    return TrialResult(None, with_figures(f"{_STORED}: {why}{said}", figures))


@dataclass(frozen=True, slots=True)
class PromptTrial:
    """How prompts are best computed here, found by trying."""

    step_tokens: int
    """Of prompts, in a step: more would be hardly faster."""
    second_core_gain: MeasuredRatio | None
    """How much faster two cores compute them than one with a unit for matrices (tiles), of which
    virtual CPUs may share one; None: there is one core, or no such unit."""
    costs: Mapping[int, MeasuredRatio] = field(default_factory=dict)
    """A prompt token's time in steps of other sizes, of that in steps of step_tokens."""
    is_decided: bool = True
    """False: rounds differ about the size of steps by more than would decide it."""

    @property
    def lends(self) -> bool:
        """False: a second core is no help to a prompt, beyond the spread."""
        gain = self.second_core_gain
        return gain is None or gain.high >= CORE_GAIN

    @property
    def why(self) -> str:
        """How large steps of prompts are, whether these get a second core, and by which figures."""
        said, figures = f"up to {self.step_tokens:,} prompt tokens a step", []
        if self.costs:
            others = (f"{cost} in steps of {size:,}" for size, cost in self.costs.items())
            figures.append(f"a token takes {', '.join(others)}, against 1")
        if not self.is_decided:
            said += f", too near to call: of those that may be best the one nearest to {_USUAL}"
        gain, is_decided = self.second_core_gain, self.is_decided
        if gain is not None:
            figures.append(f"two cores compute a prompt {gain}x as fast as one")
            if not self.lends:
                said += "; a prompt has its worker's own cores alone"
            elif gain.low >= CORE_GAIN:
                said += "; a prompt borrows idle cores"
            else:
                said += "; a prompt borrows idle cores, undecided if it gains by them"
                is_decided = False
        said += "" if is_decided else f"; {AGAIN}"
        return with_figures(said, "; ".join(figures)) if figures else said


STEP_TOKENS = (128, 256, 512)
"""Of prompts in a step; those who decode beside it, and whoever comes next, wait for its end."""
_USUAL = STEP_TOKENS[-1]
MIXTURE_STEP_TOKENS = (*STEP_TOKENS, 1024, 2048)
"""An expert gets but a few of them."""
RATE = 0.97
"""Of the best: a smaller step that comes so close is better."""
CORE_GAIN = 1.15
"""Of a second core; less is not worth waiting for when its owner wants it back."""
_MIXTURE_INPUTS = (1, 4, 16, 64)
_PROMPT_ROWS = 512
_PROMPT_ROUNDS = 7
_PROMPT_S = 0.4
"""Of a start, at most, once three rounds are made."""


def try_prompts(
    kernels: Kernels,
    level: str,
    ways: ProductWays | None,
    num_cores: int,
    values: StepValues | None = None,
) -> PromptTrial:
    """Time products as a prompt has them, by turns; takes two tenths of a second.

    Args:
        kernels: that multiply.
        level: theirs; plain C is not tried, which would take seconds.
        ways: how packed matrices are multiplied; None: matrices are as they are stored.
        num_cores: that this process may use.
        values: of the model's weights; None: those of a dense one.
    """
    most = STEP_TOKENS[-1]
    if level == "portable":
        return PromptTrial(most, None)
    trial = _Trial(kernels, _PROMPT_ROWS, most)
    counts = STEP_TOKENS if values is None or not values.expert_share else (
        *_MIXTURE_INPUTS, *STEP_TOKENS,
    )  # fmt: skip
    calls = {count: trial.call(count, _PROMPT_ROWS, _way(ways, count)) for count in counts}
    has_choice = num_cores > 1 and _way(ways, most) == TILES
    on_two = trial.call(most, _PROMPT_ROWS, TILES, 2) if has_choice else None
    for call in (*calls.values(), on_two or calls[most]):
        call()  # threads and pages are there from now on
    costs: list[dict[int, float]] = []
    gains: list[float] = []
    started_s = time.perf_counter()
    while len(costs) < _PROMPT_ROUNDS:
        # as many inputs whatever their number at once, so that all take about as long
        per_input_s = {
            count: _seconds(call, min(most // count, 8)) / count for count, call in calls.items()
        }
        costs.append(step_costs(per_input_s, values))
        if on_two is not None:
            gains.append(per_input_s[most] * most / _seconds(on_two, 1))
        if len(costs) >= 3 and time.perf_counter() - started_s > _PROMPT_S:
            break
    size, is_decided = best_step_tokens(costs)
    others = {
        other: MeasuredRatio.of(cost[other] / cost[size] for cost in costs)
        for other in costs[0]
        if other != size
    }
    return PromptTrial(
        size,
        MeasuredRatio.of(gains) if gains else None,
        costs=others,
        is_decided=is_decided,
    )


def _way(ways: ProductWays | None, num_inputs: int) -> int | None:
    return None if ways is None else ways.way_of(num_inputs)


def _seconds(call: Callable[[], None], times: int) -> float:
    """Of one call, over some."""
    started_s = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started_s) / times


def step_costs(
    per_input_s: Mapping[int, float], values: StepValues | None = None
) -> dict[int, float]:
    """What a prompt token costs by how many a step has: seconds, times a model's values.

    Args:
        per_input_s: seconds of a product for each of its inputs, by how many it has.
        values: of the model's weights; None: those of a dense one.
    """

    def seconds(inputs: float) -> float:  # of each
        return per_input_s[max(count for count in per_input_s if count <= max(inputs, 1))]

    experts, dense = (0.0, 1.0) if values is None else (values.expert_share, float(values.dense))
    sizes = MIXTURE_STEP_TOKENS if experts else STEP_TOKENS
    used = 0.0 if values is None else values.experts * experts
    return {
        size: dense * seconds(size) + (used * seconds(size * experts) if used else 0.0)
        for size in sizes
    }


def best_step_tokens(rounds: Sequence[Mapping[int, float]]) -> tuple[int, bool]:
    """The fewest prompt tokens of a step at RATE of the best rate, and if that is beyond doubt.

    A larger step is worth it where it is that much better in all rounds but the outermost, and is
    not where it is so in none. In between it is undecided, and the usual size stays, or the
    nearest to it that is in question.

    Args:
        rounds: what a token costs by size of step, measured together.
    """
    sizes = sorted(rounds[0])
    gains = {
        (size, larger): MeasuredRatio.of(costs[size] / costs[larger] for costs in rounds)
        for size in sizes
        for larger in sizes
        if larger > size
    }

    def fewest(gain: Callable[[MeasuredRatio], float]) -> int:
        return next(
            size
            for size in sizes
            if all(gain(gains[size, more]) * RATE <= 1 for more in sizes if more > size)
        )

    least, most = fewest(lambda spread: spread.low), fewest(lambda spread: spread.high)
    return min(max(_USUAL, least), most), least == most


class _Trial:
    """A matrix as it is stored and packed, inputs, and where outputs go."""

    def __init__(
        self, kernels: Kernels, num_rows: int = max(_ROWS.values()), num_inputs: int = max(_ROWS)
    ) -> None:
        self._kernels = kernels
        size = num_rows * _DEPTH * 2
        self._stored, self._packed = mmap.mmap(-1, size), mmap.mmap(-1, size)
        out_bytes = max(num_inputs * 1024, num_rows * 16) * 2
        self._x, self._out = mmap.mmap(-1, num_inputs * _DEPTH * 2), mmap.mmap(-1, out_bytes)
        random = Random(0)  # the same numbers every time
        values = array("f", [random.gauss(0, 1) for _ in range(8191)])
        noise = b"".join(bits[2:] for bits in _each(values.tobytes(), 4))
        for memory in (self._stored, self._x):
            memory.write((noise * (len(memory) // len(noise) + 1))[: len(memory)])
        panels = packed_shape(num_rows, _DEPTH)[0]
        self._at = {m: addressof(c_char.from_buffer(m)) for m in self._memories()}
        kernels.pack_pairs(
            self._at[self._packed], self._at[self._stored], num_rows, _DEPTH, 0, panels
        )

    def _memories(self) -> tuple[mmap.mmap, ...]:
        return self._stored, self._packed, self._x, self._out

    def call(
        self, num_inputs: int, num_rows: int, way: int | None, num_threads: int = 1
    ) -> Callable[[], None]:
        """What makes one product."""
        scheme, matrix = (BFLOAT16, self._stored), (BFLOAT16_PAIRS, self._packed)
        number, memory = scheme if way is None else matrix
        parts = array("q", [self._at[memory], num_rows, number])
        out, x, address = self._at[self._out], self._at[self._x], parts.buffer_info()[0]

        def call() -> None:
            if way is None:
                shape = num_inputs, _DEPTH, address, len(parts) // 3, 0
                self._kernels.linear(out, x, BFLOAT16, *shape, num_threads)
            else:
                shape = num_inputs, _DEPTH, address, len(parts) // 3, 0
                self._kernels.linear_pairs(out, x, *shape, way, num_threads)

        return call

    def seconds(
        self, num_inputs: int, ways: tuple[int | None, ...]
    ) -> dict[int | None, list[float]]:
        """Of a call in each way, which take turns, in each round."""
        calls = {way: self.call(num_inputs, _ROWS[num_inputs], way) for way in ways}
        for call in calls.values():
            call()
        found: dict[int | None, list[float]] = {way: [] for way in ways}
        for _ in range(_WAY_ROUNDS):
            for way, call in calls.items():
                found[way].append(_seconds(call, 1))
        return found

    def is_right(self, way: int) -> bool:
        """True if the way yields what matrices as stored do, but for rounding."""
        expected, found = (self._outputs(each) for each in (None, way))
        limit = _TOLERANCE * _DEPTH**0.5  # of sums of so many products of about 1
        return all(abs(a - b) <= limit for a, b in zip(expected, found, strict=True))

    def _outputs(self, way: int | None) -> tuple[float, ...]:
        num_inputs, num_rows = 3, 128
        self._out[:] = b"\xff" * len(self._out)  # NaNs, which are right nowhere
        self.call(num_inputs, num_rows, way)()
        return _floats(self._out[: num_inputs * num_rows * 2])


def _each(values: bytes, size: int) -> list[bytes]:
    return [values[i : i + size] for i in range(0, len(values), size)]
