"""Ask a hub about models, and describe its errors.

Invariant: the chosen files exist; an unsupported model is refused with the alternatives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.hub.cache import INDEX, SINGLE
from appliance.hub.names import HubName, is_quantised_as
from engine.checkpoint.gguf import parts_of
from engine.checkpoint.tokenizer_source import WHOLE, tokenizer_hint, tokenizer_source
from engine.errors import CheckpointError
from engine.units import size_text

SMALL = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
)
_TEMPLATE = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_STAGES = "modules.json"
"""What comes after a model that computes vectors: sentence-transformers' list of folders."""
_OF_STAGES = (_STAGES, "config_sentence_transformers.json", "sentence_bert_config.json")
_OF_A_STAGE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")
MAX_SMALL_BYTES = 128 << 20
"""Maximum size of a small file, which is read into memory; four times the largest tokenizers."""
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_OTHER_WEIGHTS = (".bin", ".pth", ".pt", ".h5", ".msgpack", ".onnx", ".ckpt", ".safetensors")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub lists it."""

    path: str
    size_bytes: int
    sha256: str | None
    """None for small files, which the hub keeps in git."""
    blob_id: str
    """Git's hash of its content."""

    @property
    def blob(self) -> str:
        """The name of its bytes in the cache: the expected checksum."""
        return self.sha256 or self.blob_id


@dataclass(frozen=True, slots=True)
class Repository:
    """One revision of a model as the hub lists it."""

    name: HubName
    commit: str
    files: Mapping[str, RemoteFile]
    """Files by path."""

    @property
    def gguf(self) -> list[RemoteFile]:
        """Its GGUF files that hold a language model, in order."""
        return [
            file
            for path, file in sorted(self.files.items())
            if path.endswith(".gguf") and not path.rpartition("/")[2].lower().startswith("mmproj")
        ]


def small_files(repository: Repository) -> list[RemoteFile]:
    """List the files that describe the model, including its index of weights.

    Raises:
        CheckpointError: one is too large.
    """
    files = repository.files
    wanted = [*SMALL, *_tokenizer_files(repository), *filter(_TEMPLATE.fullmatch, sorted(files))]
    if SINGLE not in files:
        wanted.append(INDEX)
    if _STAGES in files:
        wanted += [*_OF_STAGES, *filter(_OF_A_STAGE.fullmatch, sorted(files))]
    found = [files[path] for path in wanted if path in files]
    for file in found:
        if file.size_bytes > MAX_SMALL_BYTES:
            what = f"{file.path} has {size_text(file.size_bytes)}: it is no such file"
            hint = f"up to {size_text(MAX_SMALL_BYTES)} are read"
            raise CheckpointError(what, where=str(repository.name), hint=hint)
    return found


def _tokenizer_files(repository: Repository) -> tuple[str, ...]:
    """Choose the files of the tokenizer that serving would read; empty: it has no tokenizer."""
    source = tokenizer_source(repository.files)
    return () if source is None else source.files


def weight_files(repository: Repository, names: Sequence[str] | None = None) -> list[RemoteFile]:
    """List the files of the weights.

    Args:
        names: from its index, once that has been read; None: all that look like parts.

    Raises:
        CheckpointError: it has no supported weights.
    """
    if repository.name.file is not None:
        return _quantised(repository, repository.name.file)
    files = repository.files
    required = ("config.json", *(_tokenizer_files(repository) or (WHOLE,)))
    if (missing := [name for name in required if name not in files]) and not repository.gguf:
        what = f"the repository has no {missing[0]}"
        has_weights = SINGLE in files or INDEX in files
        is_tokenizer = missing[0] == WHOLE and has_weights
        hint = tokenizer_hint(files) if is_tokenizer else _instead(repository)
        raise CheckpointError(what, where=str(repository.name), hint=hint)
    if SINGLE in files:
        return [files[SINGLE]]
    if INDEX in files:
        parts = names or [path for path in sorted(files) if _SHARD.fullmatch(path)]
        if absent := [path for path in parts if path not in files]:
            what = f"its index names {absent[0]}, which the repository does not have"
            raise CheckpointError(what, where=str(repository.name))
        return [files[path] for path in parts]
    what = "the repository has no weights in safetensors"
    raise CheckpointError(what, where=str(repository.name), hint=_instead(repository))


def _quantised(repository: Repository, wanted: str) -> list[RemoteFile]:
    if wanted in repository.files:
        parts = [str(part) for part in parts_of(Path(wanted))]
        if missing := [part for part in parts if part not in repository.files]:
            what = f"the repository has no {missing[0]}, which is a part of it"
            raise CheckpointError(what, where=str(repository.name))
        return [repository.files[part] for part in parts]
    fitting = [file for file in repository.gguf if is_quantised_as(file.path, wanted)]
    if not fitting:
        what = f"the repository has no file and no quantisation {wanted!r}"
        raise CheckpointError(what, where=str(repository.name), hint=_instead(repository))
    return fitting


def _instead(repository: Repository) -> str:
    """Name the alternatives to a missing file."""
    if repository.gguf:
        listed = [f"{file.path} ({size_text(file.size_bytes)})" for file in repository.gguf]
        more = f" and {len(listed) - 12} more" if len(listed) > 12 else ""
        example = f"{repository.name.repository}:Q4_K_M"
        return f"it has {', '.join(listed[:12])}{more}; name one as {example}"
    weights = sorted(path for path in repository.files if path.endswith(_OTHER_WEIGHTS))
    if weights:
        return f"it has {', '.join(weights[:6])}, which must be converted to safetensors first"
    return "a repository in Hugging Face format has config.json, tokenizer.json and safetensors"
