"""Run a GPU worker's warm-up and then steps at random; print what Triton was asked to launch.

A process of its own, for in others the kernels are interpreted. Nothing is computed: kernels are
noted and not run, and what they would have written is zeros.
"""

import json
import random
import sys
from pathlib import Path

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.wire.sampling import SamplingParams
from engine.worker.grammars import Grammars
from engine.worker.graphs import DecodeGraphs
from engine.worker.model import transformer as transformer_module
from engine.worker.model.cuda import CudaBackend, DeviceLimits, TritonAttention
from engine.worker.model.transformer import Transformer
from engine.worker.model.weights import load_weights
from engine.worker.runner import Runner
from engine.worker.worker_request import WorkerRequest
from tests.triton_driver import NUM_PROCESSORS, SHARED_BYTES, FakeDriver

BLOCK_SIZE, MAX_MODEL_LEN, STEP_TOKENS, NUM_STEPS = 16, 1024, 64, 60
LIMITS = DeviceLimits(NUM_PROCESSORS, SHARED_BYTES[90])


class HostDevice:
    torch_device = torch.device("cpu")

    def pinned(self, values, dtype):
        return torch.tensor(values, dtype=dtype)

    def mark(self):
        return lambda: None

    def fetch(self, tensor):
        return tensor.tolist

    def capture(self, step):
        step()
        return lambda: None


def triton_backend(_device, dtype, config, _block_size, *_):
    group_size = config.num_heads // config.num_kv_heads
    attention = TritonAttention(group_size, config.head_dim, dtype.itemsize, LIMITS)
    return CudaBackend("triton", attention, attention.queries_per_tile)


def sequence(rng, number, *, is_decoding):
    length = rng.choice([rng.randrange(1, 40), rng.randrange(1, MAX_MODEL_LEN)])
    new = 1 if is_decoding else rng.randrange(1, min(length, STEP_TOKENS // 4) + 1)
    temperature = rng.choice([0.0, 0.0, 1.0])
    running = WorkerRequest(
        seq_id=number,
        generation=0,
        token_ids=[0] * length,
        num_prompt_tokens=length,
        num_computed_tokens=length - new,
        block_table=[1] * -(-length // BLOCK_SIZE),
        sampling=SamplingParams(4, number, temperature=temperature),
        until_output=4,
        admitted_ns=0,
    )
    return running, new


def main(folder, *, has_graphs):
    torch.empty = torch.zeros  # a token id that no kernel has written is one all the same
    transformer_module.choose_backend = triton_backend
    checkpoint = Checkpoint.open(Path(folder))
    config = checkpoint.config
    weights = load_weights(checkpoint, "float32", None, None, lambda *_: None)
    model = Transformer(config, weights, "float32", MAX_MODEL_LEN, BLOCK_SIZE)
    shape = (4, config.num_kv_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    pool, device, graphs = torch.zeros(shape), HostDevice(), None
    driver = FakeDriver(90).activate()
    driver.only_note()
    if has_graphs:
        graphs = DecodeGraphs(
            model, pool, device, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, max_batch=8
        )
        graphs.capture()
    runner = Runner(model, pool, BLOCK_SIZE, Grammars(lambda: None), device, graphs)
    runner.warm_up(STEP_TOKENS, MAX_MODEL_LEN)
    warm = set(driver.asked_for)
    counts, rng = [], random.Random(0)
    for _ in range(NUM_STEPS):
        is_decoding = rng.random() < 0.5
        size = rng.randrange(1, 8)
        driver.asked_for.clear()
        runner.collect(
            runner.launch([sequence(rng, i, is_decoding=is_decoding) for i in range(size)])
        )
        counts.append((is_decoding, len(driver.asked_for)))
        late = sorted({name for name, key in set(driver.asked_for) - warm})
        if late:
            break
    print(json.dumps({"warm": len(warm), "late": late, "counts": counts}))


if __name__ == "__main__":
    main(sys.argv[1], has_graphs=sys.argv[2] == "graphs")
