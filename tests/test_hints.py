"""Commands that messages name exist, and are typed as they stand there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import typer

from appliance.cli.main import ALIASES, VERBS, build
from appliance.observe.telemetry.alerts import THRESHOLDS

ROOT = Path(__file__).parents[1]
PACKAGES = ("appliance", "engine", "tui")
QUOTED = re.compile(r"`([^`]+)`")
NAMED = re.compile(r"(?:^|[ ('`])penstock ([a-z][a-z-]*)(?: ([a-z][a-z-]+))?")
PROSE = {"at", "of", "printed", "runs", "says"}
"""Words behind the program's name that begin no command."""
OTHER_PROGRAMS = {"ps"}
"""Programs that have the name of a verb of ours, and are meant themselves."""
OTHERS_WORDS = {"restart"}
"""Parameters of a tool that another company has described."""


def messages(source):
    """Texts that are no docstrings, with X for what is put in."""
    tree = ast.parse(source)
    unread = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            unread |= {id(part) for part in ast.walk(node) if part is not node}
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(p.value if isinstance(p, ast.Constant) else "X" for p in node.values)


@cache
def subcommands(verb):
    """Names of a group; none where the verb is a command itself."""
    command = typer.main.get_command(build(verb))
    context = command.make_context("penstock", [], resilient_parsing=True)
    found = command.get_command(context, verb)
    return found.list_commands(context) if hasattr(found, "list_commands") else []


def faults(source):
    """What in a file's messages nobody could type."""
    for text in messages(source):
        for quoted in QUOTED.findall(text):
            first, *_ = quoted.split() or [""]
            is_others = quoted in OTHERS_WORDS or first in OTHER_PROGRAMS
            if quoted == "penstock" or (first in VERBS and not is_others):
                yield f"`{quoted}` is `penstock {first}`"
        for verb, second in NAMED.findall(text):
            if verb in PROSE:
                continue
            if verb not in VERBS and verb not in ALIASES:
                yield f"there is no penstock {verb}"
            elif (known := subcommands(ALIASES.get(verb, verb))) and second not in known:
                yield f"there is no penstock {verb} {second}"


def test_every_command_in_a_message_exists_and_is_named_with_its_program():
    found = [
        f"{path.relative_to(ROOT)}: {fault}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for fault in faults(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "message",
    ["run `top`", "see penstock evens", "`penstock keys make NAME`", "start `penstock`"],
)
def test_what_could_not_be_typed_is_found(message):
    assert list(faults(f"hint = {message!r}"))
    assert list(faults(f"hint = f'{message}' + f'{{x}}'"))


def test_what_an_alert_advises_is_a_command_of_ours_or_of_a_known_program():
    for threshold in THRESHOLDS:
        program, _, rest = threshold.action.partition(" ")
        assert program in {"", *OTHER_PROGRAMS} or rest.partition(" ")[0] in VERBS
