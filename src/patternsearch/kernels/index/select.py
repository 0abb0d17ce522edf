# SPDX-License-Identifier: Apache-2.0
"""From scores to lists: the chosen entries, the tile diagonals, the columns left to gather.

In PyTorch, for any device; ``select_triton.py`` does the same on CUDA in one launch each and is
tested against this. Sizes follow from budgets, which the host knows; contents stay on the device.
"""

import torch
from torch import Tensor

from patternsearch.kernels._common.upload import column_spans, list_spans

__all__ = [
    "COLUMN_PADDING",
    "compact_diagonals",
    "diagonals_of_offsets",
    "loose_columns",
    "select_top",
]

COLUMN_PADDING = 128
"""Rows of gathered columns are padded with zeros to a multiple of this."""


def select_top(
    scores: Tensor,
    budgets: tuple[int, ...],
    *,
    out: Tensor | None,
    with_mask: bool,
    num_forced: int,
    causal_from: int | None,
) -> Tensor | None:
    """Take the ``budgets`` highest scores of each row; ties go to the lower index.

    Args:
        scores: float32 [groups, rows, entries], contiguous, no NaN; forced entries may be
            overwritten.
        budgets: one for each group, at least min(num_forced, entries) and at most ``entries``.
        out: int32; the entries taken are written into it, one group after the other: in ascending
            order if not causal (then rows must be 1), else in descending order, ``budget`` places
            for each of the ``entries`` query tiles.
        with_mask: return which entries were taken.
        num_forced: entries 0..num_forced−1 are taken first.
        causal_from: None, or: row r is query tile u = causal_from + r, of which only the entries
            0..u count and entry u is taken first; row u of its group's list is written.

    Returns:
        uint8 of the shape of ``scores``, or None.
    """
    _, rows, entries = scores.shape
    entry = torch.arange(entries, device=scores.device)
    inside = torch.ones((rows, entries), dtype=torch.bool, device=scores.device)
    forced = (entry < num_forced).expand(rows, entries)
    first = torch.zeros((rows, 1), dtype=torch.int64, device=scores.device)
    if causal_from is not None:
        u = causal_from + torch.arange(rows, device=scores.device)[:, None]
        inside, forced, first = entry <= u, forced | (entry == u), u
    ranked = scores.masked_fill(forced, float("inf")).masked_fill(~inside, float("-inf"))
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(-1, order, entry.expand_as(order).contiguous())
    query_tiles = None if causal_from is None else entries
    limit, starts = (x[:, None, None] for x in list_spans(budgets, query_tiles, scores.device))
    taken = (rank < limit) & inside
    if out is not None:
        place = taken.cumsum(-1) - 1
        if causal_from is not None:
            place = taken.sum(-1, keepdim=True) - 1 - place
        place = place + starts + first * limit
        out[place[taken]] = entry.int().expand_as(taken)[taken]
    return taken.to(torch.uint8) if with_mask else None


def compact_diagonals(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """List the chosen tile diagonals in ascending order, and count those that a query tile has.

    Args:
        chosen: uint8 [G, tiles].

    Returns:
        int32 [G, tiles], the chosen D first; int32 [G, tiles], the number of chosen D ≤ u.
    """
    order = chosen.sort(dim=-1, descending=True, stable=True).indices
    return order.int(), chosen.cumsum(-1, dtype=torch.int32)


def diagonals_of_offsets(chosen: Tensor, tile: int) -> Tensor:
    """Return which tile diagonals the chosen slash offsets touch: {⌊δ/T⌋, ⌈δ/T⌉}.

    Args:
        chosen: uint8 [G, n], by δ.
        tile: T.

    Returns:
        uint8 [G, num_tiles(n, T)].
    """
    heads, n = chosen.shape
    count = -(-n // tile)
    padded = torch.nn.functional.pad(chosen.bool(), (0, count * tile - n))
    by_tile = padded.view(heads, count, tile)
    touched = by_tile.any(-1)
    touched[:, 1:] |= by_tile[:, :-1, 1:].any(-1)
    return touched.to(torch.uint8)


def loose_columns(
    columns: Tensor, num_columns: tuple[int, ...], chosen: Tensor, tile: int
) -> tuple[Tensor, Tensor]:
    """List, for each query tile, the columns that none of its chosen tiles holds.

    Query tile u keeps column j if j // T ≤ u and tile diagonal u − j // T is not chosen. D = 0 is
    chosen, so a kept column lies below the query tile and every row of it may read it.

    Args:
        columns: int32, each head's columns in ascending order, one head after the other.
        num_columns: columns of each head, G of them.
        chosen: uint8 [G, tiles].
        tile: T.

    Returns:
        int32, rows as :func:`patternsearch.kernels._common.upload.column_spans` lays them out, each
        filled up with zeros to a multiple of ``COLUMN_PADDING``; int32 [G, tiles], the columns in
        each row.
    """
    heads, count = chosen.shape
    spans, out_size = column_spans(num_columns, count, COLUMN_PADDING, columns.device)
    out = torch.zeros(max(out_size, 1), dtype=torch.int32, device=columns.device)
    counts = torch.zeros((heads, count), dtype=torch.int32, device=columns.device)
    u = torch.arange(count, device=columns.device)[:, None]
    for head, (first, size, start, stride) in enumerate(spans.T.tolist()):
        mine = columns[first : first + size]
        diagonal = u - mine[None].long() // tile
        keep = (diagonal > 0) & ~chosen[head].bool()[diagonal.clamp(min=0)]
        counts[head] = keep.sum(-1)
        rows = out[start : start + stride * count].view(count, stride)
        row, entry = keep.nonzero(as_tuple=True)
        rows[row, (keep.cumsum(-1) - 1)[row, entry]] = mine[entry]
    return out, counts
