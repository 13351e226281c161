"""Test how much a prompt's layer asks of a unit of tiles, without the hardware: by counting."""

import shutil
import subprocess
import sysconfig
from math import ceil
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
KERNELS = Path("engine/kernels").resolve()
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("count") / "count_tiles"
    sources = [KERNELS / f"{name}.c" for name in ("tiles", "pairs", "fused", "attention")]
    sources += [KERNELS / "attention_squares.c", HERE / "count_tiles.c"]
    command = ["gcc", "-std=gnu11", "-O1", "-w", f"-I{KERNELS}", "-include"]
    command += [HERE / "counting_unit.h", f"-I{sysconfig.get_paths()['include']}", "-DLEVEL=x"]
    subprocess.run([*command, *sources, "-lm", "-o", path], check=True)
    return path


def counts(program, *shape):
    run = subprocess.run([program, *map(str, shape)], check=True, capture_output=True, text=True)
    rows = [line.split() for line in run.stdout.splitlines()]
    return {name: tuple(map(int, values)) for name, *values in rows}


@pytest.mark.parametrize("num_tokens", [64, 300])
def test_a_product_loads_each_square_once_and_waits_once(program, num_tokens):
    """Two threads; no square of two panels is cut between them."""
    found = counts(program, num_tokens, 9, 3, 64, 576, 1536)
    num_rows = ceil(num_tokens / 32)
    for name, depth, width in (
        ("qkv", 576, 960),
        ("output", 576, 576),
        ("gate_up", 576, 3072),
        ("down", 1536, 576),
    ):
        squares = num_rows * width // 32
        steps = squares * depth // 32
        assert found[name] == (4 * steps, 4 * squares, 4 * steps, 1), name


def test_rows_of_8_b_are_loaded_in_cuts(program):
    """14,336 values are seven cuts: six times sums are stored and loaded again."""
    found = counts(program, 64, 2, 2, 64, 128, 14336)["down"]
    squares, steps = 2 * 4, 2 * 4 * 448
    assert found == (4 * steps + 4 * 6 * squares, 4 * 7 * squares, 4 * steps, 1)


def test_attention_multiplies_no_square_that_no_row_sees(program):
    num_loads, num_stores, num_products, num_waits = counts(program, 512, 9, 3, 64, 576, 1536)[
        "attention"
    ]
    whole = 512 * 9 // 32 * 512 // 32 * 16  # products of all rows with all keys
    assert num_products < 0.6 * whole
    assert num_loads + num_stores < 1.6 * num_products
    assert num_waits == 1
