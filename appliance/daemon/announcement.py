"""Announce at start what the daemon serves, where, and a first command to try.

Invariant: sizes and counts equal the frames', which leave out the padding block.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from appliance.daemon.requests.request import ModelInfo
from appliance.observe.frame.figures import transport_text
from appliance.observe.frame.protocol import Frame
from engine.checkpoint.gguf import is_gguf
from engine.units import size_text

OPEN_CODE = "listen.open"
IS_OPEN = "is open to the network; any client with a key can use it"
GENERATION_FILE = "generation_config.json"
ADVISED_TEMPERATURE = 0.6
"""What `penstock run` and `penstock chat` take."""


def announcement(
    frame: Frame,
    model: ModelInfo,
    folder: Path,
    *,
    abouts: Mapping[str, Sequence[str]],
    measuring: str | None,
    is_elastic_static: bool,
    has_template: bool,
    addresses: Sequence[str],
    is_found: bool,
    texts: Sequence[str] = (),
    command: str = "penstock",
) -> Iterator[str]:
    """Say what a ready daemon serves, where and how, in a few lines; `status` has the details.

    Args:
        frame: a reading of the daemon that has just become ready.
        abouts: what each worker's start has found out, by its name.
        measuring: what is measured while idle; None: nothing to say.
        is_elastic_static: elastic roles act as static ones on this machine.
        addresses: where clients find it.
        is_found: they find the first of these without an option.
        texts: what each model of whole texts beside it makes.
        command: what starts a client in a shell.
    """
    note = f" ({model.note})" if model.note else ""
    yield f"serving {model.model_id}{note} in {frame.dtype}"
    if frame.weights is not None:
        yield f"  {frame.weights}"
    if frame.kv is not None:
        yield f"  {frame.kv}"
    handoff = f", {transport_text(frame.transport)}" if frame.transport else ""
    workers = ", ".join(f"{worker.name} on {worker.device}" for worker in frame.workers)
    yield f"  {workers}{handoff}"
    for worker in frame.workers:
        yield from (f"    {worker.name}: {line}" for line in abouts.get(worker.name, ()))
    yield from (f"  {about}" for about in texts)
    if measuring is not None:
        yield f"  {measuring}"
    if is_elastic_static:
        yield "  Routing: static, as the workers share one device."
    yield f"  {', '.join(_memory(frame))}; at most {model.max_model_len:,} tokens per request"
    yield f"  {sampling_text(model.sampling, folder)}"
    if advice := sampling_advice(model.sampling, folder):
        yield f"    {advice}"
    yield f"ready on {', '.join(addresses)}"
    where = "" if is_found else f" --host {shlex.quote(addresses[0])}"
    yield f"try: {command} run{where} {_first_try(model, has_template)}"


def _memory(frame: Frame) -> Iterator[str]:
    for pool in frame.pools:
        name = "" if len(frame.pools) == 1 else f" {pool.name}"
        yield f"KV pool{name} {size_text(pool.num_blocks * pool.block_bytes)}"
    for name, tier in (("DRAM", frame.dram), ("SSD", frame.ssd)):
        if tier is not None and tier.state == "on":
            used = f" ({size_text(tier.num_bytes)} used)" if tier.num_bytes else ""
            yield f"{name} cache {size_text(tier.max_bytes)}{used}"


def _first_try(model: ModelInfo, has_template: bool) -> str:
    if not has_template:
        return "--raw 'Once upon a time' --max-tokens 32"
    return "'Who are you?'" if model.note else "'Hello'"


def sampling_text(sampling: Mapping[str, float], folder: Path) -> str:
    """Say how replies are sampled by default: by the model's folder or GGUF file."""
    is_file = is_gguf(folder)
    if not sampling:
        return "Sampling: temperature 1 (default; the model sets none)"
    values = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
    return f"Sampling: {values} ({folder.name if is_file else GENERATION_FILE})"


def sampling_advice(sampling: Mapping[str, float], folder: Path) -> str:
    """Advise on the temperature if the model sets none; else return an empty text."""
    if "temperature" in sampling:
        return ""
    advice = (
        "small models ramble at temperature 1. "
        f"run and chat use {ADVISED_TEMPERATURE:g}; set `temperature` in other clients' requests"
    )
    if is_gguf(folder):  # beside which no file is read
        return advice
    return f'{advice}, or put {{"temperature": {ADVISED_TEMPERATURE:g}}} into ' + str(
        folder / GENERATION_FILE
    )
