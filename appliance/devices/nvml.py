"""Read the NVIDIA driver's library, with None in place of errors.

Invariant: an unsupported, forbidden or lost value is None, never an exception.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

# Numbers of nvml.h, which only ever gains some; older pynvml lacks names for the newest.
TEMPERATURE_GPU = 0
CLOCK_SM = 1
CLOCK_MEMORY = 2
MEMORY_V2 = 0x2000028
FIELD_POWER_INSTANT = 186
FIELD_PCIE_TX_BYTES = 197
FIELD_PCIE_RX_BYTES = 198
FIELD_NVLINK_MB_PER_S = 90
"""The rate of each active link, one way."""
FIELD_NVLINK_TX_KIB = 138
FIELD_NVLINK_RX_KIB = 139
ALL_LINKS = 0xFFFFFFFF
"""The scope of a field for all links."""
P2P_READ, P2P_WRITE = 0, 1
_XID_CRITICAL_ERROR = 0x8
_MAX_NVLINKS = 36
_REMOTE_GPU, _REMOTE_SWITCH = 0, 2
_AFFINITY_OF_NODE = 0
_NODE_WORDS = 4
"""64-bit words for the numbers of NUMA nodes."""
_MAX_EVENTS = 16
_VALUES = (
    ("dVal", 64),
    ("uiVal", 32),
    ("ulVal", 64),
    ("ullVal", 64),
    ("sllVal", 64),
    ("siVal", 32),
    ("usVal", 16),
)
"""Member of the union and its width, in the order of nvmlValueType_t."""

FieldId = int | tuple[int, int]
"""A field, or a field and its scope."""


class Field(NamedTuple):
    """Value of one field."""

    value: int
    bits: int
    """Its width in bits, where a counter wraps."""


PciAddress = tuple[int, int, int]
"""Domain, bus, device."""


class NvLinks(NamedTuple):
    """Active NVLinks of a GPU."""

    to_switches: int
    by_gpu: Counter[PciAddress]
    """Links to another GPU, by its address."""
    bytes_per_s: float | None
    """Rate of one link, one way; None: not reported."""


class Nvml:
    """Read libnvidia-ml, with None in place of every error."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def ask(self, function: str, *args: Any) -> Any:
        """Call a function of the library; None in place of every error."""
        try:
            return getattr(self._library, function)(*args)
        except self._library.NVMLError:
            return None

    def fields(self, device: Any, ids: Sequence[FieldId]) -> list[Field | None]:
        """Read several fields in one call, in the order of `ids`."""
        found = self.ask("nvmlDeviceGetFieldValues", device, list(ids))
        return [None] * len(ids) if found is None else [_field(each) for each in found]

    def address(self, device: Any) -> PciAddress | None:
        """Return a GPU's address on the PCI bus."""
        found = self.ask("nvmlDeviceGetPciInfo", device)
        return None if found is None else (found.domain, found.bus, found.device)

    def nvlinks(self, device: Any) -> NvLinks:
        """Count the active links by their other end."""
        to_switches, by_gpu = 0, Counter[PciAddress]()
        for link in range(_MAX_NVLINKS):
            if not self.ask("nvmlDeviceGetNvLinkState", device, link):
                continue
            kind = self.ask("nvmlDeviceGetNvLinkRemoteDeviceType", device, link)
            remote = self.ask("nvmlDeviceGetNvLinkRemotePciInfo", device, link)
            if kind == _REMOTE_SWITCH:
                to_switches += 1
            elif kind in (_REMOTE_GPU, None) and remote is not None:
                by_gpu[remote.domain, remote.bus, remote.device] += 1
        (speed,) = self.fields(device, [FIELD_NVLINK_MB_PER_S])
        rate = None if speed is None or not speed.value else speed.value * 1e6
        return NvLinks(to_switches, by_gpu, rate)

    def can_reach(self, one: Any, other: Any) -> bool | None:
        """Say whether each may read and write the other's memory; None: not reported."""
        states = [
            self.ask("nvmlDeviceGetP2PStatus", *pair, caps)
            for pair in ((one, other), (other, one))
            for caps in (P2P_READ, P2P_WRITE)
        ]
        if any(state not in (0, None) for state in states):
            return False
        return None if None in states else True

    def node(self, device: Any) -> int | None:
        """Return the NUMA node nearest to a GPU; None: not reported, or several are."""
        words = self.ask("nvmlDeviceGetMemoryAffinity", device, _NODE_WORDS, _AFFINITY_OF_NODE)
        mask = sum(int(word) << 64 * place for place, word in enumerate(words or ()))
        return mask.bit_length() - 1 if mask.bit_count() == 1 else None

    def xid_events(self, device: Any) -> Any:
        """Register for critical errors; None: not supported."""
        events = self.ask("nvmlEventSetCreate")
        if events is None:
            return None
        try:
            self._library.nvmlDeviceRegisterEvents(device, _XID_CRITICAL_ERROR, events)
        except self._library.NVMLError:
            self.ask("nvmlEventSetFree", events)
            return None
        return events

    def newest_xid(self, events: Any) -> int | None:
        """Return the newest critical error since the last call, without waiting."""
        newest = None
        for _ in range(_MAX_EVENTS):
            event = self.ask("nvmlEventSetWait_v2", events, 0)
            if event is None:
                break
            newest = int(event.eventData)
        return newest

    def has_gpm(self, device: Any) -> bool:
        """Say whether the device measures how busy its parts are."""
        support = self.ask("nvmlGpmQueryDeviceSupport", device)
        return support is not None and bool(support.isSupportedDevice)

    def gpm_sample(self, device: Any, instance_id: int | None, sample: Any) -> bool:
        """Fill a sample for a device or one of its MIG instances; False: it failed."""
        if instance_id is None:
            return self.ask("nvmlGpmSampleGet", device, sample) is not None
        return self.ask("nvmlGpmMigSampleGet", device, instance_id, sample) is not None

    def gpm_metrics(self, first: Any, second: Any, ids: Sequence[int]) -> list[float | None]:
        """Compute metrics over the time between two samples, in the order of `ids`."""
        wanted = self._library.c_nvmlGpmMetricsGet_t()
        wanted.version = self._library.NVML_GPM_METRICS_GET_VERSION
        wanted.numMetrics = len(ids)
        wanted.sample1, wanted.sample2 = first, second
        for metric, metric_id in zip(wanted.metrics, ids, strict=False):
            metric.metricId = metric_id
        if self.ask("nvmlGpmMetricsGet", wanted) is None:
            return [None] * len(ids)
        found = [wanted.metrics[place] for place in range(len(ids))]
        return [None if m.nvmlReturn or not math.isfinite(m.value) else m.value for m in found]


def open_nvml() -> Nvml | None:
    """Open the library; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return Nvml(pynvml)


def _field(found: Any) -> Field | None:
    if found.nvmlReturn or not 0 <= found.valueType < len(_VALUES):
        return None
    member, bits = _VALUES[found.valueType]
    return Field(int(getattr(found.value, member)), bits)
