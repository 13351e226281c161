"""Plan the models of whole texts that the prefill workers hold beside the served model.

Invariant: what cannot be served is an error here, before a worker exists.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from appliance.configuration.settings import ServeConfig
from appliance.fleet.model_files import model_folder
from appliance.fleet.supervisor import MAX_FAILED_STARTS, Supervisor
from appliance.hub.names import HubName, model_name
from engine.checkpoint.checkpoint import choose_dtype
from engine.checkpoint.text_model import NUM_ANSWERS, TextModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.text.read_models import read_text_model, read_tokenizer
from engine.text.tokenizer import Tokenizer
from engine.units import size_text
from engine.wire.messages import Command, TextModelSpec

STEP_TOKENS, GPU_STEP_TOKENS = 512, 8192
"""Tokens of a batch of texts; a chat waits for a part of a layer of it."""
_ANSWERS = ("yes", "no")


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model that can be served here."""

    name: str
    """The hub's name of the model, or its folder's."""
    folder: Path
    config: TextModelConfig

    @property
    def num_bytes(self) -> int:
        """Bytes of a worker's weights and, at most, of what a step computes with."""
        return self.config.num_bytes + self.config.scratch_bytes(STEP_TOKENS, "float32")


@dataclass(frozen=True, slots=True)
class LoadedTexts:
    """A planned model with its tokenizer."""

    model: TextModel
    tokenizer: Tokenizer
    spec: TextModelSpec

    @property
    def about(self) -> str:
        """Say what it makes, of how long texts."""
        config, is_score = self.model.config, self.model.config.kind == "rerank"
        what = "scores" if is_score else f"vectors of {config.num_dimensions:,} numbers"
        of = f"in {self.spec.dtype}, up to {config.max_tokens:,} tokens per text"
        return f"{what} by {self.model.name} {of}"


class TextWorkers:
    """The workers that hold models of texts.

    Args:
        supervisor: has these and the others.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        workers = supervisor.workers
        self._workers = {name: one for name, one in workers.items() if one.setup.text_models}
        self._supervisor = supervisor

    def send(self, worker: str, command: Command) -> None:
        """Send a command."""
        self._supervisor.send(worker, command)

    def ready(self) -> list[str]:
        """List the workers that take batches now."""
        return [name for name, worker in self._workers.items() if worker.state == "ready"]

    @property
    def cpus(self) -> list[int]:
        """List the cores that compute texts; empty: GPUs do."""
        plans = [worker.plan for worker in self._workers.values()]
        if any(plan.gpu is not None for plan in plans):
            return []
        return sorted({cpu for plan in plans for cpu in plan.cpus})

    @property
    def is_lost(self) -> bool:
        """Whether none of them can come back."""
        starts = (worker.num_failed_starts for worker in self._workers.values())
        return all(number >= MAX_FAILED_STARTS for number in starts)


def read_text_models(config: ServeConfig, served: str) -> tuple[TextModel, ...]:
    """Read the models that the settings name.

    Args:
        served: the name of the model beside which they are.

    Raises:
        ConfigError: one of them is not served, or has the name of another.
    """
    wanted: tuple[tuple[Literal["embedding", "rerank"], Path | HubName | None], ...] = (
        ("embedding", config.embedding_model),
        ("rerank", config.rerank_model),
    )
    models: list[TextModel] = []
    for kind, asked in wanted:
        if asked is None:
            continue
        folder = model_folder(asked)
        found = read_text_model(folder, kind)
        name = model_name(asked if isinstance(asked, HubName) else folder)
        _check_name(
            f"{kind}_model", name, {served, *config.models, *(model.name for model in models)}
        )
        models.append(TextModel(name, folder, found))
    return tuple(models)


def room_for_texts(models: Sequence[TextModel], num_workers: int, free_bytes: int | None) -> int:
    """Count the bytes of the models in all workers, and of what their longest texts take.

    Args:
        free_bytes: of the host; None: they may lie on a GPU.

    Raises:
        ConfigError: that is more than is free.
    """
    wanted_bytes = num_workers * sum(model.num_bytes for model in models)
    if free_bytes is not None and wanted_bytes > free_bytes:
        largest = max(models, key=lambda model: model.num_bytes)
        config, wanted = largest.config, size_text(largest.num_bytes)
        what = f"up to {wanted} for a text of {config.max_tokens:,} tokens"
        what = f"{largest.name} takes {what}, {size_text(free_bytes)} is free"
        hint = "max_seq_length in its sentence_bert_config.json bounds texts"
        raise ConfigError(what, where=f"{config.kind}_model", hint=hint)
    return wanted_bytes


def _check_name(where: str, name: str, others: Collection[str]) -> None:
    if name in others:
        what = f"another model is called {name}, too"
        raise ConfigError(what, where=where, hint="rename one of the folders")


def load_texts(models: Sequence[TextModel], *, has_gpu: bool) -> tuple[LoadedTexts, ...]:
    """Read the models' tokenizers, and choose what they compute in.

    Args:
        has_gpu: their workers compute on GPUs.

    Raises:
        CheckpointError: a tokenizer cannot be served, or lacks the answers that a score compares.
    """
    return tuple(_load(model, has_gpu=has_gpu) for model in models)


def _load(model: TextModel, *, has_gpu: bool) -> LoadedTexts:
    config = model.config
    tokenizer = read_tokenizer(config.folder, has_chats=False)
    compared: list[int] | None = None
    if config.has_answers:
        compared = list(range(NUM_ANSWERS))
    elif config.compares_tokens:
        encoded = [tokenizer.encode(answer, add_special_tokens=False) for answer in _ANSWERS]
        if any(len(ids) != 1 for ids in encoded):
            what = "the answers yes and no are not a token each"
            raise CheckpointError(what, where=str(config.folder))
        compared = [ids[0] for ids in encoded]
    dtype = choose_dtype("auto", config.stored_dtype, has_gpu=has_gpu)
    scratch_bytes = config.scratch_bytes(GPU_STEP_TOKENS if has_gpu else STEP_TOKENS, dtype)
    folder = str(model.folder)
    spec = TextModelSpec(model.name, folder, config.kind, dtype, compared, scratch_bytes)
    return LoadedTexts(model, tokenizer, spec)
