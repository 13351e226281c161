"""Show the options of serve in groups, the usual ones first.

Invariant: each setting is in one group; a test holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Usual": (
        *("model", "port", "host", "auth", "api_keys", "max_model_len", "kv_memory"),
        *("weights", "config_file", "check_config", "help_all", "help"),
    ),
    "Model": (
        *("embedding_model", "rerank_model", "dtype", "kv_dtype", "exact", "speculate"),
        *("offload_weights", "default_max_tokens", "model_aliases"),
        *("tool_parser", "reasoning_parser", "min_stay", "keep_resident", "keep_alive"),
    ),
    "Workers and devices": (
        *("roles", "place", "devices", "transport", "eager", "safe_kernels"),
        *("slo_ttft_ms", "slo_itl_ms"),
    ),
    "Caches": (*("prefix_cache", "cache_isolation", "dram_cache", "ssd_cache", "ssd_dir"),),
    "Network and access": (
        *(
            "socket",
            "listen",
            "tls_cert",
            "tls_key",
            "open_metrics",
            "page",
            "operators",
            "viewers",
        ),
        *("cors_origins", "max_connections", "max_body"),
    ),
    "Queue and log": (
        *("max_queued", "max_queued_tokens", "max_queue_wait", "priorities", "max_drain"),
        *("state_dir", "log_text", "log_keep_days", "log_max_size"),
    ),
}
"""Options by the group that help shows them in."""
SHORT = ("Usual",)
"""Groups of `--help`; the others are in `--help-all`."""


class GroupedHelp(TyperCommand):
    """A verb that shows its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the groups wanted, and how to see the others."""
        rows = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        has_all = ctx.params.get("help_all") or ctx.meta.get("help_all")
        for title, names in GROUPS.items():
            shown = [record for name in names if (record := rows.get(name)) is not None]
            if shown and (has_all or title in SHORT):
                with formatter.section(title):
                    formatter.write_dl(shown)
        if not has_all:
            num_left = sum(len(names) for title, names in GROUPS.items() if title not in SHORT)
            formatter.write_paragraph()
            formatter.write_text(f"{num_left} more options: penstock serve --help-all")


def show_all(ctx: Any, is_asked: bool) -> None:
    """Print the help with all groups, and end."""
    if is_asked:
        import typer

        ctx.meta["help_all"] = True
        typer.echo(ctx.get_help())
        raise typer.Exit
