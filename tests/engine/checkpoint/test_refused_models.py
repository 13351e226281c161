"""A model that is not served is refused by name, with the reason."""

import json

import pytest

from engine.checkpoint.families import FAMILY_BY_ARCHITECTURE, FAMILY_BY_NAME, reason
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError

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
