"""Prove a GPU's attention and small operations before its pool is sized, and route around faults.

Owns: which faults end a worker, which make another kernel serve, and what a proof holds for.
Invariant: what serves was right on every shape, or was so at an earlier start under the same key.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path

import msgspec
import torch

import engine.worker.model
from engine.checkpoint.model_config import ModelConfig
from engine.errors import WorkerFailed
from engine.kernels.attention_backends import refusal_of, this_machine
from engine.wire.messages import GpuSpec, Proof, Setup
from engine.worker.device import Device
from engine.worker.model.backend import Backend, choose_backend
from engine.worker.model.proving import Prover, Wrong
from engine.worker.model.torch_backend import TorchBackend

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
        WorkerFailed: something is computed wrongly by every kernel that there is.
    """
    started_s = time.monotonic()
    twin = TorchBackend()
    twins = {wrong.operation: wrong for wrong in _faults_of(prover, twin)}
    refused: dict[str, str] = {}
    while not isinstance(backend := choose({**faults, **refused}), TorchBackend):
        wrong = _tried(partial(prover.attention, backend))
        if wrong is None:
            break
        refused[refusal_of(backend.name.partition(" ")[0].rstrip(";"))] = wrong.about
    notes: list[str] = []
    if isinstance(backend, TorchBackend):
        _end_if_wrong(twins.values())
    else:
        found = {wrong.operation: wrong for wrong in prover.small(backend)}
        _end_if_wrong([wrong for name, wrong in found.items() if name in twins])
        refused |= {name: wrong.about for name, wrong in found.items()}
        notes = [
            f"self-test: torch's {name} is wrong here, {wrong.about}"
            for name, wrong in twins.items()
        ]
    took_ms = (time.monotonic() - started_s) * 1e3
    return Proof(key, refused, notes, took_ms)


def proof_of(setup: Setup, gpu: GpuSpec, config: ModelConfig, device: Device) -> Proof:
    """Take an earlier start's proof of the same kernels on the same card, or make one."""
    card, dtype, block_size = device.card, getattr(torch, setup.dtype), setup.block_size
    assert card is not None
    faults = this_machine(faults=gpu.faults).faults
    key = proof_key(config, dtype, block_size, f"{card.name} {card.driver} {sorted(faults)}")
    for proof in gpu.proofs:
        if proof.key == key:
            return msgspec.structs.replace(proof, took_ms=0.0)
    prover = Prover(config, dtype, device.torch_device, block_size, card.num_processors)

    def choose(faults: Mapping[str, str]) -> Backend:
        return choose_backend(device.torch_device, dtype, config, block_size, faults=faults)

    return proved(prover, choose, faults, key)


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
        config.delta is not None,
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


def _faults_of(prover: Prover, backend: Backend) -> list[Wrong]:
    wrong = _tried(partial(prover.attention, backend))
    return [*([] if wrong is None else [wrong]), *prover.small(backend)]


def _tried(prove: Callable[[], Wrong | None]) -> Wrong | None:
    try:
        return prove()
    except Exception as error:  # noqa: BLE001  # a kernel that fails is as bad as a wrong one
        return Wrong("attention", f"{type(error).__name__}: {str(error)[:200]}")


def _end_if_wrong(wrong: Collection[Wrong]) -> None:
    for each in wrong:
        raise WorkerFailed(
            f"self-test: {each.operation} is wrong, {each.about}",
            where="this device, by every kernel",
            hint="penstock doctor --self-test makes a report; another driver or torch may help",
        )
