"""A GGUF file of a model of vectors makes those of the checkpoint that it is made of."""

import pytest
import torch

from engine.checkpoint.text_model import TextModelConfig
from engine.errors import CheckpointError
from engine.wire.messages import TextModelSpec
from engine.worker.text_models import load_text_models
from tests.byte_tokenizer import write_tokenizer
from tests.gguf_files import write_gguf
from tests.text_checkpoints import add_modules, make_text_checkpoint
from tests.wordpiece_tokenizer import write_wordpiece

POOLINGS = {"mean": 1, "cls": 2, "lasttoken": 3}
OF_FAMILY = {"bert": "cls", "nomic_bert": "mean", "qwen3": "lasttoken"}
TEXTS = [[2, 7, 9, 200, 3], [2, *range(10, 90), 3]]


def vectors(path):
    spec = TextModelSpec("it", str(path), "embedding", "float32", None)
    model = load_text_models([spec], torch.device("cpu"), lambda: None)["it"]
    with torch.inference_mode():
        *_, found = model.compute(TEXTS)
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            folder = make_text_checkpoint(tmp_path_factory.mktemp("gguf") / family, family)
            add_modules(folder, pooling={"pooling_mode": OF_FAMILY[family]})
            write_tokenizer(folder) if family == "qwen3" else write_wordpiece(folder, ["hello"])
            made[family] = folder
        return made[family]

    return make


def written(family, folder, path, kind="F32", pooling=None, **more):
    arch = family.replace("_", "-")
    number = POOLINGS[OF_FAMILY[family]] if pooling is None else pooling
    return write_gguf(folder, path, kind, **{f"{arch}__pooling_type": number}, **more)


@pytest.mark.parametrize(("kind", "most"), [("F32", 1e-5), ("F16", 3e-3), ("Q8_0", 0.1)])
@pytest.mark.parametrize("family", OF_FAMILY)
def test_a_file_makes_its_checkpoints_vectors(family, kind, most, checkpoint, tmp_path):
    folder = checkpoint(family)
    path = written(family, folder, tmp_path / "it.gguf", kind)
    config, wanted = TextModelConfig.from_folder(path, "embedding"), vectors(folder)
    assert config.pooling == (OF_FAMILY[family],)
    assert config.max_tokens == 512
    assert config.num_bytes >= (path.stat().st_size - 20_000) * (kind != "Q8_0")
    errors = (vectors(path) - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(errors.max()) < most


@pytest.mark.parametrize(
    "change",
    [
        {"pooling": 4},
        {"bert__rope__scaling__type": "yarn", "bert__rope__freq_base": 1e4, "family": "nomic_bert"},
        {"bert__embedding_length": 128},
        {"bert__block_count": 5},
        {"general__architecture": "jina-bert-v2"},
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


def test_an_encoder_without_a_head_makes_no_scores(checkpoint, tmp_path):
    path = written("bert", checkpoint("bert"), tmp_path / "it.gguf")
    with pytest.raises(CheckpointError):
        TextModelConfig.from_folder(path, "rerank")
