"""What a daemon says when it is ready, from a service without workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from appliance.daemon.announcement import announcement, sampling_advice, sampling_text
from appliance.observe.frame.protocol import Frame
from engine.units import size_text
from tests.appliance.machine import Machine, make_machine

FOLDER = Path("/models/one")


@pytest.fixture
def machine(tiny_llama: Path, tmp_path: Path) -> Iterator[Machine]:
    yield from make_machine(tiny_llama, tmp_path)


def said(
    machine: Machine, *, has_template: bool = True, is_found: bool = True, **sampling: float
) -> list[str]:
    machine.start_workers()
    frame = msgspec.json.decode(machine.service.frame_json(), type=Frame)
    frame.pools[0].block_bytes = 1 << 20  # so that one block more would be seen
    model = replace(machine.service.model, sampling=sampling)
    return list(
        announcement(
            frame,
            model,
            FOLDER,
            abouts={"decode": ["found at start"]},
            measuring=None,
            is_elastic_static=False,
            has_template=has_template,
            addresses=["/run/penstock.sock"],
            is_found=is_found,
        )
    )


def test_a_pools_size_is_that_of_the_blocks_that_can_be_used(machine: Machine) -> None:
    (line,) = (line for line in said(machine) if line.startswith("  KV pool"))
    (pool,) = machine.router.ledger.pools.values()
    num_usable = pool.num_blocks - 1  # block 0 is padding
    assert f"KV pool {size_text(num_usable * 2**20)};" in line


def test_a_model_that_can_chat_is_tried_in_a_chat(machine: Machine) -> None:
    assert said(machine)[-1].endswith("penstock run 'Hello'")
    assert "--raw" in said(machine, has_template=False)[-1]


def test_a_daemon_that_no_client_looks_for_says_where_it_is(machine: Machine) -> None:
    last = said(machine, is_found=False)[-1]
    assert last.endswith("penstock run --host /run/penstock.sock 'Hello'")


def test_replies_that_nobody_has_said_how_to_sample_come_with_advice(machine: Machine) -> None:
    (line,) = (line for line in said(machine) if "ramble" in line)
    assert "use 0.6" in line
    assert str(FOLDER / "generation_config.json") in line
    told = said(machine, temperature=0.6, top_k=20)
    assert "  Sampling: temperature 0.6, top_k 20 (generation_config.json)" in told
    assert not any("ramble" in line for line in told)


def test_of_a_gguf_file_no_folder_is_spoken_of() -> None:
    path = Path("/models/one-q4.gguf")
    assert "temperature 1" in sampling_text({}, path)
    assert sampling_text({"temperature": 0.5}, path).endswith("(one-q4.gguf)")
    assert "use 0.6" in sampling_advice({}, path)
    assert sampling_advice({"temperature": 0.5}, path) == ""


def test_greedy_by_the_models_own_word_needs_no_advice() -> None:
    assert sampling_advice({"temperature": 0.0}, FOLDER) == ""


def test_what_a_workers_start_has_found_stands_under_it(machine: Machine) -> None:
    lines = said(machine)
    place = next(place for place, line in enumerate(lines) if "decode on" in line)
    assert lines[place + 1] == "    decode: found at start"
