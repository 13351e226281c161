"""What crosses between the daemon and a worker, and nothing else.

Commands (daemon to worker) are imperatives, reports (worker to daemon) are past facts. Every
command that names blocks is answered once, after the worker's last touch of them: Admit by the
`released` entry of a step, Load by Loaded, GrantSlots by the Stored entry of each slot. UseCores,
which names cores, is answered by CoresUsed.
Owns: the wire between processes. Called by: channel, router, supervisor, workers.
Invariant: (seq_id, generation) identifies an admit; a worker never sees block ids it may not touch.
Never: carries tensors; KV moves through shared memory, or stays where it is on a GPU.
"""

from __future__ import annotations

import msgspec

from engine.sequence import SamplingParams, TokenLogprob


class PoolSpec(msgspec.Struct, frozen=True):
    """A KV pool. Block 0 is padding and never allocated."""

    name: str
    fd: int | None
    """Of a memfd that the worker inherits; None: it makes the pool on its GPU, as PoolMade says."""
    num_blocks: int
    """On a GPU the most that are of use."""


class WeightsSpec(msgspec.Struct, frozen=True):
    """A memfd for weights converted to the serving dtype; shared by all workers.

    The worker converts its share (`share_index` of `share_count`), or nothing if `is_filled`.
    """

    fd: int
    num_bytes: int
    share_index: int
    share_count: int
    is_filled: bool


class GpuSpec(msgspec.Struct, frozen=True):
    """The GPU that a worker computes on."""

    uuid: str
    shares: str | None = None
    """`exports`: its weights and pool are the other worker's, too; `maps`: it has them from there;
    None: nobody else's."""
    min_blocks: int = 2
    """A pool of fewer is a failure; when the worker starts again, of fewer than before."""
    has_graphs: bool = True
    """Decode steps are captured and replayed."""
    is_shared: bool = False
    """Another worker computes on it, too."""


class SharedMemory(msgspec.Struct, frozen=True):
    """What one process exports by CUDA IPC and another maps; opaque to everybody else."""

    weights: bytes
    pool: bytes
    num_blocks: int
    seal: bytes
    """What the exporter has written behind the pool, in this life of it."""


class Setup(msgspec.Struct, tag=True, frozen=True):
    """First message to a worker: everything it needs to load. Answered by WeightsLoaded."""

    worker: str
    model_dir: str
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    block_size: int
    pool: PoolSpec
    ring: PoolSpec | None
    """Slots of the `shm` transport; None where the pool is shared."""
    weights: WeightsSpec | None
    """None: the checkpoint's dtype is served, and the files themselves are mapped."""
    cpus: list[int]
    """Its own cores, one thread each; UseCores changes them."""
    max_step_tokens: int
    max_model_len: int
    """Tokens of the longest request."""
    gpu: GpuSpec | None = None
    """None: it computes on its cores."""


class Go(msgspec.Struct, tag=True, frozen=True):
    """All workers have loaded their share of the weights. Answered by Ready."""


class MapShared(msgspec.Struct, tag=True, frozen=True):
    """After Go, for a worker that maps: where its weights and its pool are. Answered by Ready."""

    memory: SharedMemory


class Admit(msgspec.Struct, tag=True, frozen=True):
    """Run this sequence until it has `until_output` output tokens or ends by itself.

    Complete: new, moved and recovered sequences differ only in these numbers. Answered by an
    entry with `is_released` set.
    """

    seq_id: int
    generation: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_table: list[int]
    sampling: SamplingParams
    until_output: int
    num_stored_blocks: int | None
    """Blocks whose bytes have left through the ring already; None: nothing is to be stored."""
    max_chunk_tokens: int | None = None
    """Prompt tokens per step at most, for those who decode beside it; None: as many as go."""


class Release(msgspec.Struct, tag=True, frozen=True):
    """Drop a sequence after the current step. Ignored if the worker has dropped it by itself."""

    seq_id: int
    generation: int


class GrantSlots(msgspec.Struct, tag=True, frozen=True):
    """Ring slots that this worker may fill with finished blocks, in any order."""

    slots: list[int]


class Load(msgspec.Struct, tag=True, frozen=True):
    """Copy ring slots into blocks of this worker's pool. Answered by Loaded."""

    load_id: int
    slots: list[int]
    block_ids: list[int]


class UseCores(msgspec.Struct, tag=True, frozen=True):
    """Compute on these cores from the next step on, one thread each; none: compute nothing.

    Answered by CoresUsed between two steps. What is admitted to a parked worker waits in it.
    """

    cpus: list[int]


class LoadingProgress(msgspec.Struct, tag=True, frozen=True):
    """Weights read so far by this worker; sent a few times a second."""

    loaded_bytes: int
    total_bytes: int


class WeightsLoaded(msgspec.Struct, tag=True, frozen=True):
    """This worker's share of the weights is in place."""


class PoolMade(msgspec.Struct, tag=True, frozen=True):
    """The pool on this worker's GPU has been measured out and allocated; it never grows."""

    num_blocks: int
    memory: SharedMemory | None
    """Where another worker finds it; None: no other does."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The worker has run a warm-up step and takes Admits. `attention` names the backend."""

    attention: str
    max_step_tokens: int | None = None
    """Of prompts in a step: more would be hardly faster on this GPU; None: as Setup has it."""
    sharing: str | None = None
    """How processes share its GPU: `mps` or `time-sliced`; None: it has the GPU or cores alone."""
    num_graphs: int = 0
    capture_ms: float = 0.0
    graph_bytes: int = 0
    """Device memory that the graphs took."""
    ring_bytes_per_s: float | None = None
    """Of blocks to the ring and back, found unchanged; None: it has no ring."""


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """Block `block_index` of the sequence's table was copied into ring slot `slot`."""

    slot: int
    block_index: int


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """What one step did for one sequence."""

    seq_id: int
    generation: int
    num_computed_tokens: int
    token_id: int | None
    """The token sampled in this step; None while the prompt is incomplete."""
    logprob: TokenLogprob | None
    finish_reason: str | None
    """`stop`, `length` or `error` if the worker ended it."""
    is_released: bool
    """The worker has dropped the sequence and will not touch its blocks again."""
    stored: list[Stored]
    num_scheduled_tokens: int
    """Tokens of this sequence in this step; 0 if it was only released or stored."""
    admitted_ns: int
    """When the worker took this generation's Admit from its channel."""
    prompt_logprobs: list[TokenLogprob] = []
    """Of the prompt tokens that follow the positions computed in this step, if asked for."""
    error: str | None = None
    """What the client should read if it ended by `error`; then no token was sampled."""


class Stepped(msgspec.Struct, tag=True, frozen=True):
    """One step, or (with no scheduled tokens) releases and stores between steps."""

    started_ns: int
    ended_ns: int
    num_prefill_tokens: int
    num_decode_tokens: int
    entries: list[SequenceStep]


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """A Load is complete; its slots are free."""

    load_id: int
    num_bytes: int
    started_ns: int
    ended_ns: int


class CoresUsed(msgspec.Struct, tag=True, frozen=True):
    """Every later step runs on these cores, and nothing of this worker on any other."""

    cpus: list[int]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The worker cannot go on and exits; what, where and hint are for the operator."""

    what: str
    where: str
    hint: str


Command = Setup | Go | MapShared | Admit | Release | GrantSlots | Load | UseCores
Report = LoadingProgress | WeightsLoaded | PoolMade | Ready | Stepped | Loaded | CoresUsed | Failed
