"""Run a worker process: pin it, load, report ready, step until the daemon ends.

Started as `python -P -m engine.worker --channel-fd N --cpus 0,1`; the rest comes with Setup.
Invariant: never outlives the daemon (parent-death signal, and the closed channel).
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from engine.errors import (
    ChannelClosed,
    CheckpointError,
    NotFinite,
    PenstockError,
    RequestError,
    WorkerUnfit,
)
from engine.wire.beats import Beats
from engine.wire.channel import WorkerChannel
from engine.wire.messages import (
    Failed,
    GpuSpec,
    LoadingProgress,
    Ready,
    Setup,
    WeightsComplete,
    WeightsLoaded,
)
from engine.worker.process import load_torch, prepare, set_name

if TYPE_CHECKING:
    import torch

    from engine.checkpoint.checkpoint import Checkpoint
    from engine.checkpoint.model_config import ModelConfig
    from engine.kernels.cpu import ProductVariants
    from engine.worker.affinity import NodeMemory
    from engine.worker.grammars import Grammars
    from engine.worker.group import Followers
    from engine.worker.model.shards import Shards
    from engine.worker.model.transformer import Transformer
    from engine.worker.model.weight import Weight
    from engine.worker.model.weights_ahead import FileRange, WeightsAhead
    from engine.worker.speculation import Speculation
    from engine.worker.text_batches import TextBatches

_PROGRESS_INTERVAL_NS = 200_000_000


def main() -> int:
    """Run one worker; the exit code is 0 after the daemon has ended, 1 on failure."""
    parser = argparse.ArgumentParser(prog="python -m engine.worker")
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--cpus", required=True)
    parser.add_argument("--stacks-fd", type=int)
    parser.add_argument("--beats-fd", type=int)
    parser.add_argument("--link-fds")
    parser.add_argument("--memory-fd", type=int)
    options = parser.parse_args()
    prepare(options.cpus, options.stacks_fd)
    channel = WorkerChannel(socket.socket(fileno=options.channel_fd))
    try:
        load_torch()  # before Setup, so that it overlaps with what the daemon has to do
        setup = channel.expect(Setup)
        set_name(setup.worker)
        beats = None if options.beats_fd is None else Beats(options.beats_fd)
        links = [int(fd) for fd in (options.link_fds or "").split(",") if fd]
        _serve(channel, setup, beats, links, options.memory_fd)
    except ChannelClosed:
        return 0
    except PenstockError as error:
        is_lasting = isinstance(error, WorkerUnfit | NotFinite)
        channel.send(Failed(error.what, error.where, error.hint, is_lasting))
        return 1
    except Exception as error:  # noqa: BLE001  # the process border: the daemon must hear of it
        traceback.print_exc()
        channel.send(Failed(f"{type(error).__name__}: {error}", "worker", "see the traceback"))
        return 1


def _serve(
    channel: WorkerChannel,
    setup: Setup,
    beats: Beats | None,
    links: list[int],
    memory_fd: int | None,
) -> NoReturn:
    """Load and step; with links to other processes, as the first of a group."""
    from engine.worker.affinity import NodeMemory, use_cores
    from engine.worker.copying import probe
    from engine.worker.kv_pool import PagesAhead, map_pool
    from engine.worker.logits_loss import kv_loss, weights_loss
    from engine.worker.loop import StepLoop
    from engine.worker.runner import Runner

    use_cores(setup.cpus)
    progress = _Progress(channel)
    progress.heartbeat()
    checkpoint = _checkpoint(setup)
    config = checkpoint.config.in_groups() if setup.has_window_blocks else checkpoint.config
    grammars = _grammars(checkpoint)
    if setup.gpu is not None:
        _serve_on_gpu(channel, setup, setup.gpu, checkpoint, grammars, progress)
    near = NodeMemory(setup.node)
    followers = _followers(links, memory_fd, setup, beats)
    loaded = _loaded(checkpoint, setup, near, progress, followers)
    channel.send(WeightsLoaded())
    channel.expect(WeightsComplete)
    pool = map_pool(setup.pool, config, setup.block_size, setup.pool_dtype)
    near.prefer(pool)
    specs = setup.other_pools
    others = {s.name: map_pool(s, config, setup.block_size, setup.pool_dtype) for s in specs}
    probes = {name: probe(pool, other) for name, other in others.items()}
    transformer, faults = _transformer(checkpoint, config, setup, loaded, beats, followers)
    progress.heartbeat()
    groups = config.kv_groups.num_groups
    runner = Runner(transformer, pool, setup.block_size, grammars, num_groups=groups)
    runner.warm_up(setup.max_num_batched_tokens, setup.max_model_len)
    progress.heartbeat()
    speculation, why_not = _speculation(transformer, setup)
    worker = StepLoop(
        channel,
        runner,
        pools={setup.pool.name: pool, **others},
        eos_token_ids=config.eos_token_ids,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        own_cores=setup.cpus,
        pages=PagesAhead(pool) if followers is None else None,  # each process makes its own
        speculation=speculation,
        texts=_texts(channel, setup, progress, beats),
    )
    alive, model = progress.heartbeat, (transformer, checkpoint)
    loss = weights_loss(*model, setup.dtype, alive) if loaded.is_measurer else None
    of_kv = kv_loss(*model, setup.kv_dtype, alive) if setup.measures_kv else None
    attention = transformer.attention_backend
    notes = [*near.notes(pool), *why_not, *faults.values()]
    channel.send(Ready(attention, notes=notes, probes=probes, weights_loss=loss, kv_loss=of_kv))
    worker.run()


def _ahead(
    checkpoint: Checkpoint, setup: Setup, ranges: Mapping[str, FileRange], beats: Beats | None
) -> WeightsAhead | None:
    """Read weights on disk ahead; None: all are in memory."""
    from engine.worker.model.weights_ahead import WeightsAhead, units_of

    if setup.disk_bytes is None or beats is None:
        return None
    config = checkpoint.config
    few_tokens = 0
    if (experts := config.experts) is not None:
        few_tokens = (experts.num_experts - 1) // experts.num_per_token
    units = units_of(config, ranges, setup.disk_bytes)
    return WeightsAhead(units, few_tokens, beats.beat, beats.waited)


def _speculation(transformer: Transformer, setup: Setup) -> tuple[Speculation | None, list[str]]:
    """Set up speculation; return it, or the reason against it."""
    from engine.worker.speculation import Speculation

    if setup.max_drafted == 0:
        return None, []
    config = transformer.config
    # a guess could change a letter; on GPUs another batch could, too
    if setup.gpu is None and not transformer.keeps_row_bits:
        return None, ["Speculation: off (no compiled kernels)"]
    if not transformer.rewrites_records:
        return None, ["Speculation: off (recurrent layers without Triton, or in a group)"]
    return Speculation(config.vocab_size, setup.block_size, setup.max_drafted), []


def _texts(
    channel: WorkerChannel,
    setup: Setup,
    progress: _Progress,
    beats: Beats | None,
    device: torch.device | None = None,
) -> TextBatches | None:
    """Load the models of texts; return None if there are none."""
    import torch

    from engine.worker.text_batches import TextBatches
    from engine.worker.text_models import load_text_models

    if not setup.text_models:
        return None
    models = load_text_models(setup.text_models, device or torch.device("cpu"), progress.heartbeat)
    return TextBatches(models, channel.send, None if beats is None else beats.beat)


def _checkpoint(setup: Setup) -> Checkpoint:
    from engine.checkpoint.written_models import checkpoint_in
    from engine.text.read_models import read_checkpoint

    if setup.checkpoint_fd is None:
        return read_checkpoint(Path(setup.model_dir))
    return checkpoint_in(setup.checkpoint_fd)


def _grammars(checkpoint: Checkpoint) -> Grammars:
    """Compile grammars for a model's tokenizer, loaded with the first grammar."""
    from engine.text.grammar import GrammarError
    from engine.text.grammar_matcher import GrammarTokenizer
    from engine.text.read_models import read_tokenizer
    from engine.worker.grammars import Grammars

    folder, config = checkpoint.folder, checkpoint.config
    size, ends = config.vocab_size, config.eos_token_ids

    def load() -> GrammarTokenizer:
        try:
            tokenizer = read_tokenizer(folder, has_chats=False)
        except (CheckpointError, RequestError) as error:
            raise GrammarError(f"the model's tokenizer cannot be read: {error.what}") from error
        return GrammarTokenizer(tokenizer, size, ends)

    return Grammars(load)


class _Loaded(NamedTuple):
    """A worker's weights."""

    weights: dict[str, Weight]
    variants: ProductVariants | None = None
    """How packed ones are multiplied."""
    is_measurer: bool = False
    """Whether it measures what quantising them has changed."""
    ranges: Mapping[str, FileRange] = MappingProxyType({})
    """Where weights lie in files, if steps read them from disk."""
    shards: Shards | None = None
    """The first process's of a group; weights are what it has besides."""


def _followers(
    links: list[int], memory_fd: int | None, setup: Setup, beats: Beats | None
) -> Followers | None:
    """Let the other processes of a group load; None: the worker is one process."""
    if setup.group is None:
        return None
    from engine.worker.group import Followers

    if memory_fd is None:  # it computes all shards by itself
        memory_fd = os.memfd_create("penstock-group", os.MFD_CLOEXEC)
    followers = Followers(links, memory_fd, beats)
    followers.begin(setup)
    return followers


def _transformer(
    checkpoint: Checkpoint,
    config: ModelConfig,
    setup: Setup,
    loaded: _Loaded,
    beats: Beats | None,
    followers: Followers | None,
) -> tuple[Transformer, dict[str, str]]:
    """Build the model; return with it why compiled kernels are not used."""
    from engine.worker.group import LeadingTransformer
    from engine.worker.model.transformer import Transformer
    from engine.worker.self_test import faults_of_cores

    shape = setup.dtype, setup.max_model_len, setup.block_size
    beat = None if beats is None else beats.beat
    how = (config, loaded.weights, *shape, loaded.variants, setup.attention_variant, beat)
    if followers is not None and loaded.shards is not None:
        return LeadingTransformer(followers, *how, shards=loaded.shards), {}
    faults = faults_of_cores(checkpoint, setup)
    ahead = _ahead(checkpoint, setup, loaded.ranges, beats)
    return Transformer(*how, faults, ahead), faults


def _loaded(
    checkpoint: Checkpoint,
    setup: Setup,
    near: NodeMemory,
    progress: _Progress,
    followers: Followers | None,
) -> _Loaded:
    """Load the weights, or a group's shards of them."""
    from engine.checkpoint.weights_layout import AS_STORED
    from engine.kernels.cpu import ProductVariants
    from engine.system.mapped_files import map_unchanged
    from engine.worker.model.weights import load_weights
    from engine.worker.model.weights_ahead import ranges_of
    from engine.worker.write_back import WriteBack

    if followers is not None:
        part = followers.load(checkpoint, setup, progress)
        return _Loaded(part.weights, part.variants, shards=part.shards)
    spec = setup.weights
    if spec is None:
        on_disk = setup.disk_bytes is not None
        weights = load_weights(checkpoint, setup.dtype, None, None, progress, stays_on_disk=on_disk)
        ranges = {} if not on_disk else ranges_of(weights, checkpoint, None)
        return _Loaded(weights, ranges=ranges)
    if spec.is_file and spec.is_filled:
        arena = map_unchanged(spec.fd, spec.num_bytes)
    else:
        arena = mmap.mmap(spec.fd, spec.num_bytes, mmap.MAP_SHARED)
    if not spec.is_file:
        near.prefer(arena)
    share = None if spec.is_filled else (spec.share_index, spec.share_count)
    writing = WriteBack(arena, spec.fd, progress) if spec.is_file and share is not None else None
    weights = load_weights(
        checkpoint,
        setup.dtype,
        arena,
        share,
        writing or progress,
        is_packed=spec.is_packed,
        weights=spec.weights,
    )
    if writing is not None:
        writing.settle()
    variants = None
    if spec.variant is not None:
        variants = ProductVariants(spec.variant, spec.has_tiles)
    ranges = ranges_of(weights, checkpoint, (arena, spec.fd)) if spec.is_file else {}
    # the weights as stored, which are to be compared, would all be in memory
    is_measurer = spec.weights != AS_STORED and share is not None and not spec.is_file
    return _Loaded(weights, variants, is_measurer and spec.share_index == 0, ranges)


def _serve_on_gpu(
    channel: WorkerChannel,
    setup: Setup,
    gpu: GpuSpec,
    checkpoint: Checkpoint,
    grammars: Grammars,
    progress: _Progress,
) -> NoReturn:
    from engine.worker.device import CudaDevice, finished_at_the_end
    from engine.worker.loop import StepLoop
    from engine.worker.on_gpu import start

    device = CudaDevice(gpu.uuid)
    with finished_at_the_end(device):
        # before the pool takes the rest of the memory
        texts = _texts(channel, setup, progress, None, device.torch_device)
        started = start(
            channel, setup, gpu, checkpoint, device, grammars, progress, progress.heartbeat
        )
        speculation, why_not = _speculation(started.transformer, setup)
        started.ready.notes.extend(why_not)
        worker = StepLoop(
            channel,
            started.runner,
            texts=texts,
            pools=started.pools,
            eos_token_ids=checkpoint.config.eos_token_ids,
            max_num_batched_tokens=started.ready.max_num_batched_tokens
            or setup.max_num_batched_tokens,
            device=device,
            map_pool=started.map_pool,
            speculation=speculation,
        )
        channel.send(started.ready)
        worker.run()


class _Progress:
    """Sends LoadingProgress a few times a second, and after each part of the start."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._last_ns = 0
        self._so_far = LoadingProgress(0, 0)

    def __call__(self, loaded_bytes: int, total_bytes: int) -> None:
        self._so_far = LoadingProgress(loaded_bytes, total_bytes)
        now_ns = time.monotonic_ns()
        if now_ns - self._last_ns >= _PROGRESS_INTERVAL_NS or loaded_bytes == total_bytes:
            self._last_ns = now_ns
            self.heartbeat()

    def heartbeat(self) -> None:
        """Report a finished part of the start without bytes, so that it does not look hung."""
        self._channel.send(self._so_far)


if __name__ == "__main__":
    # nothing is left to tidy up, and taking torch apart politely costs a second or two
    code = main()
    sys.stderr.flush()
    os._exit(code)
