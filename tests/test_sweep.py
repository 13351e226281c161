"""A sample of the sweep; `python -m tests.sweep` kills each process at each event."""

import subprocess
import sys

import pytest

from tests.sweep.planted import BUGS, ROOT
from tests.sweep.scenarios import SCENARIOS

NUM_RUNS = 4
GROUPS = [list(SCENARIOS)[start::4] for start in range(4)]


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_no_client_notices_what_fails(names):
    command = [sys.executable, "-m", "tests.sweep", *names, "--sample", str(NUM_RUNS)]
    swept = subprocess.run(
        [*command, "--jobs", "1"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert swept.returncode == 0, swept.stdout + swept.stderr
    num_runs = len(names) * NUM_RUNS
    assert f"{num_runs} runs, 0 failures" in swept.stdout


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_replaces_one_place(name):
    bug = BUGS[name]
    assert (ROOT / bug.file).read_text().count(bug.right) == 1
    assert set(bug.scenarios) <= set(SCENARIOS)
