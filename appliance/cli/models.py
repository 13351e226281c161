"""The verbs on local models: list, show, verify.

Owns: how a model is named on the command line, and the progress of reading it.
Called by: main. Invariant: a model that cannot be served ends `show` and `verify` with exit code
78, one that is not there with 5; `list` shows what cannot be served with its problem.
Never: needs the daemon.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance import config
from appliance.cli import listings, pages, terminal
from appliance.cli.tables import Format
from appliance.cli.terminal import Output
from appliance.cli.text import size
from engine.errors import CheckpointError, ConfigError, PenstockError

# engine.checkpoint, which model_folders needs, costs every verb 20 ms; so it comes with the verbs.

LEAST_VOCABULARY = 0.5
PROGRESS_S = 0.2
PROGRESS_WITHOUT_TERMINAL_S = 10.0

Dirs = Annotated[
    list[Path] | None, typer.Option("--dir", help="Look for models here as well; repeat.")
]
Name = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a name from the list.")]

models = typer.Typer(help="Model folders on this machine.", no_args_is_help=True)


class NoSuchModel(PenstockError):
    """Neither a folder nor a name in the list."""

    exit_code = 5


@models.command("list")
def list_models(dirs: Dirs = None, output: Output = Format.TABLE) -> None:
    """List the configured model, the starter, Hugging Face's cache, and what is under --dir."""
    from appliance.cli import model_folders

    rows = [model_folders.describe(found) for found in _found(dirs)]
    terminal.write(terminal.listing("models", listings.MODELS, output).render(rows))


@models.command("show")
def show_model(model: Name, dirs: Dirs = None, output: Output = Format.TABLE) -> None:
    """Show a model's shape, its KV bytes per token, and whether it can chat and call tools."""
    from appliance.cli import model_folders

    about = model_folders.detail(_named(model, dirs))
    known, wanted = about["tokenizer_vocabulary"], about["vocabulary"]
    if known < wanted * LEAST_VOCABULARY:  # it is padded to a multiple of something, never so far
        terminal.note(
            f"penstock: the tokenizer has {known} of the model's {wanted} tokens;"
            " is it this model's?"
        )
    terminal.show("model", about, output, lambda: pages.facts(about))


@models.command("verify")
def verify(model: Name, dirs: Dirs = None, output: Output = Format.TABLE) -> None:
    """Read every byte of a model's weights; exits 78 if it cannot be served or a sum is wrong.

    Sums are compared with SHA256SUMS or FILE.sha256 in the folder, or with the names that Hugging
    Face's cache gives its files. A file that has none is read and its sum shown.
    """
    from appliance.cli import model_folders

    folder = _named(model, dirs).folder
    files = model_folders.weight_files(folder)
    expected = model_folders.expected_sums(folder, files)
    progress = _Progress(sum(path.stat().st_size for path in files))
    rows: list[dict[str, Any]] = []
    for path in files:
        found = model_folders.sha256(path, progress.add)
        wanted = expected.get(path)
        result = "no sum to compare" if wanted is None else "ok" if found == wanted else "WRONG"
        rows.append(
            {
                "file": path.name,
                "size_bytes": path.stat().st_size,
                "sha256": found,
                "expected": wanted,
                "result": result,
            }
        )
    progress.end()
    terminal.write(terminal.listing("verify", listings.CHECKSUMS, output).render(rows))
    if wrong := [row["file"] for row in rows if row["result"] == "WRONG"]:
        raise CheckpointError(
            f"the sum is wrong of {', '.join(wrong)}",
            where=str(folder),
            hint="download these files again",
        )


class _Progress:
    """How much has been read, on stderr: one line that changes, or a line now and then."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._is_terminal = sys.stderr.isatty()
        self._start_s = self._said_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """So much more has been read."""
        self._done_bytes += num_bytes
        now_s = time.monotonic()
        pause_s = PROGRESS_S if self._is_terminal else PROGRESS_WITHOUT_TERMINAL_S
        if now_s - self._said_s >= pause_s:
            self._said_s = now_s
            self._say(now_s - self._start_s)

    def end(self) -> None:
        """Clear the line for what comes next."""
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _say(self, elapsed_s: float) -> None:
        rate = size(self._done_bytes / elapsed_s)
        line = f"read {size(self._done_bytes)} of {size(self._total_bytes)} at {rate}/s"
        sys.stderr.write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
        sys.stderr.flush()


def _found(dirs: list[Path] | None) -> list[Any]:
    """Every model folder there is to see, each once."""
    from appliance.boot import STARTER_FOLDER
    from appliance.cli import model_folders

    settings = config.load({})
    named = settings.model
    found = [] if named is None else [model_folders.Found(named.name, named)]
    found += model_folders.under(STARTER_FOLDER)
    found += model_folders.in_hub_cache(model_folders.hub_cache(os.environ))
    for root in dirs or ():
        found += model_folders.under(root.expanduser().absolute())
    by_folder: dict[Path, Any] = {}
    for each in found:
        by_folder.setdefault(each.folder, each)
    return list(by_folder.values())


def _named(name: str, dirs: list[Path] | None) -> Any:
    """The folder at a path, or the one that list shows under this name."""
    from appliance.cli import model_folders

    path = Path(name).expanduser()
    if path.is_dir():
        return model_folders.Found(path.absolute().name, path.absolute())
    matching = [each for each in _found(dirs) if name in (each.name, each.name.partition("@")[0])]
    if len(matching) == 1:
        return matching[0]
    hint = "`penstock models list` shows their names; a folder's path will do as well"
    if not matching:
        raise NoSuchModel("no such model", where=name, hint=hint)
    raise ConfigError(f"{len(matching)} models have this name", where=name, hint=hint)
