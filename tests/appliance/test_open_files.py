"""The daemon takes the files that it may have, and connections leave some of them."""

import resource
import subprocess
import sys

from appliance.process_limits import NUM_APART, max_connections


def test_the_soft_limit_is_raised_to_the_hard_one():
    script = (
        "import resource; from appliance.process_limits import raise_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))\n"
        "print(raise_limit(1024)); print(raise_limit(100))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines() == [
        "max_connections is 1024, but 300 open files are allowed, with room for 172"
        " (ulimit -Hn, LimitNOFILE=)",
        "None",
        "300",
    ]


def test_connections_fit_in_what_is_left():
    assert max_connections(1024, 4096) == 1024
    assert max_connections(1024, 1024) == 1024 - NUM_APART
    assert max_connections(1024, 8) == 1
    assert max_connections(2) == min(2, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - NUM_APART)
