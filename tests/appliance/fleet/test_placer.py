"""Placements over recorded machines: the choice, its reasons, and refusals with what would work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.cli.devices import drawing
from appliance.configuration.settings import ServeConfig
from appliance.configuration.wanted_workers import parse_place
from appliance.devices.inventory import Inventory, Node, read_nodes
from appliance.fleet import placed_model
from appliance.fleet.boot_check import check_plan
from appliance.fleet.placement import placement_lines
from appliance.fleet.placer import ChosenPlacement, Placer
from appliance.fleet.worker_counts import STARTED_TWO, is_two_better
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import ConfigError
from engine.kernels.attention_backends import Machine
from engine.profile.facts import DECODE_MS, PROMPT_MS, FactKey, Profile
from engine.scheduler.measurer import ALONE
from tests import golden
from tests.appliance.inventories import machines
from tests.appliance.large_model import make_large
from tests.checkpoints import make_checkpoint

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


def placed(checkpoint: Checkpoint, inventory: Inventory, **settings: Any) -> ChosenPlacement:
    settings = settings | {"place": parse_place(settings.get("place", "auto"))}
    config = ServeConfig(socket=Path("socket"), state_dir=Path("state"), **settings)
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
    text = "".join(f"{line}\n" for line in lines)
    golden.check(golden.SENTENCES / f"place-{name}.txt", text)


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
        pool = placement.topology.pool_by_name[plan.pool]
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
    assert placement.topology.transport == transport
    on_cores = {cpu for plan in placement.workers if plan.gpu is None for cpu in plan.cpus}
    on_gpus = {cpu for plan in placement.workers if plan.gpu is not None for cpu in plan.cpus}
    assert not on_cores & on_gpus


def test_instances_are_put_by_uuid(models: dict[str, Checkpoint], inventory_of: Any) -> None:
    machine = inventory_of("h100-mig-2x3g.40gb")
    place = "prefill=MIG-01c0ffee-5eed decode=MIG-00c0ffee-5eed"
    placement = placed(models["8b"], machine, place=place).placement
    assert [plan.device for plan in placement.workers] == ["gpu0/mig1", "gpu0/mig0"]
    assert placement.topology.transport == "shm"


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
    assert by_hand.topology.transport == "shm"
    nodes = [set(node.cores) for node in machine.nodes]
    assert [set(plan.cpus) <= nodes[at] for at, plan in enumerate(by_hand.workers)] == [True] * 2


def pair_known(
    prompt_alone_ms: float, decode_alone_ms: float, prompt_ms: float, decode_ms: float
) -> Profile:
    """What is known of two processes on one GPU; chunks of 4,096 and eight sequences."""
    profile = Profile()
    profile.put(FactKey(PROMPT_MS, 4096, 0, ALONE), [prompt_alone_ms])
    profile.put(FactKey(DECODE_MS, 8, 1024, ALONE), [decode_alone_ms])
    profile.put(FactKey(PROMPT_MS, 4096, 0, "prefill on 1"), [prompt_ms])
    profile.put(FactKey(DECODE_MS, 8, 1024, "decode on 1"), [decode_ms])
    return profile


def alone_known() -> Profile:
    """What is known after one process has served."""
    profile = Profile()
    profile.put(FactKey(PROMPT_MS, 4096, 0, ALONE), [210.0])
    profile.put(FactKey(DECODE_MS, 8, 1024, ALONE), [9.0])
    return profile


def started_two() -> Profile:
    profile = alone_known()
    profile.put(STARTED_TWO, [1.0])
    return profile


@pytest.mark.parametrize(
    ("known", "num_workers", "why"),
    [
        (Profile(), 1, "first start"),
        (alone_known(), 2, "timed while idle"),
        (
            pair_known(210.0, 9.0, 222.0, 14.0),
            2,
            "219 ms in one process",
        ),
        (
            pair_known(210.0, 9.0, 400.0, 14.0),
            1,
            "55% of the rate",
        ),
        (
            started_two(),
            1,
            "the start failed",
        ),
    ],
)
def test_one_gpu_has_as_many_workers_as_were_found_to_be_better(
    known: Profile,
    num_workers: int,
    why: str,
    models: dict[str, Checkpoint],
    inventory_of: Any,
    tmp_path: Path,
) -> None:
    machine = inventory_of("2xh100-one-hidden")
    config = ServeConfig(socket=Path("socket"), state_dir=tmp_path)
    placer = Placer(config, models["8b"], machine, TORCH, MACHINE, lambda gpus, dtype: known)
    placement = placer.place("bfloat16").placement
    assert len(placement.workers) == num_workers
    assert any(why in reason for reason in placement.reasons)
    assert placement.is_trial == ("timed while idle" in why)


def h200_known(prompt_ms: float, decode_ms: float) -> Profile:
    """As eight of them might be known: chunks of prompts, and batches of single tokens."""
    profile = Profile()
    for size in (16, 256, 1024, 4096):
        for depth in (0, 2048, 8192):
            ms = prompt_ms * size / 4096 * (1 + depth / 80000)
            profile.put(FactKey(PROMPT_MS, size, depth, "prefill on 1"), [ms])
    for size in (1, 4, 16):
        for depth in (0, 512, 2048):
            ms = decode_ms * (1 + size * depth / 4e5)
            profile.put(FactKey(DECODE_MS, size, depth, "decode on 1"), [ms])
    return profile


def without_decodes(profile: Profile) -> Profile:
    return Profile({key: fact for key, fact in profile.facts.items() if key.what == PROMPT_MS})


@pytest.mark.parametrize(
    ("known", "num_prefill", "why"),
    [
        (Profile(), 3, "is estimated to need"),
        (h200_known(prompt_ms=100.0, decode_ms=5.0), 3, "was measured to need"),
        (h200_known(prompt_ms=900.0, decode_ms=5.0), 6, "was measured to need"),
        (h200_known(prompt_ms=20.0, decode_ms=9.0), 1, "was measured to need"),
        (without_decodes(h200_known(prompt_ms=20.0, decode_ms=9.0)), 3, "is estimated to need"),
    ],
)
def test_of_several_gpus_as_many_prefill_as_step_times_say(
    known: Profile,
    num_prefill: int,
    why: str,
    models: dict[str, Checkpoint],
    inventory_of: Any,
    tmp_path: Path,
) -> None:
    machine = inventory_of("8xh200-nvswitch")
    config = ServeConfig(socket=Path("socket"), state_dir=tmp_path)
    placer = Placer(config, models["8b"], machine, TORCH, MACHINE, lambda gpus, dtype: known)
    placement = placer.place("bfloat16").placement
    assert len(placement.topology.playing("prefill")) == num_prefill
    assert why in placement.reasons[0]


def test_a_whole_gpu_and_a_part_of_another_are_placed_by_hand(
    models: dict[str, Checkpoint], inventory_of: Any
) -> None:
    machine = inventory_of("2xh100-one-divided")
    place = "prefill=gpu0 decode=gpu1/mig0,gpu1/mig1"
    placement = placed(models["8b"], machine, place=place).placement
    assert [plan.device for plan in placement.workers] == ["gpu0", "gpu1/mig0", "gpu1/mig1"]
    assert placement.topology.transport == "shm"


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
        ("2xrtx4090-no-p2p", {"transport": "peer"}, "no P2P", "linked by shm"),
        ("2xh100-nvlink", {"transport": "alias"}, "do not share memory", "linked by peer"),
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
    with pytest.raises(ConfigError, match="int8 on CPUs") as refused:
        placed(models["1b"], machine, kv_dtype="int8", place=place)
    assert "--devices cpu" in refused.value.hint
    on_cores = placed(models["1b"], machine, kv_dtype="int8", devices="cpu").placement
    assert on_cores.block_bytes == models["1b"].config.kv_block_bytes(64, "int8")


@pytest.mark.parametrize("machine", ["2xh100-nvlink", "rtx4090"])
def test_gated_delta_nets_have_records_in_the_pools_of_gpus(
    machine: str, tmp_path: Path, inventory_of: Any
) -> None:
    hybrid = Checkpoint.open(make_checkpoint(tmp_path / "model", "qwen3_5_text"))
    inventory = inventory_of(machine)
    placement = placed(hybrid, inventory).placement
    assert all(worker.gpu is not None for worker in placement.workers)
    dtype = "bfloat16"
    assert placement.record_blocks == hybrid.config.record_blocks(placement.block_size, dtype) > 0
    assert {pool.record_blocks for pool in placement.pools()} == {placement.record_blocks}
    num_bytes = (2 * placement.record_blocks + 1) * placement.block_bytes
    with pytest.raises(ConfigError, match="KV blocks"):
        placed(hybrid, inventory, kv_memory_bytes=num_bytes)


def test_a_dtype_that_cores_have_no_kernels_for_is_not_mixed(
    models: dict[str, Checkpoint], inventory_of: Any
) -> None:
    machine = inventory_of("rtx4090")
    turing = replace(machine, gpus=(replace(machine.gpus[0], capability=(7, 5)),))
    config = ServeConfig(
        socket=Path("socket"),
        state_dir=Path("state"),
        place=parse_place("prefill=cuda:0 decode=0-3"),
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
        socket=Path("socket"),
        state_dir=Path("state"),
        place=parse_place("prefill=cuda:0 decode=cuda:1"),
    )
    placer = Placer(config, models["1b"], old, TORCH, Machine((2, 11), {}))
    assert placer.place("bfloat16").placement.block_size == 256


def test_without_torch_for_cuda_cores_serve_and_that_is_said(
    models: dict[str, Checkpoint], inventory_of: Any
) -> None:
    config = ServeConfig(socket=Path("socket"), state_dir=Path("state"))
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
    monkeypatch.setattr(placed_model, "this_inventory", lambda: machine)
    monkeypatch.setattr(placed_model, "installed_torch", lambda: TORCH)
    sentence, lines = check_plan(
        ServeConfig(socket=tmp_path, state_dir=tmp_path, model=models["8b"].folder)
    )
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
    beside_prompt_ms: float, beside_decode_ms: float, is_better: bool
) -> None:
    found = is_two_better(pair_known(200.0, 10.0, beside_prompt_ms, beside_decode_ms))
    assert found is not None
    assert found[0] == is_better
    assert "210 ms in one process" in found[1]


def test_two_of_which_one_kind_was_not_timed_are_not_compared() -> None:
    assert is_two_better(Profile()) is None
    assert is_two_better(without_decodes(pair_known(200.0, 10.0, 222.0, 14.0))) is None


PAIR = "prefill=0-1+2-3 decode=4-5+6-7"


def test_a_worker_of_several_processes_has_cores_for_each(
    models: dict[str, Checkpoint], inventory_of: Any
) -> None:
    machine = inventory_of("2xh100-nvlink")
    prefill, decode = placed(models["1b"], machine, devices="cpu", place=PAIR).placement.workers
    assert (prefill.device, prefill.cpus) == ("cpu 0-1+2-3", (0, 1, 2, 3))
    assert decode.ranks == ((4, 5), (6, 7))
    one = {"devices": "cpu", "roles": "colocated", "place": "colocated=0+1+2+3"}
    (alone,) = placed(models["1b"], machine, **one).placement.workers
    assert alone.ranks == ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize(
    ("settings", "where", "about"),
    [
        ({"devices": "auto"}, "place", "gpu0 would serve"),
        ({"place": "prefill=0+1+2 decode=3+4+5"}, "place", "3 processes"),
        ({"place": "prefill=0+1 decode=1+2"}, "place", "share a core"),
        ({"place": "prefill=0+1 decode=2+999"}, "place", "core 999"),
        ({"kv_dtype": "int8"}, "kv_dtype", "int8"),
        ({"roles": "elastic"}, "roles", "lend"),
        ({"weights": "q8"}, "weights", "quantises"),
        ({"offload_weights": 1 << 30}, "offload_weights", "on disk"),
    ],
)
def test_what_a_group_cannot_do_is_refused(
    settings: dict[str, Any],
    where: str,
    about: str,
    models: dict[str, Checkpoint],
    inventory_of: Any,
) -> None:
    machine = inventory_of("2xh100-nvlink")
    with pytest.raises(ConfigError, match=about) as refused:
        placed(models["1b"], machine, **{"devices": "cpu", "place": PAIR, **settings})
    assert refused.value.where == where
    assert refused.value.hint


def test_so_is_a_model_that_has_no_parts(tmp_path: Path, inventory_of: Any) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path / "model", "olmo2"))
    with pytest.raises(ConfigError, match="norms all heads together"):
        placed(checkpoint, inventory_of("2xh100-nvlink"), devices="cpu", place=PAIR)
