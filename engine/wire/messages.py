"""Define the messages between the daemon and a worker.

Commands (daemon to worker) are imperatives, reports (worker to daemon) are past facts. Every
command that names blocks is answered after the worker's last touch of them: Admit, with whatever
Extends it, by the entry of a step that has `released` set, Copy by Copied, pair by pair, and
MeasureSteps by StepsMeasured. ComputeTexts is answered by TextsComputed, and MapPool without memory
by Unmapped.
UseCores, which names cores, is answered by CoresUsed.

Invariant: (seq_id, generation) identifies an admit; a worker never sees block ids it may not touch.
Never: carries tensors; KV moves through shared memory, or stays where it is on a GPU.
"""

from __future__ import annotations

from itertools import chain
from typing import Literal

import msgspec

from engine.wire.run_spec import RunSpec
from engine.wire.sampling import TokenLogprob


class PoolSpec(msgspec.Struct, frozen=True):
    """A KV pool. Block 0 is padding and never allocated."""

    name: str
    fd: int | None
    """The memfd that the worker inherits; None: it is on a GPU, this worker's (PoolMade) or
    another's (MapPool)."""
    num_blocks: int
    """Its blocks; on a GPU the maximum useful number."""


class WeightsSpec(msgspec.Struct, frozen=True):
    """A memfd or file for weights converted to the serving dtype; shared by workers.

    The worker converts its share (`share_index` of `share_count`), or nothing if `is_filled`. On
    cores it computes from there; on a GPU it copies them all when every share is complete.
    """

    fd: int
    num_bytes: int
    share_index: int
    share_count: int
    is_filled: bool
    is_packed: bool = False
    """Whether matrices are packed, in pairs or in panels."""
    variant: int | None = None
    """The kernel that multiplies few rows by pairs; None: no matrix is packed in pairs."""
    has_tiles: bool = False
    """Whether a prompt's rows take matrix tiles."""
    weights: str = "stored"
    """The quantisation of matrices at start, `q8`, `q4` or `int8`; `stored`: none."""
    is_file: bool = False
    """Whether it is a file on disk, which holds more than memory does."""


class LogitsLoss(msgspec.Struct, frozen=True):
    """The effect of quantising on the logits of fixed prompts."""

    num_tokens: int
    kl_nats: float
    """Mean KL divergence of the next token's distribution from the unquantised one."""
    same_top_ratio: float
    """Share of tokens with an unchanged likeliest successor."""


class Proof(msgspec.Struct, frozen=True):
    """What a self-test has found on a device."""

    key: str
    """What it holds for, by engine.worker.self_test."""
    refused: dict[str, str]
    """Kernels that compute wrongly, with shape and difference; something else serves."""
    notes: list[str]
    """Faults of what does not serve."""
    took_ms: float


class GpuSpec(msgspec.Struct, frozen=True):
    """The GPU that a worker computes on."""

    uuid: str
    shares: str | None = None
    """`exports`: another worker maps its weights and pool; `maps`: it maps another's; None: not
    shared."""
    min_blocks: int = 2
    """Minimum blocks of the pool; after a restart, as many as before."""
    has_graphs: bool = True
    """Whether decode steps are captured and replayed."""
    is_shared: bool = False
    """Whether another worker computes on it, too."""
    exports_pool: bool = False
    """Whether workers on other GPUs write blocks into its pool."""
    packing: str = "widened"
    """The layout of quantised matrices, from gpu_layout()."""
    faults: dict[str, str] | None = None
    """Why packages and kernels are not used, as the daemon says; None: the worker tries them."""
    step_tokens: int | None = None
    """Prompt tokens of a step, as an earlier life has timed them; None: it times them."""
    proofs: list[Proof] = []
    """Proofs of earlier starts."""


class SharedMemory(msgspec.Struct, frozen=True):
    """Handles of memory that one process exports by CUDA IPC and another maps."""

    weights: bytes
    """The weights' handle; empty: only the pool is shared."""
    pool: bytes
    num_blocks: int
    seal: bytes
    """The bytes after the pool that the exporter wrote in this life."""


class TextModelSpec(msgspec.Struct, frozen=True):
    """A model that makes vectors or scores of whole texts, beside the served one."""

    name: str
    model_dir: str
    kind: Literal["embedding", "rerank"]
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    compared: list[int] | None = None
    """The rows of the head for `yes` and `no`, if the score compares them."""
    scratch_bytes: int = 0
    """What its largest batch computes with, beside the weights."""


class GroupSpec(msgspec.Struct, frozen=True):
    """The processes of one worker, each of which computes some shards of each layer.

    The first, of rank 0, has the channel and leads the others.
    """

    cpus: list[list[int]]
    """The cores of each process, the first one's as in Setup."""
    num_shards: int
    """Shards of the model; each process has an equal number."""
    rank: int = 0
    """The process that gets this Setup."""
    variant: int | None = None
    """The kernel that multiplies few rows by pairs; None: no matrix is packed in pairs."""
    has_tiles: bool = False
    """Whether a prompt's rows take matrix tiles."""


class Setup(msgspec.Struct, tag=True, frozen=True):
    """First message to a worker: everything it needs to load. Answered by WeightsLoaded."""

    worker: str
    model_dir: str
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    block_size: int
    pool: PoolSpec
    weights: WeightsSpec | None
    """None: the checkpoint's dtype is served, and its files are mapped."""
    cpus: list[int]
    """Its own cores, one thread each; UseCores changes them."""
    max_num_batched_tokens: int
    max_model_len: int
    """Tokens of the longest request."""
    gpu: GpuSpec | None = None
    """None: it computes on its cores."""
    node: int | None = None
    """The NUMA node of its pool and weights; None: any."""
    other_pools: list[PoolSpec] = []
    """Pools that it copies blocks to or from: other workers', or the staging buffer."""
    kv_dtype: str = "auto"
    """The dtype of all pools: `int8`, or `auto`, which is `dtype`."""
    attention_variant: int = 0
    """The kernel of prompts' attention on cores, by engine.kernels.cpu's number."""
    max_drafted: int | None = 0
    """Maximum guessed tokens per sequence in a decode step; None: as many as pay."""
    has_window_blocks: bool = False
    """Whether layers with windows have blocks of their own, by ModelConfig.in_groups()."""
    measures_kv: bool = False
    """Whether Ready must report the KV dtype's effect on the logits."""
    text_models: list[TextModelSpec] = []
    """Models that ComputeTexts may name."""
    checkpoint_fd: int | None = None
    """A memfd with what was read of the model, by engine.checkpoint.written_models.

    None: the daemon was started before an upgrade, and the worker has the model read."""
    disk_bytes: int | None = None
    """Bytes of weights that each step reads from disk; None: all stay in memory."""
    group: GroupSpec | None = None
    """None: the worker is one process."""

    @property
    def pool_dtype(self) -> str:
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype


class WeightsComplete(msgspec.Struct, tag=True, frozen=True):
    """All workers have loaded their share of the weights. Answered by Ready."""


class MapShared(msgspec.Struct, tag=True, frozen=True):
    """Give a mapping worker the handles of weights and pool. Answered by Ready."""

    memory: SharedMemory


class MapPool(msgspec.Struct, tag=True, frozen=True):
    """Tells a worker where another worker's pool is that it copies to.

    It comes after WeightsComplete, and in every new life of the pool. Without memory that life has
    ended: the worker unmaps it and answers by Unmapped.
    """

    pool: str
    memory: SharedMemory | None


class Records(msgspec.Struct, frozen=True, array_like=True):
    """A sequence's records in the pool: what recurrent layers know of its computed tokens.

    A step reads the valid one and writes another: the first that is neither valid, frozen nor kept.
    """

    blocks: list[list[int]]
    """Of each record."""
    valid: int
    """The place of the one that holds; with no computed tokens it is not read."""
    frozen: list[int]
    """Places of snapshots, which must never be written again."""
    snapshots_at: list[int]
    """Numbers of computed tokens at which a step must end; the record written there is frozen."""
    keeps_every: int = 0
    """Tokens between borders. A record at a border is kept until the next; 0: no record is kept."""
    kept: int | None = None
    """The place of the kept one; None: no record is kept yet."""


class Admit(msgspec.Struct, tag=True, frozen=True):
    """Run this sequence until it has `until_output` output tokens or ends by itself.

    Complete: new, moved and recovered sequences differ only in these numbers. Answered by an entry
    with `released` set.
    """

    seq_id: int
    generation: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_table: list[int]
    spec: RunSpec
    until_output: int
    max_chunk_tokens: int | None = None
    """Maximum prompt tokens per step, to protect others' ITL; None: no limit."""
    max_chunk_beside: int | None = None
    """Maximum prompt tokens of steps in which others decode; None: it was placed beside them."""
    records: Records | None = None
    """None: the model keeps no recurrent states."""
    window_tables: list[list[int]] = []
    """The blocks of each group of layers with windows; 0: behind the window."""
    is_suspect: bool = False
    """A worker has died while it had this sequence. Answered by Begun before anything is done."""


class Release(msgspec.Struct, tag=True, frozen=True):
    """Drop a sequence after the current step. Ignored if the worker has dropped it by itself."""

    seq_id: int
    generation: int
    reason: str = "ended"
    """The value of `released` in the answering entry: `ended` or `preempted`."""


class Extension(msgspec.Struct, frozen=True, array_like=True):
    """More blocks at the end of an admitted sequence's tables."""

    seq_id: int
    generation: int
    block_ids: list[int]
    window_ids: list[list[int]] = []
    """The blocks for the end of each window table."""


class Extend(msgspec.Struct, tag=True, frozen=True):
    """Add blocks to sequences that the worker has; void for one that it has dropped.

    Not answered: each sequence's Admit now names its new blocks, too.
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
    the step that fills it. Blocks of an ended sequence are not copied.
    """

    copy_id: int
    from_pool: str
    to_pool: str
    pairs: list[tuple[int, int]]
    """Block to block."""
    filled_by: FilledBy | None
    """None: the bytes are ready."""
    window_pairs: list[list[tuple[int, int]]] = []
    """The window blocks that are copied with each pair; empty: none are."""

    def with_windows(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return some pairs, and the window blocks that go with them."""
        return [*self.pairs[first:end], *chain(*self.window_pairs[first:end])]


class UseCores(msgspec.Struct, tag=True, frozen=True):
    """Compute on these cores from the next step on, one thread each; empty: compute nothing.

    Answered by CoresUsed between two steps. Sequences admitted to a parked worker wait in it.
    """

    cpus: list[int]


SHALLOW = 128
"""Positions before a step's tokens that hardly count."""


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """A step of equal sequences: decode if each has one token, otherwise a chunk of a prompt."""

    num_sequences: int
    num_tokens: int
    """Tokens of each sequence."""
    num_before: int
    """Positions of each sequence that count as computed."""


class MeasureSteps(msgspec.Struct, tag=True, frozen=True):
    """Run and time such steps, until the time is over or a command arrives.

    They read and write the named blocks, whose content is arbitrary. Answered by StepsMeasured.
    """

    measurement_id: int
    steps: list[StepShape]
    block_ids: list[int]
    budget_ms: float


class StopMeasuring(msgspec.Struct, tag=True, frozen=True):
    """End MeasureSteps at the next layer, as any command does. Not answered."""


class ComputeTexts(msgspec.Struct, tag=True, frozen=True):
    """Compute a vector or a score for each text, between steps. Answered by TextsComputed."""

    batch_id: int
    model: str
    texts: list[list[int]]
    """Token ids, at least one each."""
    num_unpooled: list[int] = []
    """The first tokens of each that its pooling leaves out; empty: of none."""


class LoadingProgress(msgspec.Struct, tag=True, frozen=True):
    """Weights read so far by this worker; sent a few times a second.

    It is a sign of life, too: sent again, unchanged, after each other part of a start.
    """

    loaded_bytes: int
    total_bytes: int


class WeightsLoaded(msgspec.Struct, tag=True, frozen=True):
    """This worker's share of the weights is loaded."""


class PoolMade(msgspec.Struct, tag=True, frozen=True):
    """The pool on this worker's GPU has been measured and allocated; it never grows."""

    num_blocks: int
    memory: SharedMemory | None
    """Its handle for other workers; None: not exported."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The worker has run a warm-up step and takes Admits. `attention` names the backend."""

    attention: str
    max_num_batched_tokens: int | None = None
    """Maximum prompt tokens in a step; more would hardly be faster on this GPU; None: Setup's."""
    sharing: str | None = None
    """How processes share its GPU: `mps` or `time-sliced`; None: not shared."""
    num_graphs: int = 0
    capture_ms: float = 0.0
    graph_bytes: int = 0
    """Device memory of the graphs."""
    notes: list[str] = []
    """Deviations from the plan, in words."""
    probes: dict[str, float] = {}
    """Copy rates in bytes per second to and from other pools, measured with unchanged data."""
    weights_loss: LogitsLoss | None = None
    kv_loss: LogitsLoss | None = None
    """Measured by one worker; None: not by this one."""
    proof: Proof | None = None
    """The proof of its kernels; None: it computes on cores."""


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """The result of one step for one sequence."""

    seq_id: int
    generation: int
    num_computed_tokens: int
    """Computed positions now, with their KV written."""
    token_ids: list[int]
    """Sampled in this step, in order; empty while the prompt is incomplete."""
    logprobs: list[TokenLogprob]
    """One per sampled token, or none."""
    finish_reason: str | None
    """`stop`, `length` or `error` if the worker ended it."""
    released: str | None
    """Why the worker released its blocks: `moved`, it reached the admit's target; `ended`, by
    itself or by a command; `preempted`, others need its blocks; None: not released."""
    num_scheduled_tokens: int
    """Tokens of this sequence in this step, with drafted ones; 0 if it was only released."""
    admitted_ns: int
    """When the worker took this generation's Admit from its channel."""
    is_decoding: bool = False
    """Whether all but its last token were computed before this step."""
    prompt_logprobs: list[TokenLogprob] = []
    """Log-probabilities of prompt tokens after the computed positions, if asked for."""
    error: str | None = None
    """Why the request cannot continue, if it ended by `error`; no token was sampled."""
    is_fault: bool = False
    """Whether the model, rather than the request, caused the error."""
    valid_record: int = 0
    """The place of the record that holds, among the admit's records."""
    num_drafted: int = 0
    """Guessed tokens in the step; accepted are `token_ids` but the last of them."""
    drafter: str = ""
    """Where the guess came from, one of engine.worker.drafts.DRAFTERS."""


class Stepped(msgspec.Struct, tag=True, frozen=True):
    """One step, or (with no scheduled tokens) releases between steps."""

    started_ns: int
    ended_ns: int
    num_prefill_tokens: int
    num_decode_tokens: int
    entries: list[SequenceStep]
    num_cores: int | None = None
    """The cores that computed it, if fewer than given."""


class Begun(msgspec.Struct, tag=True, frozen=True):
    """This worker was alive when a suspect came, so that its death may be the suspect's fault."""

    seq_id: int
    generation: int


class Copied(msgspec.Struct, tag=True, frozen=True):
    """More of a Copy's pairs are done, or the rest is given up."""

    copy_id: int
    num_pairs: int
    """Completed pairs after earlier reports."""
    num_bytes: int
    started_ns: int
    ended_ns: int
    is_last: bool
    """Whether this ends the copy: its blocks are not touched again."""
    error: str | None = None
    """Why the rest was not copied."""
    link_ns: int | None = None
    """The transfer time of the bytes, by the device's clock if it copies; None: unknown, since the
    host was busy or nothing was copied."""


class Unmapped(msgspec.Struct, tag=True, frozen=True):
    """This worker no longer reaches the pool's memory."""

    pool: str


class CoresUsed(msgspec.Struct, tag=True, frozen=True):
    """Every later step runs on these cores only."""

    cpus: list[int]


class MeasuredStep(msgspec.Struct, frozen=True, array_like=True):
    """One StepShape, and how long it took."""

    num_sequences: int
    num_tokens: int
    num_before: int
    elapsed_ms: float
    """Time of the whole step, possibly extrapolated from some layers."""


class StepsMeasured(msgspec.Struct, tag=True, frozen=True):
    """MeasureSteps has ended; its blocks are not touched any more."""

    measurement_id: int
    steps: list[MeasuredStep]
    too_long: list[StepShape] = []
    """Shapes left out: half a layer of them would delay a request."""


class TextsComputed(msgspec.Struct, tag=True, frozen=True):
    """ComputeTexts has ended."""

    batch_id: int
    started_ns: int
    ended_ns: int
    results: list[bytes]
    """Float32 numbers of each text; empty: some are not finite."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The worker must exit; what, where and hint are for the operator."""

    what: str
    where: str
    hint: str
    is_lasting: bool = False
    """Whether each later start would fail, too, until a person changes something."""


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
    | ComputeTexts
)
Report = (
    LoadingProgress
    | WeightsLoaded
    | PoolMade
    | Ready
    | Begun
    | Stepped
    | Copied
    | Unmapped
    | CoresUsed
    | StepsMeasured
    | Failed
    | TextsComputed
)
