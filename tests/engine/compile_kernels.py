"""Compile kernels for devices that need not be there, as a worker would launch them.

A process of its own, for a kernel is either interpreted or compiled in the whole of one. Run by
itself it compiles the suite's few variants and prints what each came to, as JSON lines;
tests.benchmarks.compile_matrix has them all.
"""

import json
import math
import re
import subprocess
import tempfile
import warnings
from dataclasses import asdict, dataclass
from itertools import accumulate

import torch
from triton import knobs

from engine.checkpoint.delta_config import GatedDeltaConfig
from engine.checkpoint.packed_layouts import CPU_FORMS, FORMS, panels_shape
from engine.worker.model import (
    triton_attention,
    triton_delta,
    triton_linear,
    triton_ops,
    triton_sampling,
)
from engine.worker.model.attention import several_queries_tiling, single_query_tiling
from engine.worker.model.delta_inputs import DeltaConstants, DeltaInputs, RecordRuns
from engine.worker.model.paged_step import PagedStep
from engine.worker.model.sampler import NUM_DRAW_FIELDS
from engine.worker.model.triton_attention import attend_several, attend_single
from engine.worker.model.triton_delta import gated_delta
from engine.worker.model.triton_sampling import sample_rows
from engine.worker.model.weight import Weight
from tests.triton_driver import NUM_PROCESSORS, SHARED_BYTES, FakeDriver

NUM_KV_HEADS, NUM_PARTS = 2, 4


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel on a device, by what it is compiled for."""

    capability: int
    kernel: str
    """`several`, `chunk` (the same in parts), `single`, `parts` (of single queries), `join` and
    `join chunk` of such parts, or an operation."""
    head_dim: int = 128
    dtype: str = "bfloat16"
    group_size: int = 4
    block_size: int = 64
    has_extras: bool = False
    """A window, a softcap and sinks."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of it."""

    shared_bytes: int
    shared_limit_bytes: int
    registers: int
    spilled_bytes: int
    waits: list[int]
    """Groups of copies that may be under way while the kernel waits for older ones, each time that
    it waits; all 0: no load is under way while anything is computed."""
    tensor_instructions: int
    copy_instructions: int
    """Asynchronous, from the device's memory to shared memory."""
    num_programs: int
    """Of the launch that it was compiled for."""

    def faults(self, variant):
        """Find what would make it slow or fail: spills, too much shared memory, idle processors.

        A product with a matrix of 4,096 rows has to give each processor a program.
        """
        if self.spilled_bytes:
            yield f"spills {self.spilled_bytes} bytes"
        if self.shared_bytes > self.shared_limit_bytes:
            yield f"wants {self.shared_bytes} bytes of shared memory"
        if variant.kernel in PRODUCTS and self.num_programs < NUM_PROCESSORS:
            yield f"{self.num_programs} programs for {NUM_PROCESSORS} processors"


SUITE = [
    *(Variant(capability, kernel) for capability in (80, 90) for kernel in ("several", "parts")),
    Variant(100, "several"),
    Variant(120, "parts"),
    Variant(90, "chunk"),
    Variant(80, "join chunk"),
    Variant(90, "several", 64, "float16", has_extras=True),
    Variant(86, "several", group_size=8, block_size=16),
    Variant(90, "sample"),
    Variant(80, "q4_1 few"),
    Variant(90, "q6_k many"),
    Variant(89, "int8_row many"),
    Variant(120, "q5_k few"),
    Variant(90, "recur"),
    Variant(80, "convolve"),
    Variant(100, "gate"),
    Variant(89, "several", 256),
    Variant(80, "several", 256),
]


def compile_variant(variant):
    driver = FakeDriver(variant.capability).activate()
    function = FUNCTIONS[variant.kernel]
    function.device_caches.clear()
    _launch(variant)
    (kernel,) = function.device_caches[driver.capability][0].values()
    return _looked_at(kernel, driver)


def _launch(v):
    """As the worker does, on tensors of the right types."""
    dtype = getattr(torch, v.dtype)
    if v.kernel in OPERATIONS:
        return OPERATIONS[v.kernel](dtype)
    num_heads = NUM_KV_HEADS * v.group_size
    kv = torch.zeros(3, 2, 2, v.block_size, NUM_KV_HEADS, v.head_dim, dtype=dtype)
    has_chunks = v.kernel in ("several", "chunk", "join chunk")
    lens = [70, 2] if has_chunks else [1, 1]
    qkv = torch.zeros(sum(lens), num_heads + 2 * NUM_KV_HEADS, v.head_dim, dtype=dtype)
    q = qkv[:, :num_heads]
    starts = torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32)
    tables = torch.zeros(2, 2, dtype=torch.int32)
    tiles = torch.zeros(2 if has_chunks else 0, 2, dtype=torch.int32)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    step = PagedStep(tables, starts, starts, seq_lens, tiles, max(lens), max(lens), True)
    extras = (64, 30.0, torch.zeros(num_heads)) if v.has_extras else (None, None, None)
    how = (step, 0.1, *extras)
    shape = (v.group_size, v.head_dim, dtype.itemsize, SHARED_BYTES[v.capability])
    out = torch.empty(q.shape, dtype=dtype)
    if has_chunks:
        parts = 1 if v.kernel == "several" else NUM_PARTS
        return attend_several(out, q, kv, 0, *how, several_queries_tiling(*shape), parts)
    parts = NUM_PARTS if v.kernel in ("parts", "join") else 1
    return attend_single(out, q, kv, 0, *how, single_query_tiling(*shape), parts)


def _norm(dtype):
    x = torch.zeros(3, 4096, dtype=dtype)
    triton_ops.norm(x, x[0], 1e-5, x, 1.0)


def _place(dtype):
    kv = torch.zeros(3, 2, 2, 64, 2, 128, dtype=dtype)
    angles = (torch.zeros(64, 1, 128, dtype=dtype),) * 2
    positions = torch.zeros(3, dtype=torch.int64)
    qkv = torch.zeros(3, 12, 128, dtype=dtype)
    triton_ops.place(qkv, 8, angles, kv, 0, positions, positions)


def _product(form, num_tokens):
    """A product with a matrix in panels, of few tokens or of many."""

    def launch(dtype):
        panels = torch.zeros(panels_shape(form, 4096, 4096), dtype=torch.uint8)
        weight = Weight(panels, None, f"{form}_panels", (4096, 4096))
        out = torch.zeros(num_tokens, 4096, dtype=dtype)
        triton_linear.multiply(out, out.clone(), weight, None, 0)

    return launch


def _delta(dtype):
    """A layer of Qwen3.5's shape, without its products."""
    config = GatedDeltaConfig(16, 32, 128, 128, 4, frozenset({0, 1}), ())
    heads, gates, betas = (torch.zeros(3, width, dtype=dtype) for width in (8192, 4096, 32))
    inputs = DeltaInputs(heads, (2048, 4096), 128, 256, gates, 256, betas, betas, 2)
    conv, small = torch.zeros(4, 8192), torch.zeros(128)
    constants = DeltaConstants(conv, small, small, small, 1e-6, 1)
    kv, records = torch.zeros(9, 1, 2, 64, 2, 256, dtype=dtype), torch.zeros(3, 2, 49).int()
    runs = RecordRuns(*[torch.zeros(3, dtype=torch.int32)] * 3, records)
    gated_delta(inputs, DeltaInputs.kept(config, heads), constants, config, kv, runs)


PRODUCTS = {
    f"{form} {words}": _product(form, num_tokens)
    for form in FORMS
    if form not in CPU_FORMS
    for words, num_tokens in (("few", 3), ("many", 300))
}
OPERATIONS = (
    PRODUCTS
    | {
        "norm": _norm,
        "gated": lambda dtype: triton_ops.gated(torch.zeros(3, 28672, dtype=dtype), "silu"),
        "place": _place,
        "sample": lambda dtype: sample_rows(
            torch.zeros(3, 128256), torch.zeros(3, NUM_DRAW_FIELDS, dtype=torch.float64)
        ),
        "greedy": lambda dtype: sample_rows(torch.zeros(3, 128256)),
    }
    | dict.fromkeys(("convolve", "recur", "gate"), _delta)
)


FUNCTIONS = {
    "several": triton_attention._several_queries_kernel,
    "chunk": triton_attention._several_queries_kernel,
    "join chunk": triton_attention._join_tiles_kernel,
    "single": triton_attention._single_query_kernel,
    "parts": triton_attention._single_query_kernel,
    "join": triton_attention._join_kernel,
    "norm": triton_ops._norm_kernel,
    "gated": triton_ops._gated_kernel,
    "place": triton_ops._place_kernel,
    "sample": triton_sampling._sample_kernel,
    "greedy": triton_sampling._sample_kernel,
    "convolve": triton_delta._convolve_kernel,
    "recur": triton_delta._recur_kernel,
    "gate": triton_delta._gate_kernel,
} | {
    name: getattr(triton_linear, "_bytes_kernel" if "int8_row" in name else "_panels_kernel")
    for name in PRODUCTS
}


def _looked_at(kernel, driver):
    resources = _resources(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    waits = re.findall(r"async_wait [^\n]*num = (\d+)", kernel.asm["ttgir"])
    return Compiled(
        shared_bytes=kernel.metadata.shared,
        shared_limit_bytes=SHARED_BYTES[driver.capability],
        registers=resources["REG"],
        spilled_bytes=resources["STACK"] + resources["LOCAL"],
        waits=[int(number) for number in waits],
        tensor_instructions=len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)", ptx)),
        copy_instructions=len(re.findall(r"\bcp\.async\.c[ag]\.", ptx)),
        num_programs=math.prod(driver.grids[-1]),
    )


def _resources(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", printed)}


def main():
    for variant in SUITE:
        found = compile_variant(variant)
        row = asdict(variant) | asdict(found) | {"faults": list(found.faults(variant))}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
