"""What a model needs on this machine is proposed wherever a person would look."""

import pytest

from appliance.fleet.placement import available_memory_bytes
from tests.appliance.cli_process import penstock, user_environ
from tests.appliance.large_model import make_large
from tests.byte_tokenizer import write_tokenizer

LAYER_BYTES = 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)


@pytest.fixture(scope="module")
def larger_than_memory(tmp_path_factory):
    """A third larger than what is free; the disk has only its headers."""
    num_layers = available_memory_bytes() * 4 // 3 // LAYER_BYTES
    shape = {"num_hidden_layers": num_layers, "vocab_size": 300}
    folder = tmp_path_factory.mktemp("models") / "larger"
    make_large(folder, bos_token_id=296, eos_token_id=297, **shape)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    "words",
    [("serve", "--check-config"), ("devices",), ("doctor",), ("models", "show")],
    ids=" ".join,
)
def test_weights_on_disk_are_proposed_with_the_reason(larger_than_memory, tmp_path, words):
    settings = {"MODEL": str(larger_than_memory), "DTYPE": "float32", "DEVICES": "cpu"}
    environ = {f"PENSTOCK_{name}": value for name, value in settings.items()}
    if words[0] == "models":
        words = (*words, str(larger_than_memory))
    ended = penstock(user_environ(tmp_path) | environ, *words)
    said = " ".join(ended.stdout.split())
    assert "exceed the" in said, ended.stderr
    assert "--offload-weights auto" in said
