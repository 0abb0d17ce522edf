# SPDX-License-Identifier: Apache-2.0
"""Selecting index entries and listing what query tiles read, one launch each, on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from patternsearch.kernels._common.checks import device_guard
from patternsearch.kernels._common.upload import column_spans, list_spans
from patternsearch.kernels.index.select import COLUMN_PADDING

__all__ = ["compact_diagonals", "diagonals_of_offsets", "loose_columns", "select_top"]

LONG_ROW = 8192
"""Rows longer than this do not stay in registers: ``topk`` first shortens them."""


@triton.jit
def _ordered(b_score):
    """Map floats to int32 of the same order; -0.0 and 0.0 are equal."""
    b_bits = (b_score + 0.0).to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(P, o_entry, length, num_forced, FORCE_LAST: tl.constexpr):
    """Load entries as int32 of their order: forced ones the highest, missing ones the lowest."""
    b_key = _ordered(tl.load(P + o_entry, mask=o_entry < length, other=0.0))
    m_forced = o_entry < num_forced
    if FORCE_LAST:
        m_forced = m_forced | (o_entry == length - 1)
    b_key = tl.where(m_forced, 0x7FFFFFFF, b_key)
    return tl.where(o_entry < length, b_key, -0x80000000)


@triton.jit
def select_top_fwd_kernel(
    SCORES, BUDGETS, STARTS, LARGEST, OUT, MASK,
    num_entries, num_forced, rows_per_group, first_row, num_largest,
    CAUSAL: tl.constexpr, HAS_LARGEST: tl.constexpr, HAS_OUT: tl.constexpr,
    HAS_MASK: tl.constexpr, IS_SHORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take the highest entries of one row; ``LARGEST`` may have the row's largest, unordered."""
    i_row = tl.program_id(0).to(tl.int64)
    i_group = i_row // rows_per_group
    budget = tl.load(BUDGETS + i_group).to(tl.int32)
    start = tl.load(STARTS + i_group)
    length = num_entries
    if CAUSAL:
        i_u = first_row + (i_row % rows_per_group).to(tl.int32)
        start += i_u.to(tl.int64) * budget
        length = i_u + 1
    budget = tl.minimum(budget, length)
    p_row = SCORES + i_row * num_entries
    if HAS_LARGEST:  # forced entries are +inf there
        p_some = LARGEST + i_row * num_largest
        num_some = num_largest
        some_forced = 0
        forced_key = tl.where(num_forced > 0, 0x7F800000, 0x7FFFFFFF)
    else:
        p_some = p_row
        num_some = length
        some_forced = num_forced
        forced_key = 0x7FFFFFFF
    if IS_SHORT:
        b_row = _keys(p_some, tl.arange(0, BLOCK), num_some, some_forced, CAUSAL)
    # Bisect between `low`, which at least `budget` entries reach, and `high`, which fewer do.
    # Forced entries stay out of the bounds: their key is far from all others.
    low = tl.full([], 0x7FFFFFFE, tl.int64)
    high = tl.full([], -0x7FFFFFFF, tl.int64)
    for first in range(0, num_some, BLOCK):
        o_entry = first + tl.arange(0, BLOCK)
        b_key = _keys(p_some, o_entry, num_some, some_forced, CAUSAL)
        m_free = (o_entry < num_some) & (b_key != forced_key)
        low = tl.minimum(low, tl.min(tl.where(m_free, b_key, 0x7FFFFFFE), 0).to(tl.int64))
        high = tl.maximum(high, tl.max(tl.where(m_free, b_key, -0x7FFFFFFF), 0).to(tl.int64))
    high = high + 1
    reached = tl.where(budget < num_some, -1, budget)  # entries that reach `low`
    while (reached != budget) & (high - low > 1):
        middle = (low + high) >> 1
        at_least = middle.to(tl.int32)
        if IS_SHORT:
            count = tl.sum((b_row >= at_least).to(tl.int32), 0)
        else:
            count = 0
            for first in range(0, num_some, BLOCK):
                o_entry = first + tl.arange(0, BLOCK)
                b_key = _keys(p_some, o_entry, num_some, some_forced, CAUSAL)
                count += tl.sum((b_key >= at_least).to(tl.int32), 0)
        enough = count >= budget
        reached = tl.where(enough, count, reached)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    cut = low.to(tl.int32)
    room = budget  # entries to take among those equal to the last one taken
    for first in range(0, length, BLOCK):
        b_key = _keys(p_row, first + tl.arange(0, BLOCK), length, num_forced, CAUSAL)
        room -= tl.sum((b_key > cut).to(tl.int32), 0)
    taken = 0
    equal = 0
    for first in range(0, length, BLOCK):
        o_entry = first + tl.arange(0, BLOCK)
        b_key = _keys(p_row, o_entry, length, num_forced, CAUSAL)
        b_equal = ((o_entry < length) & (b_key == cut)).to(tl.int32)
        b_rank = equal + tl.cumsum(b_equal, 0)
        m_take = (b_key > cut) | ((b_equal != 0) & (b_rank <= room))
        b_take = m_take.to(tl.int32)
        if HAS_OUT:
            b_place = taken + tl.cumsum(b_take, 0) - 1
            if CAUSAL:
                b_place = budget - 1 - b_place
            tl.store(OUT + start + b_place, o_entry, mask=m_take)
        if HAS_MASK:
            p_mask = MASK + i_row * num_entries + o_entry
            tl.store(p_mask, b_take.to(tl.uint8), mask=o_entry < length)
        taken += tl.sum(b_take, 0)
        equal += tl.sum(b_equal, 0)


def select_top(
    scores: Tensor,
    budgets: tuple[int, ...],
    *,
    out: Tensor | None,
    with_mask: bool,
    num_forced: int,
    causal_from: int | None,
) -> Tensor | None:
    """Do what :func:`patternsearch.kernels.index.select.select_top` does.

    One kernel, after one ``topk`` where a row is long.
    """
    groups, rows, entries = scores.shape
    assert scores.is_contiguous()
    assert scores.dtype == torch.float32
    limit, starts = list_spans(budgets, None if causal_from is None else entries, scores.device)
    largest = None
    if causal_from is None and entries > LONG_ROW:
        ranked = scores.view(groups, entries)
        ranked[:, :num_forced] = float("inf")
        largest = ranked.topk(max(budgets), dim=-1, sorted=False).values
    mask = None
    if with_mask:
        mask = torch.empty(scores.shape, dtype=torch.uint8, device=scores.device)
    block = min(LONG_ROW, max(128, triton.next_power_of_2(entries)))
    with device_guard(scores):
        select_top_fwd_kernel[(groups * rows,)](
            scores, limit, starts, largest if largest is not None else limit,
            out if out is not None else limit, mask if mask is not None else limit,
            entries, num_forced, rows, causal_from or 0, max(budgets),
            CAUSAL=causal_from is not None, HAS_LARGEST=largest is not None,
            HAS_OUT=out is not None, HAS_MASK=mask is not None,
            IS_SHORT=(entries if largest is None else max(budgets)) <= block, BLOCK=block,
            num_warps=max(4, block // 512),
        )  # fmt: skip
    return mask


@triton.jit
def compact_diagonals_fwd_kernel(CHOSEN, LISTED, COUNTS, num_tiles, BLOCK: tl.constexpr):
    p_row = tl.program_id(0).to(tl.int64) * num_tiles
    kept = 0
    for first in range(0, num_tiles, BLOCK):
        o_tile = first + tl.arange(0, BLOCK)
        m_tile = o_tile < num_tiles
        b_chosen = (tl.load(CHOSEN + p_row + o_tile, mask=m_tile, other=0) != 0).to(tl.int32)
        b_count = kept + tl.cumsum(b_chosen, 0)
        tl.store(COUNTS + p_row + o_tile, b_count, mask=m_tile)
        tl.store(LISTED + p_row + b_count - 1, o_tile, mask=b_chosen != 0)
        kept += tl.sum(b_chosen, 0)


def compact_diagonals(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Do what :func:`patternsearch.kernels.index.select.compact_diagonals` does, by one kernel.

    List entries after the chosen ones are undefined.
    """
    heads, count = chosen.shape
    listed = torch.empty((heads, count), dtype=torch.int32, device=chosen.device)
    counts = torch.empty_like(listed)
    block = min(4096, max(128, triton.next_power_of_2(count)))
    with device_guard(chosen):
        compact_diagonals_fwd_kernel[(heads,)](
            chosen, listed, counts, count, BLOCK=block, num_warps=4
        )
    return listed, counts


@triton.jit
def diagonals_of_offsets_fwd_kernel(
    CHOSEN, OUT, n, num_tiles, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i_head = tl.program_id(1).to(tl.int64)
    o_tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # D is touched by the offsets strictly between (D - 1) T and (D + 1) T
    o_offset = (o_tile[:, None] - 1) * TILE + 1 + tl.arange(0, 2 * TILE)[None, :]
    m_offset = (o_offset >= 0) & (o_offset < n) & (o_offset < (o_tile[:, None] + 1) * TILE)
    b_chosen = tl.load(CHOSEN + i_head * n + o_offset, mask=m_offset, other=0)
    b_touched = tl.max(b_chosen.to(tl.int32), 1)
    p_out = OUT + i_head * num_tiles + o_tile
    tl.store(p_out, (b_touched != 0).to(tl.uint8), mask=o_tile < num_tiles)


def diagonals_of_offsets(chosen: Tensor, tile: int) -> Tensor:
    """Do what :func:`patternsearch.kernels.index.select.diagonals_of_offsets` does."""
    heads, n = chosen.shape
    count, block = triton.cdiv(n, tile), 32
    out = torch.empty((heads, count), dtype=torch.uint8, device=chosen.device)
    with device_guard(chosen):
        diagonals_of_offsets_fwd_kernel[(triton.cdiv(count, block), heads)](
            chosen, out, n, count, TILE=tile, BLOCK=block, num_warps=4
        )
    return out


@triton.jit
def loose_columns_fwd_kernel(
    COLUMNS, SPANS, CHOSEN, OUT, COUNT,
    num_heads, num_tiles,
    TILE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_u = tl.program_id(0)
    i_head = tl.program_id(1).to(tl.int64)
    first = tl.load(SPANS + i_head)
    size = tl.load(SPANS + num_heads + i_head).to(tl.int32)
    start = tl.load(SPANS + 2 * num_heads + i_head)
    stride = tl.load(SPANS + 3 * num_heads + i_head)
    p_out = OUT + start + stride * i_u
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
    columns: Tensor, num_columns: tuple[int, ...], chosen: Tensor, tile: int
) -> tuple[Tensor, Tensor]:
    """Do what :func:`patternsearch.kernels.index.select.loose_columns` does, by one kernel.

    What follows a row's padding is undefined.
    """
    heads, count = chosen.shape
    spans, out_size = column_spans(num_columns, count, COLUMN_PADDING, columns.device)
    out = torch.empty(max(out_size, 1), dtype=torch.int32, device=columns.device)
    counts = torch.empty((heads, count), dtype=torch.int32, device=columns.device)
    block = min(1024, max(128, triton.next_power_of_2(max(num_columns, default=1))))
    with device_guard(columns):
        loose_columns_fwd_kernel[(count, heads)](
            columns, spans, chosen, out, counts,
            heads, count,
            TILE=tile, PADDING=COLUMN_PADDING, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out, counts
