"""Which rows and columns are whose, and which models have no shards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.checkpoint import Checkpoint, expected_shapes
from engine.checkpoint.shards import Cut, cut_of, num_shards, shard_config, why_no_shards
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.gguf_files import write_gguf
from tests.quantised_checkpoints import SHAPE, write_quantised

WITHOUT = {"olmo2", "olmo3", "olmoe", "gemma4_text", "gemma4_unified_text"}


@given(
    runs=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    count=st.sampled_from([1, 2, 4]),
)
def test_each_row_belongs_to_one_shard(runs, count):
    cut = Cut("rows", tuple(runs))
    spans = [span for shard in range(count) for span in cut.spans(shard, count)]
    rows = [row for first, end in spans for row in range(first, end)]
    assert sorted(rows) == list(range(sum(runs)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shard_has_the_tensors_of_a_smaller_model(family, tmp_path):
    """What is cut of a model is what a model of a shard's shape has."""
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, family))
    config = checkpoint.config
    assert (why_no_shards(checkpoint) is not None) == (family in WITHOUT)
    if family in WITHOUT:
        return
    count = num_shards(checkpoint)
    assert count == 2
    smaller = dict(expected_shapes(shard_config(config, count)))
    for name, tensor in checkpoint.tensors.items():
        cut, shape = cut_of(config, name, tensor.shape), list(tensor.shape)
        if cut is not None and cut.by == "rows":
            shape[0] //= count
        elif cut is not None and cut.by == "columns":
            shape[1] //= count
        if not name.endswith("lm_head.weight"):  # a vocabulary is nobody's shape
            assert tuple(shape) == smaller[name], name


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"num_key_value_heads": 4}, 4),
        ({"num_key_value_heads": 4, "intermediate_size": 98}, 2),
        ({"num_key_value_heads": 1}, 1),
        ({"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}, 1),
    ],
)
def test_shards_are_as_many_as_heads_and_feed_forwards_allow(overrides, expected, tmp_path):
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, **overrides))
    assert num_shards(checkpoint) == expected
    assert (why_no_shards(checkpoint) is None) == (expected > 1)


def test_rows_of_codes_are_cut_between_their_blocks(tmp_path):
    """A row of 64 values has two blocks of 32; one of 32 has no half."""
    for head_dim, expected in ((16, 2), (8, 1)):
        shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": head_dim}
        folder = make_checkpoint(tmp_path / str(head_dim), num_attention_heads=4, **shape)
        checkpoint = Checkpoint.open(write_gguf(folder, tmp_path / f"{head_dim}.gguf", "Q8_0"))
        assert num_shards(checkpoint) == expected
        reason = why_no_shards(checkpoint)
        assert (reason is None) == (expected == 2)
        assert reason is None or "codes" in reason


def test_inputs_with_one_scale_for_a_whole_row_are_not_divided(tmp_path):
    folder = make_checkpoint(tmp_path / "m", **SHAPE)
    path, _ = write_quantised(folder, "int8-tokens", tmp_path)
    assert "one scale" in str(why_no_shards(Checkpoint.open(path)))
