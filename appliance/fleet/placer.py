"""From the settings and the machine to a placement: on cores, on a GPU, on several, or on both.

Owns: which of those ways is taken, and the sentences about what is not used; how many workers do
what, by data sheets before a model was served, and after that by what its steps took, which a file
in the state directory keeps.
Invariant: what --place names is what is used; whatever is asked for and cannot be had is an error
that says what could.
Never: starts or measures anything.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from appliance.configuration.config import ServeConfig
from appliance.configuration.setting_kinds import ONE_OF_EACH
from appliance.devices.inventory import Gpu, Inventory, read_inventory
from appliance.fleet.gpu_placement import (
    WORKER_BYTES,
    ModelShape,
    WorkerDevice,
    attention_for,
    check_weights,
    choose_gpus,
    name_gpus,
    packing_on,
    place_on_gpu,
    spread,
    too_small,
)
from appliance.fleet.placement import Placement, available_cores, available_memory_bytes, place
from engine.errors import ConfigError
from engine.folder.checkpoint import Checkpoint, choose_dtype, gpu_layout
from engine.kernels.attention_backends import Machine
from engine.wire.messages import RehearsalStep, RehearsedStep

# How many workers do what on several devices, or on one: by data sheets, or by what steps took.
# Before a model was served that is an estimate by data sheets; from then on, by what its steps
# took.
# Invariant: each role has a device; of all ways to divide them the one is taken whose slower role
# is quickest, and whose links between the roles are the best.
# Never: measures anything; once it serves, elastic roles go by measured step times.


# What steps took when a model was last served on a kind of device: for the next start's placement.
# Invariant: a file that is not there, or not ours to read, is a model that has not been served yet;
# times are found again only for the same model, dtype and device.
# Never: decides anything from them.


FILE_NAME = "step-times.json"


class PairTimes(msgspec.Struct, frozen=True):
    """Steps of two processes on one device, each kind alone and beside the other."""

    chunk_tokens: int
    """Of a prompt, in one step."""
    batch: int
    """Sequences in one decode step."""
    prompt_alone_ms: float
    decode_alone_ms: float
    prompt_beside_ms: float
    decode_beside_ms: float


class MeasuredModel(msgspec.Struct, frozen=True):
    """What steps of one model in one dtype took on one kind of device."""

    steps: list[RehearsedStep] = []
    """As they were timed at start."""
    pair: PairTimes | None = None
    """None: two processes have not been timed on one of the devices."""
    is_trying: bool = False
    """Two processes were started to be timed, and have not been yet: where that stays so, the
    start has failed."""


class StepMemory:
    """The file of one state directory, as far as it is about one model.

    Args:
        state_dir: where the file is, or will be.
        key: of the model and the device, as key_of() gives it.
    """

    def __init__(self, state_dir: Path, key: str) -> None:
        self._path = state_dir / FILE_NAME
        self._key = key

    def read(self) -> MeasuredModel:
        """What is known; nothing where there is no file, or one of another form."""
        return self._all().get(self._key, MeasuredModel())

    def write(self, measured: MeasuredModel) -> None:
        """Keep it for the next start, whole or not at all."""
        everything = self._all() | {self._key: measured}
        beside = self._path.with_suffix(".new")
        beside.write_bytes(msgspec.json.encode(everything))
        os.replace(beside, self._path)

    def _all(self) -> dict[str, MeasuredModel]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, MeasuredModel])
        except (OSError, msgspec.MsgspecError):
            return {}


def key_of(checkpoint: Checkpoint, dtype: str, gpu: Gpu) -> str:
    """Names a model by its folder and bytes, its dtype, and the kind of GPU."""
    folder = checkpoint.folder.resolve()
    return f"{folder}, {checkpoint.num_bytes} bytes, {dtype}, {gpu.model}"


# One worker or two on one device: by what steps take there alone, and beside the other's.
# In one worker a token waits for the chunk of a prompt that its step has; in two, for whatever the
# device lets both processes compute at once. What that is worth is measured, not assumed.
# Invariant: two are chosen only where a token waits less and prompts are hardly slower.
# Never: starts a process.


MAX_GAP_RATIO = 0.75
"""Of a token's wait in one worker: less has to be left of it in two."""
MIN_RATE_RATIO = 0.9
"""Of the prompt tokens a second of one worker: so many have to be left."""
BATCH, CONTEXT = 8, 512
_NUM_REPEATED = 400
"""More than there is time for: both go on until theirs is over."""

Turn = Mapping[str, Sequence[RehearsalStep]]


def programme(prefill: str, decode: str, chunk_tokens: int, max_model_len: int) -> list[Turn]:
    """What to rehearse by worker: each kind by itself, in one of them, then both at once."""
    size = min(chunk_tokens, max_model_len)
    prompt = RehearsalStep(1, size, 0)
    token = RehearsalStep(BATCH, 1, min(CONTEXT, max_model_len - 1))
    alone = [prompt, token] * _NUM_REPEATED
    return [{decode: alone}, {prefill: [prompt] * _NUM_REPEATED, decode: [token] * _NUM_REPEATED}]


def pair_times(turns: Sequence[Mapping[str, Sequence[RehearsedStep]]]) -> PairTimes | None:
    """From what was made, turn by turn; None: a kind is missing, for lack of time or a worker."""
    if len(turns) != 2:
        return None
    (prompts, tokens), (prompts_beside, tokens_beside) = map(_of_kinds, turns)
    if not (prompts and tokens and prompts_beside and tokens_beside):
        return None
    return PairTimes(
        chunk_tokens=prompts[0].num_tokens,
        batch=tokens[0].num_sequences,
        prompt_alone_ms=_median(prompts),
        decode_alone_ms=_median(tokens),
        prompt_beside_ms=_median(prompts_beside),
        decode_beside_ms=_median(tokens_beside),
    )


def is_two_better(times: PairTimes) -> tuple[bool, str]:
    """Whether two workers are better than one, and why."""
    one_ms = times.prompt_alone_ms + times.decode_alone_ms
    gap = times.decode_beside_ms / one_ms
    rate = one_ms / times.prompt_beside_ms
    is_better = gap <= MAX_GAP_RATIO and rate >= MIN_RATE_RATIO
    return is_better, (
        f"beside a chunk of {times.chunk_tokens:,} prompt tokens a token takes {one_ms:.3g} ms in "
        f"one worker and {times.decode_beside_ms:.3g} ms in a second, which computes prompts at "
        f"{rate:.0%} of the rate"
    )


def _of_kinds(
    turn: Mapping[str, Sequence[RehearsedStep]],
) -> tuple[list[RehearsedStep], list[RehearsedStep]]:
    """Steps of prompts, and of decoding."""
    steps = [step for made in turn.values() for step in made]
    return [s for s in steps if s.num_tokens > 1], [s for s in steps if s.num_tokens == 1]


def _median(steps: Sequence[RehearsedStep]) -> float:
    return statistics.median(step.elapsed_ms for step in steps)


# --------------------------------------------------------------------------------------------------


USUAL_PROMPT_TOKENS = 2048
USUAL_OUTPUT_TOKENS = 256
_USUAL_DEPTH = USUAL_PROMPT_TOKENS / 2
MAX_BATCH = 32
"""Sequences that decode together; fewer where the KV of more has no room."""
_PRODUCT_SHARE, _BANDWIDTH_SHARE = 0.55, 0.65
"""Of what data sheets promise, that prefill and decode come to."""
_FLOPS_PER_BYTE: Mapping[tuple[int, int], float] = {
    (7, 5): 200,
    (8, 0): 155,
    (8, 6): 80,
    (8, 9): 165,
    (9, 0): 295,
    (10, 0): 280,
}
"""Products in halves to bytes of memory, a second of each, by data sheets of the usual GPUs."""
_USUAL_FLOPS_PER_BYTE = 200


def phase_costs(
    weights_bytes: int, kv_token_bytes: int, pool_bytes: int, capability: tuple[int, int] | None
) -> tuple[float, float]:
    """What a usual request takes of prefill and of decode; only their proportion means something.

    Args:
        weights_bytes: in memory, two for each parameter.
        kv_token_bytes: of one position.
        pool_bytes: of one device, for KV.
        capability: of the devices.
    """
    length = USUAL_PROMPT_TOKENS + USUAL_OUTPUT_TOKENS
    batch = max(min(MAX_BATCH, pool_bytes // (length * kv_token_bytes)), 1)
    per_byte = _USUAL_FLOPS_PER_BYTE
    if capability is not None:
        per_byte = int(_FLOPS_PER_BYTE.get(capability, per_byte))
    # a product and a sum for each parameter and token, and two bytes a parameter
    prefill = weights_bytes * USUAL_PROMPT_TOKENS / (_PRODUCT_SHARE * per_byte)
    read_bytes = weights_bytes / batch + length * kv_token_bytes
    return prefill, USUAL_OUTPUT_TOKENS * read_bytes / _BANDWIDTH_SHARE


def measured_costs(steps: Sequence[RehearsedStep]) -> tuple[float, float] | None:
    """Costs of both phases from steps that were timed, in ms; None: too few of a kind to tell."""
    prompts = [step for step in steps if step.num_tokens > 1]
    decodes = [s for s in steps if s.num_tokens == 1 and s.num_sequences <= MAX_BATCH]
    if not prompts or not decodes:
        return None
    # the largest, which are what a busy device makes, and of those the one most like a usual one
    prompt = max(
        prompts, key=lambda s: (s.num_sequences * s.num_tokens, -abs(_depth(s) - _USUAL_DEPTH))
    )
    decode = max(decodes, key=lambda s: (s.num_sequences, -abs(_depth(s) - USUAL_PROMPT_TOKENS)))
    return (
        USUAL_PROMPT_TOKENS * prompt.elapsed_ms / (prompt.num_sequences * prompt.num_tokens),
        USUAL_OUTPUT_TOKENS * decode.elapsed_ms / decode.num_sequences,
    )


def _depth(step: RehearsedStep) -> float:
    """Positions before a token of it, on average."""
    return step.num_before + step.num_tokens / 2


def num_prefilling(
    num_devices: int, costs: tuple[float, float], *, are_measured: bool = False
) -> tuple[int, str]:
    """How many of at least two prefill, and why."""
    prefill, decode = costs
    shares = f"{100 * prefill / (prefill + decode):.0f} to {100 * decode / (prefill + decode):.0f}"
    count = min(
        range(1, num_devices), key=lambda n: (max(prefill / n, decode / (num_devices - n)), n)
    )
    how = "was measured to need" if are_measured else "is estimated to need"
    about = (
        f"{count} of {num_devices} prefill: a request of {USUAL_PROMPT_TOKENS:,} prompt and "
        f"{USUAL_OUTPUT_TOKENS} output tokens {how} prefill and decode as {shares}"
    )
    return count, about


def divide(
    gpus: Sequence[Gpu], num_prefill: int, num_decode: int, inventory: Inventory
) -> tuple[list[Gpu], list[Gpu]]:
    """Which of the GPUs prefill and which decode: those with the best links between them."""

    def quality(pairs: Sequence[tuple[Gpu, Gpu]]) -> tuple[float, ...]:
        """More is better: pairs that reach each other, by NVLink, by a short path."""
        links = [inventory.link(*pair) for pair in pairs]
        return (
            sum(bool(each.can_reach) for each in links),
            sum(each.nvlink_bytes_per_s or each.num_nvlinks for each in links),
            -sum((99 if e.level is None else e.level) for e in links if not e.num_nvlinks),
        )

    count = num_prefill + num_decode
    chosen = max(
        itertools.combinations(gpus, count),
        key=lambda some: quality(list(itertools.combinations(some, 2))),
    )

    def between(prefill: tuple[Gpu, ...]) -> tuple[float, ...]:
        others = [gpu for gpu in chosen if gpu not in prefill]
        return quality([(one, other) for one in prefill for other in others])

    prefill = max(itertools.combinations(chosen, num_prefill), key=between)
    return list(prefill), [gpu for gpu in chosen if gpu not in prefill]


# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """What would be served, and where."""

    dtype: str
    placement: Placement
    about: str | None
    """What is there and not used."""


def this_inventory() -> Inventory:
    """What this machine has for a daemon."""
    return read_inventory(available_cores(), available_memory_bytes())


class Placer:
    """Finds the placement of one model on one machine.

    Args:
        config: the settings.
        checkpoint: of the model.
        inventory: of the machine.
        torch_version: as installed; None if it is not.
        machine: which attention could be computed.
    """

    def __init__(
        self,
        config: ServeConfig,
        checkpoint: Checkpoint,
        inventory: Inventory,
        torch_version: str | None,
        machine: Machine,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._inventory = inventory
        self._torch_version = torch_version
        self._machine = machine

    def place(self, dtype: str | None = None) -> PlacedModel:
        """Decide the devices, transports and pools of every worker.

        Args:
            dtype: to serve in; None: as the settings say, or the hardware likes it.

        Raises:
            ConfigError: naming what cannot be, and what could.
        """
        config, wanted = self._config, self._config.place
        found, version = list(self._inventory.gpus), self._torch_version
        if wanted.gpu_names:
            gpus = name_gpus(wanted.gpu_names, found, version, where="place")
            self._check_kv(gpus)
            dtype = self._dtype(gpus, dtype)
            return PlacedModel(dtype, self._by_hand(gpus, self._shape(gpus, dtype), dtype), None)
        gpus, about = choose_gpus(config.devices, found, version)
        notes = [about]
        if gpus and config.devices == "auto":
            shape = self._shape(gpus, self._dtype(gpus, dtype))
            small = [gpu for gpu in gpus if too_small(gpu, shape)]
            if small:
                others = ", ".join(gpu.name for gpu in small[1:])
                also = f", and {others} no more" if others else ""
                notes.append(f"not used: {too_small(small[0], shape)}{also}")
            gpus = [gpu for gpu in gpus if gpu not in small]
        self._check_kv(gpus)
        dtype = self._dtype(gpus, dtype)
        if not gpus:
            placement = self._on_cores(dtype)
        elif len(gpus) == 1 or config.roles == "colocated":
            others = ", ".join(gpu.name for gpu in gpus[1:])
            notes.append(others and f"{others} not used: colocated roles are one worker")
            placement = self._on_one_by_measure(gpus[0], self._shape(gpus, dtype), dtype)
        else:
            placement, about = self._on_several(gpus, self._shape(gpus, dtype), dtype)
            notes.append(about)
        return PlacedModel(dtype, placement, "; ".join(filter(None, notes)) or None)

    def _check_kv(self, gpus: list[Gpu]) -> None:
        if gpus and self._config.kv_dtype != "auto":
            raise ConfigError(
                f"KV is kept as {self._config.kv_dtype} on CPUs only, and {gpus[0].name} would "
                "serve",
                where="kv_dtype",
                hint="leave it out, or serve with --devices cpu",
            )

    def _dtype(self, gpus: list[Gpu], given: str | None) -> str:
        """The same for all: the oldest GPU decides."""
        return given or choose_dtype(
            self._config.dtype,
            self._checkpoint,
            has_gpu=bool(gpus),
            capability=min((gpu.capability for gpu in gpus if gpu.capability), default=None),
        )

    def _shape(self, gpus: list[Gpu], dtype: str) -> ModelShape:
        """Of the model; blocks are as large as suits the attention of all these GPUs."""
        checkpoint = self._checkpoint
        sizes = [
            attention_for(checkpoint, dtype, self._machine_with(gpu)).backend.default_block_size
            for gpu in gpus
        ]
        packing, _ = packing_on(gpus)
        weights_bytes = gpu_layout(checkpoint, dtype, packing).num_bytes
        wanted_len = self._config.max_model_len
        return ModelShape.of(checkpoint.config, weights_bytes, dtype, max(sizes), wanted_len)

    def _machine_with(self, gpu: Gpu) -> Machine:
        return replace(self._machine, capability=gpu.capability)

    def _on_cores(self, dtype: str) -> Placement:
        config, inventory = self._config, self._inventory
        return place(
            self._checkpoint,
            kv_dtype=dtype if config.kv_dtype == "auto" else config.kv_dtype,
            roles=config.roles,
            transport=config.transport,
            wanted=config.place,
            kv_memory_bytes=config.kv_memory_bytes,
            max_model_len=config.max_model_len,
            nodes=inventory.nodes,
            memory_bytes=inventory.memory_bytes,
        )

    def _on_one_by_measure(self, gpu: Gpu, shape: ModelShape, dtype: str) -> Placement:
        """One worker or two, as they were timed here; two, to be timed, where they never were."""
        config = self._config
        if not (config.roles == config.transport == "auto" and config.place == ONE_OF_EACH):
            return self._on_one(gpu, shape, dtype)
        measured = self._measured(gpu, dtype)
        if measured.pair is not None:
            has_two, why = is_two_better(measured.pair)
            return self._on_one(gpu, shape, dtype, "elastic" if has_two else None, why)
        if measured.is_trying:
            why = "two were started to be timed, and that start has failed"
            return self._on_one(gpu, shape, dtype, why=why)
        if shape.room_bytes(gpu) - WORKER_BYTES < shape.full_length_bytes:
            return self._on_one(gpu, shape, dtype, why="it has no room for a second process")
        why = "they are timed at this start, by which it is decided whether both go on"
        return replace(self._on_one(gpu, shape, dtype, "elastic", why), is_trial=True)

    def _measured(self, gpu: Gpu, dtype: str) -> MeasuredModel:
        """What is known of this model on such a GPU."""
        key = key_of(self._checkpoint, dtype, gpu)
        return StepMemory(self._config.state_dir, key).read()

    def _on_one(
        self,
        gpu: Gpu,
        shape: ModelShape,
        dtype: str,
        roles: str | None = None,
        why: str | None = None,
    ) -> Placement:
        config = self._config
        if config.place != ONE_OF_EACH and roles is None:
            raise ConfigError(
                f"{config.place} names more workers than {gpu.name} has room for: one of each role",
                where="place",
                hint="leave it out, divide the GPU by MIG, or serve with --devices cpu",
            )
        if config.transport == "peer":
            raise ConfigError(
                f"two workers on {gpu.name} share its memory, and nothing is copied",
                where="transport",
                hint="leave it out, or serve with --devices cpu",
            )
        check_weights([gpu], shape, "devices")
        return place_on_gpu(
            self._checkpoint,
            gpu,
            machine=self._machine_with(gpu),
            dtype=dtype,
            roles=roles or config.roles,
            transport=config.transport,
            kv_memory_bytes=config.kv_memory_bytes,
            max_model_len=config.max_model_len,
            cores=list(self._inventory.cores_near(gpu)),
            has_mps=self._inventory.has_mps,
            why=why,
        )

    def _on_several(
        self, gpus: list[Gpu], shape: ModelShape, dtype: str
    ) -> tuple[Placement, str | None]:
        """A worker on each, or on as many as are wanted."""
        config = self._config
        check_weights(gpus, shape, "devices")
        names, reasons = config.place.names, []
        num_prefill, num_decode = (len(role) for role in names)
        if config.place.is_auto and len(gpus) > 2:
            token_bytes = shape.block_bytes // shape.block_size
            rooms = min(shape.room_bytes(gpu) for gpu in gpus)
            costs = measured_costs(self._measured(gpus[0], dtype).steps)
            found = costs or phase_costs(
                shape.weights_bytes, token_bytes, rooms, gpus[0].capability
            )
            num_prefill, why = num_prefilling(len(gpus), found, are_measured=costs is not None)
            num_decode = len(gpus) - num_prefill
            reasons.append(why)
            names = config.place.of_each(num_prefill, num_decode).names
        if num_prefill + num_decode > len(gpus):
            raise ConfigError(
                f"{num_prefill + num_decode} workers, but {len(gpus)} GPUs: "
                f"{', '.join(gpu.name for gpu in gpus)}",
                where="place",
                hint="each worker needs a GPU or a MIG instance of its own",
            )
        prefill, decode = divide(gpus, num_prefill, num_decode, self._inventory)
        unused = [gpu.name for gpu in gpus if gpu not in (*prefill, *decode)]
        placement = spread(
            [WorkerDevice(name, gpu) for name, gpu in zip(names[0], prefill, strict=True)],
            [WorkerDevice(name, gpu) for name, gpu in zip(names[1], decode, strict=True)],
            self._inventory,
            shape,
            transport=config.transport,
            kv_memory_bytes=config.kv_memory_bytes,
            reasons=reasons,
        )
        about = f"{', '.join(unused)} not used: place says {config.place}" if unused else None
        return placement, about

    def _by_hand(self, gpus: list[Gpu], shape: ModelShape, dtype: str) -> Placement:
        """As --place names them."""
        config, wanted, inventory = self._config, self._config.place, self._inventory
        if config.devices != "auto":
            raise ConfigError(
                f"--devices {config.devices}, and --place names {', '.join(wanted.gpu_names)}",
                where="devices",
                hint="leave one of them out",
            )
        by_name = dict(zip(dict.fromkeys(wanted.gpu_names), gpus, strict=True))
        cores = wanted.cores(inventory.cores)
        prefill, decode = (
            [
                WorkerDevice(name, by_name[spot])
                if isinstance(spot, str)
                else WorkerDevice(name, None, cores[name])
                for name, spot in zip(names, spots, strict=True)
            ]
            for names, spots in zip(wanted.names, (wanted.prefill, wanted.decode), strict=True)
        )
        used = [spot.gpu for spot in (*prefill, *decode) if spot.gpu is not None]
        if len(used) == 2 == len(prefill) + len(decode) and used[0] == used[1]:
            return self._on_one(used[0], shape, dtype, roles="static")
        twice = sorted({gpu.name for gpu in used if used.count(gpu) > 1})
        if twice:
            raise ConfigError(
                f"{', '.join(twice)} is given to several workers",
                where="place",
                hint="give each a GPU or a MIG instance of its own, or one GPU to one of each role",
            )
        if dtype == "float16" and any(spot.gpu is None for spot in (*prefill, *decode)):
            raise ConfigError(
                "pools of one daemon have one dtype: float16, for which cores have no kernels",
                where="place",
                hint="serve with --dtype float32, or place all workers on GPUs",
            )
        return spread(
            prefill,
            decode,
            inventory,
            shape,
            transport=config.transport,
            kv_memory_bytes=config.kv_memory_bytes,
        )
