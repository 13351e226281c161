"""The starter model is an ordinary checkpoint, the same bytes every time."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.checkpoint import Checkpoint
from engine.model.starter import SPECIAL_TOKENS, make_starter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "models" / "starter"
    subprocess.run([sys.executable, "-m", "engine.model.starter", str(path)], check=True)
    return path


def test_the_same_bytes_are_written_every_time(folder, tmp_path):
    make_starter(tmp_path / "again")
    files = sorted(path.name for path in folder.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert "tokenizer.json" in files
    for name in files:
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_nothing_is_left_beside_it_and_nothing_is_overwritten(folder):
    before = (folder / "model.safetensors").stat().st_mtime_ns
    make_starter(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert list(folder.parent.iterdir()) == [folder]


def test_it_is_a_small_llama_that_can_be_served(folder):
    checkpoint = Checkpoint.open(folder)
    assert 2_000_000 < checkpoint.num_parameters < 6_000_000
    assert checkpoint.stored_dtype == "bfloat16"
    assert checkpoint.config.max_position_embeddings == 8192
    assert checkpoint.config.eos_token_ids == (297, 299)


def test_transformers_loads_it_and_it_writes_readable_text(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The river turns the wheel.", return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=64, do_sample=False, pad_token_id=0)
    tokens = output[0, ids["input_ids"].shape[1] :]
    assert len(tokens) == 64  # it did not end at once
    assert len(set(tokens.tolist())) > 8
    text = tokenizer.decode(tokens)
    assert text.isascii()
    assert text.isprintable()
    with torch.inference_mode():
        probabilities = model(**ids).logits[0].softmax(-1)
    assert probabilities[:, [297, 299]].max() < 1e-3
    top = probabilities.sort(descending=True).values
    assert (top[:, 0] < 0.9).all()  # sampling has something to choose from


@pytest.mark.parametrize(
    "text", ["hello", " the and  of\n", "naïve 🚰 漢字", "\x00\x7f\u00ad", "\U0001d518"]
)
def test_any_text_survives_the_tokenizer(folder, text):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_common_words_take_fewer_tokens_than_bytes(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize(" the and") == ["Ġthe", "Ġand"]


def test_special_tokens_and_the_chat_template_work(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [296, 297, 298, 299]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(text)["input_ids"][0] == 298


def test_tools_calls_and_their_results_are_shown_to_the_model(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    definition = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "Bern"}}}
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noon"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[definition], tokenize=False)
    head, *turns = text.split("<|im_start|>")[1:]
    assert '"name": "clock", "parameters": {}' in head
    assert turns == [
        "user\nWhen?<|im_end|>\n",
        'assistant\n<tool_call>\n{"name": "clock", "arguments": {"zone": "Bern"}}\n</tool_call>'
        "<|im_end|>\n",
        "tool\n<tool_response>\nnoon\n</tool_response><|im_end|>\n",
    ]


def test_calls_follow_the_text_and_each_other_on_lines_of_their_own(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    message = {"role": "assistant", "content": "Two:", "tool_calls": [call, call]}
    text = tokenizer.apply_chat_template([message], tokenize=False)
    one = '\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert text == f"<|im_start|>assistant\nTwo:{one}{one}<|im_end|>\n"
