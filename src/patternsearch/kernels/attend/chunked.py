# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in PyTorch, one query tile at a time: memory O(T·n), any device, no compiler.

For machines without a GPU. It gathers each query tile's keys, so its work follows the plan's
counts like the GPU kernels' does.
"""

from dataclasses import replace

import torch
from torch import Tensor

from patternsearch.kernels.attend.plan import (
    META_COLUMN_STRIDE,
    META_COLUMNS,
    META_IS_DIAGONAL,
    META_LIST,
    META_LIST_STRIDE,
    META_USES_LIST,
    META_WINDOW,
    AttendPlan,
    TilePlan,
)

__all__ = ["attend_chunked", "plan_to_host", "query_tile_keys"]


def attend_chunked(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, plan: AttendPlan
) -> tuple[Tensor, Tensor]:
    """Run the plan; arguments are checked by :func:`patternsearch.kernels.attend.attend`."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[1:3], dtype=torch.float32, device=q.device)
    group = q.shape[1] // k.shape[1]
    for part in plan.tile_plans:
        host = plan_to_host(part)
        for row, head in enumerate(part.heads):
            k_head, v_head = k[0, head // group].float(), v[0, head // group].float()
            for u in range(part.tile_count.shape[1]):
                first, last = u * part.tile, min((u + 1) * part.tile, plan.n)
                keys = query_tile_keys(host, row, u, plan.n).to(q.device)
                logits = (q[0, head, first:last].float() @ k_head[keys].T) * scale
                above = torch.arange(first, last, device=q.device)[:, None] < keys[None]
                logits.masked_fill_(above, float("-inf"))
                row_lse = logits.logsumexp(-1)
                weights = (logits - row_lse[:, None]).exp_()
                out[0, head, first:last] = (weights @ v_head[keys]).to(q.dtype)
                lse[head, first:last] = row_lse
    return out, lse


def query_tile_keys(part: TilePlan, row: int, u: int, n: int) -> Tensor:
    """Return the keys that query tile ``u`` of row ``row`` of a plan reads, int64, each once.

    The plan's tensors must be on the CPU.
    """
    meta = part.meta[row].tolist()
    count, tile = int(part.tile_count[row, u]), part.tile
    if meta[META_USES_LIST]:
        start = meta[META_LIST] + meta[META_LIST_STRIDE] * u
        entries = part.lists[start : start + count].long()
        tiles = u - entries if meta[META_IS_DIAGONAL] else entries
    else:
        t = torch.arange(count)
        tiles = torch.where(t < meta[META_WINDOW], u - t, count - 1 - t)
    keys = (tiles[:, None] * tile + torch.arange(tile)).reshape(-1)
    keys = keys[keys < n]
    start = meta[META_COLUMNS] + meta[META_COLUMN_STRIDE] * u
    columns = part.columns[start : start + int(part.column_count[row, u])].long()
    return torch.cat([keys, columns])


def plan_to_host(part: TilePlan) -> TilePlan:
    """Copy the lists of one tile size to the CPU."""
    names = ("meta", "tile_count", "column_count", "lists", "columns", "order")
    return replace(part, **{name: getattr(part, name).cpu() for name in names})
