"""Compare products of quantised matrices with reading: one input, one thread, by turns.

usage: python -m tests.benchmarks.quantised_products [--mib 256] [--rounds 15] [KIND ...]

KIND is a GGUF type such as q2_k, or a form of checkpoints such as int4_128; without one all are
timed. Reading is the product of the same input with a plain bfloat16 matrix of as many bytes.
Prints the best gigabytes a second of both, and the median of the rounds' shares with quartiles.
"""

import argparse
import statistics
import time

import torch

from engine.checkpoint.packed_layouts import FORM_BY_KIND, FORMS
from engine.kernels.cpu import load_kernels
from engine.worker.model.linear import CompiledLinear
from engine.worker.model.weight import Weight, panels_of
from tests.engine.worker.model.test_quantised import blocks_of, nvfp4_parts, packed, parts_of

DEPTH, ROWS = 2048, 768


def main() -> None:
    kinds = [kind for kind in FORM_BY_KIND if kind != "mxfp4_pairs"]
    kinds += ["nvfp4", "int4_32", "int4_128", "int8_128", "fp8_128"]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", default=kinds)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels, level = load_kernels()
    print(f"{level}, {options.mib} MiB, {options.rounds} rounds")
    values = torch.randn(options.mib << 19).bfloat16()
    plain = CompiledLinear(kernels, [Weight.plain(values.view(-1, DEPTH))], [])
    token = torch.randn(1, DEPTH).bfloat16()
    for kind in options.kinds:
        if kind in FORM_BY_KIND:
            part = packed(blocks_of(kind, ROWS, DEPTH), kind, DEPTH)
        else:
            is_nvfp4 = kind == "nvfp4"
            random = torch.Generator().manual_seed(0)
            parts = nvfp4_parts(ROWS, DEPTH, 0, random) if is_nvfp4 else parts_of(kind, ROWS, DEPTH)
            panels = panels_of(parts, FORMS[kind])
            part = Weight(panels, None, f"{kind}_panels", (ROWS, DEPTH))
        times = -(-(options.mib << 20) // part.data.nbytes)
        data = part.data.repeat(times, *[1] * (part.data.dim() - 1))
        weight = Weight(data, None, part.scheme, (ROWS * times, DEPTH))
        timed = ((CompiledLinear(kernels, [weight], []), data.nbytes), (plain, values.nbytes))
        rates: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.rounds + 1):
            for (linear, num_bytes), found in zip(timed, rates, strict=True):
                began = time.perf_counter()
                linear(token)
                found.append(num_bytes / (time.perf_counter() - began) / 1e9)
        shares = [ours / read for ours, read in zip(*rates, strict=True)][1:]
        low, middle, high = statistics.quantiles(shares, n=4)
        best = " of ".join(f"{max(found):.1f}" for found in rates)
        print(f"{kind}: {best} GB/s; {middle:.0%} [{low:.0%}, {high:.0%}]", flush=True)


if __name__ == "__main__":
    main()
