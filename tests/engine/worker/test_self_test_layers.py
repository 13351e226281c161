"""A self-test covers recurrent layers, mixtures, quantised products, and replayed graphs."""

import contextlib
from dataclasses import replace

import msgspec
import pytest
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.weights_layout import gpu_layout, panels_layout
from engine.errors import WorkerUnfit
from engine.wire.messages import GpuSpec, PoolMade, WeightsSpec
from engine.worker import self_test
from engine.worker.device import Card
from engine.worker.model import proving_layers, triton_delta, triton_linear
from engine.worker.model.attention import planes
from engine.worker.model.backend import COMPILED, choose_backend
from engine.worker.model.compiled import CompiledBackend
from engine.worker.model.cuda import CudaBackend
from engine.worker.model.feed_forward import Experts
from engine.worker.model.library_attention import flash_attention
from engine.worker.model.linear import Linears
from engine.worker.model.proof_shapes import recurrent_steps
from engine.worker.model.proving import Prover
from engine.worker.model.torch_backend import TorchBackend
from engine.worker.model.transformer import Transformer
from engine.worker.model.weights import first_rows
from engine.worker.self_test import GRAPHS, PRODUCTS, faults_of_cores, proved, routed
from tests.checkpoints import make_checkpoint
from tests.engine import upstream
from tests.engine.gpu_worker import start_alone
from tests.levels import needs_kernels
from tests.quantised_checkpoints import SHAPE, write_quantised
from tests.worlds.accelerator import FakeDevice

pytestmark = pytest.mark.usefixtures("real_bfloat16")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        family: Checkpoint.open(make_checkpoint(folder / family, family))
        for family in ("llama", "mixtral", "qwen3_next", "qwen3_5_text")
    }


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised")
    path, _ = write_quantised(make_checkpoint(folder / "tiny", **SHAPE), "awq", folder)
    return Checkpoint.open(path)


def bed_of(checkpoint, dtype=torch.bfloat16, matrices=()):
    """Few steps of attention, which has tests of its own."""
    return Prover(checkpoint.config, dtype, CPU, 256, 8, matrices, is_brief=True)


def choose_flash(faults):
    """Attention by flash-attn as it promises to be, and small operations by torch."""
    by_torch = {"norm", "norm_rows", "gated", "place", "draws"} | faults.keys()
    return CudaBackend("flash", flash_attention(upstream.flash_attn_varlen_func), by_torch=by_torch)


def operations(bed, backend):
    return [wrong.operation for wrong in bed.others(backend)]


# --------------------------------------------------------------------------------------------------
# Recurrent layers.


@pytest.mark.parametrize("conv_size", [2, 4])
def test_recurrent_steps_are_on_both_sides_of_each_branch(conv_size):
    steps = recurrent_steps(conv_size, 32, 64)
    runs = [run for step in steps for run in step]
    assert {before > 0 for before, _ in runs} == {True, False}
    assert {new < conv_size for _, new in runs} == {True, False}  # tails that are moved, or new
    assert {sum(new for _, new in step) > 32 for step in steps} == {True, False}  # all are kept
    assert {before // 64 < (before + new - 1) // 64 for before, new in runs} == {True, False}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_right_recurrent_layers_are_found_right_by_torch_and_compiled(models, family, dtype):
    bed = bed_of(models[family], dtype)
    for backend in (TorchBackend(), choose_backend(CPU, dtype, bed.config)):
        assert operations(bed, backend) == []


@pytest.fixture
def few_tokens(monkeypatch):
    """Steps that the interpreter runs in seconds."""
    monkeypatch.setattr(proving_layers, "KEPT_TOKENS", 5)
    monkeypatch.setattr(proving_layers, "CHUNK_TOKENS", 6)


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3_next", torch.bfloat16), ("qwen3_5_text", torch.float32)]
)
def test_right_recurrent_layers_are_found_right_by_triton(models, family, dtype, few_tokens):
    assert operations(bed_of(models[family], dtype), choose_flash({})) == []


real_delta = triton_delta.gated_delta


def slow_decay(inputs, kept, constants, config, kv, runs):
    return real_delta(
        inputs, kept, replace(constants, decay=constants.decay * 0.9), config, kv, runs
    )


def kept_guesses(inputs, kept, constants, config, kv, runs):
    """Writes nothing again: guesses that were refused stay in the record."""
    if inputs.heads.data_ptr() == kept.heads.data_ptr():
        return inputs.heads
    return real_delta(inputs, kept, constants, config, kv, runs)


def failing(*_):
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize("wrong", [slow_decay, kept_guesses, failing])
def test_a_wrong_recurrent_kernel_is_torchs_from_then_on(models, wrong, monkeypatch, few_tokens):
    monkeypatch.setattr(triton_delta, "gated_delta", wrong)
    bed = bed_of(models["qwen3_5_text"])
    proof = proved(bed, choose_flash, {}, "key")
    assert list(proof.refused) == ["delta"]
    assert choose_flash(proof.refused).gated_delta is None


# --------------------------------------------------------------------------------------------------
# Mixtures of experts.


def test_a_wrong_mixture_ends_the_worker_with_operation_shape_and_difference(models, monkeypatch):
    bed = bed_of(models["mixtral"])
    assert operations(bed, choose_flash({})) == operations(bed, TorchBackend()) == []
    real = Experts.routed
    monkeypatch.setattr(Experts, "routed", lambda *args: real(*args) * 1.1)
    with pytest.raises(WorkerUnfit) as raised:
        proved(bed, choose_flash, {}, "key")
    assert "mixture is wrong" in raised.value.what
    assert "experts: row" in raised.value.what
    assert "differ by" in raised.value.what
    assert raised.value.hint


# --------------------------------------------------------------------------------------------------
# Quantised products.


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Products by Triton and torch, where there are no compiled kernels."""
    monkeypatch.setattr(proving_layers, "choose_linears", lambda *_: Linears("torch", None))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 has no scaled products on CPUs")
@pytest.mark.parametrize("kind", ["awq", "fp8-tokens", "int8-tokens"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_of_the_models_own_rows_are_found_right(kind, dtype, tmp_path, as_on_a_gpu):
    path, _ = write_quantised(make_checkpoint(tmp_path / "tiny", **SHAPE), kind, tmp_path)
    checkpoint = Checkpoint.open(path)
    for packing in ("panels", "fp8"):
        matrices = first_rows(checkpoint, gpu_layout(checkpoint, dtype, packing))
        bed = bed_of(checkpoint, getattr(torch, dtype), matrices)
        assert matrices
        assert bed.products(matrices) is None
        assert bed.products(tuple(rows.widened for rows in matrices)) is None


def wrong_multiply(out, x, weight, bias, column):
    real_multiply(out, x, weight, bias, column)
    if len(x) > 16:  # the tiles of many tokens alone
        out[:, column + 33] = 0


real_multiply = triton_linear.multiply


def test_wrong_products_are_widened_where_one_worker_has_the_weights(
    quantised, monkeypatch, as_on_a_gpu
):
    matrices = first_rows(quantised, gpu_layout(quantised, "bfloat16", "panels"))
    bed = bed_of(quantised, matrices=matrices)
    monkeypatch.setattr(triton_linear, "multiply", wrong_multiply)
    proof = proved(bed, choose_flash, {}, "key")
    assert list(proof.refused) == [PRODUCTS]
    assert proof.refused[PRODUCTS].startswith("int4_128_panels, 17 x ")
    gpu = GpuSpec("GPU-0", packing="panels", faults={})
    setup = start_setup(quantised)
    assert routed(setup, gpu, proof.refused).packing == "widened"
    assert routed(setup, gpu, {}).packing == "panels"
    shared = msgspec.structs.replace(gpu, shares="exports")
    with pytest.raises(WorkerUnfit) as raised:
        routed(setup, shared, proof.refused)
    assert "--safe-kernels" in raised.value.hint
    monkeypatch.setattr(proving_layers, "choose_linears", lambda *_: Zeros())
    with pytest.raises(WorkerUnfit, match="products is wrong"):
        proved(bed, choose_flash, {}, "key")


class Zeros:
    """Every product is 0."""

    def make(self, weights, _names):
        (weight,) = weights.values()
        return lambda x, _few: x.new_zeros(len(x), weight.shape[0])


def start_setup(checkpoint, **changes):
    """What a worker that starts alone is told."""
    worker = start_alone(checkpoint, FakeDevice(), GpuSpec("GPU-0", has_graphs=False))
    with contextlib.closing(worker):
        worker.report(PoolMade)
        worker.thread.join()
    return msgspec.structs.replace(worker.setup, **changes)


# --------------------------------------------------------------------------------------------------
# Graphs: a replayed step equals the kernels that were captured.


class LosingDevice(FakeDevice):
    """Replays of one capture do nothing."""

    def __init__(self, lost):
        super().__init__()
        self.card = Card("made up", "580.65", 8)
        self.lost = lost

    def capture(self, step):
        number, replay = self.num_captures, super().capture(step)
        return replay if number != self.lost else lambda: None


def ready_of(checkpoint, device):
    worker = start_alone(checkpoint, device, GpuSpec("GPU-0"))
    with contextlib.closing(worker):
        worker.report(PoolMade)
        worker.thread.join()
    assert worker.failure is None
    return worker.started.ready


@pytest.mark.parametrize("lost", [1, 5])
def test_graphs_that_do_not_replay_are_refused_and_it_serves_without(models, lost, monkeypatch):
    """One of sampling, and one of a step."""
    monkeypatch.setattr(self_test, "proved", lambda prover, choose, faults, key: NOTHING_WRONG(key))
    monkeypatch.setattr(Transformer, "is_capturable", True)
    right = ready_of(models["llama"], LosingDevice(-1))
    assert (right.num_graphs > 0, right.proof.refused) == (True, {})
    wrong = ready_of(models["llama"], LosingDevice(lost))
    assert wrong.num_graphs == 0
    assert list(wrong.proof.refused) == [GRAPHS]
    assert any("refused graphs" in note for note in wrong.notes)
    setup, gpu = start_setup(models["llama"]), GpuSpec("GPU-0", faults={})
    assert not routed(setup, gpu, wrong.proof.refused).has_graphs


def NOTHING_WRONG(key):  # noqa: N802 - stands for a value
    return self_test.Proof(key, {}, [], 1.0)


# --------------------------------------------------------------------------------------------------
# On cores, in a fraction of a second.


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_5_text"])
def test_cores_that_compute_rightly_have_no_faults(models, family):
    assert faults_of_cores(models[family], start_setup(models["llama"])) == {}


@needs_kernels
def test_compiled_kernels_that_are_wrong_leave_the_small_operations_to_torch(models, monkeypatch):
    checkpoint, setup = models["llama"], start_setup(models["llama"])
    real = CompiledBackend.norm
    monkeypatch.setattr(CompiledBackend, "norm", lambda *args: real(*args).mul_(1.1))
    faults = faults_of_cores(checkpoint, setup)
    assert list(faults) == [COMPILED]
    assert "norm is wrong" in faults[COMPILED]
    backend = choose_backend(CPU, torch.float32, checkpoint.config, faults=faults)
    assert isinstance(backend, TorchBackend)
    assert "norm is wrong" in backend.name
    own = TorchBackend.norm
    monkeypatch.setattr(TorchBackend, "norm", lambda *args: own(*args) * 1.1)
    with pytest.raises(WorkerUnfit, match="norm is wrong"):
        faults_of_cores(checkpoint, setup)
    monkeypatch.setattr(TorchBackend, "norm", lambda *args: failing())
    faults = faults_of_cores(checkpoint, setup)
    assert list(faults) == ["self-test"], "what cannot be tried does not keep it from serving"


def next_heads_scales(kv, config):
    """An int8 pool in which each head has the scales of another."""
    heads = config.heads[0]
    moved = kv.clone()
    scales = planes(moved, heads.num_kv_heads, heads.head_dim)[1]
    scales.copy_(scales.roll(1, -2))
    return moved


@needs_kernels
@pytest.mark.parametrize("operation", ["place", "attention"])
def test_kernels_that_err_over_a_pool_of_codes_alone_are_found(models, operation, monkeypatch):
    checkpoint = models["llama"]
    setup = start_setup(checkpoint, kv_dtype="int8")
    assert faults_of_cores(checkpoint, setup) == {}
    name = "attend" if operation == "attention" else operation
    real, kv_at = getattr(CompiledBackend, name), 3 if name == "place" else 2

    def wrong(self, *args):
        kv = args[kv_at]
        if kv.dtype != torch.int8:
            return real(self, *args)
        if name == "attend":
            moved = next_heads_scales(kv, checkpoint.config)
            return real(self, *args[:kv_at], moved, *args[kv_at + 1 :])
        real(self, *args)
        return kv.copy_(next_heads_scales(kv, checkpoint.config))

    monkeypatch.setattr(CompiledBackend, name, wrong)
    assert f"{operation} is wrong" in faults_of_cores(checkpoint, setup)[COMPILED]
    assert faults_of_cores(checkpoint, msgspec.structs.replace(setup, kv_dtype="auto")) == {}


@needs_kernels
def test_wrong_quantised_products_on_cores_end_the_worker(quantised, monkeypatch):
    layout = panels_layout(quantised, "float32")
    spec = WeightsSpec(-1, layout.num_bytes, 0, 1, is_filled=True, is_packed=True)
    setup = start_setup(quantised, weights=spec)
    assert faults_of_cores(quantised, setup) == {}
    monkeypatch.setattr(proving_layers, "choose_linears", lambda *_: Zeros())
    with pytest.raises(WorkerUnfit, match="products is wrong"):
        faults_of_cores(quantised, setup)
