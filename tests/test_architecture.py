"""ARCHITECTURE.md is the map; this holds it true."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "appliance", "tui", "migrations")
MAX_FUNCTION_LINES = 60
ROW = re.compile(r"^\| `(?P<file>[\w/]+\.py)` \| (?P<what>.+) \|$", re.M)
DOOR = re.compile(r"^\| `(?P<package>[\w.]+)` \| (?P<users>`.+`) \|", re.M)

TEXT = (ROOT / "ARCHITECTURE.md").read_text()
MAP = {match["file"]: match["what"] for match in ROW.finditer(TEXT)}
RANK = {file.removesuffix(".py").replace("/", "."): i for i, file in enumerate(MAP)}
DOORS = {m["package"]: re.findall(r"`([^`]+)`", m["users"]) for m in DOOR.finditer(TEXT)}
DIRECTIONS = {
    "engine/worker/model/": ("engine",),
    "engine/worker/": ("engine",),
    "engine/": ("engine",),
    "migrations/": (),
    "appliance/": ("appliance", "engine", "migrations"),
    "tui/": (
        "tui",
        "appliance.observe.frame",
        "appliance.client",
        "appliance.configuration.config",
        "appliance.configuration.settings",
        "engine.units",
    ),
}
TORCH_ROOMS = ("engine/worker/model/", "engine/worker/")


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


@cache
def imported_names(file: str) -> set[str]:
    """Every dotted name a file imports: at the top, in functions, under TYPE_CHECKING."""
    names = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def test_every_file_is_on_the_map_once():
    on_disk = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert sorted(match["file"] for match in ROW.finditer(TEXT)) == sorted(on_disk)


@pytest.mark.parametrize("file", MAP)
def test_imports_point_up_the_map(file):
    me = RANK[file.removesuffix(".py").replace("/", ".")]
    below = sorted(n for n in imported_names(file) if RANK.get(n, -1) >= me)
    assert not below, f"{file} imports {below}, which the map lists at or below it"


@pytest.mark.parametrize("file", MAP)
def test_rooms_are_entered_in_the_allowed_direction(file):
    allowed = next(names for room, names in DIRECTIONS.items() if file.startswith(room))
    for name in imported_names(file):
        if name.split(".")[0] in PACKAGES:
            assert any(name == a or name.startswith(f"{a}.") for a in allowed), f"{file}: {name}"
            is_torch_room = name.startswith(("engine.worker.model", "engine.worker"))
            assert not is_torch_room or file.startswith(TORCH_ROOMS), f"{file}: {name}"
            if name.startswith("engine.worker"):
                assert file.startswith("engine/worker/"), f"{file}: {name}"


@pytest.mark.parametrize("file", MAP)
def test_third_party_packages_come_through_their_door(file):
    for name in imported_names(file):
        package = name.split(".")[0]
        if package in sys.stdlib_module_names or package in PACKAGES:
            continue
        assert package in DOORS, f"{file} imports {package}, which has no door on the map"
        assert any(file.startswith(door) for door in DOORS[package]), f"{file} imports {package}"


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
    for file in MAP
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
    used = {name.split(".")[0] for file in MAP for name in imported_names(file)}
    assert set(DOORS) <= used


@pytest.mark.parametrize("file", MAP)
def test_files_and_functions_fit_on_their_pages(file):
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


LABELS = ["Owns", "Invariant", "Invariants", "Never"]


@pytest.mark.parametrize("file", MAP)
def test_a_module_says_in_one_line_what_it_does_and_then_owns_and_never_does(file):
    docstring = ast.get_docstring(parsed(file)) or ""
    first = docstring.partition("\n")[0]
    assert first.endswith((".", "?", "`", ":")), "one sentence, one line"
    assert MAP[file].lower().startswith(first.rstrip(".").lower()), "the map's row says the same"
    labels = [label for label in re.findall(r"^(\w+): ", docstring, re.M) if label in LABELS]
    assert labels == sorted(labels, key=LABELS.index)


def test_packages_are_listed_explicitly():
    listed = re.search(r"^packages = \[([^\]]*)\]", (ROOT / "pyproject.toml").read_text(), re.M)
    names = set(re.findall(r'"([\w.]+)"', listed[1]))
    folders = (
        path.parent for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")
    )
    assert names == {str(folder.relative_to(ROOT)).replace("/", ".") for folder in folders}
    assert names >= {file.rpartition("/")[0].replace("/", ".") for file in MAP}


def test_files_that_the_page_names_are_there():
    for name in set(re.findall(r"`((?:engine|appliance|tui|tests|docs)/[\w/.]+\.\w+)`", TEXT)):
        assert (ROOT / name).exists(), name


CHANGES = TEXT[TEXT.index("## Where to change what") : TEXT.index("## Decisions and their price")]
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
