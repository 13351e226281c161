"""Replies end at what any file of a model says; template and marks are found where they may be."""

import json

import pytest

from engine.checkpoint.chat_files import read_chat_template, template_in_metadata
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.end_tokens import end_marks
from engine.checkpoint.folder_files import FolderFiles
from engine.checkpoint.gguf import GgufModel, find_gguf
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from engine.text.gguf_tokenizer import read_tokenizer
from engine.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf
from tests.tiny_tokenizers import CHATML

BOM = "\ufeff"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def folder(made, tmp_path):
    """A copy whose files of words can be changed."""
    for path in made.iterdir():
        if path.suffix == ".safetensors":
            (tmp_path / path.name).symlink_to(path)
        else:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    change(tmp_path, "config.json", eos_token_id=296)
    change(tmp_path, "generation_config.json", eos_token_id=296)
    change(tmp_path, "tokenizer_config.json", eos_token=None, chat_template=None)
    (tmp_path / "special_tokens_map.json").unlink(missing_ok=True)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    return tmp_path


def change(folder, name, **values):
    path = folder / name
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | values))


def ends(folder):
    return set(ModelConfig.from_folder(folder).eos_token_ids)


@pytest.mark.parametrize(
    "eos",
    [
        "<|end_of_text|>",
        {"content": "<|end_of_text|>"},
        {"content": "<|end_of_text|>", "__type": "AddedToken"},
    ],
)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_reply_ends_at_the_token_that_either_file_of_special_tokens_names(folder, file, eos):
    assert ends(folder) == {296}
    change(folder, file, eos_token=eos)
    assert ends(folder) == {296, 297}
    assert ModelConfig.from_folder(folder).end_sources[file] == (297,)


@pytest.mark.parametrize("eos", [None, "", "<|none|>", 7, ["<|end|>"], {}])
def test_what_names_no_token_ends_nothing(folder, eos):
    change(folder, "tokenizer_config.json", eos_token=eos)
    assert ends(folder) == {296}


def test_ids_of_all_files_end_a_reply_and_each_is_told_with_its_file(folder):
    change(folder, "config.json", eos_token_id=[1, 2])
    change(folder, "generation_config.json", eos_token_id=0)
    change(
        folder, "tokenizer_config.json", eos_token="<|end_of_text|>", pad_token="<|end_of_text|>"
    )
    config = ModelConfig.from_folder(folder)
    assert config.eos_token_ids == (0, 1, 2, 297)
    assert config.end_sources == {
        "generation_config.json": (0,),
        "config.json": (1, 2),
        "tokenizer_config.json": (297,),
    }


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_id_that_no_token_has_ends_nothing_and_is_told(folder, file):
    change(folder, file, eos_token_id=[-1, 300], bos_token_id=-1)
    config = ModelConfig.from_folder(folder)
    assert config.eos_token_ids == (296,)
    assert config.unknown_ends == {file: (-1, 300)}
    if file == "config.json":
        assert config.bos_token_id is None


def test_the_usual_end_holds_where_the_only_id_is_none(folder):
    values = json.loads((folder / "config.json").read_text())
    del values["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(values))
    change(folder, "generation_config.json", eos_token_id=-1)
    assert ModelConfig.from_folder(folder).end_sources == {"config.json": (2,)}


@pytest.mark.parametrize("value", ["", " \n", BOM])
@pytest.mark.parametrize(
    "file",
    [
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.json",
        "processor_config.json",
    ],
)
def test_a_file_with_nothing_in_it_is_absent(folder, file, value):
    (folder / file).write_text(value, encoding="utf-8")
    Tokenizer.from_folder(folder)
    assert Checkpoint.open(folder).config.eos_token_ids == (296,)


@pytest.mark.parametrize("is_listed", [True, False], ids=["added token", "ordinary token"])
def test_a_glm_reply_ends_where_the_next_turn_would_begin(folder, is_listed):
    rename(folder, {298: "<|user|>", 299: "<|observation|>"}, is_listed)
    template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
    change(folder, "tokenizer_config.json", chat_template=template + "<|observation|>")
    assert ends(folder) == {296, 298, 299}


def rename(folder, texts, is_listed=True):
    """Give tokens of tokenizer.json other texts."""
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    vocabulary = {token_id: text for text, token_id in spec["model"]["vocab"].items()}
    vocabulary |= {each["id"]: each["content"] for each in spec["added_tokens"]} | texts
    spec["model"]["vocab"] = {text: token_id for token_id, text in vocabulary.items()}
    for token in spec["added_tokens"]:
        token["content"] = texts.get(token["id"], token["content"])
    if not is_listed:
        spec["added_tokens"] = [each for each in spec["added_tokens"] if each["id"] not in texts]
    path.write_text(json.dumps(spec))


def test_an_end_token_of_the_ordinary_vocabulary_is_found_and_is_special(folder):
    rename(folder, {298: "<|é|>"}, is_listed=False)
    change(folder, "tokenizer_config.json", eos_token="<|é|>")
    assert ends(folder) == {296, 298}
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("a<|é|>", add_special_tokens=False)[1:] == [298]
    assert tokenizer.decode([298]) == ""


PLACES = {
    "chat_template.jinja": CHATML,
    "tokenizer_config.json": json.dumps({"chat_template": CHATML}),
    "a list in tokenizer_config.json": json.dumps(
        {"chat_template": [{"name": "default", "template": CHATML}]}
    ),
    "chat_template.json": json.dumps({"chat_template": CHATML}),
    "processor_config.json": json.dumps({"chat_template": CHATML}),
    "the only one of a list in tokenizer_config.json": json.dumps(
        {"chat_template": [{"name": "rag", "template": CHATML}, {"name": "x", "template": None}]}
    ),
    "the only one of additional_chat_templates/chatml.jinja": CHATML,
    "additional_chat_templates/default.jinja": CHATML,
}


@pytest.mark.parametrize("mark", ["", BOM], ids=["", "byte-order mark"])
@pytest.mark.parametrize("place", PLACES)
def test_a_template_is_found_in_each_place_and_its_end_of_turn_ends_replies(folder, place, mark):
    path = folder / place.rpartition(" ")[2]
    path.parent.mkdir(exist_ok=True)
    path.write_text(mark + PLACES[place], encoding="utf-8")
    rendered = Tokenizer.from_folder(folder).render_chat([{"role": "user", "content": "hi"}])
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ends(folder) == {296, 299}


def test_the_first_place_wins_and_another_template_is_told(folder):
    change(folder, "chat_template.json", chat_template="processor")
    change(folder, "tokenizer_config.json", chat_template="config")
    found = read_chat_template(FolderFiles(folder))
    assert (found.text, found.place) == ("config", "tokenizer_config.json")
    assert found.others == ("chat_template.json",)
    change(folder, "processor_config.json", chat_template="older")
    (folder / "chat_template.jinja").write_text("processor")
    found = read_chat_template(FolderFiles(folder))
    assert (found.text, found.place) == ("processor", "chat_template.jinja")
    assert found.others == ("tokenizer_config.json", "processor_config.json")
    more = folder / "additional_chat_templates" / "tool_use.jinja"
    more.parent.mkdir()
    more.write_text("tools")
    more.with_stem("rag").write_text("rag")
    found = read_chat_template(FolderFiles(folder))
    assert (found.text, found.tool_text) == ("processor", "tools")
    assert found.others[0] == "chat_template.jinja, 'rag'"


def test_a_template_for_tools_alone_hides_no_file_with_the_usual_one(folder):
    more = folder / "additional_chat_templates" / "tool_use.jinja"
    more.parent.mkdir()
    more.write_text("tools")
    assert read_chat_template(FolderFiles(folder)).text == "tools"
    change(folder, "tokenizer_config.json", chat_template="usual")
    found = read_chat_template(FolderFiles(folder))
    assert (found.text, found.tool_text, found.place) == ("usual", "tools", "tokenizer_config.json")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"": "a", ".tool_use": "t", ".rag": "r"}, ("a", "t", "metadata")),
        ({"": "a", ".default": "d"}, ("a", None, "metadata")),
        ({".default": "d", ".rag": "r"}, ("d", None, "metadata")),
        ({".rag": "r", ".chatml": "c", ".tool_use": "t"}, ("c", "t", "metadata, 'chatml'")),
        ({"": " ", ".rag": "r"}, ("r", None, "metadata, 'rag'")),
        ({".tool_use": "t"}, ("t", None, "metadata, 'tool_use'")),
    ],
)
def test_of_a_gguf_files_templates_the_usual_one_wins_else_the_first_by_name(
    made, tmp_path, keys, expected
):
    named = {f"tokenizer__chat_template{name}".replace(".", "__"): t for name, t in keys.items()}
    named.setdefault("tokenizer__chat_template", None)
    path = write_gguf(made, tmp_path / "m.gguf", **named)
    found = template_in_metadata(GgufModel.open(path).metadata, path)
    assert (found.text, found.tool_text, found.place) == expected
    template = Tokenizer.from_folder(path).chat_template
    assert template.tool_source == (expected[1] or expected[0])


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_every_file_may_begin_with_a_byte_order_mark(folder, file):
    path = folder / file
    path.write_text(BOM + path.read_text(), encoding="utf-8")
    Checkpoint.open(folder)
    Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["<|im_end|>", "<|endoftext|>", "a"], {"<|im_end|>", "<|endoftext|>"}),
        (["<|end|>", "<|user|>"], {"<|end|>"}),
        (["<|user|>", "<|observation|>", "<|assistant|>"], {"<|user|>", "<|observation|>"}),
        (["<|end|>", "<|return|>", "<|call|>"], {"<|return|>", "<|call|>"}),
        (["<|eot_id|>", "<|eom_id|>"], {"<|eot_id|>", "<|eom_id|>"}),
        (["<end_of_turn>", "<｜end▁of▁sentence｜>"], {"<end_of_turn>", "<｜end▁of▁sentence｜>"}),
    ],
)
def test_marks_that_end_replies_are_known_by_their_text(texts, expected):
    assert end_marks(texts) == expected


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_a_mark_of_a_gguf_file_is_a_control_token_whatever_its_type(made, tmp_path, kind):
    plain = write_gguf(made, tmp_path / "plain.gguf")
    kinds = list(GgufModel.open(plain).metadata["tokenizer.ggml.token_type"])
    kinds[298] = kinds[299] = kind
    path = write_gguf(
        made,
        tmp_path / "m.gguf",
        tokenizer__ggml__token_type=kinds,
        tokenizer__ggml__eos_token_id=0,
    )
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.encode("<|im_start|>h<|im_end|>", add_special_tokens=False)[::2] == [298, 299]
    assert tokenizer.special_id("<|im_end|>") == 299
    assert 299 in Checkpoint.open(path).config.eos_token_ids
    assert read_tokenizer(GgufModel.open(path)).token_to_id("<|im_end|>") == 299


@pytest.mark.parametrize("kind", [1, 6])
def test_the_token_that_a_gguf_file_says_begins_a_text_is_whole_whatever_its_type(
    made, tmp_path, kind
):
    plain = write_gguf(made, tmp_path / "plain.gguf")
    metadata = GgufModel.open(plain).metadata
    begin = metadata["tokenizer.ggml.bos_token_id"]
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[begin] = text = "<|begin|>"
    kinds = list(metadata["tokenizer.ggml.token_type"])
    kinds[begin] = kind
    path = write_gguf(
        made,
        tmp_path / "m.gguf",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=kinds,
    )
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.encode(f"h{text}h", add_special_tokens=False)[1:-1] == [begin]
    assert tokenizer.special_id(text) == begin


def test_a_file_is_what_its_first_bytes_say(made, tmp_path):
    blob = tmp_path / "sha256-0123abcd"
    write_gguf(made, blob)
    link = tmp_path / "latest"
    link.symlink_to(blob)
    for path in (blob, link):
        assert find_gguf(path) == path
        assert Checkpoint.open(path).config.num_layers == 3
        assert Tokenizer.from_folder(path).vocab_size == 300
    link.unlink()
    assert find_gguf(tmp_path) == blob
    assert Checkpoint.open(tmp_path).config.num_layers == 3
    other = tmp_path / "sha256-4567cdef"
    other.write_bytes(b"\x00" * 64)
    assert find_gguf(other) is None
    with pytest.raises(CheckpointError, match="not a folder"):
        Checkpoint.open(other)
