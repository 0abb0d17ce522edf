# SPDX-License-Identifier: Apache-2.0
"""What each pair of Vertical-Slash budgets misses of sampled rows, on CUDA.

A kernel reads the column sums once and adds up what is outside each extent budget. Few columns
are in any column budget: what they give back is taken from them alone.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from patternsearch.kernels._common.checks import device_guard
from patternsearch.kernels.index.upload import upload
from patternsearch.kernels.score.tables import BucketTable

__all__ = ["launch_missed"]


@triton.jit(do_not_specialize=["num_units", "num_tiles"])
def outside_sums_fwd_kernel(
    sums, unit_row, bucket, outside,
    stride_sums_h, stride_bucket_h, num_units, num_tiles,
    IS_TILE: tl.constexpr, TILE: tl.constexpr, UNITS: tl.constexpr,
    NUM_EXTENTS: tl.constexpr, EXTENTS: tl.constexpr,
):  # fmt: skip
    """Sum each unit's column sums over the keys outside each extent budget.

    Grid: (blocks of units, heads). ``sums`` is fp32 [heads, num_tiles, num_units, 64], 0 above
    the diagonal; ``unit_row`` int32 [num_units], the first row of each unit; ``outside`` fp32
    [heads, num_units, NUM_EXTENTS].
    """
    i_h = tl.program_id(1).to(tl.int64)
    o_unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    m_unit = o_unit < num_units
    b_row = tl.load(unit_row + o_unit, mask=m_unit, other=0)
    b_query = b_row // TILE
    p_sums = sums + i_h * stride_sums_h
    p_bucket = bucket + i_h * stride_bucket_h
    o_m = tl.arange(0, EXTENTS)
    o_column = tl.arange(0, 64)
    b_outside = tl.zeros([EXTENTS, UNITS, 64], tl.float32)
    for i_t in range(tl.minimum(tl.max(b_row, 0) // 64 + 1, num_tiles)):
        o_key = i_t * 64 + o_column
        p_tile = p_sums + (i_t * num_units + o_unit).to(tl.int64)[:, None] * 64
        b_sums = tl.load(p_tile + o_column[None, :], mask=m_unit[:, None], other=0.0)
        if IS_TILE:
            o_entry = b_query[:, None] - (o_key // TILE)[None, :]
        else:
            o_entry = (TILE * (b_query + 1) - 1)[:, None] - o_key[None, :]
        # Above the diagonal any bucket will do: the sums are 0.
        b_bucket = tl.load(p_bucket + tl.maximum(o_entry, 0)).to(tl.int32)
        m_outside = b_bucket[None, :, :] > o_m[:, None, None]
        b_outside += tl.where(m_outside, b_sums[None, :, :], 0.0)
    b_total = tl.sum(b_outside, axis=2)  # [EXTENTS, UNITS]
    o_out = o_unit[None, :] * NUM_EXTENTS + o_m[:, None]
    m_out = m_unit[None, :] & (o_m < NUM_EXTENTS)[:, None]
    tl.store(outside + i_h * num_units * NUM_EXTENTS + o_out, b_total, mask=m_out)


def launch_missed(
    sums: Tensor,
    first_row: Tensor,
    table: BucketTable,
    column_bucket: Tensor,
    budgets: tuple[int, ...],
) -> Tensor:
    """Return float32 [heads, units, M, V]: what each pair of budgets misses of a unit's rows.

    Args:
        sums: float32 [heads, key tiles, units, 64], contiguous, 0 above the diagonal.
        first_row: int64 [units], first row of each unit; its rows are of one tile of 64.
        table: M extent budgets, for these heads; ``tile`` or ``offset``.
        column_bucket: [heads, n], how many of the V column budgets leave a column out.
        budgets: the V column budgets, ascending; each leaves in so many columns.
    """
    heads, tiles, units, _ = sums.shape
    assert sums.is_contiguous()
    assert table.kind in ("tile", "offset"), table.kind
    bucket = table.bucket.contiguous()
    extents = table.num_buckets
    outside = sums.new_empty(heads, units, extents)
    per_program = 8
    with device_guard(sums):
        outside_sums_fwd_kernel[(triton.cdiv(units, per_program), heads)](
            sums, first_row.to(torch.int32), bucket, outside,
            sums.stride(0), bucket.stride(0), units, tiles,
            IS_TILE=table.kind == "tile", TILE=table.tile, UNITS=per_program,
            NUM_EXTENTS=extents, EXTENTS=triton.next_power_of_2(extents), num_warps=4,
        )  # fmt: skip
    # The columns of the largest budget, those of the smallest first.
    columns = column_bucket.sort(dim=1, stable=True).indices[:, : budgets[-1]]
    query = first_row // table.tile
    if table.kind == "tile":
        entry = query - (columns // table.tile)[..., None]  # [heads, columns, units]
    else:
        entry = table.tile * (query + 1) - 1 - columns[..., None]
    head = torch.arange(heads, device=sums.device)[:, None]
    below = columns < tiles * 64
    at = columns.clamp(max=tiles * 64 - 1)
    mine = sums[head, at // 64, :, at % 64] * below[..., None]  # [heads, columns, units]
    its_bucket = bucket[head[..., None], entry.clamp(min=0)]
    place = torch.arange(columns.shape[1], device=sums.device)
    left_in = (place[:, None] < upload(np.asarray(budgets), sums.device)).float()
    given_back = [
        torch.einsum("hcu,cv->huv", torch.where(its_bucket > extent, mine, 0.0), left_in)
        for extent in range(extents)
    ]
    return outside[..., None] - torch.stack(given_back, dim=2)
