"""Choose a placement from the settings and the machine.

Invariant: what --place names is used; an unavailable choice is an error that names the possible
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from appliance.configuration.settings import ServeConfig
from appliance.configuration.wanted_workers import ONE_OF_EACH
from appliance.devices.gpu_list import Gpu
from appliance.devices.inventory import Inventory, read_inventory
from appliance.fleet.gpu_placement import (
    WORKER_BYTES,
    attention_for,
    choose_gpus,
    name_gpus,
    packing_on,
    place_on_gpu,
)
from appliance.fleet.groups import check_group
from appliance.fleet.placement import Placement, available_cores, available_memory_bytes, place
from appliance.fleet.spread import ModelShape, WorkerDevice, check_weights, spread, too_small
from appliance.fleet.worker_counts import (
    STARTED_TWO,
    divide,
    is_two_better,
    measured_costs,
    num_prefilling,
    phase_costs,
)
from engine.checkpoint.checkpoint import Checkpoint, choose_dtype
from engine.checkpoint.weights_layout import gpu_layout
from engine.errors import ConfigError
from engine.kernels.attention_backends import Machine
from engine.profile.facts import DECODE_MS, Profile


@dataclass(frozen=True, slots=True)
class ChosenPlacement:
    """The devices, transports and pools of all workers, and the dtype that they compute in."""

    dtype: str
    placement: Placement
    about: str | None
    """Devices that exist but are not used."""


def this_inventory() -> Inventory:
    """Read the devices, cores and memory of this machine."""
    return read_inventory(available_cores(), available_memory_bytes())


class Placer:
    """Find the placement of one model on one machine.

    Args:
        torch_version: as installed; None: not installed.
        machine: what attention backends depend on.
        known: reads the facts of the model on some GPUs, in a dtype; None: no facts.
    """

    def __init__(
        self,
        config: ServeConfig,
        checkpoint: Checkpoint,
        inventory: Inventory,
        torch_version: str | None,
        machine: Machine,
        known: Callable[[Sequence[Gpu], str], Profile] | None = None,
    ) -> None:
        self._known = known or (lambda gpus, dtype: Profile())
        self._config = config
        self._checkpoint = checkpoint
        self._inventory = inventory
        self._torch_version = torch_version
        self._machine = machine

    def place(self, dtype: str | None = None) -> ChosenPlacement:
        """Decide the devices, transports and pools of every worker.

        Args:
            dtype: the serving dtype; None: from the settings or the hardware.

        Raises:
            ConfigError: naming what is impossible, and what is possible.
        """
        config, wanted = self._config, self._config.place
        found, version = list(self._inventory.gpus), self._torch_version
        if wanted.gpu_names:
            gpus = name_gpus(wanted.gpu_names, found, version, where="place")
            self._check_cpu_only(gpus)
            dtype = self._dtype(gpus, dtype)
            return ChosenPlacement(
                dtype, self._by_hand(gpus, self._shape(gpus, dtype), dtype), None
            )
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
        self._check_cpu_only(gpus)
        dtype = self._dtype(gpus, dtype)
        if not gpus:
            check_group(self._checkpoint, dtype, config)
            placement = self._on_cores(dtype)
        elif len(gpus) == 1 or config.roles == "colocated":
            others = ", ".join(gpu.name for gpu in gpus[1:])
            notes.append(others and f"{others} not used: colocated roles are one worker")
            placement = self._on_one_by_measure(gpus[0], self._shape(gpus, dtype), dtype)
        else:
            placement, about = self._on_several(gpus, self._shape(gpus, dtype), dtype)
            notes.append(about)
        return ChosenPlacement(dtype, placement, "; ".join(filter(None, notes)) or None)

    def place_with(self, kv_memory_bytes: int, dtype: str) -> Placement:
        """Decide the same with less KV memory: on cores, where weights leave no more."""
        return self._on_cores(dtype, kv_memory_bytes)

    def _check_cpu_only(self, gpus: list[Gpu]) -> None:
        if gpus and self._config.place.width > 1:
            raise ConfigError(
                f"a worker of several processes computes on cores, and {gpus[0].name} would serve",
                where="place",
                hint="add --devices cpu",
            )
        if gpus and self._config.kv_dtype != "auto":
            raise ConfigError(
                f"KV is kept as {self._config.kv_dtype} on CPUs only, and {gpus[0].name} would "
                "serve",
                where="kv_dtype",
                hint="leave it out, or serve with --devices cpu",
            )

    def _dtype(self, gpus: list[Gpu], given: str | None) -> str:
        """Choose one dtype for all GPUs; the oldest decides."""
        return given or choose_dtype(
            self._config.dtype,
            self._checkpoint.stored_dtype,
            has_gpu=bool(gpus),
            capability=min((gpu.capability for gpu in gpus if gpu.capability), default=None),
        )

    def _shape(self, gpus: list[Gpu], dtype: str) -> ModelShape:
        """Return the model's shape, with blocks that suit the attention of all these GPUs."""
        checkpoint = self._checkpoint
        sizes = [
            attention_for(checkpoint, dtype, self._machine_with(gpu)).backend.default_block_size
            for gpu in gpus
        ]
        packing, _ = packing_on(gpus, is_safe=self._config.safe_kernels)
        weights_bytes = gpu_layout(checkpoint, dtype, packing).num_bytes
        wanted_len = self._config.max_model_len
        return ModelShape.of(checkpoint.config, weights_bytes, dtype, max(sizes), wanted_len)

    def _machine_with(self, gpu: Gpu) -> Machine:
        return replace(self._machine, capability=gpu.capability)

    def _on_cores(self, dtype: str, kv_memory_bytes: int | None = None) -> Placement:
        config, inventory = self._config, self._inventory
        return place(
            self._checkpoint,
            kv_dtype=dtype if config.kv_dtype == "auto" else config.kv_dtype,
            roles=config.roles,
            transport=config.transport,
            wanted=config.place,
            kv_memory_bytes=kv_memory_bytes or config.kv_memory_bytes,
            max_model_len=config.max_model_len,
            nodes=inventory.nodes,
            memory_bytes=inventory.memory_bytes,
        )

    def _on_one_by_measure(self, gpu: Gpu, shape: ModelShape, dtype: str) -> Placement:
        """Place one worker or two, by the measured step times; one if never measured."""
        config = self._config
        if not (config.roles == config.transport == "auto" and config.place == ONE_OF_EACH):
            return self._on_one(gpu, shape, dtype)
        known = self._known([gpu], dtype)
        if (measured := is_two_better(known)) is not None:
            has_two, why = measured
            return self._on_one(gpu, shape, dtype, "elastic" if has_two else None, why)
        if known.value(*STARTED_TWO):
            why = "two processes were started, and the start failed"
            return self._on_one(gpu, shape, dtype, why=why)
        if shape.room_bytes(gpu) - WORKER_BYTES < shape.full_length_bytes:
            return self._on_one(gpu, shape, dtype, why="no memory for a second process")
        if not any(known.about(DECODE_MS)):
            why = "its first start; two are tried once its steps have been timed"
            return self._on_one(gpu, shape, dtype, why=why)
        why = "both are timed while idle; the next start keeps the better"
        return replace(self._on_one(gpu, shape, dtype, "elastic", why), is_trial=True)

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
        """Place a worker on each GPU, or on as many as configured."""
        config = self._config
        check_weights(gpus, shape, "devices")
        names, reasons = config.place.names, []
        num_prefill, num_decode = (len(role) for role in names)
        if config.place.is_auto and len(gpus) > 2:
            token_bytes = shape.block_bytes // shape.block_size
            rooms = min(shape.room_bytes(gpu) for gpu in gpus)
            costs = measured_costs(self._known(gpus, dtype))
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
                hint="give each its own GPU or MIG instance, or one GPU to both roles",
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
