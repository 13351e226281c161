"""The table of settings: how each is read, and what it means.

Owns: every setting's name, allowed values and meaning.
Never: reads a file or a variable; imports anything slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from appliance.configuration.setting_kinds import (
    a_duration,
    a_flag,
    a_path,
    a_size_or,
    aliases,
    an_address,
    at_least,
    names,
    on_or_off,
    one_of,
    origins,
    parse_bytes,
    parse_place,
    some_devices,
    some_weights,
)
from appliance.models.names import a_model
from engine.folder.model_config import INT8_KV

ROLES = ("elastic", "static", "colocated")
TOOL_PARSERS = (
    *("hermes", "qwen3_coder", "mistral", "mistral_list", "llama", "pythonic", "granite"),
    *("harmony", "deepseek_v3", "deepseek_v31", "deepseek_v32", "glm", "gemma", "functiongemma"),
)
"""Those of api.tool_format, which a test compares: importing that here would be slow."""
REASONING_PARSERS = ("think", "mistral", "gemma", "granite")


class Setting(NamedTuple):
    """One setting: how it is read, what it means, whether a running daemon can change it."""

    parse: Callable[[object], object]
    about: str
    is_reloadable: bool = False
    field: str | None = None
    """Of ServeConfig, where it is not the setting's own name."""


SETTINGS: Mapping[str, Setting] = {
    "model": Setting(
        a_model,
        "model to serve: a folder, or a name on the hub such as Qwen/Qwen3-0.6B; without one the "
        "embedded starter model",
    ),
    "dtype": Setting(
        one_of("auto", "float32", "bfloat16", "float16"),
        "dtype to serve in: auto, float32, bfloat16 or float16",
    ),
    "weights": Setting(
        one_of("stored", "q8", "q4", "int8"),
        "matrices in memory: stored, as the checkpoint has them, or quantised at start: q8 and "
        "q4 to 8 or 4 bits each, int8 to 8 bits with inputs rounded to 8 bits, too",
    ),
    "kv_dtype": Setting(
        one_of("auto", INT8_KV),
        "keys and values in the pools: auto, in the dtype that is served, or int8, of which about "
        "twice as many tokens fit, on CPUs",
    ),
    "transport": Setting(
        one_of("auto", "alias", "peer", "shm"),
        "how the KV is handed over: auto, alias (nothing moves), peer or shm",
    ),
    "roles": Setting(
        one_of("auto", *ROLES),
        "workers: elastic lets each do what pays, static has one for each phase, colocated one; "
        "auto is elastic, and colocated on a single GPU",
    ),
    "place": Setting(
        parse_place,
        "workers by role: 2x1, or cores and GPUs as 'prefill=cuda:0 decode=cuda:1,2-3'; without "
        "it one of each role, or one for each GPU or NUMA node",
    ),
    "devices": Setting(some_devices, "what to serve on: auto, cpu, or GPUs by name, as gpu0"),
    "eager": Setting(a_flag, "launch decode steps on a GPU piece by piece: true or false"),
    "slo_ttft_ms": Setting(
        at_least(0, "milliseconds"),
        "target for the first token, and for a turn; 0 is relative to the prompt's own time",
        True,
    ),
    "slo_itl_ms": Setting(
        at_least(0, "milliseconds"),
        "target for the gaps between tokens, likewise; 0 is relative to an undisturbed step",
        True,
    ),
    "max_model_len": Setting(
        at_least(2, "tokens"), "most tokens of a prompt and its reply together"
    ),
    "default_max_tokens": Setting(
        at_least(1, "tokens"),
        "most tokens of a chat's reply where its client names no limit; without it the room left",
    ),
    "kv_memory": Setting(parse_bytes, "memory for KV blocks, as 2GiB", field="kv_memory_bytes"),
    "prefix_cache": Setting(
        on_or_off,
        "keep what prompts and answers leave in the KV pools for those that begin alike: on, or "
        "off for measuring",
    ),
    "cache_isolation": Setting(
        one_of("none", "user"),
        "whose prompts share what is kept: none sets nobody apart; user lets nobody find out, by "
        "the time of a first token, what another user has asked",
    ),
    "dram_cache": Setting(
        a_size_or("off"), "most KV to keep in the host's memory below the pools, as 8GiB; or off"
    ),
    "ssd_cache": Setting(
        a_size_or("auto", "off"), "most KV to keep on disk across restarts, as 20GiB; or auto, off"
    ),
    "ssd_dir": Setting(a_path, "folder for that; by default kv in the state folder"),
    "socket": Setting(a_path, "the Unix socket to listen on"),
    "state_dir": Setting(a_path, "folder for the request log"),
    "listen": Setting(
        an_address,
        "TCP beside the socket, as 127.0.0.1:8000; beyond loopback, as 0.0.0.0:8443, only with TLS",
    ),
    "tls_cert": Setting(
        a_path, "certificate (PEM, with what leads to its root) for TLS on TCP; a reload reads it"
    ),
    "tls_key": Setting(a_path, "its private key (PEM), likewise"),
    "open_metrics": Setting(
        on_or_off, "let whoever reaches TCP read /metrics without a key, as gateways do", True
    ),
    "api_keys": Setting(a_path, "file of the keys that clients on TCP need", True),
    "operators": Setting(
        names, "users and @groups who may cancel anything and drain, with commas", True
    ),
    "viewers": Setting(names, "users and @groups who may only look, with commas", True),
    "max_queued": Setting(at_least(1, "sequences"), "most sequences that may wait", True),
    "max_queued_tokens": Setting(at_least(1, "tokens"), "most prompt tokens that may wait", True),
    "max_connections": Setting(at_least(1, "connections"), "most connections open at once", True),
    "max_body": Setting(parse_bytes, "largest body of a request, as 8MiB", True, "max_body_bytes"),
    "model_aliases": Setting(
        aliases, "other names of the model for clients, with commas; * is any text, as claude-*"
    ),
    "cors_origins": Setting(
        origins,
        "web pages that may use the API in a browser, as https://app.example; * is all",
        True,
    ),
    "tool_parser": Setting(
        one_of("auto", *TOOL_PARSERS), "how the model writes tool calls; auto: by its chat template"
    ),
    "reasoning_parser": Setting(
        one_of("auto", "none", *REASONING_PARSERS), "how the model marks its reasoning, likewise"
    ),
    "max_queue_wait": Setting(
        a_duration,
        "longest wait for a turn, as 60s: who would wait longer is refused at once, with a time to "
        "come back; 0 lets everybody wait",
        True,
        "max_queue_wait_s",
    ),
    "priorities": Setting(
        some_weights, "users and keys that get more turns, or fewer: ann=4,key:batch=0.5", True
    ),
    "max_drain": Setting(
        a_duration,
        "longest drain at a stop, as 90s, before replies are ended with a word; 0: no limit",
        True,
        "max_drain_s",
    ),
    "log_text": Setting(a_flag, "keep prompts in the request log: true or false", True),
    "log_keep_days": Setting(
        at_least(1, "days"), "days after which the log forgets a request", True
    ),
    "min_stay": Setting(
        a_duration,
        "how long a model in use stays before a request for another of [models] swaps it, as 10s; "
        "one that was idle for a second goes at once",
        True,
        "min_stay_s",
    ),
    "log_max_size": Setting(
        parse_bytes,
        "largest request log, as 2GiB; beyond it the oldest are forgotten",
        True,
        "log_max_bytes",
    ),
}
"""By the one name that a setting has in the file, as a flag and as PENSTOCK_NAME."""
