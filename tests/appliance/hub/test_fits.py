"""What models need and where they fit, for repositories as they are published."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.hub import fits
from engine.checkpoint.model_config import ModelConfig
from tests.appliance.cli_process import penstock, user_environ
from tests.appliance.hub.recorded import CONFIGS, GGUF, repository
from tests.worlds.hub_server import Hub, Repository, serving

GIB = 1 << 30
GPU_24 = fits.ServingPlace("24", 24 * GIB, is_gpu=True)
TWO_H100 = fits.ServingPlace("2x80", 80 * GIB, is_gpu=True, num_devices=2)
SMALL_BOX = fits.ServingPlace("box", 16 * GIB, is_gpu=False)


def need(folder: Path, name: str) -> fits.MemoryNeed:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name][0]))
    return fits.need_of(ModelConfig.from_folder(folder))


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_that_the_models_page_says(tmp_path: Path, name: str) -> None:
    wanted = need(tmp_path, name)
    assert wanted.num_parameters == CONFIGS[name][1]
    assert wanted.weights_bytes == 2 * CONFIGS[name][1]


def test_kv_grows_with_the_length(tmp_path: Path) -> None:
    rows = fits.kv_rows(need(tmp_path, "Qwen/Qwen3-8B"))
    assert rows == {
        "4,096 tokens": 4096 * 147_456,
        "32,768 tokens": 32_768 * 147_456,
        "40,960 tokens": 40_960 * 147_456,
    }


@pytest.mark.parametrize(
    ("name", "place", "verdict"),
    [
        ("Qwen/Qwen3-0.6B", SMALL_BOX, "yes"),
        ("Qwen/Qwen3-8B", GPU_24, "yes"),
        ("meta-llama/Llama-3.1-8B-Instruct", GPU_24, "up to 57,"),
        ("Qwen/Qwen3-8B", SMALL_BOX, "slowly: "),
        ("Qwen/Qwen3-8B", fits.ServingPlace("box", 2 << 30, is_gpu=False), "no: "),
        ("Qwen/Qwen3-32B", GPU_24, "no: "),
        ("Qwen/Qwen3-32B", TWO_H100, "yes"),
        ("meta-llama/Llama-3.3-70B-Instruct", TWO_H100, "no: "),
    ],
)
def test_verdicts(tmp_path: Path, name: str, place: fits.ServingPlace, verdict: str) -> None:
    row = fits.rows(need(tmp_path, name), [place])[0]
    assert row["verdict"].startswith(verdict)


def test_recurrent_states_count_once_whatever_the_length(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text"}))
    wanted = fits.need_of(ModelConfig.from_folder(tmp_path))
    tail, state = 3 * (2 * 16 * 128 + 32 * 128), 32 * 128 * 128
    assert wanted.state_bytes == 2 * 24 * (tail + state) * 4
    assert wanted.kv_bytes_per_token == 8 * 2 * 4 * 256 * 2
    rows = fits.kv_rows(wanted)
    assert rows["4,096 tokens"] == 4096 * wanted.kv_bytes_per_token + wanted.state_bytes
    assert fits.of_a_token(wanted)["state_bytes_of_a_request"] == wanted.state_bytes


def test_recurrent_states_take_room_from_the_longest_request(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text"}))
    wanted = fits.need_of(ModelConfig.from_folder(tmp_path))
    assert wanted.kv_bytes_per_token is not None
    least = fits.GPU_OVERHEAD_BYTES + wanted.weights_bytes + wanted.state_bytes
    place = fits.ServingPlace("x", least + 4096 * wanted.kv_bytes_per_token, is_gpu=True)
    assert fits.rows(wanted, [place])[0]["kv_tokens"] == 4096


def test_a_quantised_file_has_to_leave_memory_for_recurrent_states(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text"}))
    wanted = fits.need_of(ModelConfig.from_folder(tmp_path))
    files = [("model-Q8_0.gguf", 5 * GIB), ("model-Q4_K_M.gguf", 5 * GIB - wanted.state_bytes)]
    least = fits.LEAST_TOKENS * (wanted.kv_bytes_per_token or 0)
    largest = fits.need_of_file(*files[0])
    box = fits.ServingPlace("box", 0, is_gpu=False)
    memory = least - fits.spare_bytes(largest, box)  # for the larger file and KV alone
    assert fits.smaller(wanted, replace(box, memory_bytes=memory), files) == "model-Q4_K_M.gguf"


def test_a_quantised_file_that_would_fit_is_named(tmp_path: Path) -> None:
    eight = need(tmp_path, "Qwen/Qwen3-8B")
    box = fits.ServingPlace("box", 13 * GIB // 2, is_gpu=False)
    assert fits.rows(eight, [box], list(GGUF.items()))[0]["quantised"] == "Qwen3-8B-Q4_K_M.gguf"
    assert fits.rows(eight, [box])[0]["quantised"] == "about 4.6 GiB as Q4_K_M"
    larger = fits.ServingPlace("box", 11 * GIB, is_gpu=False)
    assert fits.rows(eight, [larger])[0]["quantised"] == "about 8.1 GiB as Q8_0"
    assert (
        fits.rows(eight, [fits.ServingPlace("tiny", 2 * GIB, is_gpu=False)])[0]["quantised"] is None
    )
    assert fits.rows(eight, [TWO_H100])[0]["quantised"] is None
    short = fits.ServingPlace("8", 17 * GIB // 2, is_gpu=True)  # where its embedding is widened
    assert fits.rows(eight, [short], list(GGUF.items()))[0]["quantised"] == "Qwen3-8B-Q4_K_M.gguf"


def test_a_quantised_file_stays_so_and_its_embedding_is_widened_on_a_gpu() -> None:
    size = GGUF["Qwen3-8B-Q4_K_M.gguf"]
    need = fits.need_of_file("Qwen3-8B-Q4_K_M.gguf", size)
    here, there = (row["weights_bytes"] for row in fits.rows(need, [SMALL_BOX, GPU_24]))
    assert size < here < 1.05 * size
    assert here < there < 0.6 * 16.4e9  # less than two bytes a parameter
    unknown = fits.need_of_file("x.gguf", size)
    assert unknown.bytes_at(GPU_24) > there
    assert fits.need_of_file("x-BF16.gguf", size).bytes_at(SMALL_BOX) == size


def test_files_that_are_much_smaller_than_the_weights_are_quantised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen/Qwen3-8B"][0]))
    config = ModelConfig.from_folder(tmp_path)
    whole = fits.need_of(config).weights_bytes
    assert fits.need_of_files(config, whole).bytes_at(SMALL_BOX) == whole
    assert fits.need_of_files(config, whole // 2).bytes_at(SMALL_BOX) == whole // 2
    on_gpu = fits.need_of_files(config, whole // 2).bytes_at(GPU_24)
    assert on_gpu == whole // 2 + 151_936 * 4096 * 2
    need = fits.need_of_file("gpt-oss-20b-MXFP4.gguf", 12_100_000_000)
    assert need.bytes_at(SMALL_BOX) < 12_400_000_000


def test_a_little_less_memory_never_fits_more(tmp_path: Path) -> None:
    eight = need(tmp_path, "Qwen/Qwen3-8B")
    tokens = [
        fits.rows(eight, [fits.ServingPlace("x", n * GIB, is_gpu=True)])[0]["kv_tokens"]
        for n in range(8, 90)
    ]
    assert tokens == sorted(tokens)


@pytest.fixture
def hub() -> Iterator[Hub]:
    published = {name.replace("/", "__"): repository(name) for name in CONFIGS}
    published["Qwen__Qwen3-8B-GGUF"] = Repository({}, listed=GGUF)
    with serving(**published) as hub:
        yield hub


def shown(environ: dict[str, str], *arguments: str) -> dict[str, Any]:
    ended = penstock(environ, "models", "show", *arguments, "-o", "json")
    assert ended.returncode == 0, ended.stderr
    content: dict[str, Any] = json.loads(ended.stdout)
    return content


def test_show_says_it_before_anything_is_downloaded(tmp_path: Path, hub: Hub) -> None:
    environ = user_environ(tmp_path) | {"HF_ENDPOINT": hub.url}
    about = shown(environ, "Qwen/Qwen3-32B", "--gpu", "24GiB", "--gpu", "2x80GiB")
    assert about["num_parameters"] == 32_762_123_264
    assert about["download_bytes"] == about["size_bytes"] == 2 * 32_762_123_264
    here, small, large = about["fits"]
    assert here["place"].startswith("this machine")
    assert small["verdict"].startswith("no: ")
    assert small["quantised"] == "about 18.5 GiB as Q4_K_M"
    assert large["verdict"] == "yes"
    assert not (tmp_path / ".cache").exists()
    quantised = shown(environ, "Qwen/Qwen3-8B-GGUF:Q6_K", "--gpu", "24GiB")
    assert quantised["size_bytes"] == GGUF["Qwen3-8B-Q6_K.gguf"]
    assert quantised["fits"][1]["weights_bytes"] > 1.3 * quantised["size_bytes"]
    page = penstock(environ, "models", "show", "Qwen/Qwen3-8B", "--gpu", "24GiB").stdout
    assert "a GPU of 24.0 GiB" in page
    assert "MOST KV TOKENS" in page, "a start takes a pool of less"


def test_doctor_says_it_of_a_model_that_is_not_here(tmp_path: Path, hub: Hub) -> None:
    environ = user_environ(tmp_path) | {"HF_ENDPOINT": hub.url}
    ended = penstock(environ, "doctor", "--model", "meta-llama/Llama-3.1-8B-Instruct")
    assert "15.0 GiB to download" in ended.stdout


@pytest.mark.parametrize("size", ["many", "0x80GiB", "x", "2x"])
def test_a_gpu_that_is_no_size(tmp_path: Path, size: str) -> None:
    ended = penstock(user_environ(tmp_path), "models", "show", "owner/name", "--gpu", size)
    assert ended.returncode == 2
    assert "24GiB" in ended.stderr
