"""What is counted of a group's weights is what its processes load."""

import pytest

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.shard_bytes import group_bytes
from engine.checkpoint.shards import num_shards
from engine.worker.model.shards import load_shards
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 16}  # fmt: skip


def is_mapped(weight):
    """Whether a weight lies within a larger memory: its file."""
    return weight.data.untyped_storage().nbytes() > weight.data.nbytes


@pytest.fixture(scope="module", params=["float32", "bfloat16", "tied", "q8_0", "tiled", "mixture"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    kind = request.param
    stored = "bfloat16" if kind in ("bfloat16", "tied") else "float32"
    family = {"mixture": "qwen3_moe", "tied": "qwen2", "tiled": "qwen3_5_text"}.get(kind, "llama")
    wide = {"mixture": {}, "tiled": WIDE | {"linear_value_head_dim": 32}}.get(kind, WIDE)
    tied = {"tie_word_embeddings": True} if kind == "tied" else {}
    made = make_checkpoint(folder / "model", family, stored, **wide, **tied)
    if kind in ("q8_0", "tiled"):
        made = write_gguf(made, folder / "m.gguf", "Q8_0")
    return Checkpoint.open(made)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_count_is_what_is_loaded(checkpoint, dtype, is_packed):
    is_packed = is_packed and dtype == "bfloat16" and checkpoint.is_mappable
    count = num_shards(checkpoint)
    assert count > 1
    for width in (each for each in (2, 4) if count % each == 0):
        counted, mapped = group_bytes(checkpoint, dtype, width, is_packed=is_packed), {}
        assert len(counted.own) == width
        for rank in range(width):
            shards = range(rank * count // width, (rank + 1) * count // width)
            loaded = load_shards(
                checkpoint, dtype, shards, count, lambda *_: None, is_packed=is_packed
            )
            common, own = loaded
            weights = list(common.values())
            for each in own.values():
                weights += [weight for name, weight in each.items() if name not in common]
            assert sum(w.data.nbytes for w in weights if not is_mapped(w)) == counted.own[rank]
            mapped |= {
                (name, shard): weight.data.nbytes
                for shard, each in own.items()
                for name, weight in each.items()
                if is_mapped(weight) and name not in common and name in checkpoint.tensors
            }
            mapped |= {name: w.data.nbytes for name, w in common.items() if is_mapped(w)}
        assert sum(mapped.values()) == counted.mapped
