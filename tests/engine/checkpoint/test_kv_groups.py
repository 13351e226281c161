"""How the KV layers of models with sliding windows are divided between blocks."""

import pytest

from engine.checkpoint.kv_groups import divide, one_group

SHAPES = {
    "Gemma 3 12B": ([1024] * 40 + [None] * 8, (8, 6)),
    "Gemma 3 4B": ([1024] * 29 + [None] * 5, (5, 7)),
    "gpt-oss 20b": ([128, None] * 12, (12, 2)),
    "Mistral 7B 0.1": ([4096] * 32, (4, 8)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_groups_have_equal_places_and_each_layer_has_one_of_its_own(name):
    windows, shape = SHAPES[name]
    groups = divide(windows, 131_072)
    assert (groups.num_layers, groups.num_groups) == shape
    assert len(set(groups.places)) == len(windows)
    assert all(group < shape[1] and place < shape[0] for group, place in groups.places)
    assert all(groups.places[i][0] == 0 for i, window in enumerate(windows) if window is None)


@pytest.mark.parametrize("windows", [[None] * 12, [4096] * 4, [None] * 9 + [8]])
def test_layers_stay_together_where_that_saves_too_little(windows):
    assert divide(windows, 4096) == one_group(len(windows))
