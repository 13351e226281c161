"""Print the map of files, from their first sentences: `python -m tests.map [FOLDER]`.

Rooms come in the order in which they may import each other, and so do the files of a room.
"""

import ast
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "migrations", "appliance", "tui")


@cache
def files() -> tuple[str, ...]:
    """List every Python file of the packages."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return tuple(sorted(str(path.relative_to(ROOT)) for path in found))


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def first_sentence(file: str) -> str:
    return (ast.get_docstring(parsed(file)) or "").partition("\n")[0]


@cache
def imported_names(file: str) -> frozenset[str]:
    """List every dotted name a file imports: at the top, in functions, under TYPE_CHECKING."""
    names: set[str] = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return frozenset(names)


@cache
def imported_files(file: str) -> frozenset[str]:
    """List the files of the packages that a file imports, packages' own files left out."""
    paths = {f"{name.replace('.', '/')}.py" for name in imported_names(file)}
    return frozenset(paths & set(files()))


def room(file: str) -> str:
    """Name the room of a file: its folder; the console is one room."""
    return "tui" if file.startswith("tui/") else file.rpartition("/")[0]


def rooms() -> dict[str, set[str]]:
    """List the rooms, each with the rooms that its files import."""
    found: dict[str, set[str]] = {room(file): set() for file in files()}
    for file in files():
        found[room(file)] |= {room(other) for other in imported_files(file)} - {room(file)}
    return found


def in_order(graph: dict[str, set[str]]) -> list[str]:
    """Sort what imports each other, the imported first, otherwise by names."""
    sorter = TopologicalSorter(dict(sorted(graph.items())))
    sorter.prepare()
    order: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        order += ready
        sorter.done(*ready)
    return order


def lines(folder: str = "") -> Iterable[str]:
    """Write the map of a folder, or of everything."""
    for name in in_order(rooms()):
        inside = {file: set(imported_files(file)) for file in files() if room(file) == name}
        if not name.startswith(folder):
            continue
        yield f"\n{name}: {first_sentence(f'{name}/__init__.py')}"
        within = {file: others & inside.keys() for file, others in inside.items()}
        for file in in_order(within):
            if not file.endswith("__init__.py"):
                yield f"  {file.removeprefix(name + '/')}: {first_sentence(file)}"


if __name__ == "__main__":
    print("\n".join(lines(*sys.argv[1:2])).lstrip())
