"""A row's bits do not depend on what else a step computes, at every level of the kernels."""

import mmap
from functools import partial
from itertools import product

import pytest
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import ACTIVATIONS
from engine.checkpoint.packed_layouts import FORM_BY_KIND, FORMS
from engine.checkpoint.weights_layout import packed_layout, weights_layout
from engine.kernels.cpu import (
    BFLOAT16,
    DOTS,
    FLOAT32,
    INT8,
    TILES,
    WIDENED,
    ProductVariants,
    load_kernels,
)
from engine.worker.model.compiled import CompiledBackend
from engine.worker.model.linear import CompiledLinear
from engine.worker.model.stored_tensors import quantised
from engine.worker.model.transformer import Transformer
from engine.worker.model.weight import Weight, packed_in_pairs, panels_of
from engine.worker.model.weights import load_weights
from tests.checkpoints import GATED_DELTA_NETS, make_checkpoint
from tests.engine.worker.model.test_quantised import blocks_of, nvfp4_parts, packed, parts_of
from tests.engine.worker.model.test_transformer import Pool
from tests.levels import each_level

NUM_INPUTS = 40
"""More than any level has few of."""
NUM_ROWS = 101
"""Seven panels: four of them side by side, then three."""
DEPTHS = (576, 1288, 2560)
"""One that is cut, and one that ends within a vector."""
SOME = [(0, 1), (39, 40), (3, 5), (7, 10), (0, 15), (5, 21), (4, 21), (10, 39), (0, 30), (0, 40)]
DTYPES = [torch.float32, torch.bfloat16]
DOTTED = ProductVariants(DOTS)


def plain(dtype):
    return lambda depth: Weight.plain(noise((NUM_ROWS, depth), 1).to(dtype))


def of_blocks(kind):
    return lambda depth: packed(
        blocks_of(kind, NUM_ROWS, depth // 256 * 256), kind, depth // 256 * 256
    )


def of_parts(form):
    def weight(depth):
        if form == "int8_row":
            parts = quantised(noise((NUM_ROWS, depth), 1), form)
        elif form == "nvfp4":
            depth = depth // 16 * 16
            parts = nvfp4_parts(NUM_ROWS, depth, 0, torch.Generator().manual_seed(0))
        else:
            parts = parts_of(form, NUM_ROWS, depth)
        return Weight(panels_of(parts, FORMS[form]), None, f"{form}_panels", (NUM_ROWS, depth))

    return weight


FORMS_WITH_PARTS = ("nvfp4", "int4_32", "int4_128", "int8_128", "int8_row", "fp8_128")
WEIGHTS = {
    **{str(dtype)[6:]: plain(dtype) for dtype in (*DTYPES, torch.float16)},
    **{kind: of_blocks(kind) for kind in FORM_BY_KIND if kind != "mxfp4_pairs"},
    **{f: of_parts(f) for f in FORMS_WITH_PARTS},
}


def noise(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_rows_are_alone(linear, x):
    """Each row is the same whichever rows are multiplied with it, and by how many threads."""
    whole = linear(x).clone()
    for first, end in SOME:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            assert linear(x[first:end].contiguous()).equal(whole[first:end]), (first, end)


@each_level
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", WEIGHTS)
def test_products_of_every_scheme(level, dtype, scheme):
    for depth in DEPTHS:
        weight = WEIGHTS[scheme](depth)
        linear = CompiledLinear(load_kernels(level)[0], [weight, weight], [noise(NUM_ROWS, 2)] * 2)
        assert_rows_are_alone(linear, noise((NUM_INPUTS, weight.shape[1]), 3).to(dtype))


@each_level
@pytest.mark.parametrize("variant", [WIDENED, DOTS])
def test_products_of_packed_pairs(level, variant):
    for depth in DEPTHS:
        weight = packed_in_pairs(Weight.plain(noise((NUM_ROWS, depth), 1).bfloat16()))
        linear = CompiledLinear(
            load_kernels(level)[0], [weight], [], variants=ProductVariants(variant)
        )
        assert_rows_are_alone(linear, noise((NUM_INPUTS, depth), 3).bfloat16())


@each_level
@pytest.mark.parametrize("few", [WIDENED, DOTS])
def test_rows_that_decode_are_the_same_beside_rows_that_take_tiles(level, few):
    """And those by tiles are the same whatever is multiplied with them."""
    for depth in DEPTHS:
        weight = packed_in_pairs(Weight.plain(noise((NUM_ROWS, depth), 1).bfloat16()))
        variants = ProductVariants(few, has_tiles=True)
        linear = CompiledLinear(load_kernels(level)[0], [weight] * 2, [], variants=variants)
        x = noise((64 + 70, depth), 3).bfloat16()
        decoded = linear(x[:64].contiguous(), 64).clone()
        tiled = linear(x[64:].contiguous(), 0).clone()
        for num_few, num_tiled in ((1, 0), (1, 1), (5, 70), (25, 9), (64, 33), (64, 70)):
            for num_threads in (1, 3):
                torch.set_num_threads(num_threads)
                found = linear(x[64 - num_few : 64 + num_tiled].contiguous(), num_few)
                assert found[:num_few].equal(decoded[64 - num_few :]), (num_few, num_tiled)
                assert found[num_few:].equal(tiled[:num_tiled]), (num_few, num_tiled)


@each_level
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [[NUM_ROWS] * 2, [96]], ids=str)
def test_gates_within_a_product_are_those_behind_it(level, activation, rows):
    """Of rows that decode, and of rows that take tiles, whole or in cuts."""
    kernels, _ = load_kernels(level)
    gated, x = CompiledBackend(kernels, level).gated, noise((NUM_INPUTS, max(DEPTHS)), 3)
    for depth, num_few, num_threads, has_bias in product(DEPTHS, (0, 5, 40), (1, 3), (0, 1)):
        matrices = [(4 * noise((count, depth), i) / depth**0.5) for i, count in enumerate(rows)]
        weights = [packed_in_pairs(Weight.plain(matrix.bfloat16())) for matrix in matrices]
        biases = [noise(count, 2) for count in rows] if has_bias else []
        how = {"variants": ProductVariants(WIDENED, has_tiles=True)}
        make = partial(CompiledLinear, kernels, weights, biases, **how)
        inputs = x[:, :depth].bfloat16()
        torch.set_num_threads(num_threads)
        expected = gated(make()(inputs, num_few), activation)
        found = make(activation=activation)(inputs, num_few)
        assert found.equal(expected), (depth, num_few, num_threads, has_bias)


def kind_of(dtype):
    return FLOAT32 if dtype == torch.float32 else BFLOAT16


class Attention:
    """One layer's queries, keys and values of a sequence of 1,300 tokens, twice in a pool."""

    num_tokens = 1300

    def __init__(
        self, level, dtype, heads, window, *, has_sinks=False, has_codes=False, variant=WIDENED
    ):
        self.kernels, _ = load_kernels(level)
        self.variant = variant
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        self.block_size, self.window, self.dtype = 16, window, dtype
        count = -(-self.num_tokens // self.block_size)
        shape = (2 * count + 1, 1, 2, self.block_size, self.num_kv_heads, self.head_dim)
        self.kv = noise(shape, 4).to(dtype)
        self.plane_bytes = self.kv[0, 0, 0].nbytes
        self.kv_type = kind_of(dtype)
        if has_codes:  # and their scales behind them
            codes = noise(shape, 4).mul(40).clamp(-127, 127).to(torch.int8).flatten(3)
            scales = noise((*shape[:3], self.num_kv_heads * self.block_size), 7).abs() / 40
            self.kv = torch.cat([codes, scales.view(torch.int8)], -1)
            self.plane_bytes, self.kv_type = self.kv.shape[-1], INT8
        self.tables = [list(range(1 + i * count, 1 + (i + 1) * count)) for i in range(2)]
        self.q = (2 * noise((self.num_tokens, self.num_heads * self.head_dim), 5)).to(dtype)
        self.sinks = noise(self.num_heads, 6) if has_sinks else None

    def __call__(self, *sequences, num_threads=1):
        """Attend to (table, first, end) each: queries of positions [first, end)."""
        q = torch.cat([self.q[first:end] for _, first, end in sequences])
        rows, row = [], 0
        for _, first, end in sequences:
            rows.append([row, end - first, end])
            row += end - first
        lengths = torch.tensor(rows)
        tables = torch.tensor([self.tables[table] for table, _, _ in sequences])
        out = torch.empty_like(q)
        self.kernels.attend(
            out.data_ptr(), q.data_ptr(), self.kv.data_ptr(), lengths.data_ptr(),
            tables.data_ptr(), 0 if self.sinks is None else self.sinks.data_ptr(),
            kind_of(self.dtype), len(sequences), tables.shape[1], q.shape[1], self.num_heads,
            self.num_kv_heads, self.head_dim, self.block_size, 1, 0, self.window, self.kv_type,
            self.plane_bytes, self.variant, num_threads, self.head_dim**-0.5, 0.0,
        )  # fmt: skip
        return out


KINDS = [(0, False), (100, False), (700, True), (0, True)]
HEADS = [(9, 3, 64), (4, 1, 16), (8, 1, 32), (4, 4, 40), (6, 3, 36)]


@each_level
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    ("window", "has_sinks"), [(0, False), (100, False), (700, True), (0, True)]
)
def test_attention(level, dtype, heads, window, has_sinks):
    assert_queries_are_alone(Attention(level, dtype, heads, window, has_sinks=has_sinks))


@each_level
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_behind_the_window_weigh_nothing(level, dtype):
    """A tile of keys may reach behind the window; further back not even NaN is noticed."""
    attention = Attention(level, dtype, HEADS[0], 100)
    for first in (1200, 1299):
        expected = attention((0, first, 1300))
        num_behind, num_far = (first + 1 - 100) // 16, (first + 1 - 100 - 64) // 16
        attention.kv[0], attention.kv[1] = torch.nan, 1e4
        near = [1] * (num_behind - num_far)
        attention.tables[1] = [0] * num_far + near + attention.tables[0][num_behind:]
        assert attention((1, first, 1300)).equal(expected)


@each_level
@pytest.mark.parametrize(("window", "has_codes"), [(0, False), (100, False), (100, True)])
def test_a_prompts_rows_by_tiles_depend_on_nothing_beside_their_chunk(level, window, has_codes):
    """Not on other sequences, nor on threads, nor on what is far behind the window."""
    how = {"has_codes": has_codes, "variant": TILES}
    attention = Attention(level, torch.bfloat16, HEADS[0], window, **how)
    alone = attention((0, 1100, 1300))
    assert attention((0, 1100, 1300), num_threads=3).equal(alone)
    beside = attention((1, 0, 40), (0, 1100, 1300), (1, 900, 901), num_threads=2)
    assert beside[40:-1].equal(alone)
    if window and not has_codes:
        num_far = (1100 + 1 - window - 64) // 16
        attention.kv[0] = torch.nan
        attention.tables[1] = [0] * num_far + attention.tables[0][num_far:]
        assert attention((1, 1100, 1300)).equal(alone)


@each_level
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_codes(level, dtype):
    assert_queries_are_alone(Attention(level, dtype, HEADS[0], 0, has_codes=True))


def assert_queries_are_alone(attend):
    whole = attend((0, 0, 1300))
    assert attend((0, 600, 1300), num_threads=3).equal(whole[600:])
    for position in (0, 63, 64, 100, 511, 512, 700, 1024, 1299):
        for num_threads in (1, 2, 5):
            alone = attend((0, position, position + 1), num_threads=num_threads)
            assert alone.equal(whole[position : position + 1]), (position, num_threads)
        end = min(position + 7, 1300)
        beside = attend((1, 900, 901), (0, position, end), (1, 0, 1), num_threads=2)
        assert beside[1:-1].equal(whole[position:end]), position


BIT_FAMILIES = ("llama", "mixtral", "gpt_oss", "qwen3_next", "qwen3_5_text")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints with sinks and windows, experts, recurrent layers, and none of these."""
    return {
        (family, dtype): make_checkpoint(tmp_path_factory.mktemp(family), family, dtype)
        for family, dtype in product(BIT_FAMILIES, ("float32", "bfloat16"))
    }


def load(folder, dtype, is_packed, variants=DOTTED, attention=WIDENED):
    checkpoint = Checkpoint.open(folder)
    layout = (packed_layout if is_packed else weights_layout)(checkpoint, dtype)
    arena = None if layout is None else mmap.mmap(-1, layout.num_bytes)
    share = None if arena is None else (0, 1)
    weights = load_weights(checkpoint, dtype, arena, share, lambda *_: None, is_packed=is_packed)
    variants = variants if is_packed else None
    how = {"variants": variants, "attention_variant": attention}
    return Transformer(checkpoint.config, weights, dtype, 256, **how)


CASES = [
    (family, dtype, is_packed)
    for family in BIT_FAMILIES
    for dtype, is_packed in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    if not (family == "gpt_oss" and is_packed)  # its checkpoint is not packed
    if family not in GATED_DELTA_NETS or is_packed == (family == "qwen3_next")
    if family != "qwen3_5_text" or dtype == "float32"
]


@each_level
@pytest.mark.parametrize(("family", "dtype", "is_packed"), CASES)
def test_logits_and_what_a_prompt_leaves(level, family, dtype, is_packed, folders, monkeypatch):
    kernels = load_kernels(level)
    monkeypatch.setattr("engine.worker.model.compiled.load_kernels", lambda *_: kernels)
    model = load(folders[family, dtype], dtype, is_packed)
    generator = torch.Generator().manual_seed(0)
    pool = Pool(model, 16, generator)
    prompt = torch.randint(0, 200, (90,), generator=generator).tolist()
    others = [(prompt[i:], 0, pool.table(90)) for i in range(1, 4)]
    whole = pool.step([(prompt, 0, pool.table(90))]).clone()
    pool.step(others)
    for sizes in ([1] * 90, [40, 5, 1, 16, 28], [7] * 12 + [6]):
        table, first = pool.table(90), 0
        for size in sizes:
            part = (prompt[first : first + size], first, table)
            beside = [([9], 50 + i, other[2]) for i, other in enumerate(others)]
            # a token goes through states once
            for step in ([part], [*beside, part])[family in GATED_DELTA_NETS :]:
                logits = pool.step(step)[-size:]
                assert logits.equal(whole[first : first + size]), (sizes, first)
            first += size


TILED_FAMILIES = ("llama", "mixtral", "qwen3_next")
"""Dense, experts that are packed, and recurrent layers."""


@each_level
@pytest.mark.parametrize("family", TILED_FAMILIES)
def test_what_a_chat_draws_from_is_the_same_beside_chunks_that_take_tiles(
    level, family, folders, monkeypatch
):
    """Steps of 1 to 64 rows that decode, guesses included, with and without prompts in them.

    Levels without the unit of tiles emulate it.
    """
    kernels = load_kernels(level)
    monkeypatch.setattr("engine.worker.model.compiled.load_kernels", lambda *_: kernels)
    variants = ProductVariants(WIDENED, has_tiles=True)
    model = load(folders[family, "bfloat16"], "bfloat16", True, variants, TILES)
    generator = torch.Generator().manual_seed(0)
    pool = Pool(model, 16, generator, num_blocks=600)

    def tokens(count):
        return torch.randint(0, 200, (count,), generator=generator).tolist()

    tables = [pool.table(64) for _ in range(16)]
    for table in tables:
        pool.step([(tokens(30), 0, table)])
    kv, records = pool.kv.clone(), dict(pool._records)

    def step(parts):
        pool.kv.copy_(kv)
        pool._records = dict(records)
        return pool.step(parts).clone()

    chats = [(tokens(1 if i % 2 else 7), 30, table) for i, table in enumerate(tables)]
    alone = [step([chat]) for chat in chats]
    for count, few, many in ((1, 0, [40]), (2, 0, [9, 70]), (5, 3, []), (16, 3, [33]), (16, 0, [])):
        before = [(tokens(few), 0, pool.table(16))] if few else []
        behind = [(tokens(size), 0, pool.table(size)) for size in many]
        found = step([*before, *chats[:count], *behind])[few:]
        expected = torch.cat(alone[:count])
        assert found[: len(expected)].equal(expected), (count, few, many)
