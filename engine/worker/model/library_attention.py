"""Call the attention of flash-attn and torch on a paged pool.

Invariant: a block is a page, of a multiple of 256 tokens; nothing is copied but queries that a
library wants copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from engine.worker.model.paged_step import PagedStep

_Function = Callable[..., torch.Tensor]


class PagedAttention(Protocol):
    """The queries of a step over the pool."""

    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        step: PagedStep,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from each query to its keys, [num_tokens, num_heads, head_dim].

        Args:
            q: of that shape; its tokens may lie apart.
            kv: the pool, [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].
            layer: to read in the pool.
            step: which queries belong to which sequence, and where its blocks are.
            scale: of the products of queries and keys.
            window: positions that a query sees, including its own; None: all.
            softcap: bound of the products, as in Gemma; None: no bound.
            sinks: float32 [num_heads], a learnt score of each head, or None.
        """


def flash_attention(attend: _Function | None = None) -> PagedAttention:
    """Make attention by flash-attn 2.

    Args:
        attend: in place of its flash_attn_varlen_func.
    """

    def own(_step: PagedStep, scale: float, softcap: float | None, _splits: bool) -> dict[str, Any]:
        return {"softmax_scale": scale, "causal": True, "softcap": softcap or 0.0}

    return _by(attend or _flash_attn(), own, is_causal=True)


def torch_varlen_attention(attend: _Function | None = None) -> PagedAttention:
    """Make attention by torch.nn.attention.varlen.

    Left alone it cuts keys into parts, and joins them as if all sequences lay in the first: the
    rows of the others stay what the memory held. One sequence is joined rightly, as are single
    queries whose heads are packed.

    Args:
        attend: in place of its varlen_attn.
    """

    # it knows no softcap, and is not chosen where there is one
    def own(step: PagedStep, scale: float, _softcap: float | None, splits: bool) -> dict[str, Any]:
        how = {"scale": scale, "enable_gqa": True, "seqused_k": step.seq_lens}
        return how | {"num_splits": None if splits else 1}

    return _by(attend or _torch_varlen(), own, is_causal=False)


def _by(
    call: _Function,
    own: Callable[[PagedStep, float, float | None, bool], dict[str, Any]],
    *,
    is_causal: bool,
) -> PagedAttention:
    """Make attention by a library's function; `own` makes the arguments that only it takes."""

    def attend(
        q: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        step: PagedStep,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks is None  # a library is not chosen where there are some
        keys, values = kv[:, layer].unbind(1)
        has_groups = q.shape[1] > keys.shape[2]
        splits = len(step.seq_lens) == 1 or (
            has_groups and window is None and step.max_query_len == 1
        )
        return call(
            q,
            keys,
            values,
            step.query_starts,
            step.key_starts,
            step.max_query_len,
            step.max_seq_len,
            window_size=_window(window, step, is_causal),
            block_table=step.block_tables,
            **own(step, scale, softcap, splits),
        )

    return attend


def _flash_attn() -> _Function:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func  # type: ignore[no-any-return]


def _torch_varlen() -> _Function:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn  # type: ignore[return-value]  # a pair, if it is asked for more


def _window(window: int | None, step: PagedStep, is_causal: bool) -> tuple[int, int]:
    """Count the positions that a query sees to its left and right; -1: without end.

    Flash-attn packs the heads of single queries, and cuts their keys in parts, only if both are
    without end. For causal attention, or one query at the end of its keys, the result is equal.
    """
    if window is None:
        return (-1, -1) if is_causal or step.max_query_len == 1 else (-1, 0)
    return (window - 1, 0)
