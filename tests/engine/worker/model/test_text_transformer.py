"""Vectors and scores are transformers' own, whatever is computed beside a text."""

import dataclasses
import json
import random
import shutil

import pytest
import torch

from engine.checkpoint.text_model import TextModelConfig
from engine.errors import CheckpointError
from engine.wire.messages import ComputeTexts, TextModelSpec
from engine.worker import text_models
from engine.worker.model import text_transformer
from engine.worker.model.linear import Linears
from engine.worker.text_batches import TextBatches
from engine.worker.text_models import load_text_models
from tests.text_checkpoints import (
    CLS,
    EMBEDDING_FAMILIES,
    RERANK_FAMILIES,
    SEP,
    VOCABULARY,
    add_modules,
    hidden_states,
    load_text_oracle,
    make_text_checkpoint,
    pooled,
    score,
)

LENGTHS = (1, 2, 9, 9, 9, 33, 70, 200)
YES, NO = 40, 41


def a_text(length, seed=0):
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(5, VOCABULARY) for _ in range(length)]


def a_pair(length, seed=0):
    return [CLS, *a_text(length // 3 + 1, seed), SEP, *a_text(length, seed), SEP]


def load(folder, kind="embedding", dtype="float32", compared=None):
    spec = TextModelSpec("it", str(folder), kind, dtype, compared)
    return load_text_models([spec], torch.device("cpu"), lambda: None)["it"]


def computed(model, texts):
    with torch.inference_mode():
        *parts, found = model.compute(texts)
    assert all(part is None for part in parts)
    return found


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def make(family, kind="embedding"):
        if (family, kind) not in made:
            folder = make_text_checkpoint(tmp_path_factory.mktemp("text") / family, family, kind)
            made[family, kind] = folder, load_text_oracle(folder, family, kind)
        return made[family, kind]

    return make


@pytest.fixture(params=["kernels", "torch"])
def products(request, monkeypatch):
    if request.param == "torch":
        chosen = Linears("torch", None)
        monkeypatch.setattr(text_models, "choose_linears", lambda *_: chosen)


@pytest.mark.parametrize("max_rows", [512, 16])
@pytest.mark.parametrize("family", EMBEDDING_FAMILIES)
def test_vectors_equal_transformers_alone_and_in_batches(
    family, max_rows, checkpoint, products, monkeypatch
):
    monkeypatch.setattr(text_transformer, "PART_ROWS", max_rows)
    folder, oracle = checkpoint(family)
    model = load(folder)
    texts = [a_text(length, seed) for seed, length in enumerate(LENGTHS)]
    wanted = [pooled(family, hidden_states(oracle, text)) for text in texts]
    together = computed(model, texts)
    for text, alone, own in zip(texts, wanted, together, strict=True):
        assert error(own, alone) < 1e-5
        assert error(computed(model, [text])[0], alone) < 1e-5


@pytest.mark.parametrize("family", EMBEDDING_FAMILIES)
def test_vectors_in_bfloat16_point_where_transformers_do(family, checkpoint, tmp_path, products):
    _, oracle = checkpoint(family)
    folder = make_text_checkpoint(tmp_path / family, family, dtype="bfloat16")
    model = load(folder, dtype="bfloat16")
    texts = [a_text(length) for length in LENGTHS]
    for text, own in zip(texts, computed(model, texts), strict=True):
        wanted = pooled(family, hidden_states(oracle, text))
        assert torch.cosine_similarity(own, wanted, dim=0) > 0.99


@pytest.mark.parametrize("family", RERANK_FAMILIES)
def test_scores_equal_transformers_after_the_sigmoid(family, checkpoint, products):
    folder, oracle = checkpoint(family, "rerank")
    compared = (YES, NO) if family == "qwen3" else None
    model = load(folder, "rerank", compared=list(compared) if compared else None)
    pairs = [a_pair(length, seed) for seed, length in enumerate(LENGTHS)]
    found = computed(model, pairs)
    assert found.shape == (len(pairs), 1)
    for pair, own in zip(pairs, found[:, 0], strict=True):
        wanted = torch.tensor(score(oracle, pair, compared=compared))
        assert torch.sigmoid(own) == pytest.approx(float(torch.sigmoid(wanted)), rel=1e-5)
        assert float(own) == pytest.approx(float(wanted), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("family", RERANK_FAMILIES)
def test_scores_in_bfloat16_are_near_transformers_after_the_sigmoid(family, tmp_path, products):
    folder = make_text_checkpoint(tmp_path / family, family, "rerank", dtype="bfloat16")
    oracle = load_text_oracle(folder, family, "rerank")
    compared = (YES, NO) if family == "qwen3" else None
    spec = {"compared": list(compared) if compared else None}
    model = load(folder, "rerank", dtype="bfloat16", **spec)
    pairs = [a_pair(length, seed) for seed, length in enumerate(LENGTHS)]
    for pair, own in zip(pairs, computed(model, pairs)[:, 0], strict=True):
        wanted = torch.tensor(score(oracle, pair, compared=compared))
        assert torch.sigmoid(own) == pytest.approx(float(torch.sigmoid(wanted)), abs=0.02)


def test_a_stretched_rotation_is_its_makers_and_token_types_may_be_absent(tmp_path):
    base, factor, dim = 20_000.0, 8.0, 16
    folder = make_text_checkpoint(tmp_path / "it", "gte", type_vocab_size=0)
    oracle = load_text_oracle(folder, "gte")
    pace = 1 / (base * factor) ** (torch.arange(0, dim, 2) / dim) / factor ** (2 / dim)
    oracle.rotary_emb.inv_freq.copy_(pace)
    where = folder / "config.json"
    keys = json.loads(where.read_text())
    del keys["rope_parameters"]
    keys |= {"architectures": ["NewModel"], "model_type": "new", "position_embedding_type": "rope"}
    keys |= {"rope_theta": base, "rope_scaling": {"type": "ntk", "factor": factor}}
    where.write_text(json.dumps(keys))
    found = computed(load(folder), [a_text(200)])[0]
    assert error(found, hidden_states(oracle, a_text(200))[0]) < 1e-5


def test_nomics_own_names_of_settings_mean_the_same(checkpoint, tmp_path):
    folder, oracle = checkpoint("nomic_bert")
    own = shutil.copytree(folder, tmp_path / "own")
    keys = json.loads((folder / "config.json").read_text())
    for ours, theirs in (
        ("hidden_size", "n_embd"),
        ("num_attention_heads", "n_head"),
        ("num_hidden_layers", "n_layer"),
        ("intermediate_size", "n_inner"),
        ("max_position_embeddings", "n_positions"),
        ("layer_norm_eps", "layer_norm_epsilon"),
    ):
        keys[theirs] = keys.pop(ours)
    del keys["hidden_act"], keys["head_dim"], keys["rope_parameters"]
    keys |= {"activation_function": "swiglu", "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0}
    (own / "config.json").write_text(json.dumps(keys))
    found = computed(load(own), [a_text(33)])[0]
    assert error(found, hidden_states(oracle, a_text(33)).mean(0)) < 1e-5


def test_a_text_without_a_number_leaves_its_neighbours_theirs(tmp_path):
    folder = make_text_checkpoint(tmp_path / "it", "bert", num_hidden_layers=2)
    model, reports, texts = load(folder), [], [a_text(9, seed) for seed in range(3)]
    good = computed(model, texts)
    texts[1][4] = 299
    model._words.values[299] = float("nan")
    batches = TextBatches({"it": model}, reports.append, None)
    batches.take(ComputeTexts(7, "it", texts))
    batches.compute(lambda: False)
    first, bad, last = reports[0].results
    assert (reports[0].batch_id, bad) == (7, b"")
    assert (first, last) == tuple(good[i].numpy().tobytes() for i in (0, 2))


POOLINGS = {
    "cls": lambda rows: rows[0],
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.amax(0),
    "lasttoken": lambda rows: rows[-1],
    "mean_sqrt_len_tokens": lambda rows: rows.sum(0) / len(rows) ** 0.5,
    "weightedmean": lambda rows: (
        (rows * torch.arange(1, len(rows) + 1)[:, None]).sum(0)
        / torch.arange(1, len(rows) + 1).sum()
    ),
}


@pytest.mark.parametrize("mode", POOLINGS)
def test_a_folders_pooling_dense_layers_and_norm_are_done(mode, tmp_path):
    folder = make_text_checkpoint(tmp_path / "it", "bert", num_hidden_layers=1)
    add_modules(folder, pooling={"pooling_mode": mode}, dense=(80, 48))
    oracle, model = load_text_oracle(folder, "bert"), load(folder)
    text = a_text(20)
    wanted = POOLINGS[mode](hidden_states(oracle, text))
    from safetensors.torch import load_file

    for place in ("2_Dense", "3_Dense"):
        tensors = load_file(folder / place / "model.safetensors")
        wanted = torch.tanh(tensors["linear.weight"] @ wanted + tensors["linear.bias"])
    own = computed(model, [text])[0]
    assert model.config.num_dimensions == len(own) == 48
    assert error(own, wanted / wanted.norm()) < 1e-5


BEHIND_A_PROMPT = POOLINGS | {
    "mean": lambda rows, start: rows[start:].mean(0),
    "max": lambda rows, start: rows[start:].amax(0),
    "mean_sqrt_len_tokens": lambda rows, start: rows[start:].sum(0) / (len(rows) - start) ** 0.5,
    "weightedmean": lambda rows, start: (
        (rows[start:] * torch.arange(start + 1, len(rows) + 1)[:, None]).sum(0)
        / torch.arange(start + 1, len(rows) + 1).sum()
    ),
    "cls": lambda rows, _: rows[0],
    "lasttoken": lambda rows, _: rows[-1],
}
"""What sentence-transformers makes of a text whose first tokens are masked when it is pooled."""


@pytest.mark.parametrize("mode", BEHIND_A_PROMPT)
def test_the_tokens_of_a_prompt_are_left_out_where_the_folder_says_so(mode, tmp_path):
    folder = make_text_checkpoint(tmp_path / "it", "bert", num_hidden_layers=1)
    add_modules(folder, pooling={"pooling_mode": mode, "include_prompt": False})
    oracle, model = load_text_oracle(folder, "bert"), load(folder)
    assert not model.config.pools_prompt
    texts = [a_text(length, seed) for seed, length in enumerate((9, 9, 9, 20, 3))]
    starts = [4, 4, 0, 7, 30]
    with torch.inference_mode():
        *_, found = model.compute(texts, starts)
    for text, start, own in zip(texts, starts, found, strict=True):
        states = hidden_states(oracle, text)
        wanted = BEHIND_A_PROMPT[mode](states, min(start, len(text) - 1))
        assert error(own, wanted / wanted.norm()) < 1e-5


def test_older_files_say_each_mode_of_pooling_and_several_lie_side_by_side(tmp_path):
    folder = make_text_checkpoint(tmp_path / "it", "bert", num_hidden_layers=1)
    modes = {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}
    add_modules(folder, pooling=modes, is_normalized=False, max_seq_length=64)
    states = hidden_states(load_text_oracle(folder, "bert"), a_text(20))
    model = load(folder)
    wanted = torch.cat((states[0], states.amax(0)))
    assert model.config.num_dimensions == 128
    assert model.config.max_tokens == 64
    assert model.config.prompts == {"query": "query: ", "document": ""}
    assert error(computed(model, [a_text(20)])[0], wanted) < 1e-5


@pytest.mark.parametrize(
    ("stated", "served"), [(100, 100), (int(1e30), 512), (9000, 512), (None, 512)]
)
def test_a_tokenizers_limit_holds_where_no_module_has_one(stated, served, tmp_path):
    for kind in ("embedding", "rerank"):
        folder = make_text_checkpoint(tmp_path / kind, "bert", kind, num_hidden_layers=1)
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": stated}))
        assert TextModelConfig.from_folder(folder, kind).max_tokens == served


@pytest.mark.parametrize(("named", "is_served"), [("query", True), (None, True), ("other", False)])
def test_the_default_prompt_is_one_of_the_prompts(named, is_served, tmp_path):
    folder = make_text_checkpoint(tmp_path / "it", "bert", num_hidden_layers=1)
    add_modules(folder)
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": named}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    if is_served:
        assert TextModelConfig.from_folder(folder, "embedding").default_prompt == named
    else:
        with pytest.raises(CheckpointError):
            TextModelConfig.from_folder(folder, "embedding")


@pytest.mark.parametrize(
    "change",
    [
        lambda keys: keys.update(architectures=["T5EncoderModel"]),
        lambda keys: keys.update(hidden_act="swish7"),
        lambda keys: keys.update(num_hidden_layers=5),
        lambda keys: keys.update(hidden_size=128),
        lambda keys: keys.update(position_embedding_type="relative_key"),
        lambda keys: keys.update(is_decoder=True),
    ],
)
def test_what_is_not_served_is_refused_by_name(change, tmp_path):
    folder = make_text_checkpoint(tmp_path / "it", "bert", num_hidden_layers=1)
    where = folder / "config.json"
    keys = json.loads(where.read_text())
    change(keys)
    where.write_text(json.dumps(keys))
    with pytest.raises(CheckpointError):
        load(folder)


def test_a_model_of_the_other_kind_is_refused(checkpoint):
    for kind, other in (("embedding", "rerank"), ("rerank", "embedding")):
        with pytest.raises(CheckpointError):
            load(checkpoint("bert", kind)[0], other)


def test_a_part_of_a_large_layer_has_fewer_tokens(checkpoint):
    config = load(checkpoint("qwen3")[0]).config
    large = dataclasses.replace(config, hidden_size=2560, num_heads=32, intermediate_size=9728)
    assert text_transformer.part_rows(config) == text_transformer.PART_ROWS
    assert text_transformer.part_rows(large) == text_transformer.LEAST_ROWS
