"""A model that is not served is refused by name, with the reason."""

import json

import pytest

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.families import FAMILY_BY_ARCHITECTURE, FAMILY_BY_NAME, reason
from engine.checkpoint.json_keys import ADAPTER_HINT
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from tests.appliance.model_folder import make_model

AS_PUBLISHED = {
    "Gemma3nForConditionalGeneration": "four streams",
    "Llama4ForConditionalGeneration": "chunk",
    "DeepseekV3ForCausalLM": "compressed",
    "Glm4MoeForCausalLM": "sigmoid",
    "Glm4MoeLiteForCausalLM": "compressed",
}


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_a_known_architecture_is_refused_with_the_reason(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(CheckpointError, match=AS_PUBLISHED[name]) as caught:
        ModelConfig.from_folder(tmp_path)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["gemma3n_text", "llama4"])
def test_names_of_config_and_gguf_have_the_same_reason(name):
    assert reason(name) is not None


@pytest.mark.parametrize("name", [*FAMILY_BY_NAME, *FAMILY_BY_ARCHITECTURE])
def test_nothing_that_is_served_is_refused(name):
    assert reason(name) is None


@pytest.mark.parametrize("has_config", [True, False])
def test_an_adapter_is_told_as_one(tmp_path, has_config):
    weights = make_model(tmp_path / "m")
    weights.rename(weights.with_name("adapter_model.safetensors"))
    weights.with_name("adapter_config.json").write_text("{}")
    if not has_config:
        weights.with_name("config.json").unlink()
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.open(weights.parent)
    assert refused.value.hint == ADAPTER_HINT


def test_a_missing_head_may_be_the_embedding(tmp_path):
    folder = make_model(tmp_path / "m", tie_word_embeddings=True).parent
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.open(folder)
    assert "tie_word_embeddings" in refused.value.hint
