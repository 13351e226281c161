"""A GGUF file is the model that it was made from: shape, values, words; a broken one is refused."""

import dataclasses
import json
import struct
import tracemalloc
from array import array
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.families import FAMILY_BY_NAME
from engine.checkpoint.gguf import GgufModel, models_in
from engine.checkpoint.tensor_info import BLOCKS
from engine.checkpoint.weights_layout import arena_layout
from engine.errors import CheckpointError, PenstockError
from engine.text.gguf_tokenizer import read_tokenizer
from engine.text.tokenizer import Tokenizer
from engine.worker.model.dequantise import dequantised
from engine.worker.model.weights import convert_weights
from engine.worker.weight_streaming import arena_views
from tests.checkpoints import GATED_DELTA_NETS, GEMMA4_E, GEMMA4_MOE, make_checkpoint
from tests.gguf_files import ARCHITECTURES, split_gguf, write_gguf

UNSAID = ("family", "stored_dtype", "eos_token_ids", "end_sources", "bos_token_id", "sampling")
"""Not by the format, or otherwise."""
TELLABLE = {  # what the format takes as known of these families
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "sliding_window_pattern": 6,
        "num_hidden_layers": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 20000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "rope_scaling": ...,
        "rope_theta": ...,
    },
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "exaone4": {"sliding_window_pattern": 4, "num_hidden_layers": 4},
    "qwen3_next": {"mlp_only_layers": []},
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "mistral": {"sliding_window": 24},
    "olmo3": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 20000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
    },
    "phi3": {"sliding_window": 24},
    "llama": {"attention_bias": True},
    "gemma4_text": GEMMA4_E | GEMMA4_MOE,
}


def values_of(checkpoint, dtype="float32"):
    layout = arena_layout(checkpoint, dtype)
    views = arena_views(layout, dtype, torch.zeros(layout.num_bytes, dtype=torch.uint8))
    convert_weights(checkpoint, views, lambda done, total: None)
    return views


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def file(folder):
    return write_gguf(folder, folder.parent / "tiny.gguf")


def delta_of_file(delta):
    """What a file says of a checkpoint's Gated DeltaNet layers."""
    if len(delta.projections) == 2:
        projections = ("in_proj_qkv", "in_proj_z", "in_proj_ba")
        return dataclasses.replace(delta, projections=projections)
    return dataclasses.replace(delta, is_output_tiled=True)


def split_heads(values):
    """Split Qwen3-Next's `in_proj_qkvz`, which has two key heads, as files do."""
    for name in [name for name in values if name.endswith("in_proj_qkvz.weight")]:
        by_head = values.pop(name).unflatten(0, (2, -1))
        q, k, v, z = (part.flatten(0, 1) for part in by_head.split([16, 16, 48, 48], 1))
        values[name.replace("qkvz", "qkv")] = torch.cat((q, k, v))
        values[name.replace("qkvz", "z")] = z


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_says_what_its_checkpoint_says(tmp_path, family):
    folder = make_checkpoint(tmp_path / "hf", family, **TELLABLE.get(family, {}))
    written, read = (
        Checkpoint.open(path) for path in (folder, write_gguf(folder, tmp_path / "tiny.gguf"))
    )
    assert read.config.family.name == written.config.family.name
    for field in dataclasses.fields(written.config):
        if field.name not in UNSAID:
            expected, found = (getattr(each.config, field.name) for each in (written, read))
            if field.name == "delta" and expected is not None:
                expected = delta_of_file(expected)
            assert found == expected, field.name
    expected, found = values_of(written), values_of(read)
    split_heads(expected)
    assert found.keys() == expected.keys()
    is_shifted = family.startswith("gemma") or family in GATED_DELTA_NETS
    shifted = 1e-6 if is_shifted else 0.0  # 1 is added, and taken off again
    for name, values in expected.items():
        is_tiled = written.config.delta is not None and read.config.delta.is_output_tiled
        if is_tiled and name.endswith("linear_attn.out_proj.weight"):  # as are the step's outputs
            values = values.unflatten(1, (2, 2, -1)).transpose(1, 2).flatten(1)
        assert torch.allclose(found[name], values, rtol=0, atol=shifted), name


def test_families_that_no_file_can_hold_have_no_architecture_in_the_format():
    unread = {name for name in FAMILY_BY_NAME if name not in ARCHITECTURES}
    own_files = {name for name in unread if FAMILY_BY_NAME[name].section is None}
    assert own_files == {"ministral", "vaultgemma", "gemma4_unified_text"}
    plain = {name.replace("-", "").replace("_", "") for name in gguf.MODEL_ARCH_NAMES.values()}
    assert not plain & {name.replace("_", "") for name in own_files}


def test_a_mistral3_file_whose_queries_do_not_grow_is_a_llama(tmp_path):
    folder = make_checkpoint(tmp_path / "hf", "ministral3")
    file = tmp_path / "tiny.gguf"
    write_gguf(folder, file, mistral3__attention__temperature_scale=None)
    config = Checkpoint.open(file).config
    assert config.family.name == "llama"
    assert all(rope.query_growth == 0 for rope in config.ropes)
    write_gguf(folder, file, mistral3__expert_count=4)
    with pytest.raises(CheckpointError, match="expert_count"):
        Checkpoint.open(file)


def test_a_file_says_that_keys_are_values_and_their_heads_few(tmp_path):
    folder = make_checkpoint(tmp_path / "hf", "gemma4_text")
    written, read = (
        Checkpoint.open(path) for path in (folder, write_gguf(folder, tmp_path / "tiny.gguf"))
    )
    for field in ("heads", "has_keys_as_values", "ropes", "kv_layers", "intermediate_size"):
        assert getattr(read.config, field) == getattr(written.config, field), field


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind != "mxfp4_pairs"])
def test_blocks_have_the_values_that_the_formats_package_gives(kind):
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (9, 3 * BLOCKS[kind][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])
    found = dequantised(torch.from_numpy(raw), kind).numpy()
    assert np.array_equal(found, expected.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_share_of_a_file_has_its_own_rows(tmp_path, folder, kind):
    checkpoint = Checkpoint.open(write_gguf(folder, tmp_path / "tiny.gguf", kind))
    whole, layout = values_of(checkpoint), arena_layout(checkpoint, "float32")
    views = arena_views(layout, "float32", torch.zeros(layout.num_bytes, dtype=torch.uint8))
    for index in range(3):
        convert_weights(checkpoint, views, lambda done, total: None, (index, 3))
    assert all(torch.equal(views[name], values) for name, values in whole.items())
    exact = values_of(Checkpoint.open(folder))
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.allclose(whole[name], exact[name], atol=0.06)  # rows in order, nearly the values


def test_llama_3s_scaled_rope_comes_from_its_factors(tmp_path, folder):
    path = write_gguf(folder, tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "scaled.gguf", "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            value = field.contents()
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    factors = np.arange(1, 9, dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    rope = Checkpoint.open(tmp_path / "scaled.gguf").config.ropes[0]
    assert rope.short_factors == rope.long_factors == tuple(factors.tolist())
    assert rope.attention_factor == 1


def test_parts_are_one_model(tmp_path, folder):
    path = write_gguf(folder, tmp_path / "tiny.gguf", "Q8_0")
    parts = split_gguf(path, 3)
    whole, split = Checkpoint.open(path), Checkpoint.open(parts[0])
    assert {tensor.file for tensor in split.tensors.values()} == set(parts)
    expected, found = values_of(whole), values_of(split)
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    assert models_in(tmp_path) == sorted([path, parts[0]])
    parts[1].unlink()
    with pytest.raises(CheckpointError, match="00002-of-00003"):
        Checkpoint.open(parts[0])


def test_a_folder_with_one_file_is_that_file_and_with_two_must_be_told(tmp_path, folder):
    path = write_gguf(folder, tmp_path / "a.gguf")
    assert Checkpoint.open(tmp_path).folder == path
    (tmp_path / "mmproj-a.gguf").write_bytes(b"eyes")
    assert Checkpoint.open(tmp_path).folder == path
    (tmp_path / "b.gguf").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="2 GGUF models") as caught:
        Checkpoint.open(tmp_path)
    assert caught.value.hint == "name one of a.gguf, b.gguf"


def test_the_tokenizer_of_a_file_is_that_of_the_checkpoint(folder, file):
    ours, theirs = Tokenizer.from_folder(file), Tokenizer.from_folder(folder)
    for text in ("the cat and the hat", "  two  spaces\n\nlines\t!", "naïve 東京 🙂", ""):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == theirs.decode(ids)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.render_chat(messages) == theirs.render_chat(messages)
    assert ours.special_ids(["<|im_end|>"]) == theirs.special_ids(["<|im_end|>"])


SENTENCE = {"▁": -3.0, "h": -9.0, "e": -9.5, "l": -9.7, "o": -9.9, "he": -1.0, "ll": -2.0}
SENTENCE |= {"hell": -4.0, "hello": -5.0, "▁hello": -6.0, "▁he": -5.5}


def sentence_piece(tmp_path, folder, **metadata):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *SENTENCE]
    tokens += [f"<filler {i}>" for i in range(300 - len(tokens))]
    scores = [0.0] * 259 + list(SENTENCE.values())
    scores += [-100.0] * (300 - len(scores))
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(SENTENCE) + [5] * (41 - len(SENTENCE))
    said = {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__pre": "default",
        "tokenizer__ggml__merges": None,
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__scores": scores,
        "tokenizer__ggml__token_type": kinds,
        "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 2,
    }
    return write_gguf(folder, tmp_path / "spm.gguf", **(said | metadata)), tokens


def test_qwen35_cuts_text_as_transformers_does(tmp_path, folder):
    file = write_gguf(folder, tmp_path / "tiny.gguf", tokenizer__ggml__pre="qwen35")
    cut = read_tokenizer(GgufModel.open(file)).pre_tokenizer
    oracle = Split(Regex(PRETOKENIZE_REGEX), "isolated")
    text = "I'LL  say cafe\u0301\u0301 1234!?\n\n  no\u0327w\t\u0301x \r\n "
    spans = [span for _, span in oracle.pre_tokenize_str(text)]
    assert [span for _, span in cut.pre_tokenize_str(text)] == spans


def test_sentence_piece_merges_the_likeliest_first(tmp_path, folder):
    path, tokens = sentence_piece(tmp_path, folder)
    tokenizer = Tokenizer.from_folder(path)
    assert [tokens[i] for i in tokenizer.encode("hello")] == ["<s>", "▁hello"]
    # bytes where there is no token
    assert [tokens[i] for i in tokenizer.encode("helé")][1:] == ["▁he", "l", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hello hello")) == "hello hello"
    path, tokens = sentence_piece(tmp_path, folder, tokenizer__ggml__add_space_prefix=False)
    assert [tokens[i] for i in Tokenizer.from_folder(path).encode("hello")] == ["<s>", "hello"]


def test_gemma_4s_tokenizer_merges_as_its_file_lists(tmp_path, folder):
    path, tokens = sentence_piece(
        tmp_path,
        folder,
        tokenizer__ggml__model="gemma4",
        tokenizer__ggml__merges=["l l", "h e"],
        tokenizer__ggml__add_space_prefix=False,
    )
    tokenizer = Tokenizer.from_folder(path)
    assert [tokens[i] for i in tokenizer.encode("hell hé")] == [
        *("<s>", "he", "ll", "▁", "h", "<0xC3>", "<0xA9>")
    ]
    assert tokenizer.decode(tokenizer.encode("hello hé")) == "hello hé"


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"tokenizer__ggml__pre": "poro-chat"}, "'poro-chat': known"),
        ({"tokenizer__ggml__model": "rwkv"}, "'rwkv': gpt2 .* llama, gemma4 and t5"),
        ({"tokenizer__ggml__merges": None}, "merges is missing"),
        ({"tokenizer__ggml__token_type": [1, 2]}, "one for each token"),
    ],
)
def test_a_tokenizer_of_an_unknown_kind_is_refused_by_name(tmp_path, folder, metadata, words):
    path = write_gguf(folder, tmp_path / "tiny.gguf", **metadata)
    with pytest.raises(CheckpointError, match=words):
        Tokenizer.from_folder(path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general__architecture": "mamba"}, "'mamba': one of llama, "),
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__embedding_length": "many"}, "embedding_length is 'many'"),
        ({"llama__block_count": 4}, r"tensor model\.layers\.3\.\S+ is missing"),
        ({"llama__feed_forward_length": 97}, "metadata asks for"),
        ({"llama__attention__value_length": 8}, "value_length is '8'"),
        ({"llama__rope__scaling__type": "magic"}, "scaling.type is 'magic'"),
    ],
)
def test_what_metadata_says_wrongly_is_named(tmp_path, folder, metadata, words):
    path = write_gguf(folder, tmp_path / "tiny.gguf", **metadata)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(path)


def test_a_quantisation_that_is_not_served_is_named_with_its_tensor(tmp_path, folder):
    path = write_gguf(folder, tmp_path / "tiny.gguf", "F32")
    content = path.read_bytes()
    name = b"blk.1.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 16
    path.write_bytes(content[:at] + struct.pack("<I", 16) + content[at + 4 :])
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight .* iq2_xxs"):
        Checkpoint.open(path)


def test_an_end_of_turn_ends_a_reply_whatever_the_file_calls_the_end_of_text(folder, file):
    marks = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    id_by_text = {each["content"]: each["id"] for each in marks}
    ends = Checkpoint.open(file).config.eos_token_ids
    assert set(ends) == {id_by_text["<|end_of_text|>"], id_by_text["<|im_end|>"]}


def header_of(file):
    """All bytes before the first tensor's."""
    start = min(tensor.start for tensor in GgufModel.open(file).tensors.values())
    return file.read_bytes()[:start]


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_broken_file_is_an_error_and_takes_no_memory(file, tmp_path_factory, data):
    content = bytearray(file.read_bytes())
    num_header = len(header_of(file))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, num_header - 9))
        size = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(st.sampled_from([0, 1, 255, 2**31 - 1, 2**63 - 1, 2**64 - 1, 7]))
        content[at : at + size] = (value % 256**size).to_bytes(size, "little")
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path_factory.getbasetemp() / "broken.gguf"
    path.write_bytes(content)
    said = None
    tracemalloc.start()
    try:
        Checkpoint.open(path)
        Tokenizer.from_folder(path)
    except PenstockError as error:
        said = error
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 64 << 20
    assert said is None or str(path) in str(said)


@pytest.mark.parametrize("count_at", [8, 16])
def test_an_absurd_count_is_refused_before_anything_is_read(tmp_path, file, count_at):
    content = bytearray(file.read_bytes())
    content[count_at : count_at + 8] = (2**63 - 1).to_bytes(8, "little")
    path = tmp_path / "absurd.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="more than the file"):
        Checkpoint.open(path)


def test_a_file_that_is_cut_names_the_tensor_that_is_not_whole(tmp_path, file):
    path = tmp_path / "cut.gguf"
    path.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"byte \d+.*truncated"):
        Checkpoint.open(path)


def test_a_file_that_shrinks_while_its_header_is_read_is_cut_off(tmp_path, file, monkeypatch):
    path, size = tmp_path / "shrinking.gguf", file.stat().st_size
    path.write_bytes(header_of(file)[:100])
    monkeypatch.setattr("os.fstat", lambda fd: SimpleNamespace(st_size=size, st_mode=0o100600))
    with pytest.raises(CheckpointError, match=r"cut off \(at byte \d+\)"):
        Checkpoint.open(path)


def test_an_older_version_and_big_endian_numbers_are_refused_by_name(tmp_path, file):
    content = bytearray(file.read_bytes())
    for version, words in ((1, "version 1"), (0x03000000, "big-endian")):
        content[4:8] = version.to_bytes(4, "little")
        path = tmp_path / "old.gguf"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            Checkpoint.open(path)


def peak_bytes_of(read):
    """Bytes that Python allocates at most while something is read."""
    tracemalloc.start()
    try:
        read()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    ("family", "metadata"),
    [
        ("llama", {"llama.block_count": 2**32 - 1}),
        ("gemma3_text", {"gemma3.block_count": 2**32 - 1}),
        ("gemma4_text", {"gemma4.block_count": 2**32 - 1}),
        ("gemma4_text", {"gemma4.attention.key_length": 2**32 - 2}),
        ("qwen3_5_text", {"qwen35.block_count": 2**32 - 1}),
        ("qwen3_5_text", {"qwen35.ssm.time_step_rank": 2**26, "qwen35.ssm.inner_size": 2**26}),
        ("qwen3_5_text", {"qwen35.ssm.group_count": 2**31 - 1}),
        ("qwen3_moe", {"qwen3moe.expert_count": 65536}),
    ],
)
def test_a_count_of_the_metadata_sizes_nothing_before_tensors_confirm_it(
    tmp_path, family, metadata
):
    source = make_checkpoint(tmp_path / family, family, **TELLABLE.get(family, {}))
    path = write_gguf(source, tmp_path / "m.gguf", **metadata)
    path.write_bytes(path.read_bytes().replace(b"rope_freqs.weight", b"rope_absent.weigh"))

    def refuse():
        with pytest.raises(CheckpointError):
            Checkpoint.open(path)

    assert peak_bytes_of(refuse) < 64 * path.stat().st_size


@pytest.mark.parametrize("kind", [8, 4], ids=["strings", "numbers"])
def test_a_vocabulary_of_no_tokens_says_what_to_do(tmp_path, file, kind):
    model = GgufModel.open(file)
    tokens = [] if kind == 8 else array("I")
    bad = dataclasses.replace(model, metadata=model.metadata | {"tokenizer.ggml.tokens": tokens})
    with pytest.raises(CheckpointError, match="lists no tokens") as refused:
        read_tokenizer(bad)
    assert refused.value.where == str(file)
    assert "download the file again" in refused.value.hint
