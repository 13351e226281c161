"""Choose how the kernels multiply bfloat16: a rule by their level and the CPU's make.

Nothing is timed: on a machine that does something else, too, one of a few noisy ratios decides a
trial, and its choice was three times slower than the rule's. What each CPU is best at is known.
Invariant: equal machines get equal choices, whatever runs beside the start.
"""

from __future__ import annotations

import mmap
import re
import struct
from array import array
from ctypes import addressof, c_char
from dataclasses import dataclass
from pathlib import Path
from random import Random

from engine.checkpoint.packed_layouts import packed_shape
from engine.kernels.cpu import (
    BFLOAT16,
    BFLOAT16_PAIRS,
    DOTS,
    EXACT,
    NOT_GATED,
    TILES,
    VARIANT_NAMES,
    WIDENED,
    Kernels,
    ProductVariants,
    load_kernels,
)

AMD = "AuthenticAMD"
_DEPTH, _ROWS = 100, 128
"""The check's matrix has a depth that is padded to whole tiles."""
_INPUTS, _FEW = 36, 3
"""The others fill a square of tiles, and leave a rest."""
_TOLERANCE = 2**-6 * _DEPTH**0.5
"""Maximum error of sums of _DEPTH products of about 1."""
_ATTENTION_TOKENS, _HEADS, _HEAD_DIM = 64, 4, 64
_WIDTH = _HEADS * _HEAD_DIM
_ATTENTION_TOLERANCE = 2**-5
"""Maximum error of means of values of about 1, with eight-bit weights."""


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """How bfloat16 is multiplied, and why."""

    variants: ProductVariants | None
    """None: matrices stay as they are stored, and are widened from there."""
    attention: int
    """The variant of prompts' attention."""
    why: str
    """The reason for people; empty: there was nothing to choose."""
    wrong: tuple[str, ...] = ()
    """What computes wrongly here and is not used."""


AS_STORED = ProductChoice(None, WIDENED, "")


def cpu_make(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Read the CPU's vendor id; empty where it has none."""
    found = re.search(r"^vendor_id\s*: (\S+)$", cpuinfo.read_text(errors="replace"), re.M)
    return "" if found is None else found[1]


def rule(level: str, make: str, *, is_bitwise: bool = False) -> tuple[ProductVariants | None, int]:
    """Look up the products and the variant of prompts' attention of a kind of CPU.

    - AMX: tiles multiply a prompt's rows five to seven times as fast as widening does. Rows that
      decode are bound by reading, where widening is 1.3 to 1.6 times as fast as tiles.
    - AVX512-BF16 of AMD: a dot issues as often as a multiply-add and does twice its work.
    - AVX512-BF16 of others: Intel's dots issue a quarter as often, so that widening is faster, and
      packed rows gain nothing over stored ones.
    - No bfloat16 instructions: widening from where matrices are stored.
    """
    if level == "amx":
        return (EXACT, WIDENED) if is_bitwise else (ProductVariants(WIDENED, has_tiles=True), TILES)
    if level == "avx512bf16" and make == AMD:
        return ProductVariants(DOTS), WIDENED
    return None, WIDENED


def choose_products(
    kernels: Kernels, level: str, make: str, *, is_bitwise: bool = False
) -> ProductChoice:
    """Choose by the rule; what computes wrongly on this machine is refused at once.

    Args:
        is_bitwise: the setting `exact`: one variant for all rows.
    """
    variants, attention = rule(level, make, is_bitwise=is_bitwise)
    if variants is None:
        return AS_STORED
    wrong = _wrong_products(kernels, variants)
    if wrong and variants.has_tiles and VARIANT_NAMES[variants.few] not in wrong:
        variants = ProductVariants(variants.few)
    elif wrong:
        variants = None
    if attention == TILES and not _attends_rightly(kernels):
        wrong, attention = [*wrong, "attention by tiles"], WIDENED
    said = "stored layout" if variants is None else f"{variants}"
    said += "; attention by tiles" if attention == TILES else ""
    of = "AMX" if level == "amx" else "AVX512-BF16 of AMD"
    ground = f"{', '.join(wrong)} computes wrongly here" if wrong else f"default of {of}, not timed"
    return ProductChoice(variants, attention, f"bfloat16 products: {said} ({ground})", tuple(wrong))


def products_here(*, is_bitwise: bool = False) -> ProductChoice:
    """Choose for this machine and its best kernels."""
    try:
        kernels, level = load_kernels()
    except ImportError:
        return AS_STORED
    return choose_products(kernels, level, cpu_make(), is_bitwise=is_bitwise)


def _wrong_products(kernels: Kernels, variants: ProductVariants) -> list[str]:
    """Compare a product by packed rows with one by stored rows, few and others in one call."""
    stored, x = _noise(_ROWS * _DEPTH * 2), _noise(_INPUTS * _DEPTH * 2)
    panels, pairs, rows, _ = packed_shape(_ROWS, _DEPTH)
    packed = mmap.mmap(-1, panels * pairs * rows * 4)
    kernels.pack_pairs(_address(packed), _address(stored), _ROWS, _DEPTH, 0, panels)
    outs = [mmap.mmap(-1, _INPUTS * _ROWS * 2) for _ in range(2)]
    num_few = variants.num_few(_INPUTS, _FEW)
    parts = [
        array("q", [_address(memory), _ROWS, scheme])
        for memory, scheme in ((stored, BFLOAT16), (packed, BFLOAT16_PAIRS))
    ]
    at = [part.buffer_info()[0] for part in parts]
    kernels.linear(
        _address(outs[0]), _address(x), BFLOAT16, _INPUTS, _DEPTH, at[0], 1, 0, 1
    )  # fmt: skip
    how = variants.few, NOT_GATED, 1
    kernels.linear_pairs(
        _address(outs[1]), _address(x), _INPUTS, num_few, _DEPTH, at[1], 1, 0, *how
    )
    pairs_of_values = zip(*map(_floats, outs), strict=True)
    is_near = [abs(a - b) <= _TOLERANCE for a, b in pairs_of_values]  # False for NaN
    wrong = [] if all(is_near[: num_few * _ROWS]) else [VARIANT_NAMES[variants.few]]
    return wrong if all(is_near[num_few * _ROWS :]) else [*wrong, VARIANT_NAMES[TILES]]


def _attends_rightly(kernels: Kernels) -> bool:
    """Say whether a prompt's attention by tiles agrees with widened values."""
    num_bytes = _ATTENTION_TOKENS * _WIDTH * 2
    q, kv = _noise(num_bytes), _noise(2 * num_bytes)
    sequence = array("q", [0, _ATTENTION_TOKENS, _ATTENTION_TOKENS])
    table = array("q", range(_ATTENTION_TOKENS // _HEAD_DIM))
    outs = []
    for variant in (WIDENED, TILES):
        outs.append(mmap.mmap(-1, num_bytes))
        kernels.attend(
            _address(outs[-1]), _address(q), _address(kv), sequence.buffer_info()[0],
            table.buffer_info()[0], 0, BFLOAT16, 1, len(table), _WIDTH, _HEADS, _HEADS, _HEAD_DIM,
            _HEAD_DIM, 1, 0, 0, BFLOAT16, _HEAD_DIM * _WIDTH * 2, variant, 1, _HEAD_DIM**-0.5, 0.0,
        )  # fmt: skip
    found = zip(*map(_floats, outs), strict=True)
    return all(abs(a - b) <= _ATTENTION_TOLERANCE for a, b in found)


def _noise(num_bytes: int) -> mmap.mmap:
    """Memory of bfloat16 values of about 1, the same every time."""
    random = Random(0)
    values = array("f", [random.gauss(0, 1) for _ in range(2039)]).tobytes()
    halves = b"".join(values[i + 2 : i + 4] for i in range(0, len(values), 4))
    memory = mmap.mmap(-1, num_bytes)
    memory.write((halves * (num_bytes // len(halves) + 1))[:num_bytes])
    return memory


def _address(memory: mmap.mmap) -> int:
    return addressof(c_char.from_buffer(memory))


def _floats(memory: mmap.mmap) -> tuple[float, ...]:
    widened = b"".join(b"\0\0" + memory[i : i + 2] for i in range(0, len(memory), 2))
    return struct.unpack(f"{len(memory) // 2}f", widened)
