"""A card's self-test finds what computes wrongly, and something else serves; or the worker ends."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.layer_heads import LayerHeads
from engine.errors import WorkerUnfit
from engine.kernels.attention_backends import SMALL_OPERATIONS, refusal_of
from engine.wire.messages import GpuSpec, PoolMade
from engine.worker.device import Card
from engine.worker.model import attention as attention_file
from engine.worker.model.attention import num_parts
from engine.worker.model.cuda import CudaBackend
from engine.worker.model.library_attention import flash_attention, torch_varlen_attention
from engine.worker.model.proof_judge import difference
from engine.worker.model.proof_shapes import Heads, attention_steps
from engine.worker.model.proving import Prover
from engine.worker.model.torch_backend import TorchBackend
from engine.worker.self_test import proof_of, proved
from tests.checkpoints import make_checkpoint
from tests.engine import upstream
from tests.engine.gpu_worker import start_alone
from tests.worlds.accelerator import FakeDevice

CPU = torch.device("cpu")
NUM_PROCESSORS = upstream.NUM_PROCESSORS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "one-layer"
    return Checkpoint.open(make_checkpoint(folder, num_hidden_layers=1))


@pytest.fixture(scope="module")
def config(checkpoint):
    return checkpoint.config


def shaped(config, num_heads, num_kv_heads, head_dim, window=None):
    return replace(
        config,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        heads=(LayerHeads(num_kv_heads, head_dim),),
        sliding_windows=(window,),
        attention_scale=head_dim**-0.5,
    )


def prover(config, dtype=torch.bfloat16):
    return Prover(config, dtype, CPU, 256, NUM_PROCESSORS)


def unguarded(*args, num_splits=None, **how):
    """As torch is called without a word on parts."""
    return upstream.varlen_attn(*args, **how)


# --------------------------------------------------------------------------------------------------
# Shapes are derived: on both sides of each branch of upstream's, for every model's heads.


def steps_of(heads, num_processors=NUM_PROCESSORS):
    def own_parts(count, num_keys):
        return num_parts(count, heads.num_kv_heads, num_keys, num_processors)

    return attention_steps(heads, num_processors, own_parts)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("num_heads", [8, 16, 32, 64])
def test_every_model_has_steps_on_both_sides_of_torchs_mistakes(num_heads, group_size, head_dim):
    for window in (None, 300):
        heads = Heads(num_heads, num_heads // group_size, head_dim, window)
        is_split, lone = set(), set()
        for step in steps_of(heads):
            new = max(count for _, count in step)
            longest = max(before + count for before, count in step)
            if len(step) > 1 and (new > 1 or group_size == 1 or window):
                shape = len(step), num_heads, head_dim, new, longest
                is_split.add((new > 1, upstream.splits_of(*shape) > 1))
            if len(step) == 1 and new > 1:
                lone.add(new % (64 if head_dim <= 128 else 32) == 1)
        expected = {(True, True), (True, False)}
        if group_size == 1 or window:
            expected |= {(False, True), (False, False)}
        assert is_split == expected
        assert lone == {True, False}


def test_rows_that_decode_come_alone_and_in_graphs_of_two_and_four():
    steps = steps_of(Heads(32, 8, 128))
    assert {1, 2, 4} <= {len(step) for step in steps if all(new == 1 for _, new in step)}
    windowed = steps_of(Heads(32, 8, 128, 300))
    ends = {before + 1 for step in windowed for before, new in step if new == 1 and len(step) == 1}
    assert {299, 300, 301} <= ends


@pytest.mark.parametrize("num_kv_heads", [8, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_torchs_parts_without_our_guard_are_found(num_kv_heads, head_dim, config):
    bed = prover(shaped(config, 8, num_kv_heads, head_dim))
    guarded = CudaBackend("torch_varlen", torch_varlen_attention(upstream.varlen_attn))
    assert bed.attention(guarded) is None
    wrong = bed.attention(CudaBackend("torch_varlen", torch_varlen_attention(unguarded)))
    assert "NaN" in wrong.about


@pytest.mark.parametrize("head_dim", [64, 256])
def test_torchs_stride_of_0_without_our_guard_is_found(head_dim, config, monkeypatch):
    bed = prover(shaped(config, 8, 2, head_dim))
    monkeypatch.setattr(F, "scaled_dot_product_attention", upstream.scaled_dot_product_attention)
    assert bed.attention(TorchBackend()) is None
    monkeypatch.setattr(attention_file, "_QUERY_BLOCK", 1 << 20)
    assert "65 after" in bed.attention(TorchBackend()).about or head_dim == 256
    assert bed.attention(TorchBackend()) is not None


# --------------------------------------------------------------------------------------------------
# What is too far off: one row of sixteen, one head, no number, a sum by four units.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("operation", ["attention", "norm", "gated", "place"])
def test_what_is_rounded_passes_and_what_is_wrong_does_not(operation, dtype):
    expected = torch.randn(16, 8, 64, generator=torch.Generator().manual_seed(1))
    right = expected.to(dtype)

    def about(change):
        actual = right.clone()
        change(actual)
        return difference(operation, actual, expected, dtype)

    assert about(lambda x: None) is None
    assert about(lambda x: x[5].zero_()).startswith("row 5 of 16 differ")
    assert about(lambda x: x.copy_(x.roll(1, 1)))
    assert about(lambda x: x[3, 2, 7].fill_(torch.nan)).startswith("row 3 of 16 hold NaN")
    assert about(lambda x: x[9, 1].copy_(x[8, 1]))


@pytest.mark.parametrize("operation", ["attention", "norm", "gated"])
def test_a_sum_of_bfloat16_that_is_off_by_four_units_is_wrong(operation):
    expected = torch.randn(16, 512, generator=torch.Generator().manual_seed(1))
    right = expected.bfloat16()
    off = (right.view(torch.int16) + 4).view(torch.bfloat16)
    assert difference(operation, right, expected, torch.bfloat16) is None
    found = difference(operation, off, expected, torch.bfloat16)
    assert found.startswith("rows 0..15 of 16")
    one = right.clone()
    one[4, expected[4].abs().argmax()] = off[4, expected[4].abs().argmax()]
    assert difference(operation, one, expected, torch.bfloat16).startswith("row 4 ")


# --------------------------------------------------------------------------------------------------
# Planted faults are found and routed around.


def stale(*args, **how):
    out = upstream.varlen_attn(*args, **how)
    out[1:] = out[:1]
    return out


def one_head_off(*args, **how):
    return upstream.flash_attn_varlen_func(*args, **how).roll(1, 1)


def failing(*_, **how):
    raise RuntimeError("no kernel image is available for execution on the device")


def chosen(flash=upstream.flash_attn_varlen_func, varlen=upstream.varlen_attn, **changes):
    """A choice among two libraries and torch, with small operations that may be changed."""

    def choose(faults):
        by_torch = set(SMALL_OPERATIONS) - changes.keys() | (changes.keys() & faults.keys())
        for name, made in (
            ("flash", flash_attention(flash)),
            ("torch_varlen", torch_varlen_attention(varlen)),
        ):
            if refusal_of(name) not in faults:
                backend = CudaBackend(name, made, by_torch=by_torch)
                for operation in changes.keys() - faults.keys():
                    setattr(backend, operation, changes[operation])
                return backend
        return TorchBackend("torch")

    return choose


@pytest.fixture(scope="module")
def bed(config):
    """Of few processors, which few sequences fill."""
    return replace(prover(shaped(config, 8, 2, 64)), num_processors=8)


def test_what_is_right_is_not_refused(bed):
    proof = proved(bed, chosen(), {}, "key")
    assert (proof.key, proof.refused, proof.notes) == ("key", {}, [])


@pytest.mark.parametrize(
    ("libraries", "refused"),
    [
        ({"flash": one_head_off}, ["flash attention"]),
        ({"flash": failing}, ["flash attention"]),
        ({"flash": one_head_off, "varlen": stale}, ["flash attention", "torch_varlen attention"]),
    ],
)
def test_wrong_attention_makes_the_next_serve_and_is_named(bed, libraries, refused):
    proof = proved(bed, chosen(**libraries), {}, "key")
    assert list(proof.refused) == refused
    assert proof.notes == []


def wrong_norm(x, weight, eps, added=None, scale=1.0):
    out = TorchBackend().norm(x, weight, eps, added, scale)
    out[-1:] *= 1.05
    return out


def wrong_gated(gate_up, activation, up=None):
    return TorchBackend().gated(gate_up, activation, up) * 0.9


def wrong_draws(logits, draws=None):
    return TorchBackend.sample_rows(logits, draws) ^ 1


def norm_in_place(rows, weight, eps):
    rows[..., :-1] = rows[..., 1:]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("norm", wrong_norm), ("gated", wrong_gated), ("norm_rows", norm_in_place)],
)
def test_a_wrong_small_operation_is_torchs_from_then_on(bed, name, wrong):
    proof = proved(bed, chosen(**{name: wrong}), {}, "key")
    assert list(proof.refused) == [name]


def test_wrong_draws_are_found(bed, monkeypatch):
    backend = chosen()({})
    backend.sample_rows = wrong_draws
    assert [wrong.operation for wrong in bed.others(backend)] == ["draws"]


def test_keys_in_anothers_block_are_found(bed):
    backend = chosen()({})
    real = backend.place

    def place(qkv, num_heads, rope_index, kv, layer, plan):
        real(qkv, num_heads, rope_index, kv, layer, plan)
        kv[0, layer, 0, 3] = 1.0

    backend.place = place
    assert [wrong.operation for wrong in bed.others(backend)] == ["place"]


def test_a_wrong_twin_is_said_and_the_kernels_serve(bed, monkeypatch):
    monkeypatch.setattr(TorchBackend, "norm", lambda *args: wrong_norm_of_torch(*args))
    right = real_norm.__get__(TorchBackend())
    proof = proved(bed, chosen(norm=right), {}, "key")
    assert proof.refused == {}
    (note,) = proof.notes
    assert "torch's norm" in note


real_norm = TorchBackend.norm


def wrong_norm_of_torch(self, x, weight, eps, added=None, scale=1.0):
    return real_norm(self, x, weight, eps, added, scale) * 1.05


def test_a_card_that_fails_everything_ends_its_worker_with_what_and_where(bed, monkeypatch):
    real = torch.Tensor.cpu

    def damaged(tensor, *args, **how):
        """A copy back to the judge in which the last value is another."""
        copied = real(tensor, *args, **how).clone()
        if copied.dtype == torch.bfloat16:
            copied.view(-1)[-1] += 1.0
        return copied

    monkeypatch.setattr(torch.Tensor, "cpu", damaged)
    with pytest.raises(WorkerUnfit) as raised:
        proved(bed, chosen(), {}, "key")
    assert "attention is wrong" in raised.value.what
    assert "row" in raised.value.what
    assert "--self-test" in raised.value.hint


# --------------------------------------------------------------------------------------------------
# A worker proves its card before its pool is sized, and once.


def test_a_worker_proves_its_card_and_takes_an_earlier_proof(checkpoint):
    device = FakeDevice()
    device.card = Card("made up", "580.65", 8)
    worker = start_alone(checkpoint, device, GpuSpec("GPU-0", has_graphs=False))
    with contextlib.closing(worker):
        worker.report(PoolMade)
        worker.thread.join()
        proof = worker.started.ready.proof
    assert proof.took_ms > 0
    assert proof.refused == {}
    spec = GpuSpec("GPU-0", proofs=[proof])
    again = proof_of(worker.setup, spec, checkpoint, device)
    assert (again.key, again.took_ms) == (proof.key, 0)
    keys = set()
    for name, driver in (("made up", "570.1"), ("another", "580.65")):
        device.card = Card(name, driver, 8)
        with device.accelerator.on():
            keys.add(proof_of(worker.setup, spec, checkpoint, device).key)
    assert len(keys - {proof.key}) == 2
