"""A group of processes: the first is the test's own, the others are as the daemon starts them."""

from __future__ import annotations

import os
import subprocess
import sys

from appliance.fleet.rank_processes import GroupFds
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.shards import num_shards
from engine.errors import WorkerFailed
from engine.wire.messages import GroupSpec, PoolSpec, Setup
from engine.worker.group import Followers, LeadingTransformer
from engine.worker.kv_pool import map_pool

BLOCK_SIZE = 16
NUM_BLOCKS = 200


class Group:
    """A model in several processes, as `.model`, over a pool, `.kv`."""

    def __init__(self, folder, width, dtype="float32", variants=None, others_folder=None):
        checkpoint = Checkpoint.open(folder)
        config = self.config = checkpoint.config
        cores = sorted(os.sched_getaffinity(0))
        pool_bytes = NUM_BLOCKS * config.kv_block_bytes(BLOCK_SIZE, dtype)
        self.pool_fd = os.memfd_create("pool", os.MFD_CLOEXEC)
        os.ftruncate(self.pool_fd, pool_bytes)
        spec = GroupSpec(
            [[cores[rank % len(cores)]] for rank in range(width)],
            num_shards(checkpoint),
            variant=None if variants is None else variants.few,
            has_tiles=variants is not None and variants.has_tiles,
        )
        setup = Setup(
            worker="w", model_dir=str(others_folder or folder), dtype=dtype, block_size=BLOCK_SIZE,
            pool=PoolSpec("w", self.pool_fd, NUM_BLOCKS), weights=None, cpus=spec.cpus[0],
            max_num_batched_tokens=256, max_model_len=512, group=spec,
        )  # fmt: skip
        fds = GroupFds(width - 1)
        _, first = fds.of_first
        self.others = [self._start(*fds.of(rank), setup) for rank in range(1, width)]
        self.memory_fd = os.dup(first[-1]) if first else os.memfd_create("group")
        links = [os.dup(fd) for fd in first[:-1]]
        fds.close()
        self.followers = Followers(links, self.memory_fd)
        self.followers.begin(setup)
        try:
            part = self.followers.load(checkpoint, setup, lambda _done, _total: None)
        except WorkerFailed:
            self.stop()
            raise
        self.reduction = part.shards.reduction
        how = (dtype, 512, BLOCK_SIZE, part.variants)
        self.model = LeadingTransformer(
            self.followers, config, part.weights, *how, shards=part.shards
        )
        self.kv = map_pool(setup.pool, config, BLOCK_SIZE, dtype)

    def _start(self, arguments, fds, setup):
        command = [sys.executable, "-P", "-m", "engine.worker.rank", *arguments]
        cpus = ",".join(str(cpu) for each in setup.group.cpus for cpu in each)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*command, "--cpus", cpus], pass_fds=[*fds, self.pool_fd], env=env)

    def stop(self):
        """End all; the exit codes of the others."""
        del self.followers._links[:]
        self.model = None
        for process in self.others:
            process.kill()
        return [process.wait() for process in self.others]
