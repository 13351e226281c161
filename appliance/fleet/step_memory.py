"""What steps took when a model was last served on a kind of device: for the next start's placement.

Owns: the file of such times in the state directory.
Invariant: a file that is not there, or not ours to read, is a model that has not been served yet;
times are found again only for the same model, dtype and device.
Never: decides anything from them.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from appliance.devices.gpu_listing import Gpu
from engine.folder.checkpoint import Checkpoint
from engine.wire.messages import RehearsedStep

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
    """Of one model in one dtype on one kind of device."""

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
