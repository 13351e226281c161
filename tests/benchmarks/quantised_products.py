"""Products with matrices larger than the caches: of one input, how near each form is to reading.

usage: python -m tests.benchmarks.quantised_products [--threads 2] [--rounds 5] [--mib 192]
    [--inputs 1]

Reading is what the fastest of all products of one input takes, by bytes, a sum by torch among them:
no other way to read was found to be faster. Of more inputs billions of operations a second are
told, too. Forms take turns; prints each one's GB/s, the median and the
extremes, and its share of the reading.
"""

import argparse
import statistics
import time

import torch

from engine.checkpoint.quantisation import FORMS, panels_shape
from engine.kernels.cpu import load_kernels
from engine.model.linear import CompiledLinear
from engine.model.weight import Weight

DEPTH = 2048
NAMES = (
    "q2_k", "q3_k", "iq4_nl", "iq4_xs", "nvfp4",
    "q4_0", "q4_1", "q4_k", "mxfp4", "int4_128", "q5_0", "q5_k", "q6_k",
    "q8_0", "int8_128", "int8_row", "fp8_128",
)  # fmt: skip


def weight_of(form: str | None, num_bytes: int) -> Weight:
    """A matrix of about so many bytes; in it are numbers of ordinary size, whatever they are."""
    if form is None:
        values = torch.randn(1 << 20).bfloat16().repeat(num_bytes // (2 << 20))
        return Weight.plain(values.view(-1, DEPTH))
    rows = num_bytes // FORMS[form].row_bytes(DEPTH) // 16 * 16
    shape = panels_shape(form, rows, DEPTH)
    noise = torch.randint(0x20, 0x3C, (1 << 20,), dtype=torch.uint8)
    whole = noise.repeat(shape[0] * shape[1] // len(noise) + 1)[: shape[0] * shape[1]]
    return Weight(whole.view(shape), None, f"{form}_panels", (rows, DEPTH))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=192)
    parser.add_argument("--inputs", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels, level = load_kernels()
    weights = {name: weight_of(name, options.mib << 20) for name in (None, *NAMES)}
    linears = {name: CompiledLinear(kernels, [weight], []) for name, weight in weights.items()}
    plain = weights[None].data.view(torch.int32)
    calls = {f"{name or 'bfloat16'}": linear for name, linear in linears.items()}
    sizes = {f"{name or 'bfloat16'}": weight.data.nbytes for name, weight in weights.items()}
    calls["torch sum"], sizes["torch sum"] = lambda _: plain.view(torch.float32).sum(), plain.nbytes
    x = torch.randn(options.inputs, DEPTH).bfloat16()
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for round_index in range(options.rounds + 1):
        for name, call in calls.items():
            started_s = time.perf_counter()
            call(x)
            if round_index:
                rates[name].append(sizes[name] / (time.perf_counter() - started_s) / 1e9)
    reading = max(map(statistics.median, rates.values()))
    about = f"{options.inputs} inputs, {options.threads} threads, {options.mib} MiB each"
    print(f"{level}, {about}; fastest {reading:.1f} GB/s")
    for name, found in rates.items():
        middle = statistics.median(found)
        spread = f"{min(found):.1f}-{max(found):.1f}"
        weight = weights.get(None if name == "bfloat16" else name)
        rows = 0 if weight is None else weight.shape[0]
        operations = 2 * options.inputs * rows * DEPTH / sizes[name] * middle
        share = f"{middle / reading:.0%}, {operations:.0f} Gop/s"
        print(f"{name}: {middle:.1f} GB/s ({spread}), {share}", flush=True)


if __name__ == "__main__":
    main()
