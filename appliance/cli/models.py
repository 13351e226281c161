"""Define the verbs on models: pull, list, show, verify, rm.

Invariant: an unsupported model ends `pull`, `show` and `verify` with exit code 78, a missing one
with 5; `list` shows an unsupported model with its problem.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.cli import fact_pages, listings, terminal
from appliance.cli.tables import Format
from appliance.cli.terminal import Output, ProgressLine
from appliance.client.address import is_of_this_machine
from appliance.configuration import client_settings
from appliance.configuration.setting_kinds import parse_bytes
from appliance.doctor import hub_models
from appliance.hub import cache
from appliance.hub.names import STARTER_FOLDER, HubName, NoSuchModel, is_model_file, model_name
from appliance.observe.frame.figures import size
from engine.errors import CheckpointError, ConfigError, PenstockError, UsageError
from engine.printable import printable

if TYPE_CHECKING:
    from appliance.hub.download import Progress

# model_folders imports engine.checkpoint.checkpoint, which costs 20 ms: imported in the verbs.

Dirs = Annotated[
    list[Path] | None, typer.Option("--dir", help="Look for models here, too. May be repeated.")
]
Name = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, a GGUF file, or a name from the list.")
]

models = typer.Typer(help="Models on this machine and on the hub.", no_args_is_help=True)


@models.command("pull")
def pull_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="owner/name[@revision][:file], or a short name (qwen3:0.6b)."
        ),
    ],
) -> None:
    """Download a model from the hub into Hugging Face's cache, which other tools share.

    Only the files that serving needs are downloaded. An interrupted download is resumed, and
    checksums are compared with the hub's. HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE have
    the same meaning as for Hugging Face's own tools.
    """
    terminal.of_this_machine()
    terminal.write(f"{printable(fetch(_hub_name(model)))}\n")


def fetch(name: HubName) -> Path:
    """Download a model, and say what, how large, from where and to where; returns its folder."""
    from appliance.hub.download import pull  # with huggingface_hub, which takes a third of a second

    root = cache.hub_cache(os.environ)
    line, start_s, sizes = ProgressLine("downloaded"), time.monotonic(), list[int]()

    def show(each: Progress) -> None:
        if not sizes:
            sizes.append(each.total_bytes)
            about = cache.download_text(name, each.total_bytes, root, os.environ)
            terminal.note(printable(f"penstock: {about}"))
        line.show(each.done_bytes, each.total_bytes, each.bytes_per_s)

    try:
        folder = pull(name, root, show)
    finally:
        line.end()
    took_s = time.monotonic() - start_s
    terminal.note(f"penstock: {printable(name)}: {size(cache.size_bytes(folder))}, {took_s:.1f} s")
    return folder


@models.command("rm")
def remove(
    model: Annotated[str, typer.Argument(metavar="NAME", help="A name that list shows.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a model, or one revision of it (owner/name@revision), from Hugging Face's cache.

    Other programs share that cache, so it asks first; without a terminal, --yes is needed.
    """
    terminal.of_this_machine()
    if STARTER_FOLDER in (Path(model).absolute(), STARTER_FOLDER.parent / model):
        raise UsageError("built in, and not removed", where=model)
    name = _hub_name(model)
    root = cache.hub_cache(os.environ)
    if not cache.repository_folder(root, name.repository).is_dir():
        hint = f"`penstock list` shows the models; the cache is {root}"
        raise NoSuchModel("not in the cache", where=str(name), hint=hint)
    commit = _commit_of(name, root) if "@" in model else None
    asked = name.repository if commit is None else f"{name.repository}@{commit[:7]}"
    if not yes:
        _confirm(f"Delete {printable(asked)} from {printable(root)}, which other programs share?")
    freed = cache.remove(root, name.repository, commit)
    terminal.write(f"removed {printable(asked)}, {size(freed)}\n")


def _commit_of(name: HubName, root: Path) -> str:
    """Return the one revision in the cache that begins like the name."""
    fitting = [
        one.commit
        for one in cache.snapshots(root)
        if one.repository == name.repository and one.commit.startswith(name.revision)
    ]
    if len(fitting) != 1:
        what = f"{len(fitting)} revisions in the cache begin with {name.revision!r}"
        raise NoSuchModel(what, where=str(name), hint="`penstock list` shows the revisions")
    return fitting[0]


def _confirm(question: str) -> None:
    """Ask at the terminal; anything but yes ends the command.

    Raises:
        UsageError: stdin is not a terminal.
    """
    if not sys.stdin.isatty():
        raise UsageError("not deleted: no terminal to confirm on", hint=f"--yes: {question}")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        terminal.note("penstock: nothing was deleted")
        raise typer.Exit(1)


@models.command("list")
def list_models(dirs: Dirs = None, output: Output = Format.TABLE) -> None:
    """List models on this machine: served, configured, built in, in the hub's cache, in --dir."""
    terminal.of_this_machine()
    from appliance.cli import model_folders

    found = _found(dirs)
    rows = [{**model_folders.describe(each), "state": state} for each, state in found]
    terminal.write(terminal.listing("models", listings.MODELS, output).render(rows))


@models.command("show")
def show_model(
    model: Name,
    dirs: Dirs = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE", help="Check these GPUs, e.g. 24GiB or 2x80GiB. May be repeated."
        ),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Show a model's shape, memory needs and where it fits, also before a download.

    MOST KV TOKENS is what fits into all memory beside the weights. A start takes a part of it:
    `serve --check-config` says how much, and --kv-memory sets it.
    """
    terminal.of_this_machine()
    from appliance.cli import model_folders
    from appliance.hub import fits

    where = hub_models.places([_gpus(text) for text in gpu or ()])
    asked = client_settings.model_named(model, terminal.passed_over)
    try:
        found = named(model, dirs)
    except NoSuchModel:
        if not isinstance(asked, HubName):
            raise
        _show(hub_models.on_hub(asked, where), output)
        return
    about, need, unfit = model_folders.detail(found)
    about |= {"kv_bytes_of_a_request": fits.kv_rows(need), "fits": fits.rows(need, where)}
    for sentence in unfit:
        terminal.note(f"penstock: {printable(sentence)}")
    _show(about, output)


@models.command("verify")
def verify(model: Name, dirs: Dirs = None, output: Output = Format.TABLE) -> None:
    """Check every byte of a model's weights; exits with 78 if it cannot be served or is damaged.

    Checksums come from SHA256SUMS or FILE.sha256 in the folder, or from the file names in Hugging
    Face's cache. Without an expected checksum, the file's own is shown.
    """
    terminal.of_this_machine()
    from appliance.cli import model_folders

    folder = named(model, dirs).folder
    files = model_folders.weight_files(folder)
    expected = model_folders.expected_sums(folder, files)
    line, reading = ProgressLine("read"), _Reading(sum(path.stat().st_size for path in files))
    rows: list[dict[str, Any]] = []
    for path in files:
        found = model_folders.sha256(path, lambda n: line.show(*reading.add(n)))
        wanted = expected.get(path)
        result = (
            "no checksum to compare" if wanted is None else "ok" if found == wanted else "WRONG"
        )
        rows.append(
            {
                "file": path.name,
                "size_bytes": path.stat().st_size,
                "sha256": found,
                "expected": wanted,
                "result": result,
            }
        )
    line.end()
    terminal.write(terminal.listing("verify", listings.CHECKSUMS, output).render(rows))
    if wrong := [row["file"] for row in rows if row["result"] == "WRONG"]:
        raise CheckpointError(
            f"checksum mismatch: {', '.join(wrong)}",
            where=str(folder),
            hint="download these files again",
        )


def _show(about: dict[str, Any], output: Format) -> None:
    """Print one model: its facts, and a table of where it fits."""

    def page() -> str:
        facts = {name: value for name, value in about.items() if name != "fits"}
        table = terminal.listing("fits", listings.FITS, output).render(about["fits"])
        return f"{fact_pages.facts(facts)}\n\n{table}".rstrip("\n")

    terminal.show("model", about, output, page)


def _gpus(text: str) -> tuple[int, int]:
    """Parse `2x80GiB`: how many, and bytes of each."""
    count, times, each = text.rpartition("x")
    try:
        if times and not 1 <= int(count) <= 16:
            raise ValueError
        return int(count) if times else 1, parse_bytes(each)
    except ValueError as error:
        raise typer.BadParameter("--gpu is a size such as 24GiB or 2x80GiB") from error


class _Reading:
    """Count the bytes read, of how many, and their rate."""

    def __init__(self, total_bytes: int) -> None:
        self._done_bytes, self._total_bytes = 0, total_bytes
        self._since_s = time.monotonic()

    def add(self, num_bytes: int) -> tuple[int, int, float]:
        """Add bytes read; return done, total and rate."""
        self._done_bytes += num_bytes
        elapsed_s = max(time.monotonic() - self._since_s, 1e-3)
        return self._done_bytes, self._total_bytes, self._done_bytes / elapsed_s


def _hub_name(text: str) -> HubName:
    """Parse a name on the hub.

    Raises:
        UsageError: it is a folder, or no possible name.
    """
    name = client_settings.model_named(text, terminal.passed_over)
    if isinstance(name, HubName):
        return name
    hint = "a model on the hub is named as owner/name, such as Qwen/Qwen3-0.6B"
    raise UsageError("not a name on the hub", where=text, hint=hint)


def _found(dirs: list[Path] | None) -> list[tuple[Any, str]]:
    """List every visible model folder once, by the name that the daemon takes where it has one.

    Returns:
        each with its state: `served`, `loaded` beside it, or empty.
    """
    from appliance.cli import model_folders

    named, tables = client_settings.models_named(terminal.passed_over)
    configured = list(_configured(tables))
    served = _served({each.name: each.folder for each in configured})
    states = {each.folder: state for each, state in served}
    found = [*configured, *(each for each, _ in served)]
    found += [model_folders.FoundModel(model_name(named), named)] if isinstance(named, Path) else []
    found += model_folders.under(STARTER_FOLDER)
    found += model_folders.in_hub_cache(cache.hub_cache(os.environ))
    for root in dirs or ():
        found += model_folders.under(terminal.named_folder(root))
    by_folder: dict[Path, Any] = {}
    for each in found:
        by_folder.setdefault(each.folder, each)
    return [(each, states.get(folder, "")) for folder, each in by_folder.items()]


def _served(configured: Mapping[str, Path]) -> list[tuple[Any, str]]:
    """Find the models that the daemon here has in memory: `served` now, or `loaded` beside it."""
    from appliance.cli import model_folders

    found: list[tuple[Any, str]] = []
    with suppress(PenstockError):
        if is_of_this_machine(terminal.address(None)):
            client = terminal.client(None, timeout_s=2)
            for model in client.rows("/v1/models"):
                with client.reading():
                    name, state = str(model["id"]), "loaded" if "is_loaded" in model else "served"
                    root = Path(model["root"]) if model.get("root") else configured.get(name)
                is_in_memory = model.get("is_loaded", True)
                if is_in_memory and root and (is_model_file(root) or root.is_dir()):
                    found.append((model_folders.FoundModel(name, root), state))
    return found


def _configured(tables: Mapping[str, Path | HubName]) -> Iterator[Any]:
    """Yield the models of the tables [models.NAME] that are on this machine."""
    from appliance.cli import model_folders
    from appliance.fleet.model_files import model_folder

    for name, model in tables.items():
        with suppress(ConfigError):  # it is yet to be pulled: serve does that when it is asked for
            yield model_folders.FoundModel(name, model_folder(model))


def named(name: str, dirs: list[Path] | None) -> Any:
    """Find the folder at a path, or the one that list shows under this name.

    Raises:
        NoSuchModel: no model has this name.
    """
    from appliance.cli import model_folders

    asked = client_settings.model_named(name, terminal.passed_over)
    if isinstance(asked, Path) and (asked.is_dir() or is_model_file(asked)):
        is_path = asked == Path(name).expanduser().absolute()
        return model_folders.FoundModel(model_name(asked) if is_path else name, asked)
    if isinstance(asked, HubName):
        in_cache = cache.resolve(cache.hub_cache(os.environ), asked)
        if in_cache is not None and asked.file is not None:
            return model_folders.FoundModel(str(asked), cache.gguf_file(in_cache, asked.file))
        if in_cache is not None:
            return model_folders.FoundModel(f"{asked.repository}@{in_cache.name[:7]}", in_cache)
    found = _found(dirs)
    matching = [each for each, _ in found if name in (each.name, each.name.partition("@")[0])]
    if len(matching) == 1:
        return matching[0]
    hint = "`penstock list` shows their names; a folder's path will do as well"
    if not matching:
        raise NoSuchModel("no such model", where=name, hint=hint)
    raise UsageError(f"{len(matching)} models have this name", where=name, hint=hint)
