"""Into which MIG instances a GPU could be divided, and which of them would suit a model.

Owns: the table of profiles, as parts of a GPU. Pure.
Invariant: what an instance has left for KV leans to the careful side; a layout that holds no
useful request is said to be of no use.
Never: divides anything; asks a driver.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from appliance.devices.gpu_listing import Gpu
from appliance.models.fits import GPU_OVERHEAD_BYTES, LEAST_TOKENS
from engine.units import size_text

_DIVISIBLE = re.compile(r"\b(A100|A800|H100|H800|H20|H200|GH200|B200|GB200)\b")
_SIZES = (40, 80, 94, 96, 141, 180)
_PROFILE = re.compile(r"MIG (\d)g\.(\d+)gb")


@dataclass(frozen=True, slots=True)
class Profile:
    """A size of MIG instance, as NVIDIA names and divides it."""

    num_slices: int
    """Of seven, of the processors."""
    num_eighths: int
    """Of the memory."""
    most: int
    """Instances of it on one GPU."""

    def named(self, gpu_memory_bytes: int) -> str:
        """As `nvidia-smi mig` has it: by its part of the size under which the GPU is sold."""
        gib = gpu_memory_bytes / 2**30
        sold = next((size for size in _SIZES if size >= gib), math.ceil(gib))
        return f"{self.num_slices}g.{math.floor(sold * self.num_eighths / 8 + 0.5)}gb"

    def bytes_of(self, gpu_memory_bytes: int) -> int:
        """Memory of an instance."""
        return gpu_memory_bytes * self.num_eighths // 8


PROFILES = (Profile(3, 4, 2), Profile(2, 2, 3), Profile(1, 2, 4), Profile(1, 1, 7))
"""Those of which there can be two, the largest first."""


def memory_to_divide(gpus: list[Gpu]) -> int | None:
    """Bytes of a GPU here that MIG can divide, or has divided; None: there is none."""
    for gpu in gpus:
        found = _PROFILE.search(gpu.model)
        if found is not None:
            slices = int(found[1])
            eighths = {p.num_slices: p.num_eighths for p in PROFILES} | {7: 8, 4: 4}
            return gpu.memory_bytes * 8 // eighths.get(slices, slices)
        if _DIVISIBLE.search(gpu.model):
            return gpu.memory_bytes
    return None


def layouts(
    gpu_memory_bytes: int, weights_bytes: int, kv_token_bytes: int
) -> Iterator[tuple[str, str, bool]]:
    """Each layout: its profiles, what it means for the model, and whether it is of use."""
    for profile in PROFILES:
        name = f"{profile.most} x {profile.named(gpu_memory_bytes)}"
        memory = profile.bytes_of(gpu_memory_bytes)
        tokens = (memory - weights_bytes - GPU_OVERHEAD_BYTES) // kv_token_bytes
        if tokens < LEAST_TOKENS:
            short = (LEAST_TOKENS - tokens) * kv_token_bytes
            yield name, f"{size_text(short)} short each", False
        else:
            about = f"{tokens:,} tokens of KV each; {profile.most} workers, blocks through the host"
            yield name, about, True
