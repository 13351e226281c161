"""List every setting: how it is read and what it means.

Never: reads a file or a variable; imports anything slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

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
    names,
    on_or_off,
    one_of,
    origins,
    parse_bytes,
    some_devices,
    some_weights,
)
from appliance.configuration.wanted_workers import parse_place
from appliance.hub.names import a_model
from engine.checkpoint.model_config import INT8_KV

MAX_DRAFT = 7
"""The limit in engine.worker.drafts, compared by a test: importing it here would be slow."""
ROLES = ("elastic", "static", "colocated")
TOOL_PARSERS = (
    *("hermes", "qwen3_coder", "mistral", "mistral_list", "llama", "pythonic", "granite"),
    *("harmony", "deepseek_v3", "glm", "gemma", "functiongemma"),
)
"""The names in formats.tool_format, compared by a test: importing it here would be slow."""
REASONING_PARSERS = ("think", "mistral", "gemma", "granite")


class Setting(NamedTuple):
    """One setting: its parser, its meaning, whether a running daemon can change it."""

    parse: Callable[[object], object]
    about: str
    is_reloadable: bool = False
    field: str | None = None
    """The field of ServeConfig, if it has another name than the setting."""


SETTINGS: Mapping[str, Setting] = {
    "model": Setting(
        a_model,
        "model to serve: a folder, a GGUF file, owner/name on the hub or a short name; "
        "default: the built-in starter model",
    ),
    "embedding_model": Setting(
        a_model,
        "model beside it that makes vectors of texts, named like model (docs/models.md)",
    ),
    "rerank_model": Setting(
        a_model,
        "model beside it that scores pairs of texts, named like model (docs/models.md)",
    ),
    "dtype": Setting(
        one_of("auto", "float32", "bfloat16", "float16"),
        "dtype to compute in: auto, float32, bfloat16 or float16",
    ),
    "weights": Setting(
        one_of("stored", "q8", "q4", "int8"),
        "weights in memory: stored keeps the checkpoint's form; q8 and q4 quantise to 8 or 4 bits; "
        "int8 is W8A8",
    ),
    "offload_weights": Setting(
        a_size_or("auto"),
        "weights that stay on disk, read in each step (CPUs only), e.g. 20GiB; auto: what does not "
        "fit in memory",
    ),
    "kv_dtype": Setting(
        one_of("auto", INT8_KV),
        "dtype of the KV cache: auto is the serving dtype; int8 holds about twice the tokens (CPUs "
        "only)",
    ),
    "exact": Setting(
        one_of("auto", "bitwise"),
        "auto lets CPUs with AMX compute prompts faster, with other last bits than decode; bitwise "
        "does not; other CPUs are always bitwise, which slows float32 prompts by a tenth",
    ),
    "speculate": Setting(
        a_number_or(1, MAX_DRAFT, "auto", "off"),
        "guess tokens from earlier text in decode steps (CPUs): auto: where replies get faster; "
        "off; or a maximum per step, 1 to 7",
    ),
    "transport": Setting(
        one_of("auto", "alias", "peer", "shm"),
        "how KV moves from prefill to decode: auto, alias (zero-copy), peer or shm",
    ),
    "roles": Setting(
        one_of("auto", *ROLES),
        "worker roles: elastic: best worker per prompt; static: one worker per phase; "
        "colocated: one worker; auto: elastic, or colocated on one GPU",
    ),
    "place": Setting(
        parse_place,
        "prefill and decode workers: 2x1, or their devices: 'prefill=cuda:0 decode=cuda:1,2-3'; "
        "default: one each, or one for each GPU or NUMA node",
    ),
    "devices": Setting(some_devices, "devices to serve on: auto, cpu, or GPUs by name, e.g. gpu0"),
    "eager": Setting(a_flag, "do not use CUDA graphs for decode steps: true or false"),
    "safe_kernels": Setting(
        a_flag, "on GPUs run kernels of torch and flash-attn alone: true or false"
    ),
    "slo_ttft_ms": Setting(
        at_least(0, "milliseconds"),
        "TTFT target in ms; 0: relative to the time that the prompt takes alone",
        True,
    ),
    "slo_itl_ms": Setting(
        at_least(0, "milliseconds"),
        "ITL target in ms; 0: relative to an undisturbed decode step",
        True,
    ),
    "max_model_len": Setting(at_least(2, "tokens"), "maximum tokens of prompt and reply together"),
    "kv_memory": Setting(
        parse_bytes, "memory for the KV cache, e.g. 2GiB", field="kv_memory_bytes"
    ),
    "default_max_tokens": Setting(
        at_least(1, "tokens"),
        "maximum tokens of a chat's reply if the client sets no limit; default: the context left",
    ),
    "prefix_cache": Setting(
        on_or_off,
        "reuse KV of prompts with equal beginnings: on or off",
    ),
    "cache_isolation": Setting(
        one_of("none", "user"),
        "prefix cache sharing: none: shared by all; user: separate per user, which prevents "
        "timing leaks",
    ),
    "dram_cache": Setting(
        a_size_or("off"), "host memory for KV evicted from the pools, e.g. 8GiB; or off"
    ),
    "ssd_cache": Setting(
        a_size_or("auto", "off"), "disk space for KV kept across restarts, e.g. 20GiB; or auto, off"
    ),
    "ssd_dir": Setting(a_path, "folder of the SSD cache; default: kv in the state folder"),
    "socket": Setting(a_path, "the Unix socket to listen on"),
    "state_dir": Setting(a_path, "folder of the request log and of KV on disk"),
    "listen": Setting(
        an_address,
        "TCP address to listen on besides, e.g. 127.0.0.1:8000; beyond loopback TLS is required",
    ),
    "tls_cert": Setting(a_path, "certificate chain (PEM) for TLS on TCP; read again at a reload"),
    "tls_key": Setting(a_path, "private key (PEM) of the certificate; read again at a reload"),
    "open_metrics": Setting(on_or_off, "serve /metrics on TCP without a key: on or off", True),
    "page": Setting(on_or_off, "answer browsers at / with a page: on or off", True),
    "api_keys": Setting(a_path, "file of the API keys of clients on TCP", True),
    "auth": Setting(
        a_flag, "ask TCP clients for API keys; without, on loopback only, each has the role user"
    ),
    "operators": Setting(
        names, "users and @groups who may cancel any request and drain, separated by commas", True
    ),
    "viewers": Setting(names, "users and @groups who may only read, separated by commas", True),
    "max_queued": Setting(at_least(1, "sequences"), "maximum sequences in the queue", True),
    "max_queued_tokens": Setting(at_least(1, "tokens"), "maximum prompt tokens in the queue", True),
    "max_connections": Setting(at_least(1, "connections"), "most open connections", True),
    "max_body": Setting(parse_bytes, "largest request body, e.g. 8MiB", True, "max_body_bytes"),
    "model_aliases": Setting(
        aliases,
        "other names of the model for clients, separated by commas; * matches any text",
    ),
    "cors_origins": Setting(
        origins,
        "web origins that may use the API from a browser, e.g. https://app.example; * is all",
        True,
    ),
    "tool_parser": Setting(
        one_of("auto", *TOOL_PARSERS),
        "format of the model's tool calls; auto: from its chat template",
    ),
    "reasoning_parser": Setting(
        one_of("auto", "none", *REASONING_PARSERS),
        "format of the model's reasoning; auto: from its chat template",
    ),
    "max_queue_wait": Setting(
        a_duration,
        "reject (429 with Retry-After) requests expected to wait longer, e.g. 60s; 0: no limit",
        True,
        "max_queue_wait_s",
    ),
    "priorities": Setting(
        some_weights,
        "shares of the queue by user or key, e.g. ann=4,key:batch=0.5; default 1",
        True,
    ),
    "max_drain": Setting(
        a_duration,
        "longest drain at a stop, e.g. 90s; running replies are then cut; 0: no limit",
        True,
        "max_drain_s",
    ),
    "log_text": Setting(a_flag, "store prompts in the request log: true or false", True),
    "log_keep_days": Setting(at_least(1, "days"), "days to keep a request in the log", True),
    "min_stay": Setting(
        a_duration,
        "minimum time that a busy model stays before a swap, e.g. 10s; an idle one is swapped at "
        "once",
        True,
        "min_stay_s",
    ),
    "keep_resident": Setting(
        at_least(1, "models"),
        "maximum loaded models: while they fit in memory, swaps between them load nothing (CPUs "
        "only); default 1",
    ),
    "keep_alive": Setting(
        a_stay,
        "time until an unused loaded model is unloaded, e.g. 5m, or forever; the first model and "
        "the served one stay",
        True,
        "keep_alive_s",
    ),
    "log_max_size": Setting(
        parse_bytes,
        "largest request log, e.g. 2GiB; the oldest rows are deleted",
        True,
        "log_max_bytes",
    ),
}
"""Settings by name, used in the file, as a flag and as PENSTOCK_NAME."""
