"""Time a worker's kernels on a device, beside the device's own limits.

Run as `python -m engine.worker.measure kernels|steps|transports`; prints one JSON object. Weights
are random, in the shape of Llama 3.1 8B or of a model folder.

Invariant: a share is relative to this device in this run, never to a data sheet.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.checkpoint import expected_shapes
from engine.checkpoint.folder_files import read_object
from engine.checkpoint.model_config import DTYPE_BYTES, ModelConfig
from engine.checkpoint.weights_layout import is_embedding, layout_of
from engine.errors import PenstockError, WorkerFailed
from engine.kernels.attention_backends import AttentionNeeds, choose_attention, this_machine
from engine.kernels.costs import (
    step_values,
)
from engine.kernels.product_choice import AS_STORED, products_here
from engine.units import size_text
from engine.wire.sampling import SamplingParams
from engine.worker.copying import copy_blocks
from engine.worker.device import CudaDevice, Device
from engine.worker.grammars import Grammars
from engine.worker.graphs import DecodeGraphs
from engine.worker.kernel_cases import SEQUENCES, SMALL_SEQUENCES, KernelFixture
from engine.worker.model.backend import choose_backend
from engine.worker.model.buffers import fresh
from engine.worker.model.transformer import Transformer
from engine.worker.model.weight import Weight, packed_in_pairs
from engine.worker.runner import Runner
from engine.worker.weight_streaming import arena_views
from engine.worker.worker_request import WorkerRequest

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
SMALL_SHAPE = {"num_hidden_layers": 2, "vocab_size": 8192}
CASES = [(1, 1024), (64, 1024), (1, 8192)]
"""Sequences, and tokens of each, in a decode step."""
SMALL_CASES = [(1, 64), (4, 64)]
CHUNK_TOKENS = 4096
_NUM_CAPTURED = 4
"""Repetitions of all layers in a graph, so that launching takes a negligible share."""
_MIN_SAMPLE_S = 0.3
_MAX_SAMPLES = 200


@dataclass(frozen=True, slots=True)
class Row:
    """One timed part, and its rate."""

    what: str
    shape: str
    ms: float
    rate: float
    """Bytes or operations per second."""
    unit: str
    """`B/s` or `FLOP/s`."""
    share: float
    """Share of the ceiling of its unit, 0 to 1."""


class Bench:
    """One device, its ceilings, and a model with random weights."""

    def __init__(self, config: ModelConfig, dtype: str, size_bytes: int, matrix: int) -> None:
        self.device: Device | None = None
        name = "cpu"
        if torch.cuda.is_available():
            self.device = CudaDevice(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
            name = torch.cuda.get_device_name()
        self.name, self.config = name, config
        self.on = torch.device("cpu") if self.device is None else self.device.torch_device
        self.dtype = dtype
        is_paired = self.device is None and dtype == "bfloat16"
        self.products = products_here() if is_paired else AS_STORED
        self.block_size = 64
        if self.device is not None:
            machine = this_machine(torch.cuda.get_device_capability())
            choice = choose_attention(AttentionNeeds.of(config, self.dtype), machine)
            self.block_size = choice.backend.default_block_size
        kind, variant = getattr(torch, dtype), self.products.attention
        how = (config, self.block_size, fresh, variant)
        self.attention = choose_backend(self.on, kind, *how).name
        self._size_bytes = size_bytes
        source, target = self.bytes(size_bytes), self.bytes(size_bytes)
        copy_ms = self.time(lambda: target.copy_(source))
        a = torch.randn(matrix, matrix, device=self.on).to(kind)
        matmul_ms = self.time(lambda: torch.mm(a, a))
        self.ceilings = {
            "B/s": 2 * size_bytes / copy_ms * 1e3,
            "FLOP/s": 2 * matrix**3 / matmul_ms * 1e3,
        }

    def bytes(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self.on)

    def time(self, run: Callable[[], object]) -> float:
        """Median milliseconds of a call, the device's work included."""
        run()
        samples: list[float] = []
        while len(samples) < 3 or (
            sum(samples) < _MIN_SAMPLE_S * 1e3 and len(samples) < _MAX_SAMPLES
        ):
            self._wait()
            started_ns = time.perf_counter_ns()
            run()
            self._wait()
            samples.append((time.perf_counter_ns() - started_ns) / 1e6)
        return statistics.median(samples)

    def time_layers(self, call: Callable[[int], object], num_layers: int) -> float:
        """Return the milliseconds of a call among many in a row, in a graph on a device."""

        def all_layers() -> None:
            for _ in range(1 if self.device is None else _NUM_CAPTURED):
                for layer in range(num_layers):
                    call(layer)

        if self.device is None:
            return self.time(all_layers) / num_layers
        return self.time(self.device.capture(all_layers)) / num_layers / _NUM_CAPTURED

    def _wait(self) -> None:
        if self.device is not None:
            self.device.mark()()

    def row(self, what: str, shape: str, run: Callable[[], object], amount: int, unit: str) -> Row:
        """Time a call that moves this many bytes or does this many operations."""
        return self.row_of(what, shape, self.time(run), amount, unit)

    def row_of(self, what: str, shape: str, ms: float, amount: int, unit: str) -> Row:
        """Make a row from a known time."""
        rate = amount / ms * 1e3
        return Row(what, shape, ms, rate, unit, rate / self.ceilings[unit])

    def transformer(self, max_model_len: int) -> Transformer:
        """Make the model with weights that keep activations finite.

        Raises:
            WorkerFailed: they do not fit into host memory.
        """
        num_values = sum(math.prod(shape) for _, shape in expected_shapes(self.config))
        num_bytes = num_values * getattr(torch, self.dtype).itemsize
        host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self.device is None and num_bytes > host_bytes // 2:
            raise WorkerFailed(
                f"weights of {size_text(num_bytes)} need too much of the memory, "
                f"which is {size_text(host_bytes)}",
                where="bench",
                hint="name the folder of a smaller model, or add --small",
            )
        # as a worker has them: what is multiplied together lies together
        layout = layout_of(expected_shapes(self.config), self.dtype)
        arena = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self.on)
        weights = {}
        for name, values in arena_views(layout, self.dtype, arena).items():
            weights[name] = Weight.plain(values.normal_(std=1 / math.sqrt(values.shape[-1])))
        if self.products.variants is not None:
            weights |= self._packed(weights)
        shape, how = (max_model_len, self.block_size), self.products
        kinds = (how.variants, how.attention)
        return Transformer(self.config, weights, self.dtype, *shape, *kinds)

    def _packed(self, weights: dict[str, Weight]) -> dict[str, Weight]:
        """Pack the matrices that a worker packs, which packed_layout() names."""
        prefix, packed = self.config.family.prefix, {}
        matrices = {name: each for name, each in weights.items() if len(each.shape) == 2}
        matrices.setdefault(
            f"{prefix}lm_head.weight", weights[f"{prefix}model.embed_tokens.weight"]
        )
        for name, stored in matrices.items():
            if not is_embedding(name):
                packed[name] = packed_in_pairs(stored)
        return packed

    def pool(self, num_blocks: int) -> torch.Tensor:
        """Make KV blocks on the device."""
        config = self.config
        shape = (config.num_kv_layers, 2, self.block_size, config.num_kv_heads, config.head_dim)
        return torch.zeros(num_blocks, *shape, dtype=getattr(torch, self.dtype), device=self.on)


def steps(bench: Bench, cases: list[tuple[int, int]], chunk: int) -> Iterator[Row]:
    """Time whole steps: decode against its reads, prefill against its operations."""
    config, size = bench.config, bench.block_size
    longest = max(context for _, context in cases) + 1
    num_blocks = (
        max(batch * -(-(context + 1) // size) for batch, context in [*cases, (1, chunk)]) + 1
    )
    transformer, pool = bench.transformer(max(longest, chunk)), bench.pool(num_blocks)
    graphs = None
    if bench.device is not None and transformer.is_capturable:
        graphs = DecodeGraphs(
            transformer,
            pool,
            bench.device,
            block_size=size,
            max_model_len=longest,
            max_batch=max(batch for batch, _ in cases),
        )
        graphs.capture()
    runner = Runner(transformer, pool, size, _no_grammars(), bench.device, graphs)
    values, item_bytes = step_values(config), pool.element_size()
    token_bytes = config.kv_block_bytes(size, bench.dtype) // size
    for batch, context in cases:
        planned = [(each, 1) for each in _decoding(batch, context, size)]
        amount = values.read(batch) * item_bytes + batch * context * token_bytes
        decode = partial(_step, runner, planned)
        yield bench.row("decode step", f"{batch} x {context}", decode, amount, "B/s")
    width = config.num_heads * config.head_dim
    operations = values.prefill_flops(chunk) + 2 * config.num_layers * width * chunk**2
    prefill = partial(_step, runner, [(_prompt(chunk, size), chunk)])
    yield bench.row("prefill chunk", f"1 x {chunk}", prefill, operations, "FLOP/s")


def _step(runner: Runner, planned: list[tuple[WorkerRequest, int]]) -> None:
    runner.collect(runner.launch(planned))


def kernels(bench: Bench, *, is_small: bool) -> Iterator[Row]:
    """Time each kernel alone, against its reads and writes or its operations."""
    dtype = getattr(torch, bench.dtype)
    bed = KernelFixture.of(bench.config, dtype, bench.on, bench.block_size, bench.products)
    sequences, token_counts = (SMALL_SEQUENCES, [4]) if is_small else (SEQUENCES, [1, 64, 4096])
    for case in bed.cases(sequences, token_counts):
        ms = bench.time_layers(case.call, bed.num_layers)
        bytes_per_s, flops_per_s = bench.ceilings["B/s"], bench.ceilings["FLOP/s"]
        amount, unit = case.cost.num_flops, "FLOP/s"
        if case.cost.is_bound_by_bytes(bytes_per_s, flops_per_s):
            amount, unit = case.cost.num_bytes, "B/s"
        yield bench.row_of(case.what, case.shape, ms, amount, unit)


def transports(bench: Bench, num_blocks: int) -> Iterator[Row]:
    """Time block copies through the staging buffer, beside one large copy of as many bytes.

    Rates count each moved byte once; the ceiling is the faster of both.
    """
    pool = bench.pool(num_blocks + 1)
    staging = torch.zeros(pool.shape, dtype=pool.dtype, pin_memory=bench.device is not None)
    pairs = [(block_id, block_id) for block_id in range(1, num_blocks + 1)]
    amount = pool[1:].numel() * pool.element_size()
    shape = f"{num_blocks} blocks"
    for what, source, target in (("to the host", pool, staging), ("from the host", staging, pool)):
        whole_ms = bench.time(partial(target[1:].copy_, source[1:], non_blocking=True))
        ms = bench.time(partial(copy_blocks, source, target, pairs, bench.device))
        rate = amount / ms * 1e3
        yield Row(f"blocks {what}", shape, ms, rate, "B/s", min(whole_ms, ms) / ms)


def _prompt(num_tokens: int, block_size: int) -> WorkerRequest:
    """Make a request in blocks of its own, all of which a step must read."""
    return WorkerRequest(
        seq_id=0,
        generation=0,
        token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_table=list(range(1, 1 + -(-num_tokens // block_size))),
        sampling=SamplingParams(1, 0, temperature=0.0),
        until_output=1,
        admitted_ns=0,
    )


def _decoding(batch: int, context: int, block_size: int) -> list[WorkerRequest]:
    count = -(-(context + 1) // block_size)
    return [
        WorkerRequest(
            seq_id=i,
            generation=0,
            token_ids=[0] * (context + 1),
            num_prompt_tokens=1,
            num_computed_tokens=context,
            block_table=list(range(1 + i * count, 1 + (i + 1) * count)),
            sampling=SamplingParams(context + 2, 0, temperature=0.0),
            until_output=context + 2,
            admitted_ns=0,
        )
        for i in range(batch)
    ]


def _no_grammars() -> Grammars:
    def load() -> None:
        raise ValueError("no sequence here has a grammar")

    return Grammars(load)  # type: ignore[arg-type]


def own_dtype(folder: Path | None) -> str:
    """Read the dtype that a model was saved in; bfloat16 of GGUF files and of the 8B model."""
    path = None if folder is None else folder / "config.json"
    if path is None or not path.exists():
        return "bfloat16"
    keys = read_object(path)
    of_text = keys.get("text_config") or {}
    named = [each.get(key) for each in (keys, of_text) for key in ("dtype", "torch_dtype")]
    return next((name for name in named if name in DTYPE_BYTES), "float32")


def _config(folder: Path | None, *, is_small: bool, free_bytes: int | None) -> ModelConfig:
    """Return the shape to measure; without a folder Llama 3.1 8B's, with the layers that fit.

    A layer's kernels are equal in each, so fewer layers only shorten the steps.
    """
    if folder is not None:
        return ModelConfig.from_folder(folder)
    shape = LLAMA_8B | (SMALL_SHAPE if is_small else {})
    if free_bytes is not None and not is_small:
        shape |= {"num_hidden_layers": layers_that_fit(shape, free_bytes)}
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "config.json").write_text(json.dumps(shape))
        return ModelConfig.from_folder(Path(made))


def layers_that_fit(shape: Mapping[str, Any], free_bytes: int) -> int:
    """Count the Llama layers that half of the memory holds in float32, with KV of CASES."""
    hidden, kv = shape["hidden_size"], shape["num_key_value_heads"]
    width = kv * hidden // shape["num_attention_heads"]
    layer = hidden * (2 * hidden + 2 * width + 3 * shape["intermediate_size"])
    layer += 2 * width * max(batch * (context + 1) for batch, context in CASES)
    ends = 2 * hidden * shape["vocab_size"]
    left = free_bytes // 2 // 4 - ends
    return int(max(1, min(shape["num_hidden_layers"], left // layer)))


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m engine.worker.measure")
    parser.add_argument("what", choices=["kernels", "steps", "transports"])
    parser.add_argument("--model", type=Path, help="a folder; only its shape counts")
    parser.add_argument("--small", action="store_true", help="little work, to see that it works")
    parser.add_argument("--dtype", choices=list(DTYPE_BYTES), help="None: the model's own")
    parser.add_argument("--free-bytes", type=int, help="of the host's memory; a GPU is asked")
    options = parser.parse_args()
    size_bytes, matrix = (1 << 26, 1024) if options.small else (1 << 30, 8192)
    cases, chunk = (SMALL_CASES, 128) if options.small else (CASES, CHUNK_TOKENS)
    try:
        free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else options.free_bytes
        config = _config(options.model, is_small=options.small, free_bytes=free)
        bench = Bench(config, options.dtype or own_dtype(options.model), size_bytes, matrix)
        with torch.inference_mode():
            if options.what == "transports":
                rows = list(transports(bench, 4 if options.small else 64))
            elif options.what == "steps":
                rows = list(steps(bench, cases, chunk))
            else:
                rows = list(kernels(bench, is_small=options.small))
    except (PenstockError, torch.cuda.OutOfMemoryError) as error:
        sys.exit(str(error))
    found = {
        "device": bench.name,
        "torch": torch.__version__,
        "dtype": bench.dtype,
        "attention": bench.attention,
        "num_layers": config.num_layers,
        "copy_bytes_per_s": bench.ceilings["B/s"],
        "matmul_flop_per_s": bench.ceilings["FLOP/s"],
        "data": [{name: getattr(row, name) for name in Row.__slots__} for row in rows],
    }
    print(json.dumps(found))  # noqa: T201  # its one result


if __name__ == "__main__":
    main()
