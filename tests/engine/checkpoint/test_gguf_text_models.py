"""A GGUF file of a model of texts makes the vectors and scores of the checkpoint it is made of."""

import pytest
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.text_model import TextModelConfig
from engine.errors import CheckpointError
from engine.wire.messages import TextModelSpec
from engine.worker.text_models import load_text_models
from tests.byte_tokenizer import write_tokenizer
from tests.gguf_files import write_gguf
from tests.text_checkpoints import add_modules, load_text_oracle, make_text_checkpoint, score
from tests.tiny_tokenizers import save, xlm_roberta_like
from tests.wordpiece_tokenizer import write_wordpiece

POOLINGS = {"mean": 1, "cls": 2, "lasttoken": 3}
OF_FAMILY = {
    "bert": "cls",
    "roberta": "mean",
    "xlm-roberta": "cls",
    "nomic_bert": "mean",
    "qwen3": "lasttoken",
    "gemma3_text": "mean",
}
ARCHITECTURES = {"nomic_bert": "nomic-bert", "qwen3": "qwen3", "gemma3_text": "gemma-embedding"}
PUBLISHED = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "query_pre_attn_scalar": 32,
}
"""What the format does not say of EmbeddingGemma, as it is published."""
TEXTS = [[2, 7, 9, 200, 3], [2, *range(10, 90), 3]]
ANSWERS = (40, 41)


def computed(path, kind="embedding", compared=None):
    spec = TextModelSpec("it", str(path), kind, "float32", compared)
    model = load_text_models([spec], torch.device("cpu"), lambda: None)["it"]
    with torch.inference_mode():
        *_, found = model.compute(TEXTS)
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def make(family, kind="embedding"):
        if (family, kind) not in made:
            folder = tmp_path_factory.mktemp("gguf") / family
            is_gemma = family == "gemma3_text"
            make_text_checkpoint(folder, family, kind, **(PUBLISHED if is_gemma else {}))
            if kind == "embedding":
                pooling = {"pooling_mode": OF_FAMILY[family]}
                add_modules(folder, pooling=pooling, dense=(96, 64) * is_gemma, has_tanh=False)
            if family == "xlm-roberta":
                save(xlm_roberta_like(), folder)
            elif family in ("bert", "nomic_bert"):
                write_wordpiece(folder, ["hello"])
            else:
                write_tokenizer(folder)
            made[family, kind] = folder
        return made[family, kind]

    return make


def written(family, folder, path, kind="F32", pooling=None, **more):
    arch = ARCHITECTURES.get(family, "bert")
    number = POOLINGS[OF_FAMILY[family]] if pooling is None else pooling
    return write_gguf(folder, path, kind, **{f"{arch}__pooling_type": number}, **more)


@pytest.mark.parametrize(("kind", "most"), [("F32", 1e-5), ("F16", 3e-3), ("Q8_0", 0.1)])
@pytest.mark.parametrize("family", OF_FAMILY)
def test_a_file_makes_its_checkpoints_vectors(family, kind, most, checkpoint, tmp_path):
    folder = checkpoint(family)
    path = written(family, folder, tmp_path / "it.gguf", kind)
    config, wanted = TextModelConfig.from_folder(path, "embedding"), computed(folder)
    assert config.pooling == (OF_FAMILY[family],)
    assert config.max_tokens == TextModelConfig.from_folder(folder, "embedding").max_tokens
    assert config.num_bytes >= (path.stat().st_size - 20_000) * (kind != "Q8_0")
    errors = (computed(path) - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(errors.max()) < most


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta"])
def test_a_file_makes_its_checkpoints_scores(family, checkpoint, tmp_path):
    folder = checkpoint(family, "rerank")
    path = write_gguf(folder, tmp_path / "it.gguf")
    found = computed(path, "rerank")
    oracle = load_text_oracle(folder, family, "rerank")
    wanted = torch.tensor([[score(oracle, text)] for text in TEXTS])
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    with pytest.raises(CheckpointError):
        TextModelConfig.from_folder(path, "embedding")


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_file_with_the_rows_of_two_answers_makes_scores(is_tied, tmp_path):
    folder = tmp_path / "it"
    make_text_checkpoint(folder, "qwen3", "rerank", tie_word_embeddings=is_tied)
    write_tokenizer(folder)
    said = {"qwen3__pooling_type": 4, "qwen3__classifier__output_labels": ["yes", "no"]}
    path = write_gguf(folder, tmp_path / "it.gguf", answers=ANSWERS, **said)
    config = TextModelConfig.from_folder(path, "rerank")
    assert config.has_answers
    oracle = load_text_oracle(folder, "qwen3", "rerank")
    wanted = torch.tensor([[score(oracle, text, compared=ANSWERS)] for text in TEXTS])
    assert computed(path, "rerank", [0, 1]) == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    said["qwen3__classifier__output_labels"] = ["no", "yes"]
    other = write_gguf(folder, tmp_path / "other.gguf", answers=ANSWERS, **said)
    with pytest.raises(CheckpointError):
        TextModelConfig.from_folder(other, "rerank")


@pytest.mark.parametrize(
    "change",
    [
        {"pooling": 5},
        {"pooling": 4},
        {"bert__rope__scaling__type": "yarn", "bert__rope__freq_base": 1e4, "family": "nomic_bert"},
        {"bert__embedding_length": 128},
        {"bert__block_count": 5},
        {"general__architecture": "jina-bert-v2"},
        {"tokenizer__ggml__model": "llama"},
    ],
)
def test_what_is_not_served_is_refused(change, checkpoint, tmp_path):
    family = change.pop("family", "bert")
    change = {
        key.replace("bert__", f"{family.replace('_', '-')}__"): v for key, v in change.items()
    }
    path = written(family, checkpoint(family), tmp_path / "it.gguf", **change)
    with pytest.raises(CheckpointError):
        TextModelConfig.from_folder(path, "embedding")


def test_a_score_without_its_pooler_and_vectors_without_dense_layers_are_refused(
    checkpoint, tmp_path
):
    bert = write_gguf(checkpoint("bert", "rerank"), tmp_path / "bert.gguf")
    gemma = written("gemma3_text", checkpoint("gemma3_text"), tmp_path / "gemma.gguf")
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(gemma.read_bytes().replace(b"dense_3.weight", b"dense_4.weight"))
    for path, kind in ((bert, "rerank"), (renamed, "embedding")):
        with pytest.raises(CheckpointError) as error:
            TextModelConfig.from_folder(path, kind)
        assert error.value.where == str(path)


def test_an_encoder_without_a_head_makes_no_scores(checkpoint, tmp_path):
    for pooling in (0, 2):
        path = written("bert", checkpoint("bert"), tmp_path / "it.gguf", pooling=pooling)
        with pytest.raises(CheckpointError):
            TextModelConfig.from_folder(path, "rerank")


def test_a_decoder_that_says_how_it_pools_is_no_chat_model(checkpoint, tmp_path):
    for pooling in (0, 3):
        path = written("qwen3", checkpoint("qwen3"), tmp_path / f"{pooling}.gguf", pooling=pooling)
        if pooling:
            with pytest.raises(CheckpointError):
                Checkpoint.open(path)
        else:
            assert Checkpoint.open(path).config.num_layers == 4
