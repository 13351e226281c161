"""Define frames: what the daemon tells the console and the CLI, versioned.

Owns: the wire format of /v1/penstock/* and /v1/requests.
Invariant: None means not reported, never 0; every duration is in milliseconds, every size in
bytes; fields are only ever added within one FRAME_VERSION.
Never: imports the engine, so that the console can run where the engine is not.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from appliance.frame.tier_frames import TierFrame


class OwnerFrame(msgspec.Struct):
    """Who holds blocks of a pool."""

    user: str
    num_blocks: int
    num_requests: int


class HolderFrame(msgspec.Struct):
    """Whose prompts and answers have left blocks that can be found."""

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
    """Most blocks first; at most MAX_POOL_OWNERS."""
    cached: int = 0
    """In use by nobody, and kept as long as nothing else needs the room."""
    holders: list[HolderFrame] = []
    """Who has left what others find, in use or not; as owners."""
    evicted: int = 0
    """Blocks that were kept and then taken for something else, since the start."""

    @property
    def used_ratio(self) -> float | None:
        """Share of blocks that new work cannot have; None: it has none at all."""
        if self.num_blocks <= 0:
            return None
        return 1 - (self.free + self.cached) / self.num_blocks


class LinkFrame(msgspec.Struct):
    """How blocks get from one pool to another."""

    from_pool: str
    to_pool: str
    transport: str
    """`peer` or `shm`: as it is now."""
    probe_bytes_per_s: float | None
    """Of blocks there and back, found unchanged at start; None: not tried yet."""
    copy_bytes_per_s: float | None
    """While it copies, lately; None: it has not copied yet."""
    bytes_per_s: float
    """That have arrived, since the last frame."""
    down: str | None = None
    """Why `transport` is not what was placed; None: it is."""
    has_detour: bool = False
    """It goes from one device's memory into another's."""
    num_bytes: int = 0
    """That have ever arrived."""
    num_strikes: int = 0
    """Copies in a row that failed or came to less than half of what the try at start did."""


FRAME_VERSION = 1
PHASES = ("queued", "prefilling", "handing_off", "paused", "decoding", "finished")


def utc_now() -> str:
    """ISO 8601, UTC, milliseconds: the form of every wall time here and in the log."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def iso_time(seconds: float) -> str:
    """Unix seconds in the same form."""
    return datetime.fromtimestamp(seconds, UTC).isoformat("T", "milliseconds")[:-6] + "Z"


def computed_at_end(num_prompt: int, num_output: int | None) -> int | None:
    """Tokens that a request has computed when it ends; its last one it does not. None: unknown."""
    return None if num_output is None else num_prompt + max(num_output - 1, 0)


class RequestFrame(msgspec.Struct):
    """One request: live, or finished a short while ago."""

    id: str
    endpoint: str
    phase: str
    """One of PHASES; of several sequences, the least advanced one that is not finished."""
    model: str
    user: str | None
    """Who asked, in one word: a user, `uid:N`, `key:NAME` or `unknown`; None in old rows."""
    stream: bool
    num_sequences: int
    prompt_tokens: int
    computed_tokens: int | None
    output_tokens: int | None
    """None, as before: its daemon was killed, and nobody knows."""
    max_tokens: int
    num_blocks: int
    worker: str | None
    transport: str | None
    received_at: str
    """ISO 8601, UTC, milliseconds."""
    age_ms: float
    """Since then; of one that has ended, until its end."""
    finish_reason: str | None = None
    error: str | None = None
    tokenize_ms: float | None = None
    queue_ms: float | None = None
    restore_ms: float | None = None
    """In the queue, for blocks of its prompt from the disk; None: it did not wait for any."""
    prefill_ms: float | None = None
    ttft_ms: float | None = None
    handoff_ms: float | None = None
    decode_wait_ms: float | None = None
    decode_ms: float | None = None
    paused_ms: float | None = None
    """Without KV blocks, which others needed; None: never, after its first token."""
    first_itl_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    handoff_bytes: int | None = None
    route: str | None = None
    """`move` (to another worker), `decode` or `prefill` (all of it by that); None in old rows."""
    route_reason: str | None = None
    """Why, in words."""
    prefill_j: float | None = None
    """Energy of its share of the steps that computed its prompt; None: no power reading."""
    decode_j: float | None = None
    slow_because: str | None = None
    """What held it up most, in one sentence; None while nothing did."""
    waits_for: str | None = None
    """Why its prompt is not being computed yet, in words; None where it is, or was."""
    preemptions: int = 0
    cached_tokens: int | None = None
    """Of prompt_tokens, those found computed; None: the prefix cache is off."""
    restore_reason: str | None = None
    restored_tokens: int = 0
    """What came of its blocks on disk (None: there were none); of cached_tokens, those loaded."""
    cancelled_by: str | None = None
    """Whose doing its end was; None unless somebody has cancelled it."""
    workers: str | None = None
    links: str | None = None
    """Where it has run, with commas, and how its KV came to all but the first; None in old rows."""
    changes: str | None = None
    """What was changed to serve it, in words: its limit of tokens, its messages; None: nothing."""
    behind: str | None = None
    """The request whose prompt is computed before its own; None: it waits for no prompt."""
    behind_tokens: int | None = None
    """Prompt tokens that are computed before its own, of all requests."""


class WorkerFrame(msgspec.Struct):
    """One worker process over the last second."""

    name: str
    """`prefill`, `decode` or `colocated`; of several `prefill0`, `prefill1`."""
    state: str
    """`starting`, `loading`, `ready` or `restarting`."""
    pid: int | None
    device: str
    """What it is pinned to, for people: `cpu 0`, `cpu 0-1`, `gpu0`, `gpu0, time-sliced`."""
    cpus: list[int]
    attention: str | None
    num_sequences: int
    """Admitted to the worker now."""
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
    """Those it computes on now: its own, those it was lent, or none while its own are lent."""
    batch_size_mean: float | None = None
    """Sequences in a step, mean of the last second's steps."""
    last_step_age_ms: float | None = None
    """Since its last step ended, while it has work or an answer to give; None: it has neither."""
    num_prefilling: int = 0
    """Of its sequences, those whose prompt is not complete."""


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
    """Preempted after their first token: others needed their blocks."""


class LatencyFrame(msgspec.Struct):
    """Exact quantiles over requests finished, and gaps seen, within the window."""

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
    """Mean over the requests whose first token came in the window, as of the other stages of ttft,
    to whose mean they add up; None: no request spent time in it."""
    prefill_ms_mean: float | None = None
    ttft_slo_ratio: float | None = None
    """Share of first tokens in time, 0 to 1; None: no target, or no first token in the window."""
    itl_slo_ratio: float | None = None
    num_stalls: int = 0
    """Gaps in the window longer than four times their median and 100 ms."""
    tokenize_ms_mean: float | None = None
    restore_ms_mean: float | None = None
    ttft_over_usual: float | None = None
    """How many times its usual TTFT a tenth of the prompts took, each compared with prompts of its
    length; 1 if they were less than a second late. None: too few first tokens in the window."""


class HandoffFrame(msgspec.Struct):
    """KV on its way from prefill to decode."""

    transport: str | None
    """`alias` or `shm`; None: nothing is handed over."""
    num_in_flight: int
    handoffs_per_s: float
    bytes_per_s: float
    probe_bytes_per_s: float | None = None
    """Measured at start with a checksum; None where no byte moves."""
    num_failed: int = 0


class EnergyFrame(msgspec.Struct):
    """Joules since the daemon started; prefill + decode + unattributed = total."""

    total_j: float | None
    """None: no device reports its energy or power."""
    prefill_j: float | None
    decode_j: float | None
    unattributed_j: float | None
    """Idle power, and what ran outside steps."""
    window_s: float
    power_w: float | None
    """All devices together, over the window."""
    prefill_j_per_token: float | None
    """Over the window, per prompt token computed; the next per output token."""
    decode_j_per_token: float | None
    method: str
    """How it was read and divided, for people; `not reported` if no device does."""


class AlertFrame(msgspec.Struct):
    """Something that is wrong now, by the table of thresholds."""

    code: str
    """Stable, dotted: `kv.occupancy`, `queue.wait`; also the code of its events."""
    severity: str
    """`warning` or `error`."""
    message: str
    since: str
    """ISO 8601, UTC."""
    subject: str = ""
    """What it is about where there are several: a pool, a worker, a device."""


class WayFrame(msgspec.Struct):
    """What came of elastic roles' predictions on one way, since the daemon started."""

    route: str
    worker: str
    """Who computes the prompt."""
    is_beside: bool
    """Somebody decodes beside it."""
    has_all: bool
    """It is computed on all cores."""
    step_tokens: int
    """The size of its steps, to the nearest power of two."""
    num_judged: int
    """Prompts whose outcome could be compared with what was predicted."""
    num_missed: int
    """Twice as bad as predicted, or worse."""
    num_gave_way: int
    """Prompts that left the worker in the middle, since gaps there exceeded the promise."""
    error_ratio: float | None
    """How far outcomes are from predictions, either way, as a factor; None: none was judged."""
    is_closed: bool
    """Not taken until steps of its size have been measured anew."""


class TotalsFrame(msgspec.Struct):
    """Counters since the daemon started; accepted = finished + aborted + failed + live."""

    accepted: int
    finished: int
    refused: int
    aborted: int
    """Ended by their clients, or by what these had asked: a grammar that grows too large."""
    failed: int
    prompt_tokens: int
    output_tokens: int
    handoffs: int
    handoff_bytes: int
    stale_messages: int
    recovered_sequences: int
    log_rows_lost: int
    routes: dict[str, int] = {}
    """Sequences placed, by route and reason, as `move cheapest`."""
    ways: list[WayFrame] = []
    has_prefix_cache: bool = False
    """It is on: not switched off, and not still loading."""
    cached_tokens: int = 0
    """Of prompt_tokens, those found computed."""
    prefix_cache_queries: int = 0
    """Prompt tokens placed while it was on; of these those found, and those copied to be found."""
    prefix_cache_hits: int = 0
    prefix_cache_fetches: int = 0
    prefix_cache_s: float = 0.0
    """Spent in hashing, finding and publishing blocks."""
    preemptions: int = 0
    """Times that a sequence's KV blocks were taken away for others."""


class SwapsFrame(msgspec.Struct):
    """Several models: those that a request may name, who comes next, how many requests wait."""

    others: list[str]
    next: str | None
    num_waiting: int
    num_swaps: int
    last_swap_ms: float | None


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
    """The GPU that a MIG slice is part of; power, clocks and energy are the parent's."""
    energy_j: float | None = None
    """Since the daemon started."""
    power_source: str | None = None
    """Where power_w comes from: `rapl`, `energy counter` or `instant field`."""
    power_instant_w: float | None = None
    memory_clock_mhz: float | None = None
    throttle_reasons: list[str] | None = None
    """In words; empty: none now."""
    sm_ratio: float | None = None
    """This and the next two by GPM where the device has it, 0 to 1."""
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
    """Of all cores, 0 to 100."""
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    daemon_cpu_percent: float | None
    """Of one core."""
    daemon_rss_bytes: int | None
    core_percents: list[int] = []
    """Of each core of the machine, 0 to 100, by its number."""


class EventFrame(msgspec.Struct):
    """Something an operator should know."""

    at: str
    severity: str
    """`info`, `warning` or `error`."""
    code: str
    """Stable, dotted: `worker.died`, `request.cancelled`, `drain.started`."""
    message: str


class Frame(msgspec.Struct):
    """One reading of everything at one time."""

    version: int
    at: str
    seq: int
    """Grows by one per frame; a gap means frames were dropped for this reader."""
    uptime_s: float
    state: str
    """`loading`, `ready`, `draining` or `degraded` (a worker is down and coming back)."""
    state_reason: str
    model: str
    model_note: str | None
    """A caveat to show beside the model's name, as that its weights are random."""
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
    """Live requests, also those beyond MAX_FRAME_REQUESTS."""
    events: list[EventFrame]
    slo_ttft_ms: int | None = None
    """Targets of elastic roles; None: relative to what the machine does undisturbed."""
    slo_itl_ms: int | None = None
    alerts: list[AlertFrame] = []
    """The worst first."""
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
    """Most tokens first; at most MAX_POOL_OWNERS."""
    today: TodayFrame | None = None


MAX_POOL_OWNERS, MAX_FRAME_REQUESTS, MAX_FRAME_EVENTS = 20, 200, 50
