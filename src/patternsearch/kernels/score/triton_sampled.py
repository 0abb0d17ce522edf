# SPDX-License-Identifier: Apache-2.0
"""Masses of sampled query rows on CUDA: only these rows are multiplied.

A program holds a block of sampled rows and walks over the key tiles. Of a tile it keeps each unit's
mass, and adds up, for every column budget of every table, the mass of the columns outside it. Both
come from a second product, of the probabilities with a matrix of zeros and ones. Nearly all tiles
are outside every extent budget, where one accumulator serves; the others are entered by bucket.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from patternsearch.kernels._common.checks import check_attention_inputs, device_guard
from patternsearch.kernels._common.upload import upload
from patternsearch.kernels.score.sampled_layout import (
    ColumnBudgets,
    blocks_of_rows,
    budgets_by_launch,
    in_slots,
    near_tiles,
    table_of_columns,
)
from patternsearch.kernels.score.triton_launch import (
    ScoreLaunch,
    ScoreOperands,
    launch_first_that_fits,
)
from patternsearch.patterns.geometry import num_tiles

__all__ = ["launch_sampled_masses"]


@triton.jit
def _sum_units(
    b_rows, UNITS: tl.constexpr, MIDDLE: tl.constexpr, LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the rows of each unit: fp32 [64, COLUMNS] to [UNITS, COLUMNS].

    A thread holds two rows of a product that are 8 apart: they are of one unit, whose other rows
    lie in neighbouring lanes, then in other warps.
    """
    OTHER: tl.constexpr = 8 // LANES
    b_x = tl.reshape(b_rows, (UNITS // OTHER, MIDDLE, 2, OTHER, LANES, COLUMNS))
    b_x = tl.sum(tl.sum(tl.sum(b_x, axis=2), axis=3), axis=1)
    return tl.reshape(b_x, (UNITS, COLUMNS))


@triton.jit
def _enter_tile(
    b_p, b_left, b_sum, acc, i_t, o_unit, m_unit, b_unit_row, o_col, b_base, b_shift, b_limit,
    p_bucket, p_entered, num_slots,
    IS_OFFSET: tl.constexpr, UNITS: tl.constexpr, MIDDLE: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Enter a tile by its buckets: bucket b of 1..M−1 in slot b−1, bucket M in ``acc``.

    ``b_sum`` and ``acc`` are fp32 [UNITS, COLUMNS]; slots fp32 [units, num_slots, COLUMNS]. One
    program enters a unit, and one thread of it an element, so the order of the additions is fixed.
    """
    p_slots = p_entered + o_unit.to(tl.int64)[:, None] * (num_slots * COLUMNS) + o_col[None, :]
    if IS_OFFSET:
        # The pairs of a tile are in different buckets: entry 64·(u + 1) − 1 − j of query tile u.
        o_key = i_t * 64 + tl.arange(0, 64)
        b_last = (b_unit_row // 64 + 1) * 64 - 1
        o_entry = tl.maximum(b_last[:, None] - o_key[None, :], 0)
        b_bucket = tl.load(p_bucket + o_entry).to(tl.int32)  # [UNITS, 64]
        OTHER: tl.constexpr = 8 // LANES
        b_bucket = tl.reshape(b_bucket, (UNITS // OTHER, 1, 1, OTHER, 1, 64))
        b_bucket = tl.broadcast_to(b_bucket, (UNITS // OTHER, MIDDLE, 2, OTHER, LANES, 64))
        b_bucket = tl.reshape(b_bucket, b_p.shape)
        limit = tl.max(b_limit, 0)
        for i_b in range(1, limit + 1):
            b_here = tl.where(b_bucket == i_b, b_p, 0.0).to(b_p.dtype)
            b_rows = tl.dot(b_here, b_left, input_precision=PRECISION)
            b_sum = _sum_units(b_rows, UNITS, MIDDLE, LANES, COLUMNS)
            if i_b < limit:
                tl.atomic_add(p_slots + (i_b - 1) * COLUMNS, b_sum, mask=m_unit[:, None],
                              sem="relaxed")  # fmt: skip
            else:
                acc += b_sum
    else:
        o_entry = (b_unit_row[:, None] >> b_shift[None, :]) - ((i_t * 64) >> b_shift)[None, :]
        o_bucket = b_base[None, :] + tl.maximum(o_entry, 0)
        b_bucket = tl.load(p_bucket + o_bucket).to(tl.int32)  # [UNITS, COLUMNS]
        acc += tl.where(b_bucket >= b_limit[None, :], b_sum, 0.0)
        m_slot = m_unit[:, None] & (b_bucket >= 1) & (b_bucket < b_limit[None, :])
        tl.atomic_add(p_slots + (b_bucket - 1) * COLUMNS, b_sum, mask=m_slot, sem="relaxed")
    return acc


@triton.jit(do_not_specialize=["n", "num_units", "num_tiles", "num_slots"])
def sampled_masses_fwd_kernel(
    q, k, lse2, rows, unit_row, bounds, left_out, columns, bucket, is_near, unit_mass, outside,
    entered, stride_q_h, stride_q_n, stride_q_d, stride_k_h, stride_k_n, stride_k_d, stride_lse_h,
    stride_left_h, stride_bucket_h, n, group, scale_log2, num_units, num_tiles, num_slots,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNITS: tl.constexpr,
    MIDDLE: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    IS_OFFSET: tl.constexpr, STORE_TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the probabilities of one block of sampled rows.

    Grid: (blocks, heads), the longest rows first. With U units, altogether of 64 rows, a block:

    - ``rows`` int32 [blocks, 64] in the order of :func:`_sum_units`, −1 for none; ``unit_row``
      int32 [blocks, U], a row of each; ``bounds`` int32 [blocks, 2], least and greatest.
    - ``left_out`` [heads, 64·num_tiles, COLUMNS], 1 where a column is outside a budget; the last
      is 1 everywhere, which gives the mass of a tile.
    - ``columns`` int32 [3, COLUMNS]: where the budget's table begins in ``bucket``, log2 of its
      tile, its number of extent budgets M.
    - ``is_near`` uint8 [heads, num_tiles + 1]: at D, whether a pair of a block that begins D tiles
      after the key tile may be in a bucket below M.
    - ``unit_mass`` fp32 [heads, units, num_tiles], 0 before; ``outside`` fp32 [heads, units,
      COLUMNS], the sums over bucket M; ``entered`` fp32 [heads, units, num_slots, COLUMNS], 0
      before, over the buckets 1..M−1.
    """
    i_b = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    o_unit = i_b * UNITS + tl.arange(0, UNITS)
    m_unit = o_unit < num_units
    o_d = tl.arange(0, BLOCK_D)
    o_key = tl.arange(0, 64)
    o_col = tl.arange(0, COLUMNS)
    m_d = (o_d < HEAD_DIM)[None, :]

    o_q = tl.load(rows + i_b * 64 + tl.arange(0, 64))
    m_q = o_q >= 0
    p_q = q + i_h * stride_q_h
    p_q += o_q.to(tl.int64)[:, None] * stride_q_n + o_d[None, :] * stride_q_d
    b_q = tl.load(p_q, mask=m_q[:, None] & m_d, other=0.0)
    b_lse = tl.load(lse2 + i_h * stride_lse_h + o_q, mask=m_q, other=float("inf"))
    b_unit_row = tl.load(unit_row + o_unit)
    first, last = tl.load(bounds + i_b * 2), tl.load(bounds + i_b * 2 + 1)

    b_base = tl.load(columns + o_col)
    b_shift = tl.load(columns + COLUMNS + o_col)
    b_limit = tl.load(columns + 2 * COLUMNS + o_col)
    p_k = k + (i_h // group) * stride_k_h
    p_k += o_key.to(tl.int64)[:, None] * stride_k_n + o_d[None, :] * stride_k_d
    p_left = left_out + i_h * stride_left_h + o_key[:, None] * COLUMNS + o_col[None, :]
    p_bucket = bucket + i_h * stride_bucket_h
    p_near = is_near + i_h * (num_tiles + 1)
    # The tile's mass is the last column: the threads that hold it store it.
    p_tile = unit_mass + ((i_h * num_units + o_unit) * num_tiles)[:, None] + 0 * o_col[None, :]
    m_tile = m_unit[:, None] & (o_col == COLUMNS - 1)[None, :]
    p_entered = entered + i_h * num_units * num_slots * COLUMNS

    acc = tl.zeros([UNITS, COLUMNS], tl.float32)
    num_whole = first // 64  # key tiles that every row of the block sees whole
    for i_t in range(num_whole):
        i_token = tl.cast(i_t * 64, tl.int64)
        b_k = tl.load(p_k + i_token * stride_k_n, mask=m_d, other=0.0)
        b_left = tl.load(p_left + i_token * COLUMNS)
        is_hot = tl.load(p_near + num_whole - i_t)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_p = tl.exp2(b_s * scale_log2 - b_lse[:, None]).to(b_left.dtype)
        b_rows = tl.dot(b_p, b_left, input_precision=PRECISION)
        b_sum = _sum_units(b_rows, UNITS, MIDDLE, LANES, COLUMNS)
        if STORE_TILES:
            tl.store(p_tile + i_t, b_sum, mask=m_tile)
        if is_hot == 0:
            acc += b_sum
        else:
            acc = _enter_tile(
                b_p, b_left, b_sum, acc, i_t, o_unit, m_unit, b_unit_row, o_col, b_base, b_shift,
                b_limit, p_bucket, p_entered, num_slots, IS_OFFSET, UNITS, MIDDLE, LANES,
                COLUMNS, PRECISION,
            )  # fmt: skip
    for i_t in range(num_whole, last // 64 + 1):
        i_token = tl.cast(i_t * 64, tl.int64)
        m_k = (i_token + o_key < n)[:, None] & m_d
        b_k = tl.load(p_k + i_token * stride_k_n, mask=m_k, other=0.0)
        b_left = tl.load(p_left + i_token * COLUMNS)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_p = tl.exp2(b_s * scale_log2 - b_lse[:, None])
        b_p = tl.where(i_t * 64 + o_key[None, :] <= o_q[:, None], b_p, 0.0).to(b_left.dtype)
        b_rows = tl.dot(b_p, b_left, input_precision=PRECISION)
        b_sum = _sum_units(b_rows, UNITS, MIDDLE, LANES, COLUMNS)
        if STORE_TILES:
            tl.store(p_tile + i_t, b_sum, mask=m_tile)
        acc = _enter_tile(
            b_p, b_left, b_sum, acc, i_t, o_unit, m_unit, b_unit_row, o_col, b_base, b_shift,
            b_limit, p_bucket, p_entered, num_slots, IS_OFFSET, UNITS, MIDDLE, LANES, COLUMNS,
            PRECISION,
        )  # fmt: skip
    p_outside = outside + (i_h * num_units + o_unit)[:, None] * COLUMNS + o_col[None, :]
    tl.store(p_outside, acc, mask=m_unit[:, None])


def launch_sampled_masses(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    lse: Tensor,
    units: tuple[range, ...],
    budgets: Sequence[ColumnBudgets],
) -> tuple[Tensor, list[Tensor]]:
    """Return what the rows of each unit give to each key tile, and what budgets miss of it.

    Args:
        q: [1, Hq, n, d], float16, bfloat16 or float32, any strides.
        k: [1, Hkv, n, d], not repeated.
        scale: factor of the logits.
        lse: float32 [Hq, n], natural log-sum-exp of each row.
        units: rows of each, all with one step, each within one tile of 64; tiles ascend.
        budgets: the pairs of budgets that are asked for.

    Returns:
        float32 [Hq, units, num_tiles(n, 64)], and for each of ``budgets`` float32 [Hq, units, M,
        V]: what a unit gives to the keys outside extent budget m and column budget v.

    Raises:
        InputError: a shape, dtype or device is not allowed.
        EnvironmentLacks: there is no CUDA device and Triton does not interpret, or no launch
            shape fits it.
    """
    check_attention_inputs(q, k)
    op = ScoreOperands(q=q, k=k, lse=lse, scale=scale)
    # bfloat16 keeps small probabilities; Triton's interpreter has no products of it.
    exact = q.dtype == torch.float32 or q.device.type == "cpu"
    dtype = torch.float32 if exact else torch.bfloat16
    unit_mass = q.new_zeros(op.num_heads, len(units), num_tiles(op.n, 64), dtype=torch.float32)
    missed: dict[int, Tensor] = {}
    for group in budgets_by_launch(budgets):
        mine = [budgets[place] for place in group]
        parts = _launch(op, units, mine, dtype, unit_mass, store_tiles=not missed)
        missed.update(zip(group, parts, strict=True))
    return unit_mass, [missed[place] for place in range(len(budgets))]


def _launch(
    op: ScoreOperands,
    units: tuple[range, ...],
    budgets: Sequence[ColumnBudgets],
    dtype: torch.dtype,
    unit_mass: Tensor,
    *,
    store_tiles: bool,
) -> list[Tensor]:
    """Launch once; return what each of ``budgets`` misses."""
    device, tiles = op.q.device, unit_mass.shape[2]
    is_offset = any(one.table.kind == "offset" for one in budgets)
    rows = blocks_of_rows(units)
    last = rows.amax((1, 2))
    first = torch.where(rows < 0, last[:, None, None], rows).amin((1, 2))
    bounds = torch.stack([first, last], dim=1)
    slots, order = in_slots(rows)
    widths = [one.num_columns for one in budgets]
    columns = max(16, triton.next_power_of_2(sum(widths) + 1))
    num_slots = max([1, *(one.table.num_buckets - 1 for one in budgets)])
    table, bucket = table_of_columns(op, budgets, columns)
    span = int((last // 64 - first // 64).max())
    near = near_tiles(op, budgets, tiles, span)
    left_out = torch.zeros(op.num_heads, tiles * 64, columns, device=device, dtype=dtype)
    start = 0
    for one in budgets:
        numbers = torch.arange(one.num_columns, device=device)
        out = one.column_bucket[..., None] > numbers
        left_out[:, : op.n, start : start + one.num_columns] = out
        start += one.num_columns
    left_out[:, :, -1] = 1
    outside = unit_mass.new_empty(op.num_heads, len(units), columns)
    entered = unit_mass.new_zeros(op.num_heads, len(units), num_slots, columns)
    grid = (len(rows), op.num_heads)
    slots, unit_row, bounds = (
        upload(table.numpy(), device) for table in (slots, rows.amax(2), bounds)
    )
    constants = op.constants | order | {"COLUMNS": columns}

    def start_with(launch: ScoreLaunch) -> None:
        sampled_masses_fwd_kernel[grid](
            op.q[0], op.k[0], op.lse2, slots, unit_row, bounds, left_out, table, bucket, near,
            unit_mass, outside, entered,
            *op.strides, left_out.stride(0), bucket.stride(0),
            op.n, op.group, op.scale_log2, len(units), tiles, num_slots,
            **constants, IS_OFFSET=is_offset, STORE_TILES=store_tiles,
            num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip

    with device_guard(op.q):
        launches = [ScoreLaunch("triton", 64, 4, stages) for stages in (3, 2, 1)]
        launch_first_that_fits(launches, start_with)
    missed = []
    start = 0
    for one in budgets:
        mine = slice(start, start + one.num_columns)
        start += one.num_columns
        # An extent budget misses its own bucket number + 1 and all later ones.
        later = entered[:, :, : one.table.num_buckets - 1, mine].flip(2).cumsum(2).flip(2)
        last_one = outside[:, :, None, mine]
        missed.append(torch.cat([later + last_one, last_one], dim=2))
    return missed
