"""What a model's files say of it, of folders and GGUF files alike."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.hub.facts import facts_of
from engine.checkpoint.checkpoint import Checkpoint
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf


def test_a_folder_and_its_gguf_file_agree_but_for_their_form(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny", "llama", max_position_embeddings=2048)
    os.utime(folder / "model.safetensors", (1000, 2000))
    facts = facts_of(Checkpoint.open(folder))
    config = Checkpoint.open(folder).config
    assert (facts.file_format, facts.family, facts.context_length) == ("safetensors", "llama", 2048)
    assert (facts.num_layers, facts.hidden_size) == (config.num_layers, config.hidden_size)
    assert (facts.num_heads, facts.num_kv_heads) == (config.num_heads, config.num_kv_heads)
    assert facts.dtype == "float32"
    assert facts.size_bytes == 4 * facts.num_parameters > 0
    assert facts.modified == 2000
    packed = facts_of(Checkpoint.open(write_gguf(folder, tmp_path / "tiny.gguf", "Q8_0")))
    assert (packed.file_format, packed.family) == ("gguf", "llama")
    assert packed.num_parameters == facts.num_parameters
    assert packed.size_bytes < facts.size_bytes
    assert packed.dtype != facts.dtype
