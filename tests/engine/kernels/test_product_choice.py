"""Which products a kind of CPU gets, and what is refused because it computes wrongly."""

import pytest

from engine.kernels.cpu import DOTS, EXACT, TILES, WIDENED, ProductVariants, load_kernels
from engine.kernels.product_choice import AMD, AS_STORED, choose_products, cpu_make, rule
from tests.levels import each_level, needs_kernels

pytestmark = needs_kernels
INTEL = "GenuineIntel"
TILED = ProductVariants(WIDENED, has_tiles=True)

US = {
    "Emerald Rapids, AMX": ("amx", INTEL, {
        "stored": [1, 1, 1, 1, 1], "widened": [0.69, 0.69, 0.83, 1, 1],
        "dots": [0.9, 1, 1.4, 1.4, 1.4], "tiles": [1, 0.91, 0.37, 0.17, 0.15]}),
    "Zen 5": ("avx512bf16", AMD, {
        "stored": [100, 139, 385, 1470, 5880], "widened": [97, 92, 290, 1200, 4800],
        "dots": [98, 85, 149, 600, 1270]}),
    "Emerald Rapids without AMX": ("avx512bf16", INTEL, {
        "stored": [17.9, 18.4, 34.2, 117, 375], "widened": [17.6, 19.2, 36.4, 105, 381],
        "dots": [16.5, 19.6, 48.0, 172, 672]}),
}  # fmt: skip
"""Times of 1, 4, 16, 64 and 256 inputs, recorded on hardware: of the first as shares of the stored
layout's (its dots of 1 and 4 inputs are made up), of the second in us, of the third in ms of CPU
time, its last column half of what 512 inputs took."""
MIX = (3, 3, 0, 2, 2)
"""Weights of a standard mix: decode steps of 1 and 4, chunks of 64 and 256."""


def cost(times, variants):
    """Relative to stored rows, as the mix weighs them."""
    few = "stored" if variants is None else ("widened", "dots")[variants.few]
    many = "tiles" if variants is not None and variants.has_tiles else few
    ways = (few, few, few, many, many)
    relative = [times[way][i] / times["stored"][i] for i, way in enumerate(ways)]
    return sum(w * r for w, r in zip(MIX, relative, strict=True)) / sum(MIX)


@pytest.mark.parametrize("machine", US)
def test_the_rule_is_within_a_tenth_of_the_best_on_every_machine_that_was_measured(machine):
    level, make, times = US[machine]
    ways = [None, ProductVariants(WIDENED), ProductVariants(DOTS)]
    ways += [TILED, ProductVariants(DOTS, has_tiles=True)] if "tiles" in times else []
    best = min(cost(times, way) for way in ways)
    assert cost(times, rule(level, make)[0]) <= 1.1 * best


@pytest.mark.parametrize(
    ("level", "make", "expected"),
    [
        ("amx", INTEL, (TILED, TILES)),
        ("avx512bf16", AMD, (ProductVariants(DOTS), WIDENED)),
        ("avx512bf16", INTEL, (None, WIDENED)),
        ("avx512bf16", "", (None, WIDENED)),
        ("avx512", INTEL, (None, WIDENED)),
        ("avx2", AMD, (None, WIDENED)),
        ("portable", "", (None, WIDENED)),
    ],
)
def test_a_kind_of_cpu_has_one_choice(level, make, expected):
    assert rule(level, make) == expected


def test_bitwise_has_one_variant_for_all_rows_and_no_tiles():
    assert rule("amx", INTEL, is_bitwise=True) == (EXACT, WIDENED)
    assert EXACT.num_few(9000, 3) == 9000
    assert TILED.num_few(9000, 3) == 3


@each_level
@pytest.mark.parametrize(("of", "make"), [("amx", INTEL), ("avx512bf16", AMD), ("avx2", INTEL)])
def test_what_computes_rightly_is_chosen_again_and_again(level, of, make):
    """Tiles and dots of a level without them are emulated."""
    kernels, _ = load_kernels(level)
    choices = [choose_products(kernels, of, make) for _ in range(3)]
    assert [(each.variants, each.attention) for each in choices] == [rule(of, make)] * 3
    assert not choices[0].wrong
    assert bool(choices[0].why) == (of != "avx2")


class Broken:
    """Kernels of which some compute nothing."""

    def __init__(self, kernels, is_broken):
        self._kernels, self._is_broken = kernels, is_broken

    def __getattr__(self, name):
        def call(*arguments):
            if not self._is_broken(name, arguments):
                getattr(self._kernels, name)(*arguments)

        return call


@pytest.mark.parametrize(
    ("of", "make", "is_broken", "variants", "attention"),
    [
        ("amx", INTEL, lambda name, a: name == "linear_pairs", None, TILES),
        ("amx", INTEL, lambda name, a: name == "attend" and a[19] == TILES, TILED, WIDENED),
        ("avx512bf16", AMD, lambda name, a: name == "linear_pairs", None, WIDENED),
    ],
)
def test_a_default_that_computes_wrongly_is_refused_at_once(
    of, make, is_broken, variants, attention
):
    kernels, _ = load_kernels("portable")
    choice = choose_products(Broken(kernels, is_broken), of, make)
    assert (choice.variants, choice.attention) == (variants, attention)
    assert choice.wrong
    assert choice.wrong[0] in choice.why


def test_where_only_tiles_are_wrong_the_few_stay_as_they_are():
    kernels, _ = load_kernels("portable")

    class WrongTiles(Broken):
        def linear_pairs(self, *arguments):
            out, x, _num_inputs, num_few, *others = arguments
            self._kernels.linear_pairs(out, x, num_few, num_few, *others)

    choice = choose_products(WrongTiles(kernels, lambda *_: False), "amx", INTEL)
    assert choice.variants == ProductVariants(WIDENED)
    assert choice.wrong == ("tiles",)


def test_the_make_is_what_the_kernel_tells(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\n")
    assert cpu_make(cpuinfo) == AMD
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 100\n")
    assert cpu_make(cpuinfo) == ""
    assert choose_products(None, "avx2", "") is AS_STORED
