"""A model of texts is shown before it is pulled, and pulled with the files of its modules."""

import json

from tests.appliance.cli_process import penstock, user_environ
from tests.byte_tokenizer import write_tokenizer
from tests.text_checkpoints import add_modules, make_text_checkpoint
from tests.worlds.hub_server import Repository, folder_files, serving


def test_it_is_shown_and_pulled_with_its_modules(tmp_path):
    source = make_text_checkpoint(tmp_path / "source", "bert")
    add_modules(source, max_seq_length=100)
    write_tokenizer(source)
    files = folder_files(source)
    with serving(owner__name=Repository(files | {"onnx/model.onnx": b"x" * 9000})) as hub:
        environ = user_environ(tmp_path) | {"HF_ENDPOINT": hub.url}
        about = shown(environ, "owner/name")
        assert (about["kind"], about["size_bytes"]) == (
            "embedding",
            (source / "model.safetensors").stat().st_size,
        )
        ended = penstock(environ, "pull", "owner/name")
        assert ended.returncode == 0, ended.stderr
        for name, path in files.items():
            assert (tmp_path / ended.stdout.strip() / name).read_bytes() == path.read_bytes()
        assert not list((tmp_path / ended.stdout.strip()).rglob("*.onnx"))
    about = shown(environ | {"HF_HUB_OFFLINE": "1"}, "owner/name")
    assert (about["num_dimensions"], about["max_model_len"]) == (64, 100)


def shown(environ, name):
    ended = penstock(environ, "models", "show", name, "-o", "ndjson")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)
