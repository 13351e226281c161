"""Plant known bugs, one at a time, and see that the sweep finds each.

python -m tests.sweep.planted [NAME...]
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SHOWN = 240
LONGEST_S = 900
"""A sweep that takes longer has found nothing; on an idle machine it takes a minute."""
TIMED_OUT = 124
"""The exit code of `timeout`."""


class Bug(NamedTuple):
    """One wrong line, and the scenarios in which it shows first."""

    file: str
    right: str
    wrong: str
    scenarios: tuple[str, ...]


BUGS = {
    "a finished sequence keeps its blocks": Bug(
        "engine/scheduler/router.py",
        "        self.ledger.release_all(sequence.seq_id)\n\n    def stop(",
        "\n    def stop(",
        ("alias",),
    ),
    "a process of a group that has no core makes it seem hung": Bug(
        "appliance/observe/telemetry/deadlines.py",
        "times_of(state.pids) if is_silent",
        "times_of(state.pids[:1]) if is_silent",
        ("groups",),
    ),
    "commands of a dead worker stay open": Bug(
        "engine/scheduler/router.py",
        "        self.ledger.reap(worker)\n",
        "",
        ("alias",),
    ),
    "sequences of a dead worker are forgotten": Bug(
        "engine/scheduler/router.py",
        "        victims = [s for s in self.at.running.values() if s.worker == worker]\n",
        "        victims = [s for s in self.at.running.values() if s.worker == worker][1:]\n",
        ("alias",),
    ),
    "which record a step wrote is forgotten": Bug(
        "engine/scheduler/router.py",
        "        sequence.valid_record = entry.valid_record\n",
        "",
        ("recurrent", "recurrent peer"),
    ),
    "a preempted sequence keeps its progress": Bug(
        "engine/scheduler/sequences/sequence.py",
        "        self.forget_computed()\n        self.computed_in = None\n        self.num_pre",
        "        self.num_pre",
        ("crowd",),
    ),
    "copies of a dead worker are not sent again": Bug(
        "engine/scheduler/routing/copies.py",
        "                    self._resend(copy.transfer, copy.number)\n        for transfer",
        "                    pass\n        for transfer",
        ("shm", "peer"),
    ),
    "blocks count as copied when they are sent": Bug(
        "engine/scheduler/routing/copies.py",
        "        transfer.sent[number] += len(pairs)\n",
        "        transfer.sent[number] += len(pairs)\n"
        "        transfer.done[number] = transfer.sent[number]\n",
        ("peer", "shm"),
    ),
    "a slot is used again before its block has left": Bug(
        "engine/scheduler/routing/copies.py",
        "                slot = transfer.slots.pop(index)\n",
        "                slot = transfer.slots.pop(max(transfer.slots))\n",
        ("shm", "every api"),
    ),
    "blocks of another pool count as computed here": Bug(
        "engine/scheduler/recovery.py",
        "        if has_blocks and sequence.computed_in == (pool, kv_pool.life):\n",
        "        if has_blocks:\n",
        ("peer", "shm", "2x1 peer"),
    ),
    "a cache hit counts a block too many": Bug(
        "engine/scheduler/prefixes/prefix_cache.py",
        "        there = self._ledger.num_hashed(sequence.seq_id, pool, ",
        "        there = 1 + self._ledger.num_hashed(sequence.seq_id, pool, ",
        ("conversations", "SSD peer"),
    ),
    "a block is published before it is full": Bug(
        "engine/scheduler/prefixes/prefix_cache.py",
        "        num_full = sequence.num_computed_tokens // size\n        if num_full",
        "        num_full = -(-sequence.num_computed_tokens // size)\n        if num_full",
        ("conversations",),
    ),
    "a hash leaves out what comes before its block": Bug(
        "engine/scheduler/cache/hashes.py",
        "            block.update(parent)\n",
        "",
        ("conversations",),
    ),
    "shared blocks are written": Bug(
        "engine/scheduler/cache/block_pool.py",
        "in self.index or self.num_references[table[i]] > 1\n",
        "is None\n",
        ("recurrent", "recurrent crowd"),
    ),
    "a command frees its blocks too early": Bug(
        "engine/scheduler/cache/block_pool.py",
        "        if self.num_commands[block_id]:\n            return BlockState.DRAINING\n",
        "",
        ("leaving crowd",),
    ),
    "two messages are swapped": Bug(
        "engine/wire/channel.py",
        "        self._unsent.append(frame(self._encode(command)))\n",
        "        self._unsent.insert(0, frame(self._encode(command)))\n",
        ("crowd", "2x1 peer"),
    ),
    "a worker is not started again": Bug(
        "appliance/fleet/supervisor.py",
        "            await self._respawn(worker)\n",
        "            return\n",
        ("alias",),
    ),
    "a dead worker's last messages are dropped": Bug(
        "appliance/fleet/supervisor.py",
        '        was_ready = worker.state == "ready"\n',
        "        was_ready = False\n",
        ("alias",),
    ),
    "a hung worker is left alone": Bug(
        "appliance/fleet/supervisor.py",
        "WorkerFailed(about, where=where)\n            worker.process.kill()\n",
        "WorkerFailed(about, where=where)\n",
        ("alias",),
    ),
    "a starved worker counts as hung": Bug(
        "appliance/observe/telemetry/progress.py",
        "        elapsed_s = own_s(last.threads, reading.threads, min(elapsed_s, MAX_ELAPSED_S))\n",
        "        elapsed_s = min(elapsed_s, MAX_ELAPSED_S)\n",
        ("alias",),
    ),
    "a row is written twice, or not": Bug(
        "appliance/daemon/serving/closed_requests.py",
        "        self._log.record(row)\n\n",
        "        if frame.recoveries == 0:\n            self._log.record(row)\n\n",
        ("alias",),
    ),
    "damaged blocks on disk are believed": Bug(
        "engine/scheduler/offload/slab_files.py",
        "        if head.payload_crc != payload_crc(buffer.block):\n",
        "        if False:\n",
        ("SSD",),
    ),
    "what a dead worker was to copy counts as copied": Bug(
        "engine/scheduler/offload/arena.py",
        "        job.num_done, job.is_void, job.error = 0, True, error\n",
        "        job.num_done, job.is_void, job.error = len(job.copy.pairs), False, None\n",
        ("DRAM",),
    ),
    "a killed process goes on": Bug(
        "tests/sweep/virtual_loop.py",
        "        if process is not None and process.is_dead:\n            process.graveyard",
        "        if False:\n            process.graveyard",
        ("alias",),
    ),
    "a replay takes values of its own": Bug(
        "appliance/api/core/enter.py",
        "anew if journal is None else journal.replayed\n",
        "anew\n",
        ("every api", "choices"),
    ),
    "a recovered stream is told its tokens twice": Bug(
        "appliance/daemon/serving/service.py",
        "        request.inbox.put_nowait(TokensEmitted(sequence, token_ids, logprobs, is_last))\n",
        "        told = TokensEmitted(sequence, token_ids, logprobs, is_last)\n"
        "        for _ in range(1 + (sequence.num_recoveries > 0 and not is_last)):\n"
        "            request.inbox.put_nowait(told)\n",
        ("alias", "choices"),
    ),
}


def find(name: str, num_runs: int = 400) -> str | None:
    """Sweep a copy of the tree with the bug; say after how many runs what showed it, or None."""
    bug, num_done = BUGS[name], 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", "*.egg-info")
        shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True)
        path = tree / bug.file
        path.write_text(path.read_text().replace(bug.right, bug.wrong))
        for scenario in bug.scenarios:
            command = ["timeout", str(LONGEST_S), sys.executable, "-m", "tests.sweep", scenario]
            command += ["--first", "--jobs", "1", "--sample", str(num_runs)]
            swept = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
            lines = swept.stdout.splitlines() or [swept.stderr[-SHOWN:]]
            num_done += sum(map(int, re.findall(r"^(\d+) runs, \d+ failures$", swept.stdout, re.M)))
            if swept.returncode not in (0, TIMED_OUT):
                return f"{num_done} runs: {lines[0][:SHOWN]}"
    return None


def main() -> int:
    missed = 0
    for name in sys.argv[1:] or BUGS:
        began_s = time.monotonic()
        found = find(name)
        missed += found is None
        print(f"{name}: {found or 'NOT FOUND'} ({time.monotonic() - began_s:.0f} s)", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
