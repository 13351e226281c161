"""Keep a version's state as fixtures: what a daemon leaves behind, for later versions to open.

usage: python -m tests.release.state tests/fixtures/vX.Y

Once for each version, by its own code: a daemon with a tiny model answers twice, stores blocks,
measures, records, and stops. Its journal is made here, as a daemon takes its own along.
"""

from __future__ import annotations

import gzip
import os
import sys
import tempfile
from pathlib import Path

from appliance.daemon.survival.journal import Journal
from appliance.fleet.profile_store import ProfileStore
from tests.appliance.cli_process import penstock
from tests.checkpoints import make_checkpoint
from tests.daemons import Daemon
from tests.journals import BATCH, HEAD, REQUEST

PROMPT = "one two three four " * 7


def write_journal(path: Path) -> None:
    """A request that has taken a value and taken one batch."""
    journal = Journal()
    journal.replayed(lambda: "before it was admitted")
    journal.open(HEAD, REQUEST)
    journal.took(BATCH)
    journal.flush()
    path.write_bytes(os.pread(journal.fd, os.fstat(journal.fd).st_size, 0))
    journal.close()


def main() -> None:
    """Make the files of a version that is new here."""
    made = Path(sys.argv[1])
    made.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = make_checkpoint(scratch / "tiny-llama", max_position_embeddings=2048)
        options = ("--ssd-cache", "64MiB", "--ssd-dir", str(scratch / "ssd"))
        daemon = Daemon(
            scratch / "d", *options, model=model, env={"PENSTOCK_MEASURE": "1"}
        ).wait_ready()
        state = scratch / "d" / "state"
        daemon.wait_for(lambda: ProfileStore(state).rows())
        daemon.wait_for(
            lambda: daemon.complete(PROMPT, max_tokens=4) and daemon.state()["ssd"]["stored_blocks"]
        )
        environ = {**daemon.env, "PENSTOCK_SOCKET": str(daemon.socket)}
        recording = scratch / "recording.penstock"
        penstock(environ, "record", "-o", str(recording), "--since", "1h")
        assert daemon.stop() == 0
        kept = [recording, *(state / name for name in ("requests.db", "profile.db"))]
        for path in [*kept, *(scratch / "ssd").rglob("slab-*")]:
            (made / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    write_journal(made / "journal")


if __name__ == "__main__":
    main()
