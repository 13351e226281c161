"""Special and added tokens are known from every file that lists them."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from engine.checkpoint.folder_files import FolderFiles
from engine.checkpoint.token_files import read_token_files
from engine.errors import CheckpointError
from engine.text.tokenizer import Tokenizer
from tests.tiny_tokenizers import byte_level, save


def entry(text, **flags):
    return {"content": text, "special": True} | flags


@pytest.fixture
def folder(tmp_path):
    return save(byte_level(), tmp_path)


def write(folder, name, **values):
    path = folder / name
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | values))


def test_a_token_of_added_tokens_decoder_alone_is_one_token_with_its_id(folder):
    size = Tokenizer.from_folder(folder).vocab_size
    decoder = {str(size + 1): entry("<|b|>"), str(size): entry("<|a|>")}
    decoder |= {str(size + 2): entry("<tool>", special=False), str(size + 9): entry("<|far|>")}
    write(folder, "tokenizer_config.json", added_tokens_decoder=decoder)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<|a|><|b|><tool>", False) == [size, size + 1, size + 2]
    assert tokenizer.decode([size, size + 1, size + 2]) == "<tool>"
    assert tokenizer.special_ids(["<|a|>", "<|b|>", "<tool>"]) == {"<|a|>": size, "<|b|>": size + 1}
    assert not tokenizer.has_token("<|far|>")  # it would get another id than its row of weights
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    text = "hello<|a|> <|b|>x<tool>"
    assert tokenizer.encode(text) == theirs.encode(text)


@pytest.mark.parametrize("is_special", [True, False])
def test_a_token_of_added_tokens_json_alone_is_one_token(folder, is_special):
    size = Tokenizer.from_folder(folder).vocab_size
    write(folder, "added_tokens.json", **{"<|a|>": size, "": 3, "<|b|>": "x", "<|c|>": -1})
    if is_special:
        write(folder, "special_tokens_map.json", additional_special_tokens=["<|a|>"])
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<|a|>", False) == [size]
    assert tokenizer.decode([size]) == ("" if is_special else "<|a|>")


def test_a_padding_token_that_is_a_word_stays_one(folder):
    write(folder, "tokenizer_config.json", pad_token="hello")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("hello", False)) == "hello"


def test_where_files_disagree_the_used_one_is_told(folder):
    own = Tokenizer.from_folder(folder).special_id("<|end|>")
    write(folder, "added_tokens.json", **{"<|end|>": 5})
    write(folder, "tokenizer_config.json", bos_token="<|begin|>", added_tokens_decoder={})
    write(folder, "special_tokens_map.json", bos_token="<|end|>", eos_token="<|end|>")
    files = read_token_files(FolderFiles(folder))
    assert files.ids["<|end|>"] == own
    assert files.variables == {"bos_token": "<|begin|>"}
    assert [line.partition(":")[0] for line in files.differing()] == [
        "added_tokens.json",
        "special_tokens_map.json",
    ]


def test_without_added_tokens_decoder_the_map_of_special_tokens_wins(folder):
    write(folder, "tokenizer_config.json", bos_token="<|begin|>", unk_token="<|im_end|>")
    write(folder, "special_tokens_map.json", bos_token={"content": "<|end|>"})
    variables = read_token_files(FolderFiles(folder)).variables
    assert variables == {"bos_token": "<|end|>", "unk_token": "<|im_end|>"}


@pytest.mark.parametrize("name", ["added_tokens.json", "special_tokens_map.json"])
def test_a_file_of_tokens_that_is_no_object_is_named(folder, name):
    (folder / name).write_text("[]")
    with pytest.raises(CheckpointError) as error:
        read_token_files(FolderFiles(folder))
    assert error.value.where == str(folder / name)
