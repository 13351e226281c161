"""Define frames: what the daemon tells the console and the CLI, versioned.

Invariant: None means not reported, never 0; every duration is in milliseconds, every size in bytes;
within one FRAME_VERSION fields are only added.
"""

from __future__ import annotations

# nothing of the engine: the console runs on other machines, too
from datetime import UTC, datetime

import msgspec

from appliance.observe.frame.late_frames import (
    LateFrame,
    RefusalFrame,
    SurvivedFrame,
    UnwrittenFrame,
)
from appliance.observe.frame.offload_frame import OffloadFrame
from appliance.observe.frame.tier_frames import TierFrame


class OwnerFrame(msgspec.Struct):
    """A user or key holding blocks of a pool."""

    user: str
    num_blocks: int
    num_requests: int


class HolderFrame(msgspec.Struct):
    """A user or key with cached blocks in a pool."""

    user: str
    num_blocks: int


class PoolFrame(msgspec.Struct):
    """Blocks of one KV pool (or of the staging buffer) by state; they add up to num_blocks."""

    name: str
    num_blocks: int
    block_size: int
    block_bytes: int
    free: int
    reserved: int
    active: int
    draining: int
    owners: list[OwnerFrame] = []
    """Owners by number of blocks; at most MAX_POOL_OWNERS."""
    cached: int = 0
    """Unused blocks kept until their memory is needed."""
    holders: list[HolderFrame] = []
    """Users with cached blocks, in use or not; at most MAX_POOL_OWNERS."""
    evicted: int = 0
    """Cached blocks evicted since the start."""
    record_blocks: int = 0
    """Blocks of one record of recurrent states; 0: the model keeps none."""
    records: int = 0
    """Records of running sequences."""
    snapshots: int = 0
    """Records that prompts can go on from."""
    window_blocks: int = 0
    """Blocks beside each block, for its layers with sliding windows; 0: a block has all layers."""

    @property
    def used_ratio(self) -> float | None:
        """Share of blocks that new work cannot have; None: the pool is for no new work."""
        if self.num_blocks <= 0:
            return None
        return 1 - (self.free + self.cached) / self.num_blocks


class LinkFrame(msgspec.Struct):
    """The link from one pool to another."""

    from_pool: str
    to_pool: str
    transport: str
    """The present transport: `peer` or `shm`."""
    probe_bytes_per_s: float | None
    """Copy rate of blocks there and back at start, if unchanged; None: not measured yet."""
    copy_bytes_per_s: float | None
    """Recent rate while copying; None: it has not copied yet."""
    bytes_per_s: float
    """Rate of arrived bytes since the last frame."""
    down: str | None = None
    """Why `transport` is not the configured one; None: it is."""
    has_detour: bool = False
    """Whether a fallback exists: the link goes from one device's memory into another's."""
    num_bytes: int = 0
    """All bytes that have arrived."""
    num_strikes: int = 0
    """Copies in a row that failed or ran below half the rate at start."""


FRAME_VERSION = 1
PHASES = ("queued", "prefilling", "handing_off", "paused", "decoding", "finished")


def utc_now() -> str:
    """Return the time in ISO 8601, UTC, milliseconds: the form of every wall time here."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def iso_time(seconds: float) -> str:
    """Format Unix seconds in ISO 8601, UTC, milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat("T", "milliseconds")[:-6] + "Z"


class RequestFrame(msgspec.Struct):
    """One request: live, or finished recently."""

    id: str
    endpoint: str
    phase: str
    """One of PHASES; of several sequences, the least advanced unfinished one."""
    model: str
    user: str | None
    """The caller: a user, `uid:N`, `key:NAME` or `unknown`; None in old rows."""
    stream: bool
    num_sequences: int
    prompt_tokens: int
    computed_tokens: int | None
    output_tokens: int | None
    """Output tokens so far; None: it makes vectors or scores, or unknown after a crash."""
    max_tokens: int | None
    """The most output tokens; None: it makes vectors or scores."""
    num_blocks: int
    worker: str | None
    transport: str | None
    received_at: str
    """The arrival time: ISO 8601, UTC, milliseconds."""
    age_ms: float
    """Time since the arrival, until the end if it has ended."""
    finish_reason: str | None = None
    error: str | None = None
    tokenize_ms: float | None = None
    queue_ms: float | None = None
    restore_ms: float | None = None
    """Queue time spent loading the prompt's blocks; None: none were loaded."""
    prefill_ms: float | None = None
    ttft_ms: float | None = None
    handoff_ms: float | None = None
    decode_wait_ms: float | None = None
    decode_ms: float | None = None
    paused_ms: float | None = None
    """Time without KV blocks after preemption; None: never after its first token."""
    first_itl_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    handoff_bytes: int | None = None
    route: str | None = None
    """`move` (to another worker), `decode` or `prefill` (all on that worker); None in old rows."""
    route_reason: str | None = None
    """The reason for the route, in words."""
    prefill_j: float | None = None
    """Energy of its share of the prompt's steps; None: no power reading."""
    decode_j: float | None = None
    slow_because: str | None = None
    """The main cause of its delay, in one sentence; None: no delay."""
    waits_for: str | None = None
    """Why its prompt is not being computed yet, in words; None: it is, or was."""
    preemptions: int = 0
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; None: the cache is off."""
    restore_reason: str | None = None
    restored_tokens: int = 0
    """Cached tokens loaded from a cache below the pools, after the outcome in words (None: none
    were stored)."""
    cancelled_by: str | None = None
    """The cause of its cancellation; None: not cancelled."""
    workers: str | None = None
    links: str | None = None
    """The workers it ran on, and how KV came to each further one, with commas; None in old rows."""
    changes: str | None = None
    """What was changed in order to serve it, in words; None: nothing."""
    behind: str | None = None
    """The request whose prompt is computed before its own; None: it waits for no prompt."""
    behind_tokens: int | None = None
    """Prompt tokens left of all requests that are computed before its own."""
    cache_miss: str | None = None
    """The token at which its cached prefix ended, and why; None: nothing was missed."""
    speculation: str | None = None
    """Its tokens per step, and how many guessed tokens were right, in words; None: no guesses."""
    client: str | None = None
    """The program and process that sent it, as the kernel names them, or its address; None: neither
    is known."""
    waited_for: str | None = None
    """What its prompt waited for last, in words; None: it had its turn within a second."""
    recoveries: int = 0
    """How often its sequences continued after the death of their worker or of the daemon."""


class RankFrame(msgspec.Struct):
    """One process of a group over the last second."""

    pid: int
    cpus: list[int]
    rss_bytes: int | None
    """Its resident memory, with what it shares."""
    wait_ratio: float | None
    """Share of the last second that its steps waited for the others, 0 to 1."""


class WorkerFrame(msgspec.Struct):
    """One worker process over the last second."""

    name: str
    """`prefill`, `decode` or `colocated`; with numbers if several: `prefill0`, `prefill1`."""
    state: str
    """`starting`, `loading`, `ready` or `restarting`."""
    pid: int | None
    device: str
    """Its device, for people: `cpu 0`, `cpu 0-1`, `gpu0`, `gpu0, time-sliced`."""
    cpus: list[int]
    attention: str | None
    num_sequences: int
    """Sequences admitted to the worker now."""
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    steps_per_s: float
    step_ms_p50: float | None
    step_ms_max: float | None
    busy_ratio: float
    """Share of the last second spent in steps, 0 to 1."""
    cpu_percent: float | None
    rss_bytes: int | None
    num_restarts: int
    loaded_bytes: int
    total_bytes: int
    cpus_used: list[int] = []
    """The cores that it computes on now: its own and lent ones, or none while lent out."""
    batch_size_mean: float | None = None
    """Mean sequences in a step, over the last second."""
    last_step_age_ms: float | None = None
    """Time since its last step, while it has work or owes an answer; None: it has neither."""
    num_prefilling: int = 0
    """Sequences with an incomplete prompt."""
    cpu_share: float | None = None
    """Share of the CPU time that it wanted in the last seconds, 0 to 1; None: it wanted little, or
    the kernel reports no waits."""
    num_refused: int = 0
    """Kernels that the self-test found wrong on its GPU; others serve."""
    disk_wait_ratio: float | None = None
    """Share of the last second in which it waited for weights, 0 to 1; None: all are in memory."""
    disk_bytes_per_s: float | None = None
    """Rate at which it read from disk in the last second."""
    disk_read_bytes: int | None = None
    """Bytes that it has read from disk since its start."""
    other_pids: list[int] = []
    """A group's processes besides the first; CPU and memory add up all of them."""
    ranks: list[RankFrame] = []
    """The processes of a group; empty: the worker is one process."""
    bound_by: str | None = None
    """What most of its steps' time went into: `computing`, `waiting` for its other processes or
    `reading` weights; None: it has neither, or had no step."""


class QueueFrame(msgspec.Struct):
    """Sequences by phase now."""

    queued: int
    prefilling: int
    handing_off: int
    decoding: int
    max_queued: int
    oldest_queued_ms: float | None
    num_owners: int = 0
    queued_tokens: int = 0
    max_queued_tokens: int = 0
    paused: int = 0
    """Sequences preempted after their first token."""
    first_token: LateFrame | None = None
    """The longest wait for a first token by its limit, in any phase; None: no request waits."""
    next_token: LateFrame | None = None
    """The same of the streams that have begun, for their next token."""


class LatencyFrame(msgspec.Struct):
    """Exact quantiles over finished requests and token times within the window."""

    window_s: float
    num_requests: int
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    ttft_ms_max: float | None
    itl_ms_p50: float | None
    itl_ms_p95: float | None
    itl_ms_max: float | None
    handoff_ms_p50: float | None
    handoff_ms_p95: float | None
    ttft_ms_p99: float | None = None
    itl_ms_p99: float | None = None
    e2e_ms_p50: float | None = None
    e2e_ms_p95: float | None = None
    e2e_ms_p99: float | None = None
    queue_ms_mean: float | None = None
    """Mean queue time of requests with a first token in the window.

    The stages' means add up to the mean ttft. None: no request spent time in it."""
    prefill_ms_mean: float | None = None
    ttft_slo_ratio: float | None = None
    """Share of first tokens in time, 0 to 1; None: no target, or no first token in the window."""
    itl_slo_ratio: float | None = None
    num_stalls: int = 0
    """Token times in the window longer than four times their median and 100 ms."""
    tokenize_ms_mean: float | None = None
    restore_ms_mean: float | None = None
    ttft_over_usual: float | None = None
    """The ratio to the usual TTFT exceeded by a tenth of the prompts.

    Each is compared with prompts of its length; 1: less than a second late. None: too few first
    tokens in the window."""


class HandoffFrame(msgspec.Struct):
    """Handoffs of KV from prefill to decode."""

    transport: str | None
    """`alias` or `shm`; None: no handoffs."""
    num_in_flight: int
    handoffs_per_s: float
    bytes_per_s: float
    probe_bytes_per_s: float | None = None
    """Copy rate measured at start with a checksum; None: no bytes move."""
    num_failed: int = 0


class EnergyFrame(msgspec.Struct):
    """Joules since the daemon started; prefill + decode + unattributed = total."""

    total_j: float | None
    """None: no device reports its energy or power."""
    prefill_j: float | None
    decode_j: float | None
    unattributed_j: float | None
    """Idle power, and energy used outside steps."""
    window_s: float
    power_w: float | None
    """Mean power of all devices over the window."""
    prefill_j_per_token: float | None
    """Joules per computed prompt token over the window."""
    decode_j_per_token: float | None
    method: str
    """How energy was read and divided, for people; `not reported` without a meter."""


class AlertFrame(msgspec.Struct):
    """A raised alert."""

    code: str
    """The alert's stable, dotted code: `kv.occupancy`, `queue.wait`; its events have it, too."""
    severity: str
    """`warning` or `error`."""
    message: str
    since: str
    """When it was raised: ISO 8601, UTC."""
    subject: str = ""
    """The pool, worker or device that it is about, if there are several."""
    request_id: str = ""
    """The request that it names; empty: none."""
    action: str = ""
    """The command that says more or helps; empty: none is known."""


class WayFrame(msgspec.Struct):
    """The outcomes of elastic roles' predictions for one route, since the daemon started."""

    route: str
    worker: str
    """The worker that computes the prompt."""
    is_beside: bool
    """Whether other sequences decode on the worker."""
    has_all: bool
    """Whether all cores compute it."""
    step_tokens: int
    """The size of its steps, to the nearest power of two."""
    num_judged: int
    """Prompts with an outcome that could be compared with the prediction."""
    num_missed: int
    """Outcomes at least twice as bad as predicted."""
    num_gave_way: int
    """Prompts that left the worker midway because ITL exceeded the promise."""
    error_ratio: float | None
    """The factor between outcomes and predictions, in either direction; None: none judged."""
    is_closed: bool
    """Out of use until steps of its size have been measured again."""


class DraftFrame(msgspec.Struct):
    """Tokens that speculation has guessed from one source, since the daemon started."""

    drafter: str
    guessed: list[int]
    """Guessed tokens by place in the guess, then the right ones among them."""
    right: list[int]


class TotalsFrame(msgspec.Struct):
    """Counters since the daemon started; accepted = finished + aborted + failed + live."""

    accepted: int
    finished: int
    refused: int
    aborted: int
    """Requests ended by their clients, or by their content, such as a too large grammar."""
    failed: int
    prompt_tokens: int
    output_tokens: int
    handoffs: int
    handoff_bytes: int
    stale_messages: int
    recovered_sequences: int
    log_rows_lost: int
    routes: dict[str, int] = {}
    """Sequences placed, by route and reason, such as `move cheapest`."""
    ways: list[WayFrame] = []
    has_prefix_cache: bool = False
    """Whether the prefix cache is in use: not off, not loading."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked for in the prefix cache, then the found and the copied ones."""
    prefix_cache_hits: int = 0
    prefix_cache_fetches: int = 0
    prefix_cache_s: float = 0.0
    """Time spent hashing, finding and publishing blocks."""
    preemptions: int = 0
    """Preemptions: a sequence's KV blocks were given to others."""
    decode_steps: int = 0
    """Decode steps, counted for each sequence, then the tokens that these have yielded."""
    decode_step_tokens: int = 0
    drafts: list[DraftFrame] = []
    client_errors: int = 0
    """Replies 4xx but 429: requests that no daemon would serve."""
    reader_failures: dict[str, int] = {}
    """Templates and grammars that took too much to read, by of what."""
    reader_restarts: int = 0
    """Restarts of the process that reads them."""
    texts: int = 0
    """Texts of which a vector or a score was computed, then their tokens."""
    text_tokens: int = 0


class ResidentFrame(msgspec.Struct):
    """A model that is loaded and not served now."""

    model: str
    num_bytes: int
    """Bytes of its weights and KV pools."""
    expires_at: str | None
    """When it is unloaded if it stays unused; None: once its memory is needed."""


class FailedModelFrame(msgspec.Struct):
    """A model that failed to load and is not tried again yet."""

    model: str
    reason: str
    retry_at: str
    """When a request may have it tried again; a change of its files allows that at once."""


class SwapsFrame(msgspec.Struct):
    """Several models: the other names, the next model, the number of waiting requests."""

    others: list[str]
    next: str | None
    num_waiting: int
    num_swaps: int
    last_swap_ms: float | None
    resident: list[ResidentFrame] = []
    """Models that are loaded besides the served one, the one unused longest first."""
    expires_at: str | None = None
    """When an unused served model makes place for the first one; None: never."""
    failed: list[FailedModelFrame] = []


class DeviceFrame(msgspec.Struct):
    """Readings of one power domain: a CPU package by RAPL or a GPU by NVML."""

    name: str
    kind: str
    """`cpu` or `gpu`."""
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    model: str | None = None
    uuid: str | None = None
    parent: str | None = None
    """The GPU that contains a MIG slice; power, clocks and energy are the parent's."""
    energy_j: float | None = None
    """Joules since the daemon started."""
    power_source: str | None = None
    """The source of power_w: `rapl`, `energy counter` or `instant field`."""
    power_instant_w: float | None = None
    memory_clock_mhz: float | None = None
    throttle_reasons: list[str] | None = None
    """Reasons for throttling, in words; empty: none now."""
    sm_ratio: float | None = None
    """This and the next two: by GPM if the device has it, 0 to 1."""
    tensor_ratio: float | None = None
    memory_bandwidth_ratio: float | None = None
    pcie_rx_bytes_per_s: float | None = None
    pcie_tx_bytes_per_s: float | None = None
    nvlink_rx_bytes_per_s: float | None = None
    nvlink_tx_bytes_per_s: float | None = None
    last_xid: int | None = None
    """The newest critical error since the daemon started."""


class UserFrame(msgspec.Struct):
    """One user who has live requests, or had tokens in the last second."""

    user: str
    num_requests: int
    output_tokens_per_s: float


class TodayFrame(msgspec.Struct):
    """Sums over the requests that ended today, in UTC."""

    since: str
    """Midnight, or when counting began because the log could not be read."""
    requests: int
    failed: int
    prompt_tokens: int
    output_tokens: int


class HostFrame(msgspec.Struct):
    """The machine and the daemon process."""

    cpu_percent: float | None
    """Use of all cores, 0 to 100."""
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    daemon_cpu_percent: float | None
    """Use in percent of one core."""
    daemon_rss_bytes: int | None
    core_percents: list[int] = []
    """Use of each core of the machine, 0 to 100, by its number."""


class EventFrame(msgspec.Struct):
    """An event for operators."""

    at: str
    severity: str
    """`info`, `warning` or `error`."""
    code: str
    """The event's stable, dotted code: `worker.died`, `request.cancelled`, `drain.started`."""
    message: str


class Frame(msgspec.Struct):
    """One reading of everything at one time."""

    version: int
    at: str
    seq: int
    """Grows by one per frame; a missing number means that this reader missed frames."""
    uptime_s: float
    state: str
    """`loading`, `ready`, `draining` or `degraded` (a worker is down and coming back)."""
    state_reason: str
    model: str
    model_note: str | None
    """A caveat to show beside the model's name, such as random weights."""
    dtype: str
    """Empty while the model is being downloaded."""
    max_model_len: int | None
    roles: str
    """`elastic`, `static` or `colocated`; can change while it runs."""
    transport: str | None
    """`alias` or `shm` as probed at start; None if colocated."""
    pid: int
    queue: QueueFrame
    workers: list[WorkerFrame]
    pools: list[PoolFrame]
    latency: LatencyFrame
    totals: TotalsFrame
    devices: list[DeviceFrame]
    host: HostFrame
    requests: list[RequestFrame]
    """Live requests, oldest first; at most MAX_FRAME_REQUESTS."""
    num_requests: int
    """The number of all live requests."""
    events: list[EventFrame]
    slo_ttft_ms: int | None = None
    """Targets of elastic roles; None: relative to the undisturbed machine."""
    slo_itl_ms: int | None = None
    alerts: list[AlertFrame] = []
    """Raised alerts, the worst first."""
    limit: str = ""
    """What limits the appliance now, in one sentence; empty if nothing does."""
    handoff: HandoffFrame | None = None
    energy: EnergyFrame | None = None
    swaps: SwapsFrame | None = None
    links: list[LinkFrame] = []  # between pools that blocks are copied between
    dram: TierFrame | None = None
    ssd: TierFrame | None = None
    weights: str | None = None  # what became of them, at what loss; None: served as stored
    kv: str | None = None  # what the pools keep, at what loss; None: the dtype that is served
    trials: list[str] = []  # what timing this machine has chosen at start, with the figures
    users: list[UserFrame] = []
    """Users by tokens; at most MAX_POOL_OWNERS."""
    today: TodayFrame | None = None
    refusals: list[RefusalFrame] = []
    """Refused requests by caller and reason, the most frequent of the last minute first."""
    starved: str = ""
    """What keeps the workers from their cores, in one sentence; empty: nothing does."""
    survived: SurvivedFrame | None = None
    """The previous daemon's end; None: it was told to stop, or there was none."""
    offload: OffloadFrame | None = None
    """Weights that stay on disk; None: all are in memory."""
    unwritten: UnwrittenFrame | None = None
    """What the request log lacks; None: it can be written."""


MAX_POOL_OWNERS, MAX_FRAME_REQUESTS, MAX_FRAME_EVENTS = 20, 200, 50
