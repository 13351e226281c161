"""Run the command line: `main` is the entry point, the verbs are in the files beside it."""

from __future__ import annotations

import gc

from engine.system.python_child import leave_folder_out


def main() -> None:
    """Run one verb of the command line, and exit with its code."""
    leave_folder_out()
    gc.disable()  # while modules load: they make thousands of objects, and no garbage
    from appliance.cli.main import main as run_verb  # so that the files below can import each other

    run_verb()
