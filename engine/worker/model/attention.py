"""Compute attention over paged KV with torch, and describe a step to GPU kernels.

Invariant: the pool is kv[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim],
contiguous, or, of int8, kv[num_blocks, num_layers, 2, block_size, bytes], of which planes() knows
where codes and scales lie; a sequence's query i sees the keys at positions j <= i, in a window
i - j < window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere

from engine.checkpoint.model_config import SCALE_BYTES
from engine.kernels.cpu import MAX_FEW
from engine.worker.model.layers import soft_cap
from engine.worker.model.records import RecordBlocks

# Sequences decode in one call if padding them to one length costs less than another call would.
_PADDING_TOKENS = 256
GATHERED_TOKENS = 1 << 16
"""Maximum tokens of keys and values that one call gathers, except for a single sequence.

It keeps a step's memory independent of its number of sequences."""
_QUERY_BLOCK = 32
"""Queries of a block in torch's memory-efficient kernel: the smaller of its two sizes."""
_SCORES = 1 << 26
"""Computed at once where torch's fused kernels do not serve; queries take turns."""

MAX_CODE = 127
"""The code of a head's largest value in an int8 pool; the kernels use the same code."""
_OVERFLOWN = 6e4
"""The largest key or value: far from any sound one, and finite when multiplied and summed."""


class WindowTables(NamedTuple):
    """Name the blocks of one group of layers with windows."""

    token_slots: torch.Tensor
    block_tables: Sequence[Sequence[int]]
    """Block 0 stands for blocks behind the window."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of one step: each sequence's new ones, in a row, sequence after sequence."""

    input_ids: torch.Tensor
    """[num_tokens] int64, as positions and token_slots."""
    positions: torch.Tensor
    token_slots: torch.Tensor
    """Where each token's KV goes: block_id * block_size + offset."""
    query_lens: Sequence[int]
    """New tokens per sequence, at least 1."""
    seq_lens: Sequence[int]
    """Tokens per sequence with these; the new ones are its last."""
    block_tables: Sequence[Sequence[int]]
    """Empty where the device alone knows them; then seq_lens are what lengths may grow to, and each
    sequence has one new token."""
    logit_rows: Sequence[int]
    """Rows of input_ids whose next token is wanted, in order."""
    records: Sequence[RecordBlocks] = ()
    """Each sequence's records; empty: the model keeps none, or this step does not."""
    windows: Sequence[WindowTables] = ()
    """The tables of each group of layers after the first."""
    device_tables: torch.Tensor | None = None
    """[num_sequences, longest table] int32, padded with block 0; None on a CPU, as the next two."""
    device_lens: torch.Tensor | None = None
    """[num_sequences] int32: seq_lens."""
    device_logit_rows: torch.Tensor | None = None
    """[num_logit_rows] int64: logit_rows."""
    device_records: torch.Tensor | None = None
    """[num_sequences, 2, blocks of a record] int32: blocks to read and to write, or block 0; None:
    the model keeps none."""
    device_record_starts: torch.Tensor | None = None
    """[num_sequences + 1] int32: the first row of each record, and the end; some may have no row.

    None: each sequence has one record. In a captured step several rows may share one."""

    @property
    def num_few_rows(self) -> int:
        """Rows of the leading sequences with MAX_FEW or fewer each, which come before all others.

        These are rows that decode, with their guesses, and what little is left of cached prompts.
        """
        return sum(takewhile(lambda query_len: query_len <= MAX_FEW, self.query_lens))

    def of_windows(self) -> list[StepBatch]:
        """Return the step as each group of layers after the first sees it."""
        return [
            replace(self, token_slots=slots, block_tables=tables, windows=())
            for slots, tables in self.windows
        ]


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of a step with equally many queries, attended to in one call."""

    rows: slice | torch.Tensor
    """Their rows in the step."""
    num_sequences: int
    block_halves: torch.Tensor | None
    """[num_layers, 2 * blocks of all]: the key halves, then the value halves, of their blocks as
    rows of the pool; None: no earlier token is visible, the step's own keys and values do."""
    keys: slice
    """The gathered positions to read."""
    mask: torch.Tensor | None
    """Added to the scores; None: a single query sees all keys, several see up to their own."""


class AttentionPlan:
    """What a step's attention needs besides tensors; the same for every layer of one window."""

    def __init__(self, batch: StepBatch, kv: torch.Tensor) -> None:
        num_layers, _, block_size = kv.shape[1:4]
        blocks = torch.div(batch.token_slots, block_size, rounding_mode="floor")
        offsets = batch.token_slots % block_size
        first_rows = blocks * (num_layers * 2 * block_size) + offsets
        planes = torch.arange(num_layers * 2, device=kv.device).view(num_layers, 2, 1)
        self.write_rows = planes * block_size + first_rows
        """[num_layers, 2, num_tokens]: rows of the pool that the new keys and values go to."""
        self.blocks, self.offsets = blocks, offsets
        """The same as blocks and places in them, [num_tokens] each."""
        self._batch = batch
        self._block_size = block_size
        self._num_layers = num_layers
        self._dtype = kv.dtype if kv.is_floating_point() else torch.float32
        self._device = kv.device
        self._groups: dict[tuple[int | None, bool], list[Group]] = {}

    def groups(self, window: int | None, *, has_own: bool = True) -> list[Group]:
        """Group the step's sequences for one call each.

        Args:
            has_own: the step's own keys and values are not read from the pool.
        """
        batch, key = self._batch, (window, has_own)
        if key not in self._groups:
            self._groups[key] = (
                [self._group(members, window, has_own=has_own) for members in _members(batch)]
                if batch.block_tables
                else [self._device_group(window)]
            )
        return self._groups[key]

    def _device_group(self, window: int | None) -> Group:
        """Group all sequences with one query each, over their whole tables."""
        tables, lens = self._batch.device_tables, self._batch.device_lens
        assert tables is not None
        assert lens is not None
        num_keys = tables.shape[1] * self._block_size
        keys = torch.arange(num_keys, device=self._device).expand(len(tables), -1)
        mask = self._mask((lens - 1)[:, None], keys, window)
        halves = self._halves(tables.flatten().long())
        return Group(slice(0, len(tables)), len(tables), halves, slice(0, num_keys), mask)

    def _group(self, members: list[int], window: int | None, *, has_own: bool) -> Group:
        batch = self._batch
        query_len = batch.query_lens[members[0]]
        rows = _rows(batch.query_lens, members, self._device)
        starts = [batch.seq_lens[i] - query_len for i in members]
        if starts == [0] and has_own:
            is_windowed = window is not None and query_len > window
            mask = self._host_mask([0], query_len, [0], query_len, window) if is_windowed else None
            return Group(rows, 1, None, slice(0, query_len), mask)
        oldest = [0 if window is None else max(0, start - window + 1) for start in starts]
        first_blocks = [position // self._block_size for position in oldest]
        num_blocks = max(
            -(-(start + query_len) // self._block_size) - first
            for start, first in zip(starts, first_blocks, strict=True)
        )
        halves = self._block_halves(members, first_blocks, num_blocks)
        first_keys = [first * self._block_size for first in first_blocks]
        if len(members) > 1:
            num_keys = max(s + 1 - first for s, first in zip(starts, first_keys, strict=True))
            mask = self._host_mask(starts, query_len, first_keys, num_keys, window)
            return Group(rows, len(members), halves, slice(0, num_keys), mask)
        # alone, a sequence reads exactly the positions that its queries see
        keys = slice(oldest[0] - first_keys[0], starts[0] + query_len - first_keys[0])
        mask = None
        if query_len > 1:
            mask = self._host_mask(starts, query_len, oldest, keys.stop - keys.start, window)
        return Group(rows, 1, halves, keys, mask)

    def _block_halves(
        self, members: list[int], first_blocks: list[int], num_blocks: int
    ) -> torch.Tensor:
        ids: list[int] = []
        for i, first in zip(members, first_blocks, strict=True):
            table = self._batch.block_tables[i][first : first + num_blocks]
            ids += table
            ids += [0] * (num_blocks - len(table))
        return self._halves(torch.tensor(ids, device=self._device))

    def _halves(self, block_ids: torch.Tensor) -> torch.Tensor:
        first_halves = block_ids * (2 * self._num_layers)
        halves = torch.cat((first_halves, first_halves + 1))
        planes = torch.arange(0, 2 * self._num_layers, 2, device=self._device)
        return halves + planes[:, None]

    def _host_mask(
        self,
        query_starts: list[int],
        query_len: int,
        key_starts: list[int],
        num_keys: int,
        window: int | None,
    ) -> torch.Tensor:
        """Make the mask of positions in a row from each sequence's start."""
        queries, keys = (
            torch.tensor(starts, device=self._device)[:, None]
            + torch.arange(length, device=self._device)
            for starts, length in ((query_starts, query_len), (key_starts, num_keys))
        )
        return self._mask(queries, keys, window)

    def _mask(self, queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
        """Make [num_sequences, 1, queries, keys]: 0 where a query sees a key, else -inf."""
        ends, keys = queries[:, None, :, None], keys[:, None, None, :]
        is_hidden = keys > ends
        if window is not None:
            is_hidden |= keys <= ends - window
        zeros = torch.zeros(is_hidden.shape, dtype=self._dtype, device=self._device)
        return zeros.masked_fill_(is_hidden, -torch.inf)


def _members(batch: StepBatch) -> list[list[int]]:
    """Group sequences for one call: several only if each has a single query."""
    alone = [[i] for i, query_len in enumerate(batch.query_lens) if query_len > 1]
    decoding = [i for i, query_len in enumerate(batch.query_lens) if query_len == 1]
    decoding.sort(key=lambda i: -batch.seq_lens[i])
    together: list[list[int]] = []
    longest = 0
    for i in decoding:
        seq_len = batch.seq_lens[i]
        is_far = longest - seq_len > max(_PADDING_TOKENS, seq_len)
        if not together or is_far or (len(together[-1]) + 1) * longest > GATHERED_TOKENS:
            together.append([])
            longest = seq_len
        together[-1].append(i)
    return [sorted(members) for members in together] + alone


def _rows(
    query_lens: Sequence[int], members: list[int], device: torch.device
) -> slice | torch.Tensor:
    first = sum(query_lens[: members[0]])
    if members[-1] - members[0] == len(members) - 1:
        return slice(first, first + sum(query_lens[members[0] : members[-1] + 1]))
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    return torch.tensor([starts[i] for i in members], device=device)


def planes(kv: torch.Tensor, num_kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """View an int8 pool as a layer with these heads does.

    Returns:
        codes, int8 [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], and their
        factors by head, float32 [num_blocks, num_layers, 2, num_kv_heads, block_size].
    """
    block_size = kv.shape[3]
    size, num_scales = block_size * num_kv_heads * head_dim, num_kv_heads * block_size
    flat = kv.flatten(3)
    scales = flat[..., size : size + num_scales * SCALE_BYTES].view(torch.float32)
    shape = kv.shape[:3]
    codes = flat[..., :size].view(*shape, block_size, num_kv_heads, head_dim)
    return codes, scales.view(*shape, num_kv_heads, block_size)


def _write_codes(
    kv: torch.Tensor, layer: int, half: int, new: torch.Tensor, plan: AttentionPlan
) -> None:
    """Store keys or values as codes; `new` becomes what will be read back."""
    codes, scales = planes(kv, *new.shape[1:])
    values = new.float().nan_to_num_(nan=0.0).clamp_(-_OVERFLOWN, _OVERFLOWN)
    scale = values.abs().amax(-1) / MAX_CODE
    divisor = torch.where(scale > 0, scale, 1.0)[..., None]
    code = (values / divisor).round_().clamp_(-MAX_CODE, MAX_CODE)
    codes[plan.blocks, layer, half, plan.offsets] = code.to(torch.int8)
    scales[plan.blocks, layer, half, :, plan.offsets] = scale
    new.copy_(code.mul_(scale[..., None]))


def write_kv(
    kv: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan
) -> None:
    """Store a step's new keys and values, each [num_tokens, num_kv_heads, head_dim].

    What has overflowed is cut to size, here and for the caller. Others read these positions when
    the block is theirs, masked, and no mask hides a NaN or the infinity of a score.
    """
    if kv.dtype == torch.int8:
        for half, new in enumerate((k, v)):
            _write_codes(kv, layer, half, new, plan)
        return
    for new in (k, v):
        new.nan_to_num_(nan=0.0).clamp_(-_OVERFLOWN, _OVERFLOWN)
    rows = kv.view(-1, *kv.shape[4:])
    key_rows, value_rows = plan.write_rows[layer]
    rows.index_copy_(0, key_rows, k)
    rows.index_copy_(0, value_rows, v)


def torch_attention(
    q: torch.Tensor,
    own: tuple[torch.Tensor, ...] | None,
    heads: Sequence[int],
    kv: torch.Tensor,
    layer: int,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather each group's blocks and run scaled-dot-product attention over them.

    q is [num_tokens, num_heads, head_dim]. `own` are the step's keys and values, which are in the
    pool already; None: only there. heads are (num_kv_heads, head_dim); sinks are float32
    [num_heads], a learnt score of each head.
    """
    how = (tuple(heads), scale, softcap, sinks)
    groups = plan.groups(window, has_own=own is not None)
    if len(groups) == 1:  # all rows in order: nothing to put together
        return _attend(groups[0], q, own, kv, layer, *how)
    output = torch.empty_like(q)
    for group in groups:
        rows = group.rows
        mine = None if own is None else tuple(each[rows] for each in own)
        output[rows] = _attend(group, q[rows], mine, kv, layer, *how)
    return output


def _attend(
    group: Group,
    q: torch.Tensor,
    own: tuple[torch.Tensor, ...] | None,
    kv: torch.Tensor,
    layer: int,
    heads: tuple[int, ...],
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    num_sequences = group.num_sequences
    if group.block_halves is None:
        assert own is not None
        keys, values = (each[None] for each in own)
    else:
        gathered = _gathered(kv, group.block_halves[layer], heads, q.dtype)
        gathered = gathered.view(2, num_sequences, -1, *heads)
        keys, values = gathered[:, :, group.keys].unbind()
    q_heads = q.view(num_sequences, -1, *q.shape[1:]).transpose(1, 2)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    is_causal = group.block_halves is None and group.mask is None
    mask = None if group.mask is None else group.mask.to(q.dtype)
    if softcap is not None or sinks is not None:
        mask = _causal_mask(q_heads) if is_causal else mask
        num_queries = max(1, _SCORES // (num_sequences * q.shape[1] * keys.shape[2]))
        output = torch.cat(
            [
                _plain_attention(part, keys, values, some, scale, softcap, sinks)
                for part, some in _parts(q_heads, mask, num_queries)
            ],
            2,
        )
    else:
        output = _fused_attention(q_heads, keys, values, mask, scale, is_causal=is_causal)
    return output.transpose(1, 2).reshape(q.shape)


def _parts(
    q: torch.Tensor, mask: torch.Tensor | None, num_queries: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Split queries [num_sequences, num_heads, num_queries, head_dim], and their rows of a mask."""
    for first in range(0, q.shape[2], num_queries):
        rows = slice(first, first + num_queries)
        yield q[:, :, rows], None if mask is None else mask[:, :, rows]


def _fused_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    is_causal: bool,
) -> torch.Tensor:
    """Attend by one of torch's kernels, in a form that the memory-efficient one takes.

    q is [num_sequences, num_heads, num_queries, head_dim], keys and values have fewer heads. With
    enable_gqa and a mask torch has no kernel on a GPU but one that copies keys and writes down all
    scores. So heads that share keys become queries where each has one; else there is one sequence,
    whose key heads become sequences, and the heads of each read the same keys by a stride of 0.

    Until 2.13 torch's kernel mistakes strides of 0 where a block of 32 or 64 queries has only one:
    then the last query takes a call of its own.
    """
    num_kv_heads, num_keys = keys.shape[1:3]
    if q.shape[2] % _QUERY_BLOCK == 1 < q.shape[2]:
        masks = (None, None) if mask is None else (mask[:, :, :-1], mask[:, :, -1:])
        first = _fused_attention(q[:, :, :-1], keys, values, masks[0], scale, is_causal=is_causal)
        last = _fused_attention(q[:, :, -1:], keys, values, masks[1], scale, is_causal=False)
        return torch.cat((first, last), 2)
    if q.shape[2] == 1:
        queries = q.reshape(len(q), num_kv_heads, -1, q.shape[3])
    else:
        queries = q[0].view(num_kv_heads, -1, *q.shape[2:])
        shape = (num_kv_heads, queries.shape[1], num_keys, -1)
        keys, values = (x[0].unsqueeze(1).expand(shape) for x in (keys, values))
    output = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale
    )
    return output.reshape(q.shape)


def _gathered(
    kv: torch.Tensor, halves: torch.Tensor, heads: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Gather halves of blocks, [len(halves), block_size, num_kv_heads, head_dim], in `dtype`."""
    if kv.dtype != torch.int8:
        return kv.flatten(0, 2).flatten(1).index_select(0, halves)
    codes, scales = (each.flatten(0, 2)[halves] for each in planes(kv, heads[0], heads[1]))
    return (codes * scales.transpose(1, 2)[..., None]).to(dtype)


def _causal_mask(q: torch.Tensor) -> torch.Tensor:
    return q.new_full((1, 1, q.shape[2], q.shape[2]), -torch.inf).triu_(1)


def _plain_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with bent scores or sinks, which torch's fused kernels do not know.

    q is [num_sequences, num_heads, num_queries, head_dim], keys and values have fewer heads: the
    queries of the heads that share them are laid end to end, so that no key is copied.
    """
    num_sequences, num_kv_heads, num_keys = keys.shape[:3]
    grouped = q.reshape(num_sequences, num_kv_heads, -1, q.shape[3])
    scores = (grouped * scale) @ keys.transpose(2, 3)
    if softcap is not None:
        soft_cap(scores, softcap)
    if mask is not None:
        scores.view(num_sequences, num_kv_heads, -1, q.shape[2], num_keys).add_(mask[:, :, None])
    if sinks is not None:
        column = sinks.view(num_kv_heads, -1, 1).expand(-1, -1, q.shape[2])
        column = column.reshape(1, num_kv_heads, -1, 1).expand(num_sequences, -1, -1, -1)
        scores = torch.cat((scores.float(), column), -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., :num_keys].to(q.dtype)
    return (weights @ values).view(q.shape)


_MIN_KEYS_PER_PART = 128
_PROGRAMS_PER_PROCESSOR = 2
_HOPPER_SHARED_BYTES = 200_000
"""Shared memory of one program; only compute capability 9.0 and later has more."""
MAX_PARTS = 64
"""Maximum parts of one sequence's keys."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """What one program works on, and with how many warps."""

    num_rows: int
    """Queries times the heads that share a key head."""
    num_keys: int
    num_warps: int


def several_queries_tiling(
    group_size: int, head_dim: int, itemsize: int, shared_bytes: int
) -> Tiling:
    """Choose the tiles for sequences with several queries.

    Args:
        group_size: query heads per key head.
        itemsize: bytes of one value; tensor cores multiply values of 2.
        shared_bytes: shared memory that one program may have.
    """
    rows, row_bytes = 128 if itemsize == 2 else 32, padded_dim(head_dim) * itemsize
    if row_bytes > 256 and shared_bytes < _HOPPER_SHARED_BYTES:
        rows = min(rows, 64)  # more spill registers there
    return _fitting(rows, 8, group_size, row_bytes, shared_bytes)


def single_query_tiling(group_size: int, head_dim: int, itemsize: int, shared_bytes: int) -> Tiling:
    """Choose tiles for single queries: fewest rows, two programs to a processor."""
    shared_bytes //= _PROGRAMS_PER_PROCESSOR
    return _fitting(16, 4, group_size, padded_dim(head_dim) * itemsize, shared_bytes)


def _fitting(
    num_rows: int, num_warps: int, group_size: int, row_bytes: int, shared_bytes: int
) -> Tiling:
    """Take as many keys as registers hold; reduce keys, then rows, until the tiles fit."""
    least_rows = max(16, next_power_of_2(group_size))
    rows, keys = max(num_rows, least_rows), 64 if row_bytes <= 256 else 32
    while _staged_rows(rows, keys, row_bytes) * row_bytes > shared_bytes and (
        keys > 16 or rows > least_rows
    ):
        keys, rows = (keys // 2, rows) if keys > 16 else (keys, rows // 2)
    return Tiling(rows, keys, num_warps)


def _staged_rows(num_rows: int, num_keys: int, row_bytes: int) -> int:
    """Bound the rows of queries, keys and values in shared memory, as the compiler stages them.

    Three tiles of keys and of values are loading or in use. Narrow queries are in registers by
    then; wide ones stay.
    """
    tiles = 6 * num_keys
    return num_rows + tiles if row_bytes > 256 else max(num_rows + 4 * num_keys, tiles)


def num_parts(
    num_sequences: int, num_kv_heads: int, max_visible_keys: int, num_processors: int
) -> int:
    """Choose how many parts to cut the keys of each sequence, or tile, into: to fill processors."""
    programs = num_sequences * num_kv_heads
    wanted = -(-_PROGRAMS_PER_PROCESSOR * num_processors // programs)
    return max(1, min(wanted, max_visible_keys // _MIN_KEYS_PER_PART, MAX_PARTS))


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def padded_dim(head_dim: int) -> int:
    """Return the width of a head in a tile."""
    return max(16, next_power_of_2(head_dim))
