"""Models read by the process with limits: the same as here, or an error of that model alone."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice, product

import psutil
import pytest

from appliance.hub.names import STARTER_FOLDER
from engine.checkpoint.checkpoint import Checkpoint, expected_shapes
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError, Overran
from engine.system.python_child import python_command
from engine.system.threads import HELPERS
from engine.text import read_models, reading
from engine.text.answers import Answer, send_answer
from engine.text.reading import READER, Reader
from engine.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf, write_pieces
from tests.hostile_models import (
    HOSTILE,
    HOSTILE_TOKENIZERS,
    SLOW_AT_LOAD,
    large_vocabulary,
    nested_config,
    sentence_piece_bomb,
    slow_tokenizer,
)
from tests.protobuf_fields import field
from tests.running import running

pytestmark = pytest.mark.usefixtures("in_time")

FAMILIES = ("phi3", "gemma4_text", "gpt_oss", "qwen3_5_moe_text")
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 6,
    "long_factor": [2.0] * 6,
    "original_max_position_embeddings": 256,
}
PROGRAM = (
    "import engine.reader.__main__ as reader, engine.reader.jobs as jobs, time\n"
    "reader.MODEL_CPU_S = 0.5\n"
    "jobs.JOBS['config'] = lambda path: time.sleep(60)\n"
    "reader.main()"
)
"""The process with less time; reading a configuration hangs."""

PEAK = """
import sys
from pathlib import Path
from engine.errors import CheckpointError
from engine.text import read_models
try:
    getattr(read_models, sys.argv[1])(Path(sys.argv[2]))
except CheckpointError:
    with open("/proc/self/status") as file:
        print(*(line.split()[1] for line in file if line.startswith("VmHWM")))
"""
"""Reads a model; says the most kilobytes that this process had, if the model is refused."""


@pytest.fixture
def short():
    reader = Reader(python_command("-c", PROGRAM))
    yield reader
    reader.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_process_answers_is_what_reading_here_gives(tmp_path, family):
    more = {"rope_parameters": LONG | {"rope_theta": 10000.0}} if family == "phi3" else {}
    paths = [make_checkpoint(tmp_path / family, family, **more)]
    (paths[0] / "generation_config.json").write_text('{"top_k": 20, "temperature": 0.5}')
    if family != "phi3":
        paths.append(write_gguf(paths[0], tmp_path / "m.gguf"))
    for path in paths:
        here, there = Checkpoint.open(path), read_models.read_checkpoint(path)
        assert repr(there) == repr(here)
        assert there == here
        assert there.config.family is here.config.family
        assert read_models.read_config(path) == here.config
        ours, theirs = Tokenizer.from_folder(path), read_models.read_tokenizer(path)
        text = "Once upon a time, \n\t12 é中 [/INST]"
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.chat_template.tool_source == ours.chat_template.tool_source


def test_an_error_keeps_its_words_its_file_and_its_hint(tmp_path):
    folder = tmp_path / os.fsdecode(b"odd \xff name")
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(CheckpointError) as here:
        Checkpoint.open(folder)
    with pytest.raises(CheckpointError) as there:
        read_models.read_checkpoint(folder)
    assert there.value.args == here.value.args
    assert there.value.exit_code == 78


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_headers_that_claim_or_hold_too_much_are_an_error_of_that_model(tmp_path, make):
    with pytest.raises(CheckpointError) as refused:
        read_models.read_checkpoint(make(tmp_path / "m"))
    assert str(tmp_path) in refused.value.where
    assert read_models.read_config(STARTER_FOLDER).num_layers > 0


@pytest.mark.parametrize("make", HOSTILE_TOKENIZERS.values(), ids=HOSTILE_TOKENIZERS)
def test_tokenizers_that_take_too_much_are_an_error_of_that_model(tmp_path, make):
    with pytest.raises(CheckpointError) as refused:
        read_models.read_tokenizer(make(tmp_path / "m"))
    assert str(tmp_path) in refused.value.where


@pytest.mark.parametrize(
    ("read", "make"),
    [
        ("read_checkpoint", nested_config),
        ("read_tokenizer", large_vocabulary),
    ],
)
def test_what_a_model_holds_takes_no_memory_of_the_process_that_asks(tmp_path, read, make):
    command = [sys.executable, "-c", PEAK, read, str(make(tmp_path / "m"))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 0 < int(ended.stdout) < 200_000, ended.stderr


@pytest.mark.parametrize("expression", SLOW_AT_LOAD.values(), ids=SLOW_AT_LOAD)
def test_a_tokenizer_that_takes_too_long_is_refused_with_its_expressions(
    tmp_path, short, monkeypatch, expression
):
    monkeypatch.setattr(read_models, "READER", short)
    folder = slow_tokenizer(tmp_path / "m", expression)
    with pytest.raises(CheckpointError, match="takes too much time") as refused:
        read_models.read_tokenizer(folder)
    assert f"'{expression}'" in refused.value.what
    assert str(folder) in refused.value.where
    assert read_models.read_tokenizer(STARTER_FOLDER).encode("a")


def test_half_a_character_is_an_error_of_its_model(tmp_path):
    folder, before = tmp_path / "m", READER.failures["error"]
    folder.mkdir()
    for path in STARTER_FOLDER.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "\ud800"}))
    with pytest.raises(CheckpointError):
        read_models.read_tokenizer(folder)
    assert READER.failures["error"] == before


def test_reading_that_never_ends_is_ended(tmp_path, short):
    path = os.fsencode(sentence_piece_bomb(tmp_path / "m"))
    with pytest.raises(Overran):
        short.read_model("tokenizer", path, False)
    assert dict(short.failures) == {"time": 1}
    assert short.num_restarts == 0
    assert short.read("constraint", "regex", "a", True)


def test_a_disk_that_hangs_costs_its_own_read_alone(short, monkeypatch):
    assert short.read_model("checkpoint", os.fsencode(STARTER_FOLDER))  # its start may take longer
    monkeypatch.setattr(reading, "LONGEST_S", 0.5)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(short.read_model, "config", b"m")
        while {*HELPERS.values()} <= {short.pid}:
            time.sleep(0.01)
        assert short.read_model("checkpoint", os.fsencode(STARTER_FOLDER))
        assert isinstance(asked.exception(), Overran)
    assert not HELPERS
    assert short.num_restarts == 0


def test_a_process_that_gets_no_core_is_waited_for(monkeypatch):
    looks, (ours, theirs) = count(), socket.socketpair()

    def used_s(_):
        if next(looks) == 20:
            send_answer(theirs, Answer.DONE, "{}")
        return 0.0  # as if it were not run

    monkeypatch.setattr(reading, "LONGEST_S", 0.01)
    monkeypatch.setattr(reading, "process_time_s", used_s)
    with ours, theirs, running("while True: pass") as helper:
        assert reading._of_helper(ours, helper.pid) == (Answer.DONE, b"{}")


def test_what_reads_a_model_ends_with_the_process_that_asked():
    script = (
        "import sys, threading, time; from engine.text.reading import Reader\n"
        "from engine.system.threads import HELPERS\n"
        "from engine.system.python_child import python_command\n"
        "reader = Reader(python_command('-c', sys.argv[1]))\n"
        "threading.Thread(target=reader.read_model, args=('config', b'm'), daemon=True).start()\n"
        "while {*HELPERS.values()} <= {reader.pid}: time.sleep(0.01)\n"
        "print(*HELPERS.values(), flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as daemon:
        process = psutil.Process(int(daemon.stdout.readline()))
        daemon.kill()
    process.wait(10)


def test_a_model_of_many_tensors_is_read_within_its_memory(tmp_path):
    """As the largest published ones: most of their tensors are experts'."""
    config = {"model_type": "qwen3_moe", "num_experts": 1024, "num_hidden_layers": 40}
    config |= {"hidden_size": 64, "num_attention_heads": 4, "moe_intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    entries, end = {}, 0
    for name, shape in expected_shapes(ModelConfig.from_folder(tmp_path)):
        start, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(weights, 8 + len(header) + end)
    assert len(entries) > 120_000
    assert len(read_models.read_checkpoint(tmp_path).tensors) == len(entries)


@pytest.mark.parametrize("has_gguf", [True, False])
def test_a_large_vocabulary_of_pieces_is_read_within_its_memory(tmp_path, has_gguf):
    """As Gemma's, with several pairs for each piece, which no file lists."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(each) for size in (1, 2, 3) for each in product(letters, repeat=size)]
    words += ["".join(each) for each in islice(product(letters, repeat=4), 80_000)]
    if has_gguf:
        path = write_pieces(tmp_path / "m.gguf", words)
    else:
        path = tmp_path
        pieces = b"".join(field(1, field(1, word.encode())) for word in ("<unk>", *words))
        (path / "tokenizer.model").write_bytes(pieces + field(2, field(3, 2)))
    assert read_models.read_tokenizer(path).vocab_size == len(words) + 1


def test_a_reader_that_is_killed_reads_the_model_once_more():
    READER.start()
    os.kill(READER.pid, signal.SIGKILL)
    assert read_models.read_config(STARTER_FOLDER).num_layers > 0
