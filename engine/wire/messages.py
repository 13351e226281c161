"""Define the messages between the daemon and a worker.

Commands (daemon to worker) are imperatives, reports (worker to daemon) are past facts. Every
command that names blocks is answered after the worker's last touch of them: Admit, with whatever
Extends it, by the entry of a step that has `released` set, Copy by Copied, pair by pair, and
MeasureSteps by StepsMeasured. MapPool without memory is answered by Unmapped.
UseCores, which names cores, is answered by CoresUsed.

Owns: the records in which a request's sampling goes from the api to the workers; the wire between
processes.
Invariant: (seq_id, generation) identifies an admit; a worker never sees block ids it may not touch.
Never: carries tensors; KV moves through shared memory, or stays where it is on a GPU.
"""

from __future__ import annotations

import msgspec

from engine.wire.sampling import SamplingParams, TokenLogprob


class PoolSpec(msgspec.Struct, frozen=True):
    """A KV pool. Block 0 is padding and never allocated."""

    name: str
    fd: int | None
    """Of a memfd that the worker inherits; None: it is on a GPU, its own as PoolMade says, another
    worker's as MapPool does."""
    num_blocks: int
    """On a GPU the most that are of use."""


class WeightsSpec(msgspec.Struct, frozen=True):
    """A memfd for weights converted to the serving dtype; shared by workers.

    The worker converts its share (`share_index` of `share_count`), or nothing if `is_filled`. On
    cores it computes from there; on a GPU it copies them all when every share is in place.
    """

    fd: int
    num_bytes: int
    share_index: int
    share_count: int
    is_filled: bool
    is_packed: bool = False
    """Matrices lie in it packed in pairs; how they are multiplied is in the two lists."""
    way_starts: list[int] = []
    """Numbers of inputs from which on..."""
    ways: list[int] = []
    """...products are done in these ways."""
    weights: str = "stored"
    """What matrices are quantised to at start, `q8`, `q4` or `int8`; `stored`: not."""


class LogitsLoss(msgspec.Struct, frozen=True):
    """What quantising has done to the logits of fixed prompts."""

    num_tokens: int
    kl_nats: float
    """Mean divergence of the next token's distribution from what it is without."""
    same_top_ratio: float
    """Share of tokens after which the likeliest next one is the same."""


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
    exports_pool: bool = False
    """Workers on other GPUs write blocks into its pool."""
    packing: str = "widened"
    """What becomes of quantised matrices, as gpu_layout() has it."""


class SharedMemory(msgspec.Struct, frozen=True):
    """What one process exports by CUDA IPC and another maps; opaque to everybody else."""

    weights: bytes
    """Empty: the pool alone is shared."""
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
    weights: WeightsSpec | None
    """None: the checkpoint's dtype is served, and the files themselves are mapped."""
    cpus: list[int]
    """Its own cores, one thread each; UseCores changes them."""
    max_num_batched_tokens: int
    max_model_len: int
    """Tokens of the longest request."""
    gpu: GpuSpec | None = None
    """None: it computes on its cores."""
    node: int | None = None
    """The NUMA node that its pool and its weights are to be on; None: wherever they are touched."""
    other_pools: list[PoolSpec] = []
    """That it copies blocks to or from: other workers', or the staging buffer."""
    kv_dtype: str = "auto"
    """Of all pools: `int8`, or `auto`, which is `dtype`."""
    attention_way: int = 0
    """How prompts' queries meet keys on cores, as engine.kernels.cpu numbers ways."""
    measures_kv: bool = False
    """It is to say in Ready what that does to the logits."""

    @property
    def pool_dtype(self) -> str:
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype


class WeightsComplete(msgspec.Struct, tag=True, frozen=True):
    """All workers have loaded their share of the weights. Answered by Ready."""


class MapShared(msgspec.Struct, tag=True, frozen=True):
    """After WeightsComplete, for who maps: where weights and pool are. Answered by Ready."""

    memory: SharedMemory


class MapPool(msgspec.Struct, tag=True, frozen=True):
    """Where another worker's pool is that this one copies to.

    It comes after WeightsComplete, and in every new life of that pool. Without memory that life is
    over: let go of it, which is answered by Unmapped.
    """

    pool: str
    memory: SharedMemory | None


class Admit(msgspec.Struct, tag=True, frozen=True):
    """Run this sequence until it has `until_output` output tokens or ends by itself.

    Complete: new, moved and recovered sequences differ only in these numbers. Answered by an
    entry with `released` set.
    """

    seq_id: int
    generation: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_table: list[int]
    sampling: SamplingParams
    until_output: int
    max_chunk_tokens: int | None = None
    """Prompt tokens per step at most, for those who decode beside it; None: as many as go."""


class Release(msgspec.Struct, tag=True, frozen=True):
    """Drop a sequence after the current step. Ignored if the worker has dropped it by itself."""

    seq_id: int
    generation: int
    reason: str = "ended"
    """What the entry that answers it has as `released`: `ended` or `preempted`."""


class Extension(msgspec.Struct, frozen=True, array_like=True):
    """More blocks at the end of an admitted sequence's table."""

    seq_id: int
    generation: int
    block_ids: list[int]


class Extend(msgspec.Struct, tag=True, frozen=True):
    """More blocks for sequences that the worker has; void for one that is not there any more.

    Not answered by itself: from now on each sequence's Admit names its new blocks, too.
    """

    extensions: list[Extension]


class FilledBy(msgspec.Struct, frozen=True, array_like=True):
    """The admit whose steps fill the blocks of a copy."""

    seq_id: int
    generation: int
    first_block: int
    """Place of the copy's first block in the sequence's table; the others follow it."""


class Copy(msgspec.Struct, tag=True, frozen=True):
    """Copy blocks from one pool to another, in order, beside the steps. Answered by Copied.

    It may come before the bytes: while the admit that fills them runs here, each block waits for
    the step that fills it. What the sequence no longer needs, for it has ended, is not copied.
    """

    copy_id: int
    from_pool: str
    to_pool: str
    pairs: list[tuple[int, int]]
    """Block to block."""
    filled_by: FilledBy | None
    """None: the bytes are there."""


class UseCores(msgspec.Struct, tag=True, frozen=True):
    """Compute on these cores from the next step on, one thread each; none: compute nothing.

    Answered by CoresUsed between two steps. What is admitted to a parked worker waits in it.
    """

    cpus: list[int]


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """A step of equal sequences: decode if each has one token, else a chunk of a prompt."""

    num_sequences: int
    num_tokens: int
    """Of each."""
    num_before: int
    """Positions of each that count as computed."""


class MeasureSteps(msgspec.Struct, tag=True, frozen=True):
    """Make steps like these and time them, until the time is over or a command arrives.

    They read and write the named blocks, whose content is nothing to anybody. Answered by
    StepsMeasured.
    """

    measurement_id: int
    steps: list[StepShape]
    block_ids: list[int]
    budget_ms: float


class StopMeasuring(msgspec.Struct, tag=True, frozen=True):
    """End MeasureSteps at the next layer, as any command does. Has no answer of its own."""


class LoadingProgress(msgspec.Struct, tag=True, frozen=True):
    """Weights read so far by this worker; sent a few times a second.

    It is a sign of life, too: sent again, unchanged, after each other part of a start.
    """

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
    max_num_batched_tokens: int | None = None
    """Of prompts in a step: more would be hardly faster on this GPU; None: as Setup has it."""
    sharing: str | None = None
    """How processes share its GPU: `mps` or `time-sliced`; None: it has the GPU or cores alone."""
    num_graphs: int = 0
    capture_ms: float = 0.0
    graph_bytes: int = 0
    """Device memory that the graphs took."""
    notes: list[str] = []
    """What is not as it was to be, in words."""
    probes: dict[str, float] = {}
    """By other pool that it copies to or from: bytes a second of blocks that went there and back,
    and were found unchanged."""
    weights_loss: LogitsLoss | None = None
    kv_loss: LogitsLoss | None = None
    """Of the worker that measured it; None: it was not its to measure."""


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """What one step did for one sequence."""

    seq_id: int
    generation: int
    num_computed_tokens: int
    """How far it is computed now: positions whose KV is written."""
    token_ids: list[int]
    """Sampled in this step, in order; empty while the prompt is incomplete."""
    logprobs: list[TokenLogprob]
    """One for each of those tokens, or none."""
    finish_reason: str | None
    """`stop`, `length` or `error` if the worker ended it."""
    released: str | None
    """Why the worker has let go of it, after its last touch of the blocks: `moved`, it has all that
    the admit was for; `ended`, by itself or since it was told to; `preempted`, since others need
    its blocks; None: it has it still."""
    num_scheduled_tokens: int
    """Tokens of this sequence in this step; 0 if it was only released."""
    admitted_ns: int
    """When the worker took this generation's Admit from its channel."""
    is_decoding: bool = False
    """Before this step it was computed up to its last token."""
    prompt_logprobs: list[TokenLogprob] = []
    """Of the prompt tokens that follow the positions computed in this step, if asked for."""
    error: str | None = None
    """Why what was asked cannot be gone on with, if it ended by `error`; no token was sampled."""
    is_fault: bool = False
    """The error is not in what was asked: the model has computed no numbers."""


class Stepped(msgspec.Struct, tag=True, frozen=True):
    """One step, or (with no scheduled tokens) releases between steps."""

    started_ns: int
    ended_ns: int
    num_prefill_tokens: int
    num_decode_tokens: int
    entries: list[SequenceStep]
    num_cores: int | None = None
    """That it was computed on, where those are fewer than the worker was given."""


class Copied(msgspec.Struct, tag=True, frozen=True):
    """Some more of a Copy's pairs are done, or the rest will not be."""

    copy_id: int
    num_pairs: int
    """That are complete, after those of earlier reports."""
    num_bytes: int
    started_ns: int
    ended_ns: int
    is_last: bool
    """Nothing more comes: none of the copy's blocks will be touched again."""
    error: str | None = None
    """Why the rest could not be copied."""
    link_ns: int | None = None
    """What the bytes took on their way, by the device's clock where one copies; None: not known,
    since the host was too busy, or nothing was copied."""


class Unmapped(msgspec.Struct, tag=True, frozen=True):
    """Nothing of this worker reaches the memory of a pool any more that MapPool has told of."""

    pool: str


class CoresUsed(msgspec.Struct, tag=True, frozen=True):
    """Every later step runs on these cores, and nothing of this worker on any other."""

    cpus: list[int]


class MeasuredStep(msgspec.Struct, frozen=True, array_like=True):
    """One StepShape, and how long it took."""

    num_sequences: int
    num_tokens: int
    num_before: int
    elapsed_ms: float
    """Of the whole step, also where it was told from some of the layers."""


class StepsMeasured(msgspec.Struct, tag=True, frozen=True):
    """MeasureSteps is over; its blocks will not be touched any more."""

    measurement_id: int
    steps: list[MeasuredStep]
    too_long: list[StepShape] = []
    """Left out: half a layer of it would keep a request waiting."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The worker cannot go on and exits; what, where and hint are for the operator."""

    what: str
    where: str
    hint: str


Command = (
    Setup
    | WeightsComplete
    | MapShared
    | MapPool
    | Admit
    | Extend
    | Release
    | Copy
    | UseCores
    | MeasureSteps
    | StopMeasuring
)
Report = (
    LoadingProgress
    | WeightsLoaded
    | PoolMade
    | Ready
    | Stepped
    | Copied
    | Unmapped
    | CoresUsed
    | StepsMeasured
    | Failed
)
