"""What may import what: rooms, their directions and doors, and what ARCHITECTURE.md names."""

import ast
import re
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.map import (
    PACKAGES,
    ROOT,
    files,
    first_sentence,
    imported_files,
    imported_names,
    parsed,
    rooms,
)

MAX_FUNCTION_LINES = 60

TEXT = (ROOT / "ARCHITECTURE.md").read_text()
FILES = [file for file in files() if not file.endswith("__init__.py")]
DOORS = {
    "torch": ("engine/worker/",),
    "triton": ("engine/worker/model/",),
    "flash_attn": ("engine/worker/model/library_attention.py",),
    "tokenizers": (
        "engine/text/tokenizer.py",
        "engine/text/tokenizer_parts.py",
        "engine/text/gguf_tokenizer.py",
        "engine/text/folder_tokenizer.py",
    ),
    "jinja2": ("engine/text/jinja_templates.py",),
    "llguidance": ("engine/text/grammar.py", "engine/text/grammar_matcher.py"),
    "msgspec": ("engine/", "appliance/", "tui/feed.py"),
    "uvicorn": ("appliance/http/",),
    "h11": (
        "appliance/http/connection.py",
        "appliance/http/strict_heads.py",
        "appliance/dynamo/daemon_http.py",
        "tui/feed.py",
    ),
    "starlette": ("appliance/api/", "appliance/http/"),
    "psutil": ("appliance/fleet/placement.py", "appliance/observe/telemetry/telemetry.py"),
    "pynvml": ("appliance/devices/nvml.py",),
    "prometheus_client": ("appliance/observe/metrics/exposition.py",),
    "sqlite_utils": (
        "migrations/",
        "appliance/observe/log/log_file.py",
        "appliance/fleet/profile_store.py",
    ),
    "huggingface_hub": ("appliance/hub/download.py",),
    "httpx2": ("appliance/hub/download.py",),
    "typer": ("appliance/cli/",),
    "textual": ("tui/",),
    "rich": ("tui/",),
}
"""Third-party packages, and the files or rooms that may import each."""

BELOW = (
    *(f"engine.{name}." for name in ("wire", "checkpoint", "text", "kernels", "profile", "system")),
    *(f"engine.{name}" for name in ("errors", "units", "printable")),
)
"""What both halves of the engine import: the daemon's, and the worker's."""
DIRECTIONS = {
    "engine/scheduler/": ("engine.scheduler.", *BELOW),
    "engine/worker/": ("engine.worker.", *BELOW),
    "engine/reader/": ("engine.reader.", *BELOW),
    "engine/": BELOW,
    "migrations/": (),
    "appliance/": ("appliance.", "engine.scheduler.", *BELOW, "migrations."),
    "tui/": (
        "tui.",
        "appliance.observe.frame.",
        "appliance.client.calls",
        "appliance.configuration.settings",
    ),
}
"""Rooms, and what each may import; the first that fits counts."""


def test_files_import_each_other_in_no_circle():
    TopologicalSorter({file: imported_files(file) for file in files()}).prepare()


def test_rooms_import_each_other_in_no_circle():
    TopologicalSorter(rooms()).prepare()


def test_a_room_says_what_it_is_for():
    without = [file for file in files() if file.endswith("__init__.py")]
    assert not [file for file in without if not first_sentence(file).endswith(".")]


def test_no_file_of_the_appliance_lies_outside_its_rooms():
    assert [file for file in files() if file.rpartition("/")[0] == "appliance"] == [
        "appliance/__init__.py"
    ]


@pytest.mark.parametrize("file", FILES)
def test_rooms_are_entered_in_the_allowed_direction(file):
    allowed = next(names for room, names in DIRECTIONS.items() if file.startswith(room))
    for other in imported_files(file):
        assert other.removesuffix(".py").replace("/", ".").startswith(allowed), other


@pytest.mark.parametrize("file", FILES)
def test_third_party_packages_come_through_their_door(file):
    for name in imported_names(file):
        package = name.split(".")[0]
        if package in sys.stdlib_module_names or package in PACKAGES:
            continue
        assert package in DOORS, f"{file} imports {package}, which has no door in DOORS"
        assert file.startswith(DOORS[package]), f"{file} imports {package}"


ROUTER = "engine/scheduler/router.py"


def methods_of_the_router() -> set[str]:
    (router,) = (
        node
        for node in parsed(ROUTER).body
        if isinstance(node, ast.ClassDef) and node.name == "Router"
    )
    return {node.name for node in router.body if isinstance(node, ast.FunctionDef)}


LOOKS = [
    file
    for file in FILES
    if file.startswith("appliance/") and "engine.scheduler.router" in imported_names(file)
]


@pytest.mark.parametrize("file", LOOKS)
def test_the_appliance_looks_at_snapshots_and_never_at_the_routers_parts(file):
    taken = {
        node.attr
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value).rpartition(".")[2].removeprefix("_") == "router"
    }
    assert taken <= methods_of_the_router()


def test_every_door_is_used():
    used = {name.split(".")[0] for file in FILES for name in imported_names(file)}
    assert set(DOORS) <= used


@pytest.mark.parametrize("file", FILES)
def test_files_and_functions_fit_on_their_pages(file):
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


LABELS = ["Invariant", "Invariants", "Never"]


@pytest.mark.parametrize("file", FILES)
def test_a_module_says_in_one_line_what_it_does_and_then_what_always_holds(file):
    docstring = ast.get_docstring(parsed(file)) or ""
    first = docstring.partition("\n")[0]
    assert first.endswith((".", "?", "`", ":")), "one sentence, one line"
    assert not re.search(r"^Owns: ", docstring, re.M), "its names say what it has"
    labels = [label for label in re.findall(r"^(\w+): ", docstring, re.M) if label in LABELS]
    assert labels == sorted(labels, key=LABELS.index)


def test_packages_are_listed_explicitly():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted({file.rpartition("/")[0].replace("/", ".") for file in files()})


def test_the_page_is_read_in_ten_minutes():
    prose = [line for line in TEXT.splitlines() if not line.startswith("|")]
    assert sum(len(line.split()) for line in prose) < 2000


def test_files_that_the_page_names_are_there():
    for name in set(re.findall(r"`((?:engine|appliance|tui|tests|docs)/[\w/.]+\.\w+)`", TEXT)):
        assert (ROOT / name).exists(), name


CHANGES = TEXT[TEXT.index("## Where to change what") :]
NAMES_OF_FILE = re.compile(r"((?:`\w+`\)?(?:,| and| or)? )+)(?:in|of)\s`([\w/]+\.py)`")


def defined_names(file: str) -> set[str]:
    """Every class, function, field, constant and key of a table in a file."""
    names = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for target in targets for part in ast.walk(target)]
            names |= {part.id for part in parts if isinstance(part, ast.Name)}
        elif isinstance(node, ast.Dict):
            names |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return names


@pytest.mark.parametrize(
    ("name", "file"),
    [(n, m[2]) for m in NAMES_OF_FILE.finditer(CHANGES) for n in re.findall(r"\w+", m[1])
     if n not in ("and", "or")],
)  # fmt: skip
def test_a_name_to_change_is_defined_in_the_file_named_for_it(name, file):
    assert name in defined_names(file)


def test_the_files_to_change_exist():
    folder, missing = Path(), []
    for name in re.findall(r"`([\w/]+\.py)`", CHANGES):
        if "/" in name:
            folder = Path(name).parent
        path = Path(name) if "/" in name else folder / name
        missing += [] if (ROOT / path).exists() else [str(path)]
    assert not missing


def test_tests_mirror_the_rooms():
    tested = {
        path.parent.relative_to(ROOT / "tests")
        for package in PACKAGES
        for path in (ROOT / "tests" / package).rglob("test_*.py")
    }
    assert not [folder for folder in tested if not (ROOT / folder / "__init__.py").exists()]


BY_HAND = {"st_uid", "st_mode", "O_NOFOLLOW", "open"}
MAY_BY_HAND = {
    "engine/system/own_files.py": "the one place",
    "engine/checkpoint/model_file.py": "models may be anybody's, and links",
    "appliance/http/access.py": "the owner of a process",
    "appliance/http/listeners.py": "a folder to lock, and whether a path is a socket",
    "appliance/http/tls.py": "whether a path is a pipe; the file is read by OpenSSL",
    "appliance/observe/log/reader.py": "whether a path is a folder; SQLite opens the log",
    "appliance/observe/log/store.py": "a new file that the user names",
    "appliance/cli/chat.py": "a person's own history",
    "appliance/cli/conversation.py": "a new file that the user names",
    "appliance/cli/new_file.py": "a new file that the user names",
    "appliance/cli/install_service.py": "whether others may enter the program's folders",
    "appliance/daemon/survival/kept_replies.py": "whether a descriptor is a socket",
    "appliance/cli/terminal.py": "/dev/null",
    "appliance/daemon/process/limits.py": "/dev/null",
    "appliance/daemon/process/log_lines.py": "the terminal",
    "tui/__main__.py": "/dev/null",
}
"""Files that open by `os.open`, or look at owners and modes, for a reason other than state."""


def test_state_is_opened_and_its_owner_checked_in_one_file():
    by_hand = {
        file
        for file in files()
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Attribute)
        and node.attr in BY_HAND
        and (node.attr != "open" or ast.unparse(node) == "os.open")
    }
    assert by_hand == MAY_BY_HAND.keys()


READS_BY_HAND = {
    "appliance/bench/workloads.py": "a trace that the user names",
    "appliance/cli/bench.py": "/proc",
    "appliance/cli/conversation.py": "a conversation that the user names",
    "appliance/cli/install_service.py": "files of ours and root's",
    "appliance/cli/new_file.py": "what it has just written",
    "appliance/cli/record.py": "what it has just written",
    "appliance/cli/texts.py": "texts that the user names",
    "appliance/client/ephemeral.py": "what its child has just written",
    "appliance/configuration/settings_file.py": "settings that the user names, up to a length",
    "appliance/daemon/process/stacks.py": "/proc",
    "appliance/daemon/survival/departures.py": "/proc",
    "appliance/devices/inventory.py": "/sys",
    "appliance/devices/machine.py": "/sys",
    "appliance/doctor/bundle.py": "/proc, and the log",
    "appliance/doctor/gpu_checks.py": "/proc",
    "appliance/doctor/ports.py": "/proc",
    "appliance/fleet/cgroup_limits.py": "/sys",
    "appliance/fleet/own_cpus.py": "/proc",
    "appliance/fleet/weights_file.py": "/proc",
    "appliance/observe/telemetry/offload_readings.py": "/proc",
    "appliance/observe/telemetry/rank_readings.py": "/proc",
    "appliance/fleet/placement.py": "/sys",
    "appliance/fleet/scopes.py": "/proc, and libraries of ours",
    "appliance/http/access.py": "/proc",
    "appliance/http/page.py": "a file of ours",
    "appliance/http/tls.py": "a certificate, which is no pipe",
    "appliance/observe/frame/recording.py": "a recording that the user names",
    "appliance/observe/log/recording_copy.py": "what it has just written",
    "appliance/observe/log/statements.py": "/proc",
    "appliance/observe/telemetry/deadlines.py": "/proc",
    "appliance/observe/telemetry/disturbances.py": "/proc",
    "appliance/observe/telemetry/thread_times.py": "/proc",
    "engine/checkpoint/checkpoint.py": "/proc",
    "engine/kernels/product_choice.py": "/proc",
    "engine/reader/__main__.py": "/proc",
    "engine/reader/limits.py": "/proc",
    "engine/system/own_files.py": "/proc",
    "engine/system/threads.py": "/proc",
    "engine/worker/device.py": "/proc",
    "engine/worker/self_test.py": "sources of ours",
}
"""Files that read others than by model_file and own_files, and what these are: no stranger's."""


def reads_by_hand(node: ast.AST) -> bool:
    """Say whether a call opens what its path leads to, be it a pipe, a device or without end."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        is_opened = any(isinstance(each, ast.Call) for each in node.args[:1])
        return node.func.id == "open" and not is_opened and not node.keywords
    name = getattr(node.func, "attr", "")
    modes = [each.value for each in node.args if isinstance(each, ast.Constant)]
    has_mode = any(isinstance(mode, str) and mode[:1] in "rwax" for mode in modes)
    return name in ("read_text", "read_bytes") or (name == "open" and has_mode)


def test_folders_of_strangers_are_read_by_two_files_alone():
    by_hand = {
        file for file in files() if any(reads_by_hand(node) for node in ast.walk(parsed(file)))
    }
    assert by_hand == READS_BY_HAND.keys()


READ_MODELS = {
    "engine/reader/jobs.py": "the process with limits",
    "appliance/cli/model_sources.py": "a command of a person's, once that process has read it",
    "engine/worker/measure.py": "a shape that a person has measured",
}
"""Files that read what models hold, beside the readers themselves."""
READERS = {"Checkpoint.open", "GgufModel.open", "FolderFiles", "TokenizerFiles.read"}
READERS |= {"ModelConfig.from_folder", "TextModelConfig.from_folder", "Tokenizer.from_folder"}


def test_the_daemon_and_its_workers_read_no_model_by_themselves():
    found = {
        file
        for file in files()
        if not file.startswith(("engine/checkpoint/", "engine/text/"))
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in READERS
    }
    assert found == READ_MODELS.keys()
