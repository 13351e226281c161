"""How busy the parts of a GPU are, where the GPU measures it: Hopper and later.

Owns: two samples for each device or MIG instance, between which a metric is taken.
Invariant: the first sample shows nothing, and a window so long that it says nothing of now begins
anew; none is too short to tell, as machine reads no device twice within 200 ms.
Never: blocks; names a device.
"""

from __future__ import annotations

from typing import Any

from appliance.devices.nvml import Nvml

MAX_WINDOW_NS = 10_000_000_000
_MIB = 1 << 20
_METRICS = {
    "sm_ratio": (2, 0.01),
    "tensor_ratio": (5, 0.01),
    "memory_bandwidth_ratio": (10, 0.01),
    "pcie_tx_bytes_per_s": (20, _MIB),
    "pcie_rx_bytes_per_s": (21, _MIB),
    "nvlink_rx_bytes_per_s": (60, _MIB),
    "nvlink_tx_bytes_per_s": (61, _MIB),
}
"""By field of DeviceFrame: the metric's id, and its unit in ours."""

Activity = dict[str, float | None]


class Gpm:
    """One device, or one MIG instance of it.

    Args:
        device: the GPU, also for an instance.
        instance_id: of the GPU instance; None for the whole GPU.
    """

    def __init__(self, nvml: Nvml, device: Any, instance_id: int | None = None) -> None:
        self._nvml = nvml
        self._device = device
        self._instance_id = instance_id
        self._samples = [nvml.ask("nvmlGpmSampleAlloc") for _ in range(2)]
        self._taken_ns: int | None = None
        """When the newest sample was, which is the first of the two."""

    def read(self, now_ns: int) -> Activity:
        """The metrics since the last call, as fields of DeviceFrame; empty if there are none."""
        before, spare = self._samples
        if spare is None or not self._nvml.gpm_sample(self._device, self._instance_id, spare):
            self._taken_ns = None
            return {}
        taken_ns, self._taken_ns = self._taken_ns, now_ns
        self._samples = [spare, before]
        if taken_ns is None or now_ns - taken_ns > MAX_WINDOW_NS:
            return {}
        ids = [metric_id for metric_id, _ in _METRICS.values()]
        values = self._nvml.gpm_metrics(before, spare, ids)
        return {
            name: None if value is None else value * unit
            for (name, (_, unit)), value in zip(_METRICS.items(), values, strict=True)
        }

    def close(self) -> None:
        """Give the samples back."""
        for sample in self._samples:
            if sample is not None:
                self._nvml.ask("nvmlGpmSampleFree", sample)
        self._samples = [None, None]
