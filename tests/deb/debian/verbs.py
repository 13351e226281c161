"""Lists the verbs, each with a tab and its first sentence, for manual pages."""

import typer

from appliance.cli.main import build


def walk(command, words):
    about = (command.get_short_help_str(1000) or "").rstrip(".")
    print(" ".join(words), about, sep="\t")
    for name, verb in getattr(command, "commands", {}).items():
        if not verb.hidden:
            walk(verb, [*words, name])


walk(typer.main.get_command(build("")), ["penstock"])
