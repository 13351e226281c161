"""A replayed step is the step, bit for bit, whatever has happened since it was recorded."""

import mmap
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.weights_layout import weights_layout
from engine.kernels.cpu import load_kernels
from engine.worker.model.compiled import MAX_GRAPHS, MAX_TOKENS
from engine.worker.model.linear import Linears
from engine.worker.model.records import RecordBlocks
from engine.worker.model.transformer import Transformer
from engine.worker.model.weight import Weight
from engine.worker.model.weights import load_weights
from tests.checkpoints import (
    FAMILIES,
    GEMMA4_E,
    GEMMA4_MOE,
    make_checkpoint,
)
from tests.engine.worker.model.test_attention import batch_of

try:
    load_kernels()
except ImportError:
    pytest.skip("no compiled kernels", allow_module_level=True)

NUM_BLOCKS = 160


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: make_checkpoint(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


class Model:
    """A model with decode graphs beside the same one without, each with a pool of its own."""

    def __init__(self, folder, dtype="float32"):
        checkpoint = Checkpoint.open(folder)
        layout = weights_layout(checkpoint, dtype)
        arena = None if layout is None else mmap.mmap(-1, layout.num_bytes)
        weights = load_weights(checkpoint, dtype, arena, arena and (0, 1), lambda *_: None)
        to = getattr(torch, dtype)
        weights = {name: Weight.plain(w.values.to(to)) for name, w in weights.items()}
        self.recorded, self.plain = (
            Transformer(checkpoint.config, weights, dtype, 512) for _ in range(2)
        )
        self.plain._graphs = None
        self.config = checkpoint.config
        self.dtype = getattr(torch, dtype)
        self.pools = self.new_pools()

    def new_pools(self, block_size=8):
        c = self.config
        shape = (NUM_BLOCKS, c.num_kv_layers, 2, block_size, c.num_kv_heads, c.head_dim)
        self.pools = torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype)
        return self.pools

    def assert_same(self, sequences, seed=0):
        """Of [(context, new tokens)] side by side in the pool."""
        block_size = self.pools[0].shape[3]
        tables, first = [], 1
        for context, new in sequences:
            count = -(-(context + new) // block_size)
            tables.append(list(range(first, first + count)))
            first += count
        batch = batch_of(sequences, tables, block_size)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(5, 290, batch.positions.shape, generator=generator)
        batch = replace(batch, input_ids=ids, logit_rows=list(range(len(ids))))
        batch = replace(batch, records=self._records_of(sequences, first, seed % 2))
        logits = self.recorded.forward(batch, self.pools[0])
        assert torch.equal(logits, self.plain.forward(batch, self.pools[1]))
        assert torch.equal(*self.pools)

    def _records_of(self, sequences, first, turn):
        """Two records of each sequence behind the tables, by turns read and written."""
        size = self.config.record_blocks(self.pools[0].shape[3], str(self.dtype)[6:])
        if not size:
            return ()
        places = range(first, NUM_BLOCKS + 1 - size, size)
        both = [places[-1 - 2 * i :: -1][:2] for i in range(len(sequences))]
        records = [[list(range(place, place + size)) for place in two] for two in both]
        return [
            RecordBlocks(two[turn] if context else (), two[1 - turn])
            for two, (context, _) in zip(records, sequences, strict=True)
        ]

    @property
    def num_graphs(self):
        return len(self.recorded._graphs._graphs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_growing_sequence_is_decoded_as_without_graphs(folders, family):
    model = Model(folders[family])
    model.assert_same([(0, 5)])
    for context in range(5, 75):
        model.assert_same([(context, 1)], seed=context)
    assert 1 <= model.num_graphs <= 5  # one for each power of two that its table passes


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_steps_with_guesses_are_recorded_by_their_number_of_tokens(folders, family):
    model = Model(folders[family])
    model.assert_same([(0, 40)])
    widths = (1, 2, 4, 8)
    for seed in range(3):
        for width in widths:
            model.assert_same([(30, width)], seed)
            model.assert_same([(30, width), (9, 1)], seed)
    assert model.num_graphs == 2 * len(widths)


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_batches_come_and_go_in_any_order(folders, data):
    model = Model(folders["llama"], data.draw(st.sampled_from(["float32", "bfloat16"])))
    for seed in range(8):
        num_new = data.draw(st.sampled_from([1, 1, 1, 9]))
        contexts = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=5))
        model.assert_same([(context, num_new) for context in contexts], seed)


def test_a_buffer_that_moves_ends_its_graphs(folders):
    model = Model(folders["llama"])
    for _ in range(3):
        model.assert_same([(9, 1)])
    model.assert_same([(0, 100)])
    for _ in range(3):
        model.assert_same([(9, 1)])


def test_another_pool_has_graphs_of_its_own(folders):
    model = Model(folders["llama"])
    for block_size in (8, 16, 8, 4):
        kept = model.new_pools(block_size)
        for seed in range(3):
            model.assert_same([(20, 1), (3, 1)], seed)
        assert kept is model.pools


def test_more_cores_have_graphs_of_their_own(folders):
    model = Model(folders["llama"])
    for num_threads in (1, 2, 1, 3):
        torch.set_num_threads(num_threads)
        for seed in range(2):
            model.assert_same([(40, 1)], seed)
    torch.set_num_threads(1)


def test_longer_tables_of_cosines_are_found(folders):
    model = Model(folders["llama"])
    model.recorded._num_table_positions = model.plain._num_table_positions = 0
    model.assert_same([(9, 1)])
    for transformer in (model.recorded, model.plain):
        transformer._num_table_positions = 0  # as after a longer sequence: new tables
    for _ in range(2):
        model.assert_same([(9, 1)])


def test_there_are_only_so_many_graphs(folders):
    model = Model(folders["llama"])
    model.assert_same([(3, 1)] * MAX_TOKENS)
    for num_sequences in range(1, MAX_TOKENS + 2):
        for context in (3, 9, 20):
            model.assert_same([(context, 1)] * num_sequences)
    assert model.num_graphs == MAX_GRAPHS


def test_queries_that_grow_with_their_position_are_recorded(folders):
    model = Model(folders["ministral3"])
    assert model.recorded._growing is not None
    for context in (5, 40, 130, 300, 41):
        model.assert_same([(context, 1), (2, 1)], seed=context)
        model.assert_same([(context, 1), (2, 1)], seed=context + 1)


@pytest.mark.parametrize("own", [GEMMA4_E, GEMMA4_MOE], ids=["inputs by layer", "experts"])
def test_what_gemma_4_adds_to_a_layer_is_recorded(tmp_path, own):
    model = Model(make_checkpoint(tmp_path, "gemma4_text", **own))
    for context in (5, 40, 130, 41):
        model.assert_same([(context, 1), (2, 1)], seed=context)
        model.assert_same([(context, 1), (2, 1)], seed=context + 1)
    assert model.num_graphs


def test_steps_that_torch_has_a_part_in_are_not_recorded(folders, monkeypatch):
    monkeypatch.setattr(Linears, "make_experts", lambda *_: None)
    model = Model(folders["mixtral"])
    assert model.recorded._graphs is None
    model.assert_same([(9, 1)])


def test_a_step_that_fails_leaves_no_graph(folders, monkeypatch):
    model = Model(folders["llama"])
    model.assert_same([(0, 9)])

    def fail(*_):
        raise RuntimeError("no such layer")

    monkeypatch.setattr(model.recorded._graphs, "_layers", fail)
    with pytest.raises(RuntimeError):
        model.assert_same([(9, 1)])
    monkeypatch.undo()
    for _ in range(3):
        model.assert_same([(9, 1)])
