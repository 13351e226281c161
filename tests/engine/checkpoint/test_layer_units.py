"""Units that stay on disk: as many bytes as asked, spread over the steps."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.layer_units import (
    is_expert,
    names_by_unit,
    units_on_disk,
    weight_bytes,
)
from engine.checkpoint.weights_layout import arena_layout, packed_layout, panels_layout

SIZES = st.lists(st.integers(0, 1 << 30), min_size=1, max_size=40).filter(sum)


@given(SIZES, st.floats(0, 1))
def test_as_many_bytes_as_asked_stay_on_disk_and_at_most_a_unit_more(sizes, share):
    wanted = int(share * sum(sizes))
    chosen = [sizes[unit] for unit in units_on_disk(sizes, wanted)]
    assert wanted <= sum(chosen) < wanted + max(sizes) or sum(chosen) == wanted == 0


def test_units_on_disk_lie_evenly_between_those_that_stay():
    chosen = units_on_disk([10] * 12, 40)
    assert {b - a for a, b in pairwise(chosen)} == {3}
    assert units_on_disk([10] * 12, 120) == list(range(12))
    assert units_on_disk([10] * 12, 0) == []


def test_every_matrix_of_a_layer_is_in_its_unit_and_the_head_in_the_last(tiny_llama):
    checkpoint = Checkpoint.open(tiny_llama)
    names = names_by_unit(checkpoint.tensors, checkpoint.config)
    assert len(names) == checkpoint.config.num_layers + 1
    assert all(f"layers.{unit}." in name for unit in range(3) for name in names[unit])
    assert names[-1] == ["lm_head.weight"]
    others = checkpoint.tensors.keys() - {name for unit in names for name in unit}
    assert others == {"model.embed_tokens.weight", "model.norm.weight"}


def test_bytes_of_weights_are_those_of_their_layout(tiny_llama):
    checkpoint = Checkpoint.open(tiny_llama)
    plain = arena_layout(checkpoint, "bfloat16")
    pairs = packed_layout(checkpoint, "bfloat16")
    panels = panels_layout(checkpoint, "float32", "q8")
    mapped = weight_bytes(checkpoint, "float32", None)
    matrices = [each for each in checkpoint.tensors.values() if len(each.shape) > 1]
    assert sum(mapped.values()) == sum(each.num_bytes for each in matrices)
    for layout, dtype in ((plain, "bfloat16"), (pairs, "bfloat16"), (panels, "float32")):
        found = sum(weight_bytes(checkpoint, dtype, layout).values())
        assert found <= layout.num_bytes < found + 64 * len(checkpoint.tensors)


def test_an_expert_is_told_from_what_every_token_reads():
    assert is_expert("model.layers.0.mlp.experts.7.up_proj.weight")
    assert not is_expert("model.layers.0.mlp.shared_expert.up_proj.weight")
