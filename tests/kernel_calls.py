"""Random calls of every kernel, on memory that ends where it may be read: run by tests.sanitize.

usage: python tests/kernel_calls.py MODULE_FILE CALLS SEED

Shapes are odd, rows lie at odd addresses, and every array ends at a page that cannot be touched or,
by turns, comes from malloc, around which a sanitizer watches. Each call is made on one thread and
on three, and has to write the same. Imports no torch, which is slow under a sanitizer.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import mmap
import sys
from array import array
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine.checkpoint.packed_layouts import FORMS, panels_shape
from engine.kernels.cpu import FORMS as NUMBERS
from engine.kernels.cpu import NOT_GATED

FLOAT32, BFLOAT16, FLOAT16 = range(3)
INT8, INT64 = 16, 64
SIZE = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2, INT8: 1, INT64: 8}
INF = float("inf")
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]


class Memory:
    """Arrays for one call; `outputs` are read back and compared."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._kept: list[Any] = []
        self.outputs: list[tuple[int, int]] = []

    def array(self, data: bytes) -> int:
        """The address of a copy, at whose end nothing more may be read."""
        if self._random.random() < 0.5:
            address = LIBC.malloc(max(len(data), 1))
        else:
            pages = -(-max(len(data), 1) // mmap.PAGESIZE)
            whole = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
            base = ctypes.addressof(ctypes.c_char.from_buffer(whole))
            guard = base + pages * mmap.PAGESIZE
            if LIBC.mprotect(ctypes.c_void_p(guard), mmap.PAGESIZE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
            self._kept.append(whole)
            address = guard - len(data)
        ctypes.memmove(address, data, len(data))
        return int(address)

    def page(self) -> int:
        """A page of zeros."""
        page = mmap.mmap(-1, mmap.PAGESIZE)
        self._kept.append(page)
        return ctypes.addressof(ctypes.c_char.from_buffer(page))

    def values(self, count: int, kind: int) -> int:
        """So many values of about 1."""
        floats = array("f", [self._random.gauss(0, 1) for _ in range(min(count, 997))])
        data = floats.tobytes()
        if kind != FLOAT32:  # the upper half is bfloat16, and some number or other as float16
            data = b"".join(data[i + 2 : i + 4] for i in range(0, len(data), 4))
        num_bytes = count * SIZE[kind]
        return self.array((data * (num_bytes // max(len(data), 1) + 1))[:num_bytes])

    def integers(self, numbers: list[int]) -> int:
        """As int64."""
        return self.array(array("q", numbers).tobytes())

    def output(self, count: int, kind: int) -> int:
        """Room for values; every one has to be written."""
        address = self.array(b"\x7f" * (count * SIZE[kind]))
        self.outputs.append((address, count * SIZE[kind]))
        return address

    def result(self) -> list[bytes]:
        """What is in the outputs."""
        return [ctypes.string_at(address, size) for address, size in self.outputs]


def linear(kernels: Any, r: Random, m: Memory, threads: int) -> None:
    """Matrices as stored, of several schemes."""
    kind, inputs, depth = (
        r.choice([FLOAT32, BFLOAT16]),
        r.choice([1, 2, 5, 31, 47]),
        r.randint(1, 150),
    )
    rows = [r.randint(1, 70) for _ in range(r.randint(1, 3))]
    parts = []
    for count in rows:
        scheme = r.choice([FLOAT32, BFLOAT16, FLOAT16])
        parts += [m.values(count * depth, scheme), count, scheme]
    bias = m.values(sum(rows), FLOAT32) if r.random() < 0.5 else 0
    out, x = m.output(inputs * sum(rows), kind), m.values(inputs * depth, kind)
    kernels.linear(out, x, kind, inputs, depth, m.integers(parts), len(rows), bias, threads)


def linear_quantised(kernels: Any, r: Random, m: Memory, threads: int) -> None:
    """Matrices in panels; any bytes are codes, and these are scales of ordinary size, too."""
    form = r.choice(sorted(FORMS))
    unit = 1 if form.startswith(("int", "fp8")) else 32 if FORMS[form].head_bytes == 0 else 256
    kind, inputs = r.choice([FLOAT32, BFLOAT16]), r.choice([1, 2, 3, 5, 15, 17])
    depth, rows = unit * r.randint(1, 300 // unit + 1), [r.randint(1, 70) for _ in range(2)]
    parts = []
    for count in rows:
        panels, size = panels_shape(form, count, depth)
        data = bytes(r.randrange(0x20, 0x3C) for _ in range(499))
        parts += [m.array((data * (panels * size // 499 + 1))[: panels * size]), count]
        parts.append(NUMBERS[form])
    bias = m.values(sum(rows), FLOAT32) if r.random() < 0.5 else 0
    out, x = m.output(inputs * sum(rows), kind), m.values(inputs * depth, kind)
    kernels.linear(out, x, kind, inputs, depth, m.integers(parts), len(rows), bias, threads)


def linear_pairs(kernels: Any, r: Random, m: Memory, threads: int) -> None:
    """Packing, and all variants to multiply by what is packed."""
    inputs, depth, variant = r.choice([1, 2, 7, 25, 33, 64]), r.randint(1, 150), r.randrange(2)
    few = r.choice([0, inputs, r.randint(0, inputs)])
    rows = [r.randint(1, 70) for _ in range(r.randint(1, 3))]
    activation = r.choice([NOT_GATED, NOT_GATED, *range(4)])
    if activation != NOT_GATED:
        rows = r.choice([rows[:1] * 2, [32 * len(rows)]])
    parts = []
    for count in rows:
        panels, padded = -(-count // 16), -(-depth // 32) * 32
        packed = m.output(panels * 16 * padded, BFLOAT16)
        kernels.pack_pairs(packed, m.values(count * depth, BFLOAT16), count, depth, 0, panels)
        parts += [packed, count, 3]
    bias = m.values(sum(rows), FLOAT32) if r.random() < 0.5 else 0
    width = sum(rows) if activation == NOT_GATED else sum(rows) // 2
    out, x = m.output(inputs * width, BFLOAT16), m.values(inputs * depth, BFLOAT16)
    how = bias, variant, activation, threads
    kernels.linear_pairs(out, x, inputs, few, depth, m.integers(parts), len(rows), *how)


def rms_norm(kernels: Any, r: Random, m: Memory, threads: int) -> None:
    """Rows after an addition, or as they are."""
    kind, tokens, rows, dim = r.choice([0, 1]), r.randint(1, 40), r.randint(1, 3), r.randint(1, 70)
    weight_kind, size = r.choice([FLOAT32, kind]), tokens * rows * dim
    x, added = m.values(size, kind), m.values(size, kind) if r.random() < 0.5 else 0
    m.outputs.append((x, size * SIZE[kind]))
    out, weight = m.output(size, kind), m.values(rows * dim, weight_kind)
    if added and r.random() < 0.3:
        out = weight = 0  # nothing but the addition
    shape = (tokens, rows, dim, rows * dim, rows * dim)
    by = 0.5, r.choice([1.0, 0.7]), 1e-5
    kernels.rms_norm(out, x, added, weight, kind, weight_kind, *shape, threads, *by)


def gated(kernels: Any, r: Random, m: Memory, threads: int) -> None:
    """All activations."""
    kind, tokens, width = r.choice([FLOAT32, BFLOAT16]), r.randint(1, 40), r.randint(1, 90)
    out, x = m.output(tokens * width, kind), m.values(2 * tokens * width, kind)
    up = m.values(tokens * (width + 3), kind) if r.random() < 0.5 else 0
    strides = (2 * width, width + 3) if up else (2 * width, 2 * width)
    up = up or x + width * SIZE[kind]
    kernels.gated(out, x, up, kind, tokens, width, *strides, r.randrange(4), threads)


def attention(kernels: Any, r: Random, m: Memory, threads: int) -> None:
    """Keys and values to their places in a pool, then attention over them."""
    kind, kv_heads, group = r.choice([FLOAT32, BFLOAT16]), r.randint(1, 2), r.randint(1, 3)
    dim, block_size, layers = r.choice([6, 16, 34, 64]), r.choice([1, 7, 16]), 2
    sequences, tables, slots, positions, used = [], [], [], [], 0
    members = [(r.randint(0, 90), r.choice([1, 1, 3, 50])) for _ in range(r.randint(1, 3))]
    width = max(-(-(before + new) // block_size) for before, new in members)
    for before, new in members:
        sequences += [len(positions), new, before + new]
        count = -(-(before + new) // block_size)
        table = list(range(used, used + count))
        tables += table + [0] * (width - count)
        used += count
        for position in range(before, before + new):
            positions.append(position)
            slots.append(table[position // block_size] * block_size + position % block_size)
    heads, tokens, rotary = kv_heads * group, len(positions), r.choice([0, dim])
    qkv = m.values(tokens * (heads + 2 * kv_heads) * dim, kind)
    kv_kind, row = r.choice([(kind, dim * SIZE[kind]), (INT8, dim + SIZE[FLOAT32])])
    plane = block_size * kv_heads * row + r.choice([0, 12])  # another layer may have more heads
    kv = m.array(bytes(used * layers * 2 * plane))
    m.outputs.append((kv, used * layers * 2 * plane))
    angles = [m.values((max(positions) + 1) * rotary, kind) if rotary else 0 for _ in range(2)]
    kernels.place(
        qkv, kv, *angles, m.integers(positions), m.integers(slots), kind, tokens, heads, kv_heads,
        dim, rotary, block_size, layers, 1, kv_kind, plane, threads,
    )  # fmt: skip
    sinks = m.values(heads, FLOAT32) if r.random() < 0.5 else 0
    kernels.attend(
        m.output(tokens * heads * dim, kind), qkv, kv, m.integers(sequences), m.integers(tables),
        sinks, kind, len(members), width, (heads + 2 * kv_heads) * dim, heads, kv_heads, dim,
        block_size, layers, 1, r.choice([0, 0, 20]), kv_kind, plane, r.choice([0, 2]), threads, 0.2,
        r.choice([0.0, 5.0]),
    )  # fmt: skip


def grow(kernels: Any, r: Random, m: Memory, threads: int) -> None:
    """Rows that lie apart, each times a number of its own."""
    kind, tokens, width = r.choice([FLOAT32, BFLOAT16]), r.randint(1, 40), r.randint(1, 90)
    size = (tokens - 1) * (width + 3) + width
    rows, factors = m.values(size, kind), m.values(tokens, kind)
    m.outputs.append((rows, size * SIZE[kind]))
    kernels.grow(rows, factors, kind, tokens, width, width + 3, threads)


def mixture(kernels: Any, r: Random, m: Memory, threads: int) -> None:
    """Experts whose matrices are stored as they are, or packed in pairs."""
    is_packed, tokens, experts = r.random() < 0.3, r.choice([1, 2, 9, 40]), r.randint(1, 20)
    kind = BFLOAT16 if is_packed else r.choice([FLOAT32, BFLOAT16])
    chosen, hidden, width = r.randint(1, min(experts, 4)), r.randint(1, 70), r.randint(1, 70)

    def matrix(rows: int, depth: int) -> list[int]:
        values = m.values(rows * depth, kind)
        if not is_packed:
            return [values, rows, kind]
        panels = -(-rows // 16)
        packed = m.output(panels * 16 * (-(-depth // 32) * 32), kind)
        kernels.pack_pairs(packed, values, rows, depth, 0, panels)
        return [packed, rows, 3]

    has_bias = r.random() < 0.5
    few, variant = r.randint(0, tokens), r.randrange(2)
    ups = [n for _ in range(experts) for n in matrix(width, hidden) + matrix(width, hidden)]
    downs = [n for _ in range(experts) for n in matrix(hidden, width)]
    up_bias = m.values(experts * 2 * width, FLOAT32) if has_bias else 0
    down_bias = m.values(experts * hidden, FLOAT32) if has_bias else 0
    table = m.integers(
        [
            *(experts, chosen, r.randrange(2), r.randrange(3), hidden, width),
            *(m.integers(ups), 2, up_bias, m.integers(downs), down_bias),
            *(is_packed, is_packed, variant),
            m.values(experts, FLOAT32) if r.random() < 0.5 else 0,
        ]
    )
    out, x = m.output(tokens * hidden, kind), m.values(tokens * hidden, kind)
    kernels.mixture(out, x, m.values(tokens * experts, kind), table, kind, tokens, few, threads)


def delta(kernels: Any, r: Random, m: Memory, threads: int) -> None:
    """A recurrent layer, whose records lie across blocks, or are not kept."""
    kind, heads, ratio = r.choice([FLOAT32, BFLOAT16]), r.randint(1, 3), r.randint(1, 2)
    key_dim, value_dim, conv_size = r.randint(1, 35), r.randint(1, 70), r.randint(1, 4)
    width, values = heads * (2 * key_dim + ratio * value_dim), heads * ratio * value_dim
    lengths = [r.choice([1, 1, 3, 31, 32, 70]) for _ in range(r.randint(1, 3))]
    tokens, sequences, records = sum(lengths), [], []
    first_value = r.randint(0, 9)
    size = first_value + (conv_size - 1) * width + values * key_dim
    block_values = r.randint(1, size)
    blocks = -(-size // block_values)
    for i, length in enumerate(lengths):
        sequences += [sum(lengths[:i]), length, length + 9]
        for first in (1 + 2 * i * blocks, 1 + (2 * i + 1) * blocks):
            is_kept = r.random() < 0.8
            records += [first + place if is_kept else 0 for place in range(blocks)]
    pool_size = (1 + 2 * len(lengths) * blocks) * block_values
    pool = m.values(pool_size, FLOAT32)
    m.outputs.append((pool, pool_size * SIZE[FLOAT32]))
    layer = m.integers(
        [
            *(heads, ratio, key_dim, value_dim, conv_size, first_value),
            *(width, values, heads * ratio),
            *(key_dim, ratio * value_dim, ratio * value_dim, ratio),
            m.values(conv_size * width, FLOAT32),
            *(m.values(heads * ratio, FLOAT32) for _ in range(2)),
            m.values(value_dim, FLOAT32),
            *r.choice([(ratio, 1), (1, heads)]),
        ]
    )
    qkv, places = m.values(tokens * width, kind), (0, heads * key_dim, 2 * heads * key_dim)
    inputs = [qkv + place * SIZE[kind] for place in places]
    inputs += [m.values(tokens * count, kind) for count in (values, heads * ratio, heads * ratio)]
    kernels.delta(
        m.output(tokens * values, kind), pool, m.integers(sequences),
        m.integers(records) if r.random() < 0.9 else 0, layer, *inputs, kind, tokens, len(lengths),
        blocks, block_values * SIZE[FLOAT32], threads, 1e-6,
    )  # fmt: skip


def split_gates(kernels: Any, r: Random, m: Memory, threads: int) -> None:
    """Queries, each with a gate, and what lies behind them, if anything."""
    kind, tokens, heads = r.choice([FLOAT32, BFLOAT16]), r.randint(1, 40), r.randint(1, 4)
    dim, rest = r.randint(1, 40), r.choice([0, 1, 30])
    qkv, gates = m.output(tokens * (heads * dim + rest), kind), m.output(tokens * heads * dim, kind)
    x = m.values(tokens * (2 * heads * dim + rest), kind)
    sizes = dim * SIZE[kind], rest * SIZE[kind]
    kernels.split_gates(qkv, gates, x, tokens, heads, *sizes, threads)


def rows_of_logits(r: Random, m: Memory, count: int, num_rows: int) -> list[int]:
    """Rows that lie one after the other; each is the same after the call."""
    rows = [m.values(count, FLOAT32) for _ in range(num_rows)]
    m.outputs += [(row, count * SIZE[FLOAT32]) for row in rows]
    return rows


def draw(kernels: Any, r: Random, m: Memory, threads: int) -> None:
    """Rows with all filters, some with rules of their own."""
    count, fields = r.choice([1, 2, 15, 16, 40, 64, 65, 300]), array("d")
    rows = rows_of_logits(r, m, count, r.randint(1, 9))
    for row in rows:
        fields.extend([r.choice([0, 0.5, 1, 3]), r.randrange(-(2**31), 2**31), r.randrange(2**31)])
        fields.extend([r.choice([1, 0.9, 0]), r.choice([0, 0.1, 1]), r.choice([0, 1, 20, 70])])
        is_allowed, num_ids, num_added = r.random() < 0.5, r.choice([0, 1, 50]), r.randint(0, 3)
        words = m.array(bytes(r.randrange(256) for _ in range(-(-count // 32) * 4)))
        ids = m.integers([r.randrange(count) for _ in range(num_ids)])
        fields.extend([row, words if is_allowed else 0, ids, num_ids // 3, num_ids])
        fields.extend([r.choice([1, 1.3]), r.choice([0, 0.4]), r.choice([0, -1])])
        added = [n for _ in range(num_added) for n in (r.randrange(count), r.choice([-INF, 2.5]))]
        fields.extend([m.array(array("d", added).tobytes()), num_added])
    token_ids = m.output(len(rows), INT64)
    kernels.draw(token_ids, m.array(fields.tobytes()), len(rows), count, threads)


def rate(kernels: Any, r: Random, m: Memory, threads: int) -> None:
    """Log-probabilities of few and of many alternatives."""
    count = r.choice([1, 2, 16, 40, 65, 300])
    rows = rows_of_logits(r, m, count, r.randint(1, 9))
    width = r.choice([0, 1, 5, 70, 300])
    width = min(width, count)
    fields = [n for row in rows for n in (row, r.randrange(count), width)]
    values, ids = m.output(len(rows) * (1 + width), 0), m.output(len(rows) * (1 + width), INT64)
    kernels.rate(values, ids, m.integers(fields), len(rows), count, 1 + width, threads)


def reduce(kernels: Any, r: Random, m: Memory, threads: int) -> None:
    """Parts of a sum that lie apart, in a group of one process."""
    kind, tokens, dim = r.choice([FLOAT32, BFLOAT16]), r.randint(0, 40), r.randint(1, 90)
    count, stride = r.choice([1, 2, 4, 8]), tokens * dim + r.choice([0, 3])
    out, parts = m.output(tokens * dim, kind), m.values(count * stride, kind)
    group = m.page()
    sizes = (kind, tokens, dim, stride, count)
    for _ in range(2):
        kernels.reduce(out, parts, group, *sizes, 0, 1, threads)


PRODUCTS = (linear, linear_quantised, linear_pairs)
SMALL = (rms_norm, gated, grow, split_gates, reduce, draw, rate)
CALLS = (*PRODUCTS, *SMALL, attention, mixture, delta)


def main() -> None:
    """Make the calls; the first that differs between threads ends the process."""
    file, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    name = f"engine.kernels.{file.name.partition('.')[0]}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(file))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    kernels = importlib.util.module_from_spec(spec)
    loader.exec_module(kernels)
    kernels.supported()  # asks Linux for AMX's tiles, without which their first use is fatal
    for number in range(count):
        call, results = CALLS[number % len(CALLS)], []
        for threads in (1, 3):
            random = Random(seed * 1_000_003 + number)  # repeatable, not secret
            memory = Memory(random)
            kernels.record()
            call(kernels, random, memory, threads)
            calls = kernels.recorded()
            if call in PRODUCTS:  # again, each announced to the threads of the one before
                kernels.replay(calls * 3)
            results.append(memory.result())
        # decode attention joins parts where there are threads: the last bits may differ there
        if results[0] != results[1] and call is not attention:
            sys.exit(f"{call.__name__}, call {number} of seed {seed}: threads change the result")
    print(f"{count} calls")  # its result


if __name__ == "__main__":
    main()
