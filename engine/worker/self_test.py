"""Prove a GPU's kernels before its weights are read, its graphs later, and route around faults.

Invariant: what serves was right on every shape, or was so at an earlier start under the same key.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path

import msgspec
import torch

import engine.worker.model
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import INT8_KV, ModelConfig
from engine.checkpoint.weights_layout import AS_STORED, PanelsLayout, gpu_layout, panels_layout
from engine.errors import WorkerUnfit
from engine.kernels.attention_backends import refusal_of, this_machine
from engine.wire.messages import GpuSpec, Proof, Setup
from engine.worker.device import Device
from engine.worker.graphs import DecodeGraphs
from engine.worker.model.backend import COMPILED, Backend, choose_backend
from engine.worker.model.proving import Prover, Wrong
from engine.worker.model.torch_backend import TorchBackend
from engine.worker.model.weight import MatrixRows
from engine.worker.model.weights import first_rows

GRAPHS, PRODUCTS = "graphs", "products"
"""Names of refusals beside kernels'."""
_PACKAGES = ("torch", "triton", "flash-attn")
Choose = Callable[[Mapping[str, str]], Backend]
"""Chooses the backend of a machine with these faults."""


def proved(prover: Prover, choose: Choose, faults: Mapping[str, str], key: str) -> Proof:
    """Find what computes rightly on this device.

    Args:
        choose: the backend for given faults.
        faults: why things are not used anyway.
        key: of what the proof holds for.

    Raises:
        WorkerUnfit: something is computed wrongly by every kernel that there is.
    """
    started_s = time.monotonic()
    twins = {wrong.operation: wrong for wrong in prover.faults(TorchBackend())}
    refused: dict[str, str] = {}
    while not isinstance(backend := choose({**faults, **refused}), TorchBackend):
        wrong = prover.attention(backend)
        if wrong is None:
            break
        refused[refusal_of(backend.name.partition(" ")[0].rstrip(";"))] = wrong.about
    notes: list[str] = []
    if isinstance(backend, TorchBackend):
        _end_if_wrong(twins.values())
    else:
        found = {wrong.operation: wrong for wrong in prover.others(backend)}
        has_no_twin = twins.keys() | {"mixture"}  # torch computes it, whatever the backend
        _end_if_wrong([wrong for name, wrong in found.items() if name in has_no_twin])
        refused |= {name: wrong.about for name, wrong in found.items()}
        notes = [
            f"self-test: torch's {name} is wrong here, {wrong.about}"
            for name, wrong in twins.items()
        ]
    wrong = prover.products(prover.matrices)
    if wrong is not None:
        refused[PRODUCTS] = wrong.about
        widened = prover.products(tuple(rows.widened for rows in prover.matrices))
        _end_if_wrong([] if widened is None else [widened])
    took_ms = (time.monotonic() - started_s) * 1e3
    return Proof(key, refused, notes, took_ms)


def proof_of(setup: Setup, gpu: GpuSpec, checkpoint: Checkpoint, device: Device) -> Proof:
    """Take an earlier start's proof of the same kernels on the same card, or make one."""
    card, dtype, block_size = device.card, getattr(torch, setup.dtype), setup.block_size
    assert card is not None
    config, faults = checkpoint.config, this_machine(faults=gpu.faults).faults
    about = f"{card.name} {card.driver} {sorted(faults)} {gpu.packing}"
    key = proof_key(config, dtype, block_size, about)
    for proof in gpu.proofs:
        if proof.key == key:
            return msgspec.structs.replace(proof, took_ms=0.0)
    layout = gpu_layout(checkpoint, setup.dtype, gpu.packing)
    matrices = first_rows(checkpoint, layout) if isinstance(layout, PanelsLayout) else ()
    how = (config, dtype, device.torch_device, block_size, card.num_processors)
    prover = Prover(*how, matrices)

    def choose(faults: Mapping[str, str]) -> Backend:
        return choose_backend(device.torch_device, dtype, config, block_size, faults=faults)

    return proved(prover, choose, faults, key)


def routed(setup: Setup, gpu: GpuSpec, refused: Mapping[str, str]) -> GpuSpec:
    """Leave out what was refused; widen quantised matrices where products with them are wrong.

    Raises:
        WorkerUnfit: others have them in the same memory, in their bits.
    """
    gpu = msgspec.structs.replace(
        gpu,
        faults={**this_machine(faults=gpu.faults).faults, **refused},
        has_graphs=gpu.has_graphs and GRAPHS not in refused,
    )
    if PRODUCTS not in refused or gpu.packing == "widened":
        return gpu
    if gpu.shares is not None or setup.weights is not None:
        raise WorkerUnfit(
            f"self-test: quantised products are wrong, {refused[PRODUCTS]}",
            where=gpu.uuid,
            hint="serve with --safe-kernels, which widens them for all workers",
        )
    return msgspec.structs.replace(gpu, packing="widened")


def proved_graphs(
    graphs: DecodeGraphs, proof: Proof | None
) -> tuple[DecodeGraphs | None, Proof | None]:
    """Refuse graphs if a replayed step is not the step that its kernels compute one by one."""
    about = None if proof is None else graphs.wrong_replay()
    if proof is None or about is None:
        return graphs, proof
    return None, msgspec.structs.replace(proof, refused={**proof.refused, GRAPHS: about})


def faults_of_cores(checkpoint: Checkpoint, setup: Setup) -> dict[str, str]:
    """Prove compiled kernels in a fraction of a second; return why they are not used.

    Raises:
        WorkerUnfit: torch is wrong, too, or products are, which nothing replaces.
    """
    config, dtype, on = checkpoint.config, getattr(torch, setup.dtype), torch.device("cpu")
    variant = setup.attention_variant
    backend = choose_backend(on, dtype, config, setup.block_size, attention_variant=variant)
    if isinstance(backend, TorchBackend):  # its name says why
        return {}
    spec = setup.weights
    matrices: tuple[MatrixRows, ...] = ()
    if spec is None or spec.is_packed:  # a group packs its own
        kept = AS_STORED if spec is None else spec.weights
        layout = panels_layout(checkpoint, setup.dtype, kept)
        matrices = () if layout is None else first_rows(checkpoint, layout)
    how = (config, dtype, on, setup.block_size, len(setup.cpus), matrices)
    prover = Prover(*how, is_brief=True, has_codes=setup.pool_dtype == INT8_KV)
    products, found = prover.products(matrices), next(prover.faults(backend), None)
    twin = None if found is None else next(prover.faults(TorchBackend()), None)
    failed = next((each for each in (products, twin) if each and each.has_failed), None)
    if failed is not None:  # the first step shows what cannot be computed at all
        return {"self-test": f"the self-test of {failed.operation} failed: {failed.about}"}
    _end_if_wrong(filter(None, (products, twin)))
    if found is None:
        return {}
    return {COMPILED: f"self-test: {found.operation} is wrong, {found.about}"}


def proof_key(config: ModelConfig, dtype: torch.dtype, block_size: int, card: str) -> str:
    """Name all that a proof holds for: card, driver, packages, build, flags, shapes, dtype."""
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(metadata.version(package))
        except metadata.PackageNotFoundError:
            versions.append("")
    matmul, sdp = torch.backends.cuda.matmul, torch._C
    flags = (
        torch.get_float32_matmul_precision(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
        sdp._get_flash_sdp_enabled(),
        sdp._get_mem_efficient_sdp_enabled(),
    )
    shapes = (
        config.num_heads, config.heads, config.sliding_windows, config.attention_softcap,
        config.hidden_size, config.hidden_act, config.vocab_size, config.family.has_sinks,
        config.delta, config.experts,
    )  # fmt: skip
    parts = (card, versions, _build(), flags, shapes, str(dtype), block_size)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _build() -> str:
    """Name the sources of the kernels and of what calls them."""
    folder = Path(str(engine.worker.model.__file__)).parent
    made = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        made.update(path.read_bytes())
    return made.hexdigest()


def _end_if_wrong(wrong: Iterable[Wrong]) -> None:
    for each in wrong:
        raise WorkerUnfit(
            f"self-test: {each.operation} is wrong, {each.about}",
            where="this device, by every kernel",
            hint="penstock doctor --self-test makes a report; another driver or torch may help",
        )
