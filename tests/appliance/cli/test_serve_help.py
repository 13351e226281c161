"""The help of serve has its options in groups, the usual ones first."""

import typer
from click.testing import CliRunner
from typer.core import TyperGroup
from typer.main import get_command

from appliance.cli.main import build
from appliance.cli.serve_help import GROUPS, SHORT
from appliance.configuration.settings import SETTINGS


def shown(flag):
    return CliRunner().invoke(get_command(build("serve")), ["serve", flag]).output


def test_every_setting_is_in_one_group():
    names = [name for group in GROUPS.values() for name in group]
    assert len(names) == len(set(names))
    assert SETTINGS.keys() <= set(names)


def test_help_shows_the_usual_options_and_help_all_every_one():
    short, whole = shown("--help"), shown("--help-all")
    assert len(GROUPS[SHORT[0]]) <= 12
    assert ("--kv-memory" in short, "--tool-parser" in short, "--help-all" in short) == (
        True,
        False,
        True,
    )
    assert all(f"--{name.replace('_', '-')}" in whole for name in SETTINGS)
    assert all(f"{title}:" in whole for title in GROUPS)


def test_every_value_has_a_name_in_help():
    root = get_command(build(""))

    def records(command, words):
        context = typer.Context(command)
        for name in command.list_commands(context) if isinstance(command, TyperGroup) else ():
            yield from records(command.get_command(context, name), [*words, name])
        for param in command.params:
            if record := param.get_help_record(context):
                yield " ".join([*words, record[0]])

    assert [each for each in records(root, []) if "<text>" in each] == []
