# SPDX-License-Identifier: Apache-2.0
"""Selecting index entries and listing loose columns on the device, in one pass over each row."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from patternsearch.kernels.index.select import COLUMN_PADDING

__all__ = ["loose_columns", "select_top"]


@triton.jit
def select_top_fwd_kernel(
    SCORES, THRESHOLDS, BUDGETS, STARTS, LENGTHS, OUT, MASK,
    num_entries,
    DESCENDING: tl.constexpr, HAS_OUT: tl.constexpr, HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    length = tl.load(LENGTHS + i_row)
    budget = tl.minimum(tl.load(BUDGETS + i_row).to(tl.int32), length)
    threshold = tl.load(THRESHOLDS + i_row)
    start = tl.load(STARTS + i_row)
    p_row = SCORES + i_row * num_entries
    above = 0
    for first in range(0, length, BLOCK):
        o_entry = first + tl.arange(0, BLOCK)
        b_score = tl.load(p_row + o_entry, mask=o_entry < length, other=float("-inf"))
        above += tl.sum((b_score > threshold).to(tl.int32), 0)
    room = budget - above  # entries equal to the threshold that are taken, lowest index first
    taken = 0
    equal = 0
    for first in range(0, length, BLOCK):
        o_entry = first + tl.arange(0, BLOCK)
        m_entry = o_entry < length
        b_score = tl.load(p_row + o_entry, mask=m_entry, other=float("-inf"))
        b_equal = ((b_score == threshold) & m_entry).to(tl.int32)
        b_rank = equal + tl.cumsum(b_equal, 0)
        b_take = (b_score > threshold) | ((b_equal != 0) & (b_rank <= room))
        b_int = b_take.to(tl.int32)
        b_position = taken + tl.cumsum(b_int, 0) - 1
        if HAS_OUT:
            if DESCENDING:
                b_place = budget - 1 - b_position
            else:
                b_place = b_position
            m_store = b_take & (b_place >= 0) & (b_place < budget)
            tl.store(OUT + start + b_place, o_entry, mask=m_store)
        if HAS_MASK:
            tl.store(MASK + i_row * num_entries + o_entry, b_take.to(tl.uint8), mask=m_entry)
        taken += tl.sum(b_int, 0)
        equal += tl.sum(b_equal, 0)


def select_top(
    scores: Tensor,
    cuts: Tensor,
    budgets: Tensor,
    *,
    lengths: Tensor,
    starts: Tensor,
    out: Tensor | None,
    descending: bool,
    with_mask: bool,
) -> Tensor | None:
    """Do what :func:`patternsearch.kernels.index.select.select_top` does, by one kernel.

    Writes the list into ``out`` and returns the mask, if they are asked for.
    """
    rows, entries = scores.shape
    assert scores.is_contiguous()
    assert scores.dtype == torch.float32
    mask = None
    if with_mask:
        mask = torch.zeros((rows, entries), dtype=torch.uint8, device=scores.device)
    block = min(4096, max(128, triton.next_power_of_2(entries)))
    select_top_fwd_kernel[(rows,)](
        scores, cuts, budgets, starts, lengths,
        out if out is not None else starts, mask if mask is not None else starts,
        entries,
        DESCENDING=descending, HAS_OUT=out is not None, HAS_MASK=mask is not None,
        BLOCK=block, num_warps=8 if block >= 2048 else 4,
    )  # fmt: skip
    return mask


@triton.jit
def loose_columns_fwd_kernel(
    COLUMNS, FIRSTS, SIZES, CHOSEN, START, STRIDE, OUT, COUNT,
    num_tiles,
    TILE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_u = tl.program_id(0)
    i_head = tl.program_id(1).to(tl.int64)
    first = tl.load(FIRSTS + i_head)
    size = tl.load(SIZES + i_head).to(tl.int32)
    p_out = OUT + tl.load(START + i_head) + tl.load(STRIDE + i_head) * i_u
    p_chosen = CHOSEN + i_head * num_tiles
    kept = 0
    for begin in range(0, size, BLOCK):
        o_entry = begin + tl.arange(0, BLOCK)
        m_entry = o_entry < size
        b_column = tl.load(COLUMNS + first + o_entry, mask=m_entry, other=0)
        b_diagonal = i_u - b_column // TILE
        m_below = m_entry & (b_diagonal > 0)
        b_chosen = tl.load(p_chosen + b_diagonal, mask=m_below, other=1)
        m_keep = m_below & (b_chosen == 0)
        b_int = m_keep.to(tl.int32)
        b_place = kept + tl.cumsum(b_int, 0) - 1
        tl.store(p_out + b_place, b_column, mask=m_keep)
        kept += tl.sum(b_int, 0)
    o_fill = kept + tl.arange(0, PADDING)
    end = ((kept + PADDING - 1) // PADDING) * PADDING
    tl.store(p_out + o_fill, tl.zeros([PADDING], tl.int32), mask=o_fill < end)
    tl.store(COUNT + i_head * num_tiles + i_u, kept)


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
    """Do what :func:`patternsearch.kernels.index.select.loose_columns` does, by one kernel."""
    heads, count = chosen.shape
    sizes = np.asarray(num_columns, dtype=np.int64)
    firsts_and_sizes = torch.from_numpy(np.stack([np.cumsum(sizes) - sizes, sizes]))
    if columns.device.type == "cuda":
        firsts_and_sizes = firsts_and_sizes.pin_memory()
    firsts, on_device_sizes = firsts_and_sizes.to(columns.device, non_blocking=True)
    out = torch.empty(max(out_size, 1), dtype=torch.int32, device=columns.device)
    counts = torch.empty((heads, count), dtype=torch.int32, device=columns.device)
    longest = max(num_columns, default=0)
    block = min(1024, max(128, triton.next_power_of_2(longest)))
    loose_columns_fwd_kernel[(count, heads)](
        columns, firsts, on_device_sizes, chosen.to(torch.uint8).contiguous(),
        out_start, out_stride, out, counts,
        count,
        TILE=tile, PADDING=COLUMN_PADDING, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out, counts
