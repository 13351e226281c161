"""Declare every setting: its default, how it is read, and what it means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from appliance.configuration import paths
from appliance.configuration.setting_kinds import (
    a_duration,
    a_flag,
    a_number_or,
    a_path,
    a_size_or,
    a_stay,
    aliases,
    an_address,
    at_least,
    is_loopback,
    names,
    on_or_off,
    one_of,
    origins,
    parse_bytes,
    some_devices,
    some_weights,
)
from appliance.configuration.wanted_workers import ONE_OF_EACH, WantedWorkers, parse_place
from appliance.hub.names import HubName, a_model
from engine.checkpoint.model_config import INT8_KV
from engine.errors import ConfigError

MAX_DRAFT = 7
"""The limit in engine.worker.drafts, compared by a test: importing it here would be slow."""
ROLES = ("elastic", "static", "colocated")
TOOL_PARSERS = (
    *("hermes", "qwen3_coder", "mistral", "mistral_list", "llama", "pythonic", "granite"),
    *("harmony", "deepseek_v3", "glm", "gemma", "functiongemma"),
)
"""The names in formats.tool_format, compared by a test: importing it here would be slow."""
REASONING_PARSERS = ("think", "mistral", "gemma", "granite")


SSD_FOLDER = "kv"
"""The subfolder of the state folder for blocks on disk."""
DEFAULT_OPERATORS = ("@penstock-admin",)
"""The unit's group; most machines have no such group."""
_KEY = "setting"


class Setting(NamedTuple):
    """One setting: its parser, its meaning, whether a running daemon can change it."""

    parse: Callable[[object], object]
    about: str
    is_reloadable: bool
    field: str
    """The field of ServeConfig, whose name may say the unit besides."""


def _setting(
    default: object,
    parse: Callable[[object], object],
    about: str,
    *,
    name: str = "",
    is_reloadable: bool = False,
) -> Any:
    """Declare a field of ServeConfig with its setting; `name` if it is another than the field's."""
    return field(default=default, metadata={_KEY: (name, parse, about, is_reloadable)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """All settings of the daemon; built by config.load(), or by hand in tests."""

    model: Path | HubName | None = _setting(
        None,
        a_model,
        "model to serve: a folder, a GGUF file, owner/name on the hub or a short name; "
        "default: the built-in starter model",
    )
    embedding_model: Path | HubName | None = _setting(
        None,
        a_model,
        "model beside it that makes vectors of texts, named like model (docs/models.md)",
    )
    rerank_model: Path | HubName | None = _setting(
        None,
        a_model,
        "model beside it that scores pairs of texts, named like model (docs/models.md)",
    )
    dtype: str = _setting(
        "auto",
        one_of("auto", "float32", "bfloat16", "float16"),
        "dtype to compute in: auto, float32, bfloat16 or float16",
    )
    weights: str = _setting(
        "stored",
        one_of("stored", "q8", "q4", "int8"),
        "weights in memory: stored keeps the checkpoint's form; q8 and q4 quantise to 8 or 4 bits; "
        "int8 is W8A8",
    )
    offload_weights: int | str = _setting(
        "auto",
        a_size_or("auto"),
        "weights that stay on disk, read in each step (CPUs only), e.g. 20GiB; auto: what does not "
        "fit in memory",
    )
    kv_dtype: str = _setting(
        "auto",
        one_of("auto", INT8_KV),
        "dtype of the KV cache: auto is the serving dtype; int8 holds about twice the tokens (CPUs "
        "only)",
    )
    exact: str = _setting(
        "auto",
        one_of("auto", "bitwise"),
        "auto lets CPUs with AMX compute prompts faster, with other last bits than decode; bitwise "
        "does not; other CPUs are always bitwise, which slows float32 prompts by a tenth",
    )
    speculate: int | str = _setting(
        "auto",
        a_number_or(1, MAX_DRAFT, "auto", "off"),
        "guess tokens from earlier text in decode steps (CPUs): auto: where replies get faster; "
        "off; or a maximum per step, 1 to 7",
    )
    transport: str = _setting(
        "auto",
        one_of("auto", "alias", "peer", "shm"),
        "how KV moves from prefill to decode: auto, alias (zero-copy), peer or shm",
    )
    roles: str = _setting(
        "auto",
        one_of("auto", *ROLES),
        "worker roles: elastic: best worker per prompt; static: one worker per phase; "
        "colocated: one worker; auto: elastic, or colocated on one GPU",
    )
    place: WantedWorkers = _setting(
        ONE_OF_EACH,
        parse_place,
        "prefill and decode workers: 2x1, or their devices: 'prefill=cuda:0 decode=cuda:1,2-3'; "
        "default: one each, or one for each GPU or NUMA node",
    )
    devices: str = _setting(
        "auto", some_devices, "devices to serve on: auto, cpu, or GPUs by name, e.g. gpu0"
    )
    eager: bool = _setting(False, a_flag, "do not use CUDA graphs for decode steps: true or false")
    safe_kernels: bool = _setting(
        False, a_flag, "on GPUs run kernels of torch and flash-attn alone: true or false"
    )
    slo_ttft_ms: int = _setting(
        0,
        at_least(0, "milliseconds"),
        "TTFT target in ms; 0: relative to the time that the prompt takes alone",
        is_reloadable=True,
    )
    slo_itl_ms: int = _setting(
        0,
        at_least(0, "milliseconds"),
        "ITL target in ms; 0: relative to an undisturbed decode step",
        is_reloadable=True,
    )
    max_model_len: int | None = _setting(
        None, at_least(2, "tokens"), "maximum tokens of prompt and reply together"
    )
    kv_memory_bytes: int | None = _setting(
        None, parse_bytes, "memory for the KV cache, e.g. 2GiB", name="kv_memory"
    )
    default_max_tokens: int | None = _setting(
        None,
        at_least(1, "tokens"),
        "maximum tokens of a chat's reply if the client sets no limit; default: the context left",
    )
    prefix_cache: bool = _setting(
        True, on_or_off, "reuse KV of prompts with equal beginnings: on or off"
    )
    cache_isolation: str = _setting(
        "none",
        one_of("none", "user"),
        "prefix cache sharing: none: shared by all; user: separate per user, which prevents "
        "timing leaks",
    )
    dram_cache: int | str = _setting(
        "off", a_size_or("off"), "host memory for KV evicted from the pools, e.g. 8GiB; or off"
    )
    ssd_cache: int | str = _setting(
        "auto",
        a_size_or("auto", "off"),
        "disk space for KV kept across restarts, e.g. 20GiB; or auto, off",
    )
    ssd_dir: Path | None = _setting(
        None, a_path, "folder of the SSD cache; default: kv in the state folder"
    )
    socket: Path = _setting(MISSING, a_path, "the Unix socket to listen on")
    state_dir: Path = _setting(MISSING, a_path, "folder of the request log and of KV on disk")
    listen: tuple[str, int] | None = _setting(
        None,
        an_address,
        "TCP address to listen on besides, e.g. 127.0.0.1:8000; beyond loopback TLS is required",
    )
    tls_cert: Path | None = _setting(
        None, a_path, "certificate chain (PEM) for TLS on TCP; read again at a reload"
    )
    tls_key: Path | None = _setting(
        None, a_path, "private key (PEM) of the certificate; read again at a reload"
    )
    open_metrics: bool = _setting(
        False, on_or_off, "serve /metrics on TCP without a key: on or off", is_reloadable=True
    )
    page: bool = _setting(
        True, on_or_off, "answer browsers at / with a page: on or off", is_reloadable=True
    )
    api_keys: Path | None = _setting(
        None, a_path, "file of the API keys of clients on TCP", is_reloadable=True
    )
    auth: bool = _setting(
        True,
        a_flag,
        "ask TCP clients for API keys; without, on loopback only, each has the role user",
    )
    operators: tuple[str, ...] = _setting(
        DEFAULT_OPERATORS,
        names,
        "users and @groups who may cancel any request and drain, separated by commas",
        is_reloadable=True,
    )
    viewers: tuple[str, ...] = _setting(
        (), names, "users and @groups who may only read, separated by commas", is_reloadable=True
    )
    max_queued: int = _setting(
        512, at_least(1, "sequences"), "maximum sequences in the queue", is_reloadable=True
    )
    max_queued_tokens: int = _setting(
        1 << 20, at_least(1, "tokens"), "maximum prompt tokens in the queue", is_reloadable=True
    )
    max_connections: int = _setting(
        1024, at_least(1, "connections"), "most open connections", is_reloadable=True
    )
    max_body_bytes: int = _setting(
        8 << 20, parse_bytes, "largest request body, e.g. 8MiB", name="max_body", is_reloadable=True
    )
    model_aliases: tuple[str, ...] = _setting(
        (), aliases, "other names of the model for clients, separated by commas; * matches any text"
    )
    cors_origins: tuple[str, ...] = _setting(
        (),
        origins,
        "web origins that may use the API from a browser, e.g. https://app.example; * is all",
        is_reloadable=True,
    )
    tool_parser: str = _setting(
        "auto",
        one_of("auto", *TOOL_PARSERS),
        "format of the model's tool calls; auto: from its chat template",
    )
    reasoning_parser: str = _setting(
        "auto",
        one_of("auto", "none", *REASONING_PARSERS),
        "format of the model's reasoning; auto: from its chat template",
    )
    max_queue_wait_s: float = _setting(
        60.0,
        a_duration,
        "reject (429 with Retry-After) requests expected to wait longer, e.g. 60s; 0: no limit",
        name="max_queue_wait",
        is_reloadable=True,
    )
    priorities: tuple[tuple[str, float], ...] = _setting(
        (),
        some_weights,
        "shares of the queue by user or key, e.g. ann=4,key:batch=0.5; default 1",
        is_reloadable=True,
    )
    max_drain_s: float = _setting(
        90.0,
        a_duration,
        "longest drain at a stop, e.g. 90s; running replies are then cut; 0: no limit",
        name="max_drain",
        is_reloadable=True,
    )
    log_text: bool = _setting(
        False, a_flag, "store prompts in the request log: true or false", is_reloadable=True
    )
    log_keep_days: int = _setting(
        30, at_least(1, "days"), "days to keep a request in the log", is_reloadable=True
    )
    min_stay_s: float = _setting(
        10.0,
        a_duration,
        "minimum time that a busy model stays before a swap, e.g. 10s; an idle one is swapped at "
        "once",
        name="min_stay",
        is_reloadable=True,
    )
    keep_resident: int = _setting(
        1,
        at_least(1, "models"),
        "maximum loaded models: while they fit in memory, swaps between them load nothing (CPUs "
        "only); default 1",
    )
    keep_alive_s: float = _setting(
        300.0,
        a_stay,
        "time until an unused loaded model is unloaded, e.g. 5m, or forever; the first model and "
        "the served one stay",
        name="keep_alive",
        is_reloadable=True,
    )
    log_max_bytes: int = _setting(
        2 << 30,
        parse_bytes,
        "largest request log, e.g. 2GiB; the oldest rows are deleted",
        name="log_max_size",
        is_reloadable=True,
    )
    models: Mapping[str, ServeConfig] = field(default_factory=dict)
    """The other models that a request may name, each with its own settings."""

    def __post_init__(self) -> None:
        if self.place.colocated is not None and self.roles != "colocated":
            raise ConfigError(
                "a place of the colocated worker, and roles that have none",
                where="place",
                hint="add --roles colocated",
            )
        is_named = self.place.colocated is not None or self.place == ONE_OF_EACH
        if not is_named and self.roles == "colocated":
            raise ConfigError(
                "colocated roles have one worker",
                where="place",
                hint="write colocated=0-3, or leave out --place or --roles",
            )
        if self.transport in ("peer", "shm") and self.roles == "colocated":
            raise ConfigError(
                f"{self.transport!r} needs two workers: colocated roles have nothing to hand over",
                where="transport",
                hint="leave out --transport, or --roles",
            )

        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(
                "a certificate and its key go together",
                where="tls_cert" if self.tls_key is None else "tls_key",
                hint="name both: --tls-cert CHAIN.pem --tls-key KEY.pem",
            )
        if self.listen is not None and self.tls is None and not is_loopback(self.listen[0]):
            raise ConfigError(
                f"{self.listen[0]} is reached from beyond this machine, which needs TLS",
                where="listen",
                hint="add --tls-cert CHAIN.pem --tls-key KEY.pem, or listen on 127.0.0.1",
            )
        if not self.auth and (self.listen is None or self.is_open_to_network):
            raise ConfigError(
                "TCP without API keys is for a port on loopback",
                where="auth",
                hint="add --port 8000" if self.listen is None else "leave out --no-auth",
            )

    @property
    def max_drafted(self) -> int | None:
        """Guessed tokens per sequence in a decode step; None: as many as pay."""
        if isinstance(self.speculate, int):
            return self.speculate
        return None if self.speculate == "auto" else 0

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """The certificate and key for TLS on TCP."""
        both = self.tls_cert, self.tls_key
        return None if both[0] is None or both[1] is None else (both[0], both[1])

    @property
    def is_open_to_network(self) -> bool:
        """Whether other machines can reach it."""
        return self.listen is not None and not is_loopback(self.listen[0])

    @property
    def ssd_folder(self) -> Path:
        """The folder of blocks on disk."""
        return self.ssd_dir or self.state_dir / SSD_FOLDER

    @property
    def log_path(self) -> Path:
        """The request log's file."""
        return paths.log_path(self.state_dir)


def _declared() -> dict[str, Setting]:
    """Collect the settings of ServeConfig by name."""
    found = {}
    for one in fields(ServeConfig):
        if _KEY in one.metadata:
            name, parse, about, is_reloadable = one.metadata[_KEY]
            found[name or one.name] = Setting(parse, about, is_reloadable, one.name)
    return found


SETTINGS: Mapping[str, Setting] = _declared()
"""Settings by name, used in the file, as a flag and as PENSTOCK_NAME."""
