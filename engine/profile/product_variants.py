"""Time the CPU kernels' variants of matrix products and attention in bfloat16; choose the fastest.

The kernels read matrices as the checkpoint stores them, or packed in pairs, which a processor's
dots of pairs and its matrix tiles want. What an instruction is called says little about its speed:
dots are twice as fast as widening on some processors, and less than half as fast on others. So each
variant is timed once per machine, on few inputs and on many, and checked against the first. One is
chosen for all numbers of inputs, so that a row's bits do not depend on how many there are.

Owns: the trial, whose times are facts of the machine, and what follows from these facts.
Invariant: a variant with other results than the first one is not chosen; equal facts give equal
choices.
Never: imports torch; is timed while a model is loaded.
"""

from __future__ import annotations

import mmap
import struct
import time
from array import array
from collections.abc import Callable, Iterator
from ctypes import addressof, c_char
from dataclasses import dataclass
from random import Random

from engine.checkpoint.packed_layouts import packed_shape
from engine.kernels.cpu import (
    BFLOAT16,
    BFLOAT16_PAIRS,
    DOTS,
    TILES,
    VARIANT_NAMES,
    WIDENED,
    Kernels,
    ProductVariants,
)
from engine.profile.facts import IS_WRONG, FactKey, Profile
from engine.units import with_figures

PRODUCT_US, ATTENTION_US = "product_us", "attention_us"
LEVELS = {"avx512bf16": (WIDENED, DOTS), "amx": (WIDENED, DOTS, TILES)}
"""Levels with instructions for bfloat16, and their variants for packed matrices."""
STORED = "stored"
"""The place of facts about matrices as the checkpoint has them."""
NUM_INPUTS = (1, 4, 16, 64, 256)
"""Numbers of inputs that are timed for each variant."""
MAX_FEW = 16
"""Maximum inputs for which another variant may replace tiles: a step without prompts."""
ATTENTION_TOKENS = 512
_HEADS, _HEAD_DIM = 4, 64
"""A block of the trial has as many tokens as a head has values."""
_WIDTH = _HEADS * _HEAD_DIM
GAIN = 1.5
"""Minimum gain of packing at 256 inputs, for its memory and its time at start."""
LOSS = 0.8
"""Minimum speed with packing, relative to no packing, at any other number of inputs."""
GAIN_TO_CHANGE = 1.1
"""Minimum gain of another variant over tiles for few inputs, and of tiles for attention."""
ROUNDS = 9
"""Rounds; each times all variants one after the other."""
_DEPTH = 1024
_ROWS = {1: 16384, 4: 16384, 16: 2048, 64: 2048, 256: 1024}
"""Few inputs are bound by reading: more than the caches hold."""
_TOLERANCE = 2**-6
_ATTENTION_TOLERANCE = 2**-5
"""Maximum error of outputs that are means of values of about 1, with eight-bit weights."""


@dataclass(frozen=True, slots=True)
class VariantsChoice:
    """How bfloat16 is multiplied, and why."""

    variants: ProductVariants | None
    """None: matrices stay as they are stored, which is as fast or faster."""
    attention: int
    """The variant of prompts' attention."""
    why: str
    """The reason for people; empty: there was nothing to choose."""


AS_STORED = VariantsChoice(None, WIDENED, "")


def try_variants(profile: Profile, kernels: Kernels, level: str) -> None:
    """Time every variant of the level, unless the profile knows them; takes half a second once."""
    variants = LEVELS.get(level, ())
    if not variants or profile.value(PRODUCT_US, NUM_INPUTS[0], 0, STORED) is not None:
        return
    trial = _Trial(kernels)
    for variant in variants:
        profile.put(
            FactKey(IS_WRONG, place=VARIANT_NAMES[variant]), [float(not trial.is_right(variant))]
        )
    for count in NUM_INPUTS:
        calls = {STORED: trial.call(count, None)}
        calls |= {VARIANT_NAMES[variant]: trial.call(count, variant) for variant in variants}
        _take_turns(profile, PRODUCT_US, count, calls)
    if TILES in variants:
        attention = _AttentionTrial(kernels)
        attends = {VARIANT_NAMES[variant]: attention.call(variant) for variant in (WIDENED, TILES)}
        _take_turns(profile, ATTENTION_US, ATTENTION_TOKENS, attends)
        is_wrong = float(not attention.is_right())
        profile.put(FactKey(IS_WRONG, place="attention"), [is_wrong])


def _take_turns(
    profile: Profile, what: str, size: int, calls: dict[str, Callable[[], None]]
) -> None:
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # threads and pages are there from now on
    for _ in range(ROUNDS):
        for name, call in calls.items():
            started_s = time.perf_counter()
            call()
            found[name].append((time.perf_counter() - started_s) * 1e6)
    for name, times_us in found.items():
        profile.put(FactKey(what, size, 0, name), times_us)


def choose_variants(profile: Profile, level: str, *, is_bitwise: bool = False) -> VariantsChoice:
    """Choose one variant for all numbers of inputs, by the known facts.

    Where tiles are fastest for prompts, another variant may serve up to MAX_FEW inputs, unless
    the setting `exact` says bitwise. The shortest times are compared: what else runs can only make
    a call longer.
    """
    variants = LEVELS.get(level, ())
    wrong = [v for v in variants if profile.value(IS_WRONG, place=VARIANT_NAMES[v])]
    right = [v for v in variants if v not in wrong]
    names = ", ".join(VARIANT_NAMES[v] for v in wrong)
    about_wrong = f" ({names} compute wrongly)" if wrong else ""
    gains = {count: _gains(profile, PRODUCT_US, count, right) for count in NUM_INPUTS}
    if not all(gains.values()):
        return VariantsChoice(None, WIDENED, _about("stored layout", about_wrong) if wrong else "")
    attention = _gains(profile, ATTENTION_US, ATTENTION_TOKENS, right, VARIANT_NAMES[WIDENED])
    is_tiled = attention.get(TILES, 0) > GAIN_TO_CHANGE and not is_bitwise
    is_tiled &= not profile.value(IS_WRONG, place="attention")
    kind, by_tiles = (TILES, "; attention by tiles") if is_tiled else (WIDENED, "")
    layout, reason = "stored layout", ""
    for chosen in _candidates(gains, is_bitwise=is_bitwise):
        found = [gains[count][chosen.variant_of(count)] for count in NUM_INPUTS]
        reason = f"repacked is {found[0]:.1f}x at 1 token, {found[-1]:.1f}x at {NUM_INPUTS[-1]}"
        if found[-1] >= GAIN and min(found) >= LOSS:
            how = f" up to {MAX_FEW} tokens, then ".join(VARIANT_NAMES[v] for v in chosen.variants)
            layout = f"repacked, {how}"
            break
    else:
        chosen = None
    said = _about(layout, by_tiles + about_wrong)
    return VariantsChoice(chosen, kind, with_figures(said, reason))


def _about(layout: str, more: str) -> str:
    return f"bfloat16 products: {layout}{more}"


def _gains(
    profile: Profile, what: str, size: int, variants: list[int], usual: str = STORED
) -> dict[int, float]:
    """Compute how much faster than the usual each variant is; nothing where one is not known."""
    facts = [profile.facts.get(FactKey(what, size, 0, VARIANT_NAMES[v])) for v in variants]
    first = profile.facts.get(FactKey(what, size, 0, usual))
    known = {v: fact.low for v, fact in zip(variants, facts, strict=True) if fact is not None}
    return {} if first is None else {v: first.low / low for v, low in known.items()}


def _candidates(
    gains: dict[int, dict[int, float]], *, is_bitwise: bool
) -> Iterator[ProductVariants]:
    """List variants by their speed for many inputs; the first may have another for few."""
    most = gains[NUM_INPUTS[-1]]
    by_speed = sorted(most, key=most.__getitem__, reverse=True)
    if by_speed[0] == TILES and not is_bitwise:
        few = [gains[count] for count in NUM_INPUTS if count <= MAX_FEW]
        costs = {v: sum(gain[TILES] / gain[v] for gain in few) / len(few) for v in by_speed}
        best = min(costs, key=costs.__getitem__)
        if costs[best] * GAIN_TO_CHANGE < 1:
            yield ProductVariants((1, MAX_FEW + 1), (best, TILES))
            return
    for variant in by_speed if is_bitwise else by_speed[:1]:
        yield ProductVariants((1,), (variant,))


class _AttentionTrial:
    """A prompt's chunk of 4 heads of 64 over itself."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        num_bytes = ATTENTION_TOKENS * _WIDTH * 2
        self._q, self._kv = _noise(num_bytes), _noise(2 * num_bytes)
        self._outs = {variant: mmap.mmap(-1, num_bytes) for variant in (WIDENED, TILES)}
        self._sequence = array("q", [0, ATTENTION_TOKENS, ATTENTION_TOKENS])
        self._table = array("q", range(ATTENTION_TOKENS // _HEAD_DIM))

    def call(self, variant: int) -> Callable[[], None]:
        """Make a call that computes the trial once."""
        out, q, kv = (_address(each) for each in (self._outs[variant], self._q, self._kv))

        def call() -> None:
            self._kernels.attend(
                out, q, kv, self._sequence.buffer_info()[0], self._table.buffer_info()[0], 0,
                BFLOAT16, 1, len(self._table), _WIDTH, _HEADS, _HEADS, _HEAD_DIM, _HEAD_DIM,
                1, 0, 0, BFLOAT16, _HEAD_DIM * _WIDTH * 2, variant, 1, _HEAD_DIM**-0.5, 0.0,
            )  # fmt: skip

        return call

    def is_right(self) -> bool:
        """Say whether both variants, computed before, agree."""
        expected, found = (_floats(out[-16 * _WIDTH * 2 :]) for out in self._outs.values())
        pairs = zip(expected, found, strict=True)
        return all(abs(a - b) <= _ATTENTION_TOLERANCE for a, b in pairs)


class _Trial:
    """A matrix, stored and packed, with inputs and memory for outputs."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        num_rows, num_inputs = max(_ROWS.values()), max(_ROWS)
        self._stored, self._x = _noise(num_rows * _DEPTH * 2), _noise(num_inputs * _DEPTH * 2)
        self._packed = mmap.mmap(-1, num_rows * _DEPTH * 2)
        self._out = mmap.mmap(-1, max(num_inputs * 1024, num_rows * 16) * 2)
        panels = packed_shape(num_rows, _DEPTH)[0]
        addresses = _address(self._packed), _address(self._stored)
        kernels.pack_pairs(*addresses, num_rows, _DEPTH, 0, panels)

    def call(
        self, num_inputs: int, variant: int | None, num_rows: int | None = None
    ) -> Callable[[], None]:
        """Make a call that computes one product; variant None: of the stored matrix."""
        memory, scheme = (
            (self._stored, BFLOAT16) if variant is None else (self._packed, BFLOAT16_PAIRS)
        )
        parts = array("q", [_address(memory), num_rows or _ROWS[num_inputs], scheme])
        out, x, address = _address(self._out), _address(self._x), parts.buffer_info()[0]

        def call() -> None:
            shape = num_inputs, _DEPTH, address, len(parts) // 3, 0
            if variant is None:
                self._kernels.linear(out, x, BFLOAT16, *shape, 1)
            else:
                self._kernels.linear_pairs(out, x, *shape, variant, 1)

        return call

    def is_right(self, variant: int) -> bool:
        """Say whether a variant agrees with the stored matrix, up to rounding."""
        expected, found = (self._outputs(each) for each in (None, variant))
        limit = _TOLERANCE * _DEPTH**0.5  # for sums of _DEPTH products of about 1
        return all(abs(a - b) <= limit for a, b in zip(expected, found, strict=True))

    def _outputs(self, variant: int | None) -> tuple[float, ...]:
        num_inputs, num_rows = 3, 128
        self._out[:] = b"\xff" * len(self._out)  # NaNs, which are right nowhere
        self.call(num_inputs, variant, num_rows)()
        return _floats(self._out[: num_inputs * num_rows * 2])


def _noise(num_bytes: int) -> mmap.mmap:
    """Memory of bfloat16 values of about 1, the same every time."""
    random = Random(0)
    values = array("f", [random.gauss(0, 1) for _ in range(8191)]).tobytes()
    halves = b"".join(values[i + 2 : i + 4] for i in range(0, len(values), 4))
    memory = mmap.mmap(-1, num_bytes)
    memory.write((halves * (num_bytes // len(halves) + 1))[:num_bytes])
    return memory


def _address(memory: mmap.mmap) -> int:
    return addressof(c_char.from_buffer(memory))


def _floats(bfloat16: bytes) -> tuple[float, ...]:
    count = len(bfloat16) // 2
    widened = b"".join(b"\0\0" + bfloat16[i : i + 2] for i in range(0, len(bfloat16), 2))
    return struct.unpack(f"{count}f", widened)
