"""Quantised checkpoints through the daemon: token for token what their values would give."""

import pytest
import torch

from engine.kernels.cpu import has_kernels
from tests.checkpoints import load_oracle, make_checkpoint
from tests.daemons import ARMS
from tests.quantised_checkpoints import ROUNDED, SHAPE, rounded, write_quantised
from tests.test_exactness import assert_all_same, prompts
from tests.worlds.computing_world import finish, transformer_of, world_of

CASES = {"int8-rows": "elastic", "gptq-order": "colocated"}
"""By kind: the arm. Several workers map one copy of the weights, except where it is widened."""
IN_ONE_PROCESS = ("fp8-blocks", "int4-32", "gptq", "awq")
WIDENED = ("gptq-order",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hf") / "tiny", **SHAPE)


def oracle_of(meant, kind):
    """The reference with the values that codes mean, and inputs rounded as the kind has them."""
    oracle = load_oracle(meant)
    if kind in ROUNDED and has_kernels():
        for name, module in oracle.named_modules():
            if ".layers." in name and isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    return oracle


@pytest.mark.parametrize("kind", IN_ONE_PROCESS)
def test_a_quantised_checkpoint_is_computed_exactly(tmp_path, folder, kind):
    path, meant = write_quantised(folder, kind, tmp_path)
    world = world_of("alias", transformer_of(path))
    asked = [world.sequence(prompt=prompt, max_tokens=12) for prompt in prompts([3, 64, 130])]
    finish(world, oracle_of(meant, kind), *asked)


@pytest.mark.parametrize("kind", CASES)
def test_a_quantised_checkpoint_is_served_exactly(start_daemon, tmp_path, folder, kind):
    path, meant = write_quantised(folder, kind, tmp_path)
    daemon = start_daemon("--dtype", "float32", *ARMS[CASES[kind]], model=path).wait_ready()
    cases = [(prompt, 12) for prompt in prompts([3, 64, 130])]
    assert_all_same(daemon, oracle_of(meant, kind), cases)
    is_packed = kind not in WIDENED and has_kernels()
    said = "in memory, quantised as they are" if is_packed else "widened to float32 at start"
    assert said in daemon.stderr
    assert daemon.stop() == 0


@pytest.mark.skipif(not has_kernels(), reason="no compiled kernels")
@pytest.mark.parametrize(("weights", "arm"), [("q8", "alias"), ("int8", "colocated")])
def test_weights_are_quantised_at_start_and_what_that_costs_is_said(
    start_daemon, folder, weights, arm
):
    daemon = start_daemon("--weights", weights, *ARMS[arm], model=folder).wait_ready()
    state = daemon.http.get("/v1/penstock/state").json()
    assert f"quantised to {weights} at start" in state["weights"]
    assert "of the logits 0." in state["weights"]
    assert state["weights"] in daemon.stderr
    assert daemon.complete("the cat", max_tokens=5)["usage"]["completion_tokens"] == 5
    assert daemon.stop() == 0


def test_what_is_quantised_already_is_not_quantised_again(start_daemon, tmp_path, folder):
    path, _ = write_quantised(folder, "gptq", tmp_path)
    daemon = start_daemon("--weights", "q4", model=path)
    assert daemon.process.wait(120) == 78
    assert "quantised already, as gptq_int4" in daemon.stderr or not has_kernels()
