"""Every command on the pages for users is run, or at least one that the command line knows.

Pages are README.md and docs/*.md; a new one is taken in by itself. On a page

- a block of `sh` is run by bash, one of `python` by Python, from top to bottom in one folder that
  has the repository's files, against one daemon with the starter model. `penstock serve` is only
  asked with `--check-config` whether it could. ID stands for the newest request's id;
- `<!-- not run: REASON -->` on the line before a block leaves it out; `<!-- ends with 0 or 8 -->`
  says which exit codes are right; on a page's first line either holds for the whole page;
- in blocks, run or not, and in `penstock ...` and `--option` in the text, each verb and option must
  be one of the command's, or in `<!-- options of other programs: --a --b -->`; a block of `toml`
  has names of settings.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from appliance.cli.main import build
from appliance.configuration.settings import SETTINGS
from tests.daemons import Daemon

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>.+?) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
SPAN = re.compile(r"`([^`\n]+)`")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
OTHERS = re.compile(r"<!-- options of other programs: (.+?) -->")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
UsageError = typer.BadParameter.__base__  # typer brings its own click, or takes the installed
NOT_RUN = "not run: "
MOST_LINES = {"README.md": 90, "MEASUREMENTS.md": 110}
SHELL = ("sh", "bash")
WRAPPER = """#!/bin/sh
[ "$1" = serve ] && set -- "$@" --check-config
exec {python} -m appliance.cli "$@"
"""


@dataclass(frozen=True)
class Block:
    """A fenced block, and what its page says of running it."""

    at: str
    language: str
    text: str
    mark: str

    @property
    def is_run(self):
        return self.language in (*SHELL, "python") and not self.mark.startswith(NOT_RUN)

    @property
    def right_codes(self):
        codes = re.fullmatch(r"ends with ([\d or]+)", self.mark)
        return {0} if codes is None else {int(code) for code in codes[1].split(" or ")}


def page_mark(text):
    found = re.match(r"<!-- (.+?) -->\n(?!```)", text)
    return "" if found is None else found[1]


def blocks_of(page):
    text = page.read_text()
    for found in BLOCK.finditer(text):
        at = f"{page.name}:{text.count(chr(10), 0, found.start()) + 1}"
        yield Block(at, found["language"], found["text"], found["mark"] or page_mark(text))


def penstock_words(line):
    """The words behind each `penstock` of a line of shell."""
    words = shlex.shlex(line.replace("`", " "), posix=True, punctuation_chars=True)
    words.whitespace_split = True
    calls, call = [], None
    for word in words:
        if re.fullmatch(r"[|&;<>()]+", word):
            call = None
        elif call is not None:
            call.append(word)
        elif word.rpartition("/")[2] == "penstock":
            calls.append(call := [])
    return calls


def check_words(words, at, command):
    """That they are a verb of the command, and its options."""
    path = ["penstock"]
    context = command.make_context(path[0], [], resilient_parsing=True)
    while hasattr(command, "get_command") and words and not words[0].startswith("-"):
        name, words = words[0], words[1:]
        path.append(name)
        command = command.get_command(context, name)
        assert command is not None, f"{at}: there is no {' '.join(path)}"
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
    context.resilient_parsing = False  # which would take any option
    command.make_parser(context).parse_args(args=list(words))


@pytest.fixture(scope="module")
def command():
    return typer.main.get_command(build(""))


@pytest.fixture(scope="module")
def options(command):
    def options_of(one):
        names = {name for p in one.params for name in (*p.opts, *p.secondary_opts)}
        for each in getattr(one, "commands", {}).values():
            names |= options_of(each)
        return names

    return options_of(command) | {"--help"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    daemon = Daemon(tmp_path_factory.mktemp("daemon")).wait_ready()
    daemon.complete("hello", max_tokens=2)
    yield daemon
    assert daemon.stop() == 0


@pytest.fixture
def folder(daemon, tmp_path):
    """Where a reader would stand: the repository, and its commands installed."""
    for path in ROOT.iterdir():
        if path.name not in (".venv", ".git", "keys"):
            (tmp_path / path.name).symlink_to(path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "penstock").write_text(WRAPPER.format(python=sys.executable))
    (programs / "penstock").chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    return tmp_path


def run(block, folder, daemon):
    (newest,) = daemon.http.get("/v1/penstock/log?limit=1").json()["data"]
    text = re.sub(r"\bID\b", newest["id"], block.text)
    shell = ["bash", "-eo", "pipefail", "-c"]
    program = shell if block.language in SHELL else [sys.executable, "-c"]
    own = {name: str(folder / name) for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    own |= {
        "PATH": f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "PENSTOCK_SOCKET": str(daemon.socket),
        "PENSTOCK_STATE_DIR": str(daemon.folder / "state"),
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    return subprocess.run(
        [*program, text],
        cwd=folder,
        env={**inherited, **own},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, request):
    runnable = [block for block in blocks_of(page) if block.is_run]
    if not runnable:
        return
    folder, daemon = request.getfixturevalue("folder"), request.getfixturevalue("daemon")
    for block in runnable:
        if "curl " in block.text and shutil.which("curl") is None:
            continue
        ended = run(block, folder, daemon)
        said = f"{block.at} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
        assert ended.returncode in block.right_codes, said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_verbs_and_options_are_the_commands(page, command, options):
    text = page.read_text()
    if page_mark(text).startswith(NOT_RUN):
        return
    for block in blocks_of(page):
        if block.language in SHELL:
            for line in block.text.replace("\\\n", " ").splitlines():
                for words in penstock_words(line):
                    check_words(words, block.at, command)
    others = {name for found in OTHERS.findall(text) for name in OPTION.findall(found)}
    for span in SPAN.findall(BLOCK.sub("", text)):
        if span.startswith("penstock "):
            for words in penstock_words(span):
                check_words(words, f"{page.name}: {span}", command)
        elif span.startswith("--"):
            unknown = {*OPTION.findall(span)} - options - others
            assert not unknown, f"{page.name}: {span}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_in_toml_are_there(page):
    for block in blocks_of(page):
        if block.language == "toml":
            table = tomllib.loads(block.text)
            of_models = {name for one in table.pop("models", {}).values() for name in one}
            table.pop("short_names", None)
            assert {*table, *of_models} <= SETTINGS.keys(), block.at


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_and_figures_fit_on_their_screens_and_marks_give_reasons():
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in MOST_LINES}
    assert all(lines[name] <= most for name, most in MOST_LINES.items()), lines
    assert (ROOT / "CHANGELOG.md").stat().st_size <= 12_000
    for page in PAGES[1:]:
        for block in blocks_of(page):
            known = block.mark.startswith((NOT_RUN, "ends with"))
            assert known or not block.mark, f"{block.at}: {block.mark}"


def test_readme_lists_every_page_once_in_an_order_to_read_them():
    listed = (ROOT / "README.md").read_text().partition("## Documentation")[2].partition("\n## ")[0]
    names = LINK.findall(listed)
    pages = {f"docs/{page.name}" for page in PAGES[1:]}
    assert sorted(name for name in names if name.startswith("docs/")) == sorted(pages)


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_a_page_says_first_for_whom_it_is(page):
    lines = [line for line in page.read_text().splitlines() if line and not line.startswith("<!--")]
    assert lines[0].startswith("# ")
    assert lines[1].startswith("*For people who ")


def test_every_command_of_the_tutorial_is_run():
    blocks = list(blocks_of(ROOT / "docs" / "tutorial.md"))
    assert len(blocks) > 5
    assert all(block.is_run for block in blocks)


def test_a_wrong_option_verb_or_exit_code_is_found(command, tmp_path):
    for wrong in ("penstock sevre", "penstock ps --states queued", "x | penstock bench ruin"):
        (words,) = penstock_words(wrong)
        with pytest.raises((AssertionError, UsageError)):
            check_words(words, "here", command)
    page = tmp_path / "page.md"
    page.write_text("<!-- ends with 0 or 8 -->\n```sh\nfalse\n```\n\n```sh\nfalse\n```\n")
    first, second = blocks_of(page)
    assert (first.right_codes, second.right_codes) == ({0, 8}, {0})
    assert (second.at, second.is_run) == ("page.md:6", True)
    (left_out,) = blocks_of(_written(page, "<!-- not run: a GPU -->\n```sh\nnvidia-smi\n```\n"))
    assert not left_out.is_run


def _written(page, text):
    page.write_text(text)
    return page
