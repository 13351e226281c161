"""Placements over recorded machines: what is chosen, why, and what is refused with what would work.

To accept a change: PENSTOCK_UPDATE_GOLDEN=1 pytest tests/appliance/fleet/test_placing.py, then
read the diff of tests/appliance/golden/place-*.txt.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.cli.doctor import drawing
from appliance.configuration.config import ServeConfig
from appliance.configuration.setting_kinds import parse_place
from appliance.devices.inventory import Inventory, Node, read_nodes
from appliance.fleet import boot
from appliance.fleet.placement import placement_lines
from appliance.fleet.placer import (
    MeasuredModel,
    PairTimes,
    PlacedModel,
    Placer,
    StepMemory,
    is_two_better,
    key_of,
    pair_times,
    programme,
)
from engine.errors import ConfigError
from engine.folder.checkpoint import Checkpoint
from engine.kernels.attention_backends import Machine
from engine.wire.messages import RehearsedStep
from tests.appliance.inventories import machines
from tests.appliance.large_model import make_large

GOLDEN = Path(__file__).parents[1] / "golden"
TORCH, MACHINE = "2.11.0+cu130", Machine((2, 11), {"flash_attn": "no flash_attn"})
SMALL = {"num_hidden_layers": 4, "vocab_size": 32000}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "8b": Checkpoint.open(make_large(folder / "8b")),
        "1b": Checkpoint.open(make_large(folder / "1b", **SMALL)),
    }


@pytest.fixture
def inventory_of(tmp_path: Path) -> Any:
    return lambda name: machines()[name].read(tmp_path / name)


def placed(checkpoint: Checkpoint, inventory: Inventory, **settings: Any) -> PlacedModel:
    settings = settings | {"place": parse_place(settings.get("place", "auto"))}
    config = ServeConfig(Path("socket"), Path("state"), **settings)
    return Placer(config, checkpoint, inventory, TORCH, MACHINE).place("bfloat16")


@pytest.mark.parametrize("name", machines())
def test_what_is_there_and_what_goes_where_is_said_of_every_machine(
    name: str, models: dict[str, Checkpoint], inventory_of: Any
) -> None:
    inventory = inventory_of(name)
    lines = ["penstock devices", *drawing(inventory)]
    for model, checkpoint in models.items():
        found = placed(checkpoint, inventory)
        lines += ["", f"serve --check-config, {model}"]
        lines += [found.about] if found.about else []
        lines += placement_lines(found.placement)
    text, path = "".join(f"{line}\n" for line in lines), GOLDEN / f"place-{name}.txt"
    if os.environ.get("PENSTOCK_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", machines())
def test_every_placement_keeps_what_placements_promise(
    name: str, models: dict[str, Checkpoint], inventory_of: Any
) -> None:
    inventory = inventory_of(name)
    placement = placed(models["1b"], inventory).placement
    cores = [cpu for plan in placement.workers for cpu in plan.cpus]
    assert len(set(cores)) == len(cores)
    assert set(cores) <= set(inventory.cores)
    gpus = [plan.gpu.name for plan in placement.workers if plan.gpu is not None]
    assert len(set(gpus)) == (1 if placement.is_trial else len(gpus))
    for plan in placement.workers:
        pool = placement.places.pool_by_name[plan.pool]
        if plan.gpu is not None:
            assert pool.home == ("decode" if placement.is_trial else plan.name)
            num_bytes = pool.num_blocks * placement.block_bytes + models["1b"].num_bytes
            assert num_bytes < plan.gpu.memory_bytes
            assert set(plan.cpus) <= set(inventory.cores_near(plan.gpu))


def test_between_pairs_that_are_joined_best_stand_prefill_and_decode(
    models: dict[str, Checkpoint], inventory_of: Any
) -> None:
    machine = inventory_of("4xa100-uneven")
    plans = placed(models["8b"], machine, place="1x1").placement.workers
    assert {plan.gpu.name for plan in plans if plan.gpu} in ({"gpu0", "gpu1"}, {"gpu2", "gpu3"})
    both = placed(models["8b"], machine, place="2x2").placement
    by_name = {plan.name: plan.gpu for plan in both.workers if plan.gpu is not None}
    for name in ("prefill0", "prefill1"):
        links = [machine.link(by_name[name], by_name[other]) for other in ("decode0", "decode1")]
        assert sorted(link.num_nvlinks for link in links) == [0, 12]


@pytest.mark.parametrize(
    ("place", "workers", "transport"),
    [
        ("prefill=cuda:1 decode=cuda:0", ["gpu1", "gpu0"], "peer"),
        ("prefill=gpu0 decode=GPU-15eed", ["gpu0", "gpu1"], "peer"),
        ("prefill=cuda:0 decode=0-3", ["gpu0", "cpu 0-3"], "peer"),
        ("prefill=0-3 decode=cuda:0", ["cpu 0-3", "gpu0"], "shm"),
        ("prefill=cuda:0 decode=cuda:1,0-3", ["gpu0", "gpu1", "cpu 0-3"], "peer"),
        ("prefill=cuda:0 decode=cuda:0", ["gpu0", "gpu0"], "alias"),
        ("prefill=cuda:1,4 decode=cuda:0", ["gpu1", "cpu 4", "gpu0"], "peer+shm"),
    ],
)
def test_workers_are_where_they_are_put_by_hand(
    place: str,
    workers: list[str],
    transport: str,
    models: dict[str, Checkpoint],
    inventory_of: Any,
) -> None:
    placement = placed(models["1b"], inventory_of("2xh100-nvlink"), place=place).placement
    assert [plan.device for plan in placement.workers] == workers
    assert placement.places.transport == transport
    on_cores = {cpu for plan in placement.workers if plan.gpu is None for cpu in plan.cpus}
    on_gpus = {cpu for plan in placement.workers if plan.gpu is not None for cpu in plan.cpus}
    assert not on_cores & on_gpus


def test_instances_are_put_by_uuid(models: dict[str, Checkpoint], inventory_of: Any) -> None:
    machine = inventory_of("h100-mig-2x3g.40gb")
    place = "prefill=MIG-01c0ffee-5eed decode=MIG-00c0ffee-5eed"
    placement = placed(models["8b"], machine, place=place).placement
    assert [plan.device for plan in placement.workers] == ["gpu0/mig1", "gpu0/mig0"]
    assert placement.places.transport == "shm"


def test_of_several_divided_boards_pairs_stand_on_one_each(
    models: dict[str, Checkpoint], inventory_of: Any
) -> None:
    machine = inventory_of("2xh100-mig-2x3g.40gb")
    both = placed(models["8b"], machine).placement
    by_board: dict[str, list[str]] = {}
    for plan in both.workers:
        assert plan.gpu is not None
        by_board.setdefault(plan.gpu.board, []).append(plan.name.rstrip("01"))
    assert list(by_board.values()) == [["prefill", "decode"]] * 2
    one = placed(models["8b"], machine, place="1x1").placement
    assert len({plan.gpu.board for plan in one.workers if plan.gpu}) == 1
    place = "prefill=MIG-00c0ffee-5eed decode=MIG-11c0ffee-5eed"
    by_hand = placed(models["8b"], machine, place=place).placement
    assert [plan.device for plan in by_hand.workers] == ["gpu0/mig0", "gpu1/mig1"]
    assert by_hand.places.transport == "shm"
    nodes = [set(node.cores) for node in machine.nodes]
    assert [set(plan.cpus) <= nodes[at] for at, plan in enumerate(by_hand.workers)] == [True] * 2


TIMES = PairTimes(4096, 8, 210.0, 9.0, 222.0, 14.0)
"""Of two processes that compute at once."""
TURNS = PairTimes(4096, 8, 210.0, 9.0, 410.0, 19.0)
"""Of two that take turns."""


@pytest.mark.parametrize(
    ("known", "workers", "why"),
    [
        (MeasuredModel(), ["prefill", "decode"], "they are timed at this start"),
        (
            MeasuredModel(pair=TIMES),
            ["prefill", "decode"],
            "219 ms in one worker and 14 ms in a second",
        ),
        (MeasuredModel(pair=TURNS), ["colocated"], "at 53% of the rate"),
        (MeasuredModel(is_trying=True), ["colocated"], "that start has failed"),
    ],
)
def test_one_gpu_has_one_worker_or_two_by_what_was_timed_there(
    known: MeasuredModel,
    workers: list[str],
    why: str,
    models: dict[str, Checkpoint],
    inventory_of: Any,
    tmp_path: Path,
) -> None:
    machine = inventory_of("2xh100-one-hidden")
    gpu = next(gpu for gpu in machine.gpus if gpu.obstacle is None)
    StepMemory(tmp_path, key_of(models["8b"], "bfloat16", gpu)).write(known)

    def found(model: str, **settings: Any) -> Any:
        config = ServeConfig(Path("socket"), tmp_path, **settings)
        return Placer(config, models[model], machine, TORCH, MACHINE).place("bfloat16").placement

    placement = found("8b")
    assert placement.places.names == workers
    assert placement.is_trial == (known == MeasuredModel())
    assert why in placement.reasons[0]
    assert found("1b").is_trial  # of another model nothing is known
    asked = [found("8b", roles=roles) for roles in ("static", "colocated")]
    assert [len(each.workers) for each in asked] == [2, 1]
    assert not any(each.is_trial for each in asked)


def h200_steps(prompt_ms: float, decode_ms: float) -> list[RehearsedStep]:
    """As eight of them might report: chunks of prompts, and batches of single tokens."""
    prompts = [
        RehearsedStep(1, n, before, prompt_ms * n / 4096 * (1 + before / 80000))
        for n in (16, 256, 1024, 4096)
        for before in (0, 2048, 8192)
    ]
    decodes = [
        RehearsedStep(n, 1, before, decode_ms * (1 + n * before / 4e5))
        for n in (1, 4, 16)
        for before in (64, 512, 2048)
    ]
    return prompts + decodes  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "num_prefill", "why"),
    [
        ([], 3, "is estimated to need"),
        (h200_steps(prompt_ms=100.0, decode_ms=5.0), 3, "was measured to need"),
        (h200_steps(prompt_ms=900.0, decode_ms=5.0), 6, "was measured to need"),
        (h200_steps(prompt_ms=20.0, decode_ms=9.0), 1, "was measured to need"),
        (h200_steps(prompt_ms=20.0, decode_ms=9.0)[:3], 3, "is estimated to need"),
    ],
)
def test_of_several_gpus_as_many_prefill_as_step_times_say(
    steps: list[RehearsedStep],
    num_prefill: int,
    why: str,
    models: dict[str, Checkpoint],
    inventory_of: Any,
    tmp_path: Path,
) -> None:
    machine = inventory_of("8xh200-nvswitch")
    memory = StepMemory(tmp_path, key_of(models["8b"], "bfloat16", machine.gpus[0]))
    memory.write(MeasuredModel(steps=steps))
    config = ServeConfig(Path("socket"), tmp_path)
    placement = Placer(config, models["8b"], machine, TORCH, MACHINE).place("bfloat16").placement
    assert len(placement.places.playing("prefill")) == num_prefill
    assert why in placement.reasons[0]


def test_a_memory_of_steps_that_cannot_be_read_is_none(
    models: dict[str, Checkpoint], inventory_of: Any, tmp_path: Path
) -> None:
    gpu = inventory_of("rtx4090").gpus[0]
    memory = StepMemory(tmp_path, key_of(models["1b"], "bfloat16", gpu))
    assert memory.read() == MeasuredModel()
    (tmp_path / "step-times.json").write_text('{"a": [')
    assert memory.read() == MeasuredModel()
    memory.write(MeasuredModel(pair=TIMES))
    assert memory.read().pair == TIMES
    other = StepMemory(tmp_path, key_of(models["8b"], "bfloat16", gpu))
    other.write(MeasuredModel(is_trying=True))
    assert memory.read().pair == TIMES


def test_a_whole_gpu_and_a_part_of_another_are_placed_by_hand(
    models: dict[str, Checkpoint], inventory_of: Any
) -> None:
    machine = inventory_of("2xh100-one-divided")
    place = "prefill=gpu0 decode=gpu1/mig0,gpu1/mig1"
    placement = placed(models["8b"], machine, place=place).placement
    assert [plan.device for plan in placement.workers] == ["gpu0", "gpu1/mig0", "gpu1/mig1"]
    assert placement.places.transport == "shm"


@pytest.mark.parametrize(
    ("machine", "settings", "what", "hint"),
    [
        ("2xh100-nvlink", {"place": "prefill=cuda:0 decode=cuda:2"}, "no cuda:2", "gpu0, gpu1"),
        ("2xh100-nvlink", {"place": "2x1"}, "3 workers, but 2 GPUs", "of its own"),
        ("rtx4090", {"place": "2x1", "devices": "gpu0"}, "more workers than gpu0", "MIG"),
        ("rtx4090", {"transport": "peer", "model": "1b"}, "share its memory", "leave it out"),
        ("2xh100-nvlink", {"place": "prefill=cuda:0,cuda:0 decode=cuda:1"}, "several workers",
         "its own"),
        ("2xh100-nvlink", {"place": "prefill=cuda:0 decode=cuda:1", "devices": "gpu0"},
         "--place names cuda:0, cuda:1", "one of them"),
        ("2xh100-one-hidden", {"place": "prefill=gpu0 decode=gpu1"}, "CUDA_VISIBLE_DEVICES",
         "name another"),
        ("2xrtx4090-no-p2p", {"transport": "peer"}, "no P2P", "there is shm"),
        ("2xh100-nvlink", {"transport": "alias"}, "do not share memory", "there is peer"),
        ("h100-mig-7x1g.10gb", {"devices": "gpu0/mig3"}, "gpu0/mig3 has 9.8 GiB",
         "a larger MIG instance"),
        ("laptop", {"place": "prefill=cuda:0 decode=0-3"}, "gpu0 has 4.0 GiB", "--devices cpu"),
        ("none", {"place": "prefill=cuda:0 decode=0-3"}, "no cuda:0", "no GPU with a driver"),
        ("2xh100-nvlink", {"kv_memory_bytes": 200 << 30}, "bytes of KV memory", "divided among"),
        ("2xh100-nvlink", {"kv_memory_bytes": 4 << 20}, "KV blocks", "give at least"),
    ],
)  # fmt: skip
def test_what_cannot_be_says_why_and_what_could(
    machine: str,
    settings: dict[str, Any],
    what: str,
    hint: str,
    models: dict[str, Checkpoint],
    inventory_of: Any,
) -> None:
    checkpoint = models[settings.pop("model", "8b")]
    with pytest.raises(ConfigError) as refused:
        placed(checkpoint, inventory_of(machine), **settings)
    assert what in refused.value.what
    assert hint in refused.value.hint


@pytest.mark.parametrize("place", ["auto", "prefill=cuda:0 decode=cuda:1"])
def test_kv_as_codes_of_a_byte_is_refused_on_gpus_and_placed_on_cores_beside_them(
    place: str, models: dict[str, Checkpoint], inventory_of: Any
) -> None:
    machine = inventory_of("2xh100-nvlink")
    with pytest.raises(ConfigError, match="KV is kept as int8 on CPUs only") as refused:
        placed(models["1b"], machine, kv_dtype="int8", place=place)
    assert "--devices cpu" in refused.value.hint
    on_cores = placed(models["1b"], machine, kv_dtype="int8", devices="cpu").placement
    assert on_cores.block_bytes == models["1b"].config.kv_block_bytes(64, "int8")


def test_a_dtype_that_cores_have_no_kernels_for_is_not_mixed(
    models: dict[str, Checkpoint], inventory_of: Any
) -> None:
    machine = inventory_of("rtx4090")
    turing = replace(machine, gpus=(replace(machine.gpus[0], capability=(7, 5)),))
    config = ServeConfig(
        Path("socket"), Path("state"), place=parse_place("prefill=cuda:0 decode=0-3")
    )
    with pytest.raises(ConfigError, match="one dtype") as refused:
        Placer(config, models["1b"], turing, TORCH, MACHINE).place()
    assert "--dtype float32" in refused.value.hint


def test_blocks_suit_the_attention_of_every_gpu(
    models: dict[str, Checkpoint], inventory_of: Any
) -> None:
    machine = inventory_of("2xh100-nvlink")
    old = replace(machine, gpus=(machine.gpus[0], replace(machine.gpus[1], capability=(7, 5))))
    config = ServeConfig(
        Path("socket"), Path("state"), place=parse_place("prefill=cuda:0 decode=cuda:1")
    )
    placer = Placer(config, models["1b"], old, TORCH, Machine((2, 11), {}))
    assert placer.place("bfloat16").placement.block_size == 256


def test_without_torch_for_cuda_cores_serve_and_that_is_said(
    models: dict[str, Checkpoint], inventory_of: Any
) -> None:
    config = ServeConfig(Path("socket"), Path("state"))
    machine = inventory_of("2xh100-nvlink")
    found = Placer(config, models["1b"], machine, "2.13.0+cpu", MACHINE).place()
    assert found.about is not None
    assert "gpu0, gpu1 not used" in found.about
    assert all(plan.gpu is None for plan in found.placement.workers)


def test_the_check_of_a_configuration_says_where_everything_goes(
    models: dict[str, Checkpoint],
    inventory_of: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = inventory_of("2xh100-nvlink")
    monkeypatch.setattr(boot, "this_inventory", lambda: machine)
    monkeypatch.setattr(boot, "installed_torch", lambda: TORCH)
    sentence, lines = boot.check_plan(ServeConfig(tmp_path, tmp_path, model=models["8b"].folder))
    assert sentence.startswith(f"it serves {models['8b'].folder} in ")
    assert lines[0].split()[:2] == ["prefill", "gpu0,"]
    assert lines[-1].endswith("18 NVLinks, 445 GiB/s each way")


def test_nodes_that_the_kernel_does_not_describe_are_one(tmp_path: Path) -> None:
    assert read_nodes([3, 1], tmp_path) == (Node(0, (1, 3)),)
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text("0-1\n")
    (tmp_path / "node0" / "meminfo").write_text("Node 0 MemTotal:  1024 kB\n")
    assert read_nodes([0, 1, 2], tmp_path) == (Node(0, (0, 1, 2)),)  # a cpu is on no node
    assert read_nodes([1], tmp_path) == (Node(0, (1,), 1 << 20),)


# One worker or two on one device: what is timed for it, and what follows.


def made(steps, elapsed_ms):
    return [
        RehearsedStep(s.num_sequences, s.num_tokens, s.num_before, elapsed_ms(s)) for s in steps[:9]
    ]


def test_what_is_timed_is_each_kind_alone_and_beside_the_other():
    alone, beside = programme("p", "d", 4096, 131072)
    assert list(alone) == ["d"]
    assert {step.num_tokens for step in alone["d"]} == {1, 4096}
    assert {step.num_tokens for step in beside["p"]} == {4096}
    assert {step.num_tokens for step in beside["d"]} == {1}
    by_turn = [
        {"d": made(alone["d"], lambda s: 200.0 if s.num_tokens > 1 else 10.0)},
        {"p": made(beside["p"], lambda s: 230.0), "d": made(beside["d"], lambda s: 17.0)},
    ]
    times = pair_times(by_turn)
    assert times == PairTimes(4096, 8, 200.0, 10.0, 230.0, 17.0)
    assert pair_times(by_turn[:1]) is None
    assert pair_times([by_turn[0], {"p": by_turn[1]["p"], "d": []}]) is None


@pytest.mark.parametrize(
    ("beside_prompt_ms", "beside_decode_ms", "is_better"),
    [
        (222.0, 14.0, True),  # they compute at once
        (205.0, 160.0, False),  # a token waits nearly as long as for one worker's step
        (400.0, 20.0, False),  # they take turns, and prompts take twice as long
        (210.0, 210.0, False),
    ],
)
def test_two_are_better_where_tokens_wait_less_and_prompts_hardly_more(
    beside_prompt_ms, beside_decode_ms, is_better
):
    times = PairTimes(4096, 8, 200.0, 10.0, beside_prompt_ms, beside_decode_ms)
    found, why = is_two_better(times)
    assert found == is_better
    assert "210 ms in one worker" in why
