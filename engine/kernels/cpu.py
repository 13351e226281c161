"""Load the compiled CPU kernels that this machine can run.

setup.py compiles the same C files once per instruction set, each into a module of its own. The
functions take addresses, sizes and strides, and trust them: a wrong one is memory overwritten.

Invariant: one level is chosen once, at start.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

FLOAT32, BFLOAT16, FLOAT16 = range(3)
"""The types of elements, as the kernels number them."""
INT8 = 16
"""Codes of keys and values in a pool, whose scales lie behind them."""
BFLOAT16_PAIRS = 3
"""The scheme of matrices that `pack_pairs` has packed."""
FORMS = {
    "q4_0": 4, "q4_1": 5, "q4_k": 6, "q5_0": 7, "q5_1": 8, "q5_k": 9, "q6_k": 10, "q8_0": 11,
    "mxfp4": 12, "iq4_nl": 13, "iq4_xs": 14, "q2_k": 15, "q3_k": 16, "nvfp4": 17,
    "int4_32": 18, "int4_128": 19, "int8_128": 20, "int8_row": 21, "fp8_128": 22,
}  # fmt: skip
"""The kernels' numbers of quantised forms, by their names in engine.checkpoint.packed_layouts."""
WIDENED, DOTS, TILES = range(3)
"""Variants in which the kernels multiply: exact products, dots of pairs, matrix tiles."""
VARIANT_NAMES = ("widened", "dots", "tiles")
NOT_GATED = -1
"""The number of no activation: a product without gates."""
MAX_FEW = 8
"""Maximum rows of a sequence without tiles; a decode step with its guesses has no more."""


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
        """Multiply bfloat16 rows by packed matrices: few in a variant, others by tiles."""

    def pack_pairs(self, *arguments: float) -> None:
        """Pack panels of a bfloat16 matrix."""

    def mixture(self, *arguments: float) -> None:
        """Rows through those experts that their router's scores choose."""

    def grow(self, *arguments: float) -> None:
        """Multiply rows by numbers of their own, in place."""

    def delta(self, *arguments: float) -> None:
        """Run a step's tokens through a layer's convolution and states."""

    def split_gates(self, *arguments: float) -> None:
        """Split queries, keys and values off the queries' gates."""

    def draw(self, *arguments: float) -> None:
        """Choose each row's next token."""

    def rate(self, *arguments: float) -> None:
        """Compute log-probabilities of tokens, and of each row's likeliest."""

    def reduce(self, *arguments: float) -> None:
        """Wait for a group's other processes, and add up what all have computed."""

    def record(self) -> None:
        """Write down every call from now on."""

    def recorded(self) -> bytes:
        """Return the calls since record(), and stop recording."""

    def replay(self, calls: bytes) -> None:
        """Repeat a graph's recorded kernel calls, in order."""


def has_kernels() -> bool:
    """Say whether workers of this machine will find kernels."""
    try:
        load_kernels()
    except ImportError:
        return False
    return True


def load_kernels(level: str | None = None) -> tuple[Kernels, str]:
    """Load the kernels of a level, or of the best one, and name the level.

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


@dataclass(frozen=True, slots=True)
class ProductVariants:
    """How packed matrices are multiplied, by kind of row and never by their number.

    A row's bits then depend on nothing beside it: a chat's are the same with and without a prompt
    in the step.
    """

    few: int
    """The variant of rows that decode, and of a prompt's last MAX_FEW: WIDENED or DOTS."""
    has_tiles: bool = False
    """Whether a prompt's other rows take tiles; else they are multiplied as the few are."""

    def num_few(self, num_rows: int, num_few: int) -> int:
        """Count the leading rows to be multiplied as few, of which num_few are of that kind."""
        return num_few if self.has_tiles else num_rows

    def __str__(self) -> str:
        tiles = f", prompts by {VARIANT_NAMES[TILES]} from {MAX_FEW + 1} rows"
        return f"{VARIANT_NAMES[self.few]}{tiles if self.has_tiles else ''}"


EXACT = ProductVariants(WIDENED)
"""Exact products of all rows."""
