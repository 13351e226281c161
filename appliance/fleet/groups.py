"""Refuse workers of several processes that a model or the settings do not allow.

Invariant: what a group cannot do is refused before anything is loaded, with what would do.
"""

from __future__ import annotations

from appliance.configuration.settings import ServeConfig
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.shards import num_shards, why_no_shards
from engine.checkpoint.weights_layout import AS_STORED
from engine.errors import ConfigError
from engine.kernels.cpu import has_kernels

_LEAVE_OUT = "leave + out of --place: a worker is one process then"


def check_group(checkpoint: Checkpoint, dtype: str, config: ServeConfig) -> None:
    """Refuse workers of the wanted number of processes, if that cannot be.

    Raises:
        ConfigError: naming why.
    """
    if config.place.width == 1:
        return
    reason = why_no_shards(checkpoint)
    if reason is not None:
        what = f"this model cannot be divided between processes: {reason}"
        raise ConfigError(what, where="place", hint=_LEAVE_OUT)
    count = num_shards(checkpoint)
    unfit = [width for width in config.place.widths if count % width]
    if unfit:
        able = [str(each) for each in range(2, count + 1) if count % each == 0]
        raise ConfigError(
            f"{unfit[0]} processes, and the model is divided into {count} parts",
            where="place",
            hint=f"a worker of this model has {' or '.join(able)} processes",
        )
    if config.roles == "elastic":
        what = "workers of several processes lend each other no cores"
        raise ConfigError(what, where="roles", hint="--roles static, or leave it out")
    if dtype == "float16":
        what = "a worker of several processes has no kernels for float16"
        raise ConfigError(what, where="dtype", hint="--dtype auto")
    if config.kv_dtype != "auto":
        what = f"a worker of several processes keeps no KV as {config.kv_dtype}"
        raise ConfigError(what, where="kv_dtype", hint="leave out --kv-dtype")
    if config.weights != AS_STORED:
        what = "a worker of several processes quantises no weights at start"
        raise ConfigError(what, where="weights", hint="leave out --weights")
    if isinstance(config.offload_weights, int):
        what = "a worker of several processes keeps no weights on disk"
        raise ConfigError(what, where="offload_weights", hint="leave out --offload-weights")
    if not has_kernels():
        what = "a worker of several processes needs the compiled kernels, which are missing"
        raise ConfigError(what, where="place", hint=_LEAVE_OUT)
