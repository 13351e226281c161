"""The host's part of a decode step by graphs, while sequences come and go.

    python -m tests.benchmarks.graph_rows [--root OTHER_TREE]

There is no device: captured graphs do nothing, and tensors lie on the host, so that what is left is
Python and the making of small tensors. Each step launches the next; in the second of each pair of
columns one sequence ends and another comes before every step.
"""

import argparse
import random
import statistics
import sys
import time
from types import SimpleNamespace

BLOCK_SIZE, MAX_MODEL_LEN, CONTEXT = 64, 131_072, 1024
NUM_STEPS = 60


class Nothing:
    """A device that has no work."""

    def __init__(self, torch):
        self._torch = torch
        self.torch_device = torch.device("cpu")

    def pinned(self, values, dtype):
        return self._torch.tensor(values, dtype=dtype)

    def capture(self, step):
        return lambda: None


def sequence(running_type, sampling, number):
    names = running_type.__dataclass_fields__
    return running_type(
        seq_id=number,
        generation=0,
        token_ids=[0] * (CONTEXT + 1),
        num_prompt_tokens=1,
        num_computed_tokens=CONTEXT,
        block_table=list(range(1, 2 + (CONTEXT + 512) // BLOCK_SIZE)),
        sampling=sampling,
        until_output=CONTEXT + 512,
        admitted_ns=0,
        **({"num_stored_blocks": None} if "num_stored_blocks" in names else {}),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", help="a tree to import engine from")
    options = parser.parse_args()
    if options.root:
        sys.path.insert(0, options.root)
    import torch

    from engine.wire.sampling import SamplingParams
    from engine.workers.graphs import DecodeGraphs
    from engine.workers.worker_request import WorkerRequest

    torch.set_num_threads(1)
    config = SimpleNamespace(vocab_size=16)
    graphs = DecodeGraphs(
        SimpleNamespace(config=config),
        None,
        Nothing(torch),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
    )
    graphs.capture()
    in_rows = getattr(graphs, "in_rows", lambda sequences: sequences)
    sampling = SamplingParams(CONTEXT + 512, 0, temperature=0.0)
    for batch in (64, 256):
        for is_churning in (False, True):
            rng, times = random.Random(0), []
            members = [sequence(WorkerRequest, sampling, number) for number in range(batch)]
            for number in range(NUM_STEPS):
                if is_churning:
                    del members[rng.randrange(batch)]
                    members.append(sequence(WorkerRequest, sampling, batch + number))
                started_ns = time.perf_counter_ns()
                graphs.launch(in_rows(members))
                times.append((time.perf_counter_ns() - started_ns) / 1e6)
            what = "churn" if is_churning else "steady"
            quartiles = statistics.quantiles(times[5:], n=4)
            print(f"{batch} {what} {quartiles[1]:.3f} ms ({quartiles[0]:.3f}-{quartiles[2]:.3f})")


if __name__ == "__main__":
    main()
