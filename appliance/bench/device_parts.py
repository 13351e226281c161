"""Measure a worker's parts on this machine's device, in a process that may import torch.

Invariant: its stderr is passed on when it fails.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from appliance.fleet.placement import available_memory_bytes
from engine.errors import WorkerFailed
from engine.system.python_child import python_command

KINDS = ("kernels", "steps", "transports")


def measure_device(
    kind: str, model: Path | None, dtype: str | None = None, *, is_small: bool = False
) -> dict[str, Any]:
    """Run one of KINDS to its end.

    Args:
        model: a folder whose shape to take; None: Llama 3.1 8B's, with the layers that fit.
        dtype: of weights and activations; None: the model's own.
        is_small: little work, to see that it works.

    Returns:
        device, torch, dtype, number of layers, the two ceilings, and `data`: a row for each figure.

    Raises:
        WorkerFailed: it did not come to its end.
    """
    command = [*python_command("-m", "engine.worker.measure", kind)]
    command += [] if model is None else ["--model", str(model)]
    command += [] if dtype is None else ["--dtype", dtype]
    command += ["--small"] if is_small else []
    command += ["--free-bytes", str(available_memory_bytes())]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        last = ended.stderr.strip().rpartition("\n")[2]
        raise WorkerFailed(
            last or f"it ended with {ended.returncode}",
            where=f"bench {kind}",
            hint="a smaller model may fit: name its folder" if "memory" in last else "",
        )
    found: dict[str, Any] = json.loads(ended.stdout)
    return found
