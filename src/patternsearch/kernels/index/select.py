# SPDX-License-Identifier: Apache-2.0
"""From scores to lists: the chosen entries, the tile diagonals, the columns left to gather.

Everything stays on the device: sizes follow from budgets, which the host knows. On CUDA the work
is done by the kernels of ``select_triton.py``; elsewhere by the PyTorch below, which is also what
those kernels are tested against. Both give the same integers.
"""

import torch
from torch import Tensor

__all__ = [
    "COLUMN_PADDING",
    "compact_diagonals",
    "diagonals_of_offsets",
    "loose_columns",
    "select_top",
    "thresholds",
]

COLUMN_PADDING = 128
"""Rows of gathered columns are padded with zeros to a multiple of this."""


def thresholds(scores: Tensor, budgets: Tensor, largest_budget: int) -> Tensor:
    """Return each row's ``budgets``-th largest score.

    Args:
        scores: float32 [rows, entries].
        budgets: int64 [rows], each in 1..largest_budget.
        largest_budget: at most the number of entries.
    """
    top = scores.topk(largest_budget, dim=-1).values
    return top.gather(-1, budgets[:, None] - 1).squeeze(-1)


def select_top(
    scores: Tensor,
    cuts: Tensor,
    budgets: Tensor,
    *,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    out: Tensor | None = None,
    out_size: int = 0,
    descending: bool = False,
    with_mask: bool = False,
    triton: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Take the ``budgets`` highest scores of each row; ties go to the lower index.

    Args:
        scores: float32 [rows, entries], contiguous.
        cuts: float32 [rows], the score of the last entry taken (:func:`thresholds`).
        budgets: int64 [rows].
        lengths: int32 [rows], how many entries of a row count; all of them by default.
        starts: int64 [rows], where each row's entries go in the list.
        out: int32 list to write into.
        out_size: length of a new list of zeros, if ``out`` is not given; 0 for no list.
        descending: list entries in descending index order instead of ascending.
        with_mask: also return which entries were taken.
        triton: run the kernel instead of PyTorch.

    Returns:
        The list, min(budget, length) entries a row, or None; uint8 [rows, entries] or None.
    """
    rows, entries = scores.shape
    device = scores.device
    if lengths is None:
        lengths = torch.full((rows,), entries, dtype=torch.int32, device=device)
    if starts is None:
        starts = torch.zeros((rows,), dtype=torch.int64, device=device)
    if out is None and out_size:
        out = torch.zeros(out_size, dtype=torch.int32, device=device)
    if triton:
        from patternsearch.kernels.index.select_triton import select_top as on_device

        mask = on_device(
            scores, cuts, budgets, lengths=lengths, starts=starts, out=out,
            descending=descending, with_mask=with_mask,
        )  # fmt: skip
        return out, mask
    entry = torch.arange(entries, device=device)
    inside = entry < lengths[:, None]
    above = (scores > cuts[:, None]) & inside
    equal = (scores == cuts[:, None]) & inside
    limit = torch.minimum(budgets, lengths)[:, None]
    taken = above | (equal & (equal.cumsum(-1) <= limit - above.sum(-1, keepdim=True)))
    if out is not None:
        place = taken.cumsum(-1) - 1
        if descending:
            place = limit - 1 - place
        row, chosen = taken.nonzero(as_tuple=True)
        out[starts[row] + place[row, chosen]] = chosen.int()
    return out, taken.to(torch.uint8) if with_mask else None


def compact_diagonals(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """List the chosen tile diagonals in ascending order, and count those that a query tile has.

    Args:
        chosen: uint8 or bool [G, tiles].

    Returns:
        int32 [G, tiles], the chosen D first and zeros after; int32 [G, tiles], the number of
        chosen D ≤ u.
    """
    heads, count = chosen.shape
    taken = chosen.bool()
    counts = taken.cumsum(-1, dtype=torch.int32)
    position = torch.where(taken, counts - 1, count).long()
    diagonal = torch.arange(count, dtype=torch.int32, device=chosen.device).expand(heads, count)
    listed = torch.zeros((heads, count + 1), dtype=torch.int32, device=chosen.device)
    listed.scatter_(1, position, diagonal)
    listed[:, count] = 0
    return listed[:, :count].contiguous(), counts


def diagonals_of_offsets(chosen: Tensor, tile: int) -> Tensor:
    """Return which tile diagonals the chosen slash offsets touch: {⌊δ/T⌋, ⌈δ/T⌉}.

    Args:
        chosen: uint8 or bool [G, n], by δ.
        tile: T.

    Returns:
        uint8 [G, num_tiles(n, T)].
    """
    heads, n = chosen.shape
    count = -(-n // tile)
    padded = torch.nn.functional.pad(chosen.bool(), (0, count * tile - n))
    by_tile = padded.view(heads, count, tile)
    floor = by_tile.any(-1)
    above = by_tile[:, :-1, 1:].any(-1)
    touched = floor.clone()
    touched[:, 1:] |= above
    return touched.to(torch.uint8)


def loose_columns(
    columns: Tensor,
    num_columns: tuple[int, ...],
    chosen: Tensor,
    *,
    tile: int,
    out_start: Tensor,
    out_stride: Tensor,
    out_size: int,
) -> tuple[Tensor, Tensor]:
    """List, for each query tile, the columns that none of its chosen tiles holds.

    Query tile u keeps column j if j // T ≤ u and tile diagonal u − j // T is not chosen. D = 0 is
    chosen, so a kept column lies below the query tile and every row of it may read it.

    Args:
        columns: int32, each head's columns in ascending order, one head after the other.
        num_columns: columns of each head.
        chosen: uint8 or bool [G, tiles].
        tile: T.
        out_start: int64 [G], where a head's rows start in the result.
        out_stride: int64 [G], the length of a row: a multiple of ``COLUMN_PADDING``.
        out_size: length of the result.

    Returns:
        int32 [out_size], rows filled up with zeros to a multiple of ``COLUMN_PADDING``; int32
        [G, tiles], the columns in each row.
    """
    if columns.device.type == "cuda":
        from patternsearch.kernels.index.select_triton import loose_columns as on_device

        return on_device(
            columns,
            num_columns,
            chosen,
            tile=tile,
            out_start=out_start,
            out_stride=out_stride,
            out_size=out_size,
        )
    heads, count = chosen.shape
    out = torch.zeros(max(out_size, 1), dtype=torch.int32, device=columns.device)
    counts = torch.zeros((heads, count), dtype=torch.int32, device=columns.device)
    u = torch.arange(count, device=columns.device)[:, None]
    first = 0
    for head, size in enumerate(num_columns):
        mine = columns[first : first + size]
        first += size
        diagonal = u - mine[None].long() // tile
        keep = (diagonal > 0) & ~chosen[head].bool()[diagonal.clamp(min=0)]
        counts[head] = keep.sum(-1)
        start, stride = int(out_start[head]), int(out_stride[head])
        rows = out[start : start + stride * count].view(count, stride)
        row, entry = keep.nonzero(as_tuple=True)
        rows[row, (keep.cumsum(-1) - 1)[row, entry]] = mine[entry]
    return out, counts
