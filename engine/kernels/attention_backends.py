"""Choose a GPU's attention backend, and say what the other backends lack.

Invariant: the choice is a function of what is needed and of what is installed; what was passed over
is named with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from engine.checkpoint.model_config import ModelConfig
from engine.kernels.attention_needs import flash_attn_fault, triton_fault

SMALL_OPERATIONS = ("norm", "norm_rows", "gated", "place", "draws", "delta")
"""Parts of a GPU's step with a kernel and a twin in torch."""
SAFE = dict.fromkeys((*SMALL_OPERATIONS, "triton attention"), "safe kernels")
"""The faults of a machine on which none of our kernels is to run."""
_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """One row: what it takes, and what it can do."""

    name: str
    package: str | None = None
    """A package that it needs beside torch."""
    min_torch: tuple[int, int] = (2, 11)
    min_capability: tuple[int, int] = (7, 5)
    """Of the device."""
    dtypes: tuple[str, ...] = (*_HALVES, "float32")
    block_multiple: int = 1
    """Tokens that a block's size is a multiple of."""
    default_block_size: int = 64
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    has_softcap: bool = True
    has_sinks: bool = False
    has_uneven_heads: bool = False
    """Layers may differ in the number and size of their key heads, or share keys."""


ATTENTION_BACKENDS = (
    AttentionBackend(
        "flash",
        package="flash_attn",
        min_capability=(8, 0),
        dtypes=_HALVES,
        block_multiple=256,
        default_block_size=256,
        max_head_dim=256,
        head_dim_multiple=8,
    ),
    AttentionBackend(
        "torch_varlen",
        min_torch=(2, 13),  # before, its keys could not be kept whole
        min_capability=(8, 0),
        dtypes=_HALVES,
        block_multiple=256,
        default_block_size=256,
        max_head_dim=256,
        head_dim_multiple=8,
        has_softcap=False,
    ),
    AttentionBackend("triton", min_capability=(8, 0), has_sinks=True),
    AttentionBackend("torch", has_sinks=True, has_uneven_heads=True),
)
"""Backends, the best first.

All but the last need Triton, which comes with torch for CUDA. Before compute capability 8.0 a GPU's
shared memory is too small for flash's prefill."""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model asks of attention."""

    dtype: str
    head_dim: int
    has_softcap: bool
    block_size: int | None = None
    """None: to be chosen, as the backend likes it."""
    has_sinks: bool = False
    has_uneven_heads: bool = False

    @classmethod
    def of(cls, config: ModelConfig, dtype: str, block_size: int | None = None) -> AttentionNeeds:
        """Return the needs of a model that is computed in a dtype."""
        has_softcap = config.attention_softcap is not None
        is_uneven = len(set(config.heads)) > 1 or config.num_kv_layers < config.num_layers
        has_sinks = config.family.has_sinks
        return cls(dtype, config.head_dim, has_softcap, block_size, has_sinks, is_uneven)


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware and packages to choose for."""

    torch: tuple[int, int]
    faults: Mapping[str, str]
    """Reasons why something is not used: a package, an attention backend, a small operation."""
    capability: tuple[int, int] | None = None
    """The device's compute capability; None: not read, and taken to be new enough."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The attention backend that a machine gets, and why the others were not taken."""

    backend: AttentionBackend
    passed_over: tuple[str, ...]
    """Why not the better ones, one reason for each."""

    @property
    def title(self) -> str:
        """The name, and why it is not a better one."""
        reasons = "; ".join(self.passed_over)
        return f"{self.backend.name} ({reasons})" if reasons else self.backend.name


def this_machine(
    capability: tuple[int, int] | None = None, faults: Mapping[str, str] | None = None
) -> Machine:
    """Find the installed packages that work, without importing them into this process.

    Args:
        capability: of the device; None: not read.
        faults: why packages are unusable, where that is known; None: they are tried.
    """
    try:
        torch = version("torch").split(".")
    except PackageNotFoundError:
        torch = ["0", "0"]
    if faults is None:
        found = {"triton": triton_fault(), "flash_attn": flash_attn_fault()}
        faults = {name: fault for name, fault in found.items() if fault is not None}
    return Machine((int(torch[0]), int(torch[1])), faults, capability)


def choose_attention(needs: AttentionNeeds, machine: Machine) -> AttentionChoice:
    """Choose the first backend that meets the needs."""
    passed_over: list[str] = []
    for backend in ATTENTION_BACKENDS[:-1]:
        reason = _objection(backend, needs, machine)
        if reason is None:
            return AttentionChoice(backend, tuple(passed_over))
        passed_over.append(f"{backend.name}: {reason}")
    return AttentionChoice(ATTENTION_BACKENDS[-1], tuple(passed_over))


def refusal_of(backend: str) -> str:
    """Return the name by which a machine's faults say that a backend computes wrongly there."""
    return f"{backend} attention"


def _objection(backend: AttentionBackend, needs: AttentionNeeds, machine: Machine) -> str | None:
    """Why a backend cannot be taken; None: it can."""
    if (fault := machine.faults.get(refusal_of(backend.name))) is not None:
        return fault
    for package in ("triton", backend.package):
        if package is not None and package in machine.faults:
            return machine.faults[package]
    if machine.torch < backend.min_torch:
        return f"needs torch {'.'.join(map(str, backend.min_torch))}"
    if machine.capability is not None and machine.capability < backend.min_capability:
        return f"needs compute capability {'.'.join(map(str, backend.min_capability))}"
    if needs.dtype not in backend.dtypes:
        return f"no {needs.dtype}"
    if needs.has_softcap and not backend.has_softcap:
        return "no softcap"
    if needs.has_sinks and not backend.has_sinks:
        return "no sinks"
    if needs.has_uneven_heads and not backend.has_uneven_heads:
        return "no layers that differ in their heads"
    is_too_wide = backend.max_head_dim is not None and needs.head_dim > backend.max_head_dim
    if is_too_wide or needs.head_dim % backend.head_dim_multiple:
        return f"no heads of {needs.head_dim}"
    if needs.block_size is not None and needs.block_size % backend.block_multiple:
        return f"blocks of {backend.block_multiple}"
    return None
