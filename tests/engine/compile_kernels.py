"""Compile the kernels for devices that need not be there; prints what each came to, as JSON lines.

A process of its own, for a kernel is either interpreted or compiled in the whole of one.
"""

import json
import warnings

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.model import triton_attention, triton_ops, triton_sampler
from engine.model.sampler import NUM_DRAW_FIELDS
from engine.model.tiling import padded_dim, several_queries_tiling, single_query_tiling

SHARED_BYTES = {80: 166_912, 90: 232_448}
INTEGERS = {"block_tables", "query_starts", "seq_lens", "query_tiles"}
POINTERS = (
    dict.fromkeys(INTEGERS, "i32")
    | dict.fromkeys(["positions", "token_slots", "token_ids"], "i64")
    | dict.fromkeys(["logits", "part_mixed", "part_sums"], "fp32")
    | {"draws": "fp64"}
    | dict.fromkeys(["out", "q", "keys", "values", "x", "added", "weight", "gate_up"], "bf16")
    | dict.fromkeys(["qkv", "pool", "cosines", "sines"], "bf16")
)
FLOATS = {"inner_scale", "outer_scale", "eps", "scale"}


def type_of(name):
    return f"*{POINTERS[name]}" if name in POINTERS else "fp32" if name in FLOATS else "i32"


def built(kernel, constants, num_warps, capability):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else type_of(n) for n in names}
    aligned = [i for i, n in enumerate(names) if n in POINTERS.keys() - INTEGERS or "stride" in n]
    source = ASTSource(
        kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    options = {"num_warps": num_warps, "num_stages": 3}
    return compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)


def attention(capability, head_dim, has_extras):
    shared_bytes, group_size = SHARED_BYTES[capability], 4
    constants = {
        "GROUP_SIZE": group_size,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim(head_dim),
        "BLOCK_SIZE": 64,
        "HAS_WINDOW": has_extras,
        "HAS_SOFTCAP": has_extras,
        "PRECISION": "tf32",
    }
    for tiling, kernel, more in (
        (several_queries_tiling, triton_attention._several_queries_kernel, {}),
        (single_query_tiling, triton_attention._single_query_kernel, {"IS_PART": True}),
    ):
        t = tiling(group_size, head_dim, 2, shared_bytes)
        tile = {"NUM_ROWS": t.num_rows, "NUM_KEYS": t.num_keys}
        yield built(kernel, constants | more | tile, t.num_warps, capability)


def others(capability):
    shape = {"HEAD_DIM": 128, "PADDED_DIM": 128}
    yield built(triton_attention._join_kernel, shape, 4, capability)
    norm = {"DIM": 4096, "WIDTH": 4096, "HEIGHT": 1, "HAS_ADDED": True}
    yield built(triton_ops._norm_kernel, norm, 4, capability)
    yield built(triton_ops._gated_kernel, {"IS_GELU": True, "TILE": 2048}, 4, capability)
    place = {"HEAD_DIM": 128, "HALF": 48, "HALF_WIDTH": 64, "PASSING_WIDTH": 32}
    place |= {"BLOCK_SIZE": 64, "HEIGHT": 8}
    yield built(triton_ops._place_kernel, place, 4, capability)
    sample = {"IS_GREEDY": False, "NUM_FIELDS": NUM_DRAW_FIELDS, "TILE": 8192}
    yield built(triton_sampler._sample_kernel, sample, 32, capability)


def main():
    for kernel in (
        *attention(80, 128, has_extras=False),
        *attention(90, 128, has_extras=False),
        *attention(90, 256, has_extras=True),
        *others(90),
    ):
        capability = kernel.metadata.target.arch
        row = {
            "name": kernel.metadata.name,
            "capability": capability,
            "shared_bytes": kernel.metadata.shared,
            "shared_limit_bytes": SHARED_BYTES[capability],
            "has_wgmma": "wgmma" in kernel.asm["ptx"],
        }
        print(json.dumps(row))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
