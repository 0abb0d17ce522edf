# SPDX-License-Identifier: Apache-2.0
"""Masses of sampled query rows on CUDA: only these rows are multiplied.

A program holds a block of sampled rows and walks over the key tiles. Of a tile it keeps each unit's
mass, and adds up, for every column budget of every table, the mass of the columns outside it. Both
come from a second product, of the probabilities with a matrix of zeros and ones. Nearly all tiles
are outside every extent budget, where one accumulator serves; the others are entered by bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from patternsearch.kernels._common.checks import check_attention_inputs, device_guard
from patternsearch.kernels._common.upload import upload
from patternsearch.kernels.score.sampled import BLOCK_ROWS, unit_rows
from patternsearch.kernels.score.tables import BucketTable
from patternsearch.kernels.score.triton_launch import (
    ScoreLaunch,
    ScoreOperands,
    launch_first_that_fits,
)
from patternsearch.patterns.geometry import num_tiles

__all__ = ["ColumnBudgets", "launch_sampled_masses"]

_MAX_COLUMNS = 63
"""Column budgets of all tables that one launch reduces under, unless one table has more."""


@dataclass(frozen=True, slots=True)
class ColumnBudgets:
    """Extent budgets and column budgets that are reduced under together.

    Attributes:
        table: M extent budgets; ``tile``, or ``offset`` with a tile of 64.
        column_bucket: integer [Hq, n], how many of the V column budgets leave a column out.
        num_columns: V.
    """

    table: BucketTable
    column_bucket: Tensor
    num_columns: int


@triton.jit
def _enter_tile(
    b_p, b_left, acc, i_t, o_unit, m_unit, b_unit_row, o_col, b_base, b_shift, b_limit,
    p_bucket, p_entered, num_slots,
    IS_OFFSET: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Enter a tile by its buckets: bucket b of 1..M−1 in slot b−1, bucket M in ``acc``.

    ``acc`` is fp32 [UNITS, COLUMNS]; slots fp32 [units, num_slots, COLUMNS]. One program enters a
    unit, and one thread of it an element, so the order of the additions is fixed.
    """
    p_slots = p_entered + o_unit.to(tl.int64)[:, None] * (num_slots * COLUMNS) + o_col[None, :]
    if IS_OFFSET:
        # The pairs of a tile are in different buckets: entry 64·(u + 1) − 1 − j of query tile u.
        o_key = i_t * 64 + tl.arange(0, 64)
        b_last = (b_unit_row // 64 + 1) * 64 - 1
        o_entry = tl.maximum(b_last[:, None] - o_key[None, :], 0)
        b_bucket = tl.load(p_bucket + o_entry).to(tl.int32)  # [UNITS, 64]
        b_bucket = tl.broadcast_to(b_bucket[:, None, :], (UNITS, ROWS, 64))
        b_bucket = tl.reshape(b_bucket, (UNITS * ROWS, 64))
        limit = tl.max(b_limit, 0)
        for i_b in range(1, limit + 1):
            b_here = tl.where(b_bucket == i_b, b_p, 0.0).to(b_p.dtype)
            b_sum = tl.dot(b_here, b_left, input_precision=PRECISION)
            b_sum = tl.sum(tl.reshape(b_sum, (UNITS, ROWS, COLUMNS)), axis=1)
            if i_b < limit:
                tl.atomic_add(p_slots + (i_b - 1) * COLUMNS, b_sum, mask=m_unit[:, None],
                              sem="relaxed")  # fmt: skip
            else:
                acc += b_sum
    else:
        b_sum = tl.dot(b_p, b_left, input_precision=PRECISION)
        b_sum = tl.sum(tl.reshape(b_sum, (UNITS, ROWS, COLUMNS)), axis=1)
        o_entry = (b_unit_row[:, None] >> b_shift[None, :]) - ((i_t * 64) >> b_shift)[None, :]
        o_bucket = b_base[None, :] + tl.maximum(o_entry, 0)
        b_bucket = tl.load(p_bucket + o_bucket).to(tl.int32)  # [UNITS, COLUMNS]
        acc += tl.where(b_bucket >= b_limit[None, :], b_sum, 0.0)
        m_slot = m_unit[:, None] & (b_bucket >= 1) & (b_bucket < b_limit[None, :])
        tl.atomic_add(p_slots + (b_bucket - 1) * COLUMNS, b_sum, mask=m_slot, sem="relaxed")
    return acc


@triton.jit(do_not_specialize=["n", "num_units", "num_tiles", "num_slots"])
def sampled_masses_fwd_kernel(
    q, k, lse2, rows, bounds, left_out, columns, bucket, is_near, unit_mass, outside, entered,
    stride_q_h, stride_q_n, stride_q_d, stride_k_h, stride_k_n, stride_k_d, stride_lse_h,
    stride_left_h, stride_bucket_h, n, group, scale_log2, num_units, num_tiles, num_slots,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, IS_OFFSET: tl.constexpr, STORE_TILES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the probabilities of one block of sampled rows.

    Grid: (blocks, heads), the longest rows first. With U units of R rows a block:

    - ``rows`` int32 [blocks, U, R], −1 for none; ``bounds`` int32 [blocks, 2], least and greatest.
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
    o_slot = tl.arange(0, UNITS * ROWS)
    o_unit = i_b * UNITS + tl.arange(0, UNITS)
    m_unit = o_unit < num_units
    o_d = tl.arange(0, BLOCK_D)
    o_key = tl.arange(0, 64)
    o_col = tl.arange(0, COLUMNS)
    m_d = (o_d < HEAD_DIM)[None, :]

    o_q = tl.load(rows + i_b * UNITS * ROWS + o_slot)
    m_q = o_q >= 0
    p_q = q + i_h * stride_q_h
    p_q += o_q.to(tl.int64)[:, None] * stride_q_n + o_d[None, :] * stride_q_d
    b_q = tl.load(p_q, mask=m_q[:, None] & m_d, other=0.0)
    b_lse = tl.load(lse2 + i_h * stride_lse_h + o_q, mask=m_q, other=float("inf"))
    b_unit_row = tl.max(tl.reshape(o_q, (UNITS, ROWS)), axis=1)
    first, last = tl.load(bounds + i_b * 2), tl.load(bounds + i_b * 2 + 1)

    b_base = tl.load(columns + o_col)
    b_shift = tl.load(columns + COLUMNS + o_col)
    b_limit = tl.load(columns + 2 * COLUMNS + o_col)
    p_k = k + (i_h // group) * stride_k_h
    p_k += o_key.to(tl.int64)[:, None] * stride_k_n + o_d[None, :] * stride_k_d
    p_left = left_out + i_h * stride_left_h + o_key[:, None] * COLUMNS + o_col[None, :]
    p_bucket = bucket + i_h * stride_bucket_h
    p_near = is_near + i_h * (num_tiles + 1)
    p_tile = unit_mass + (i_h * num_units + o_unit) * num_tiles
    p_entered = entered + i_h * num_units * num_slots * COLUMNS

    acc_rows = tl.zeros([UNITS * ROWS, COLUMNS], tl.float32)
    acc_units = tl.zeros([UNITS, COLUMNS], tl.float32)
    num_whole = first // 64  # key tiles that every row of the block sees whole
    for i_t in range(num_whole):
        i_token = tl.cast(i_t * 64, tl.int64)
        b_k = tl.load(p_k + i_token * stride_k_n, mask=m_d, other=0.0)
        b_left = tl.load(p_left + i_token * COLUMNS)
        is_hot = tl.load(p_near + num_whole - i_t)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_p = tl.exp2(b_s * scale_log2 - b_lse[:, None])
        b_p = b_p.to(b_left.dtype)
        b_sum = tl.dot(b_p, b_left, input_precision=PRECISION)
        if STORE_TILES:
            b_row = tl.sum(tl.where(o_col[None, :] == COLUMNS - 1, b_sum, 0.0), axis=1)
            b_mass = tl.sum(tl.reshape(b_row, (UNITS, ROWS)), axis=1)
            tl.store(p_tile + i_t, b_mass, mask=m_unit)
        if is_hot == 0:
            acc_rows += b_sum
        else:
            acc_units = _enter_tile(
                b_p, b_left, acc_units, i_t, o_unit, m_unit, b_unit_row, o_col, b_base, b_shift,
                b_limit, p_bucket, p_entered, num_slots, IS_OFFSET, UNITS, ROWS, COLUMNS, PRECISION,
            )  # fmt: skip
    for i_t in range(num_whole, last // 64 + 1):
        i_token = tl.cast(i_t * 64, tl.int64)
        m_k = (i_token + o_key < n)[:, None] & m_d
        b_k = tl.load(p_k + i_token * stride_k_n, mask=m_k, other=0.0)
        b_left = tl.load(p_left + i_token * COLUMNS)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_p = tl.exp2(b_s * scale_log2 - b_lse[:, None])
        b_p = tl.where(i_t * 64 + o_key[None, :] <= o_q[:, None], b_p, 0.0)
        if STORE_TILES:
            b_mass = tl.sum(tl.reshape(tl.sum(b_p, axis=1), (UNITS, ROWS)), axis=1)
            tl.store(p_tile + i_t, b_mass, mask=m_unit)
        acc_units = _enter_tile(
            b_p.to(b_left.dtype), b_left, acc_units, i_t, o_unit, m_unit, b_unit_row, o_col,
            b_base, b_shift, b_limit, p_bucket, p_entered, num_slots, IS_OFFSET, UNITS, ROWS,
            COLUMNS, PRECISION,
        )  # fmt: skip
    acc_units += tl.sum(tl.reshape(acc_rows, (UNITS, ROWS, COLUMNS)), axis=1)
    p_outside = outside + (i_h * num_units + o_unit)[:, None] * COLUMNS + o_col[None, :]
    tl.store(p_outside, acc_units, mask=m_unit[:, None])


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
    for group in _groups(budgets):
        mine = [budgets[place] for place in group]
        parts = _launch(op, units, mine, dtype, unit_mass, store_tiles=not missed)
        missed.update(zip(group, parts, strict=True))
    return unit_mass, [missed[place] for place in range(len(budgets))]


def _groups(budgets: Sequence[ColumnBudgets]) -> list[list[int]]:
    """Return which budgets go into one launch; no budgets make one launch for the tiles."""
    groups: list[list[int]] = []
    width = 0
    for place, one in enumerate(budgets):
        if one.table.kind != "tile":
            assert (one.table.kind, one.table.tile) == ("offset", 64), one.table
            continue
        assert one.table.tile % 64 == 0, one.table.tile
        width += one.num_columns
        if not groups or width > _MAX_COLUMNS:
            groups.append([])
            width = one.num_columns
        groups[-1].append(place)
    groups += [[place] for place, one in enumerate(budgets) if one.table.kind == "offset"]
    return groups or [[]]


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
    rows = unit_rows(units)
    per_block, places = rows.shape[1:]
    is_small = op.constants["BLOCK_D"] <= 128 and dtype != torch.float32
    if is_small and rows.numel() > BLOCK_ROWS:
        # Twice the rows read the keys half as often.
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, len(rows) % 2), value=-1)
        per_block *= 2
        rows = rows.view(-1, per_block, places)
    flat = rows.flatten(1)
    last = flat.amax(1)
    first = torch.where(flat < 0, last[:, None], flat).amin(1)
    bounds = torch.stack([first, last], dim=1)
    widths = [one.num_columns for one in budgets]
    columns = max(16, triton.next_power_of_2(sum(widths) + 1))
    num_slots = max([1, *(one.table.num_buckets - 1 for one in budgets)])
    table, bucket = _table_of_columns(op, budgets, columns)
    span = int((last // 64 - first // 64).max())
    near = _near(op, budgets, tiles, span)
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
    rows, bounds = upload(rows.numpy(), device), upload(bounds.numpy(), device)
    num_warps = 8 if per_block * places > BLOCK_ROWS else 4
    constants = op.constants | {"UNITS": per_block, "ROWS": places, "COLUMNS": columns}

    def start_with(launch: ScoreLaunch) -> None:
        sampled_masses_fwd_kernel[grid](
            op.q[0], op.k[0], op.lse2, rows, bounds, left_out, table, bucket, near,
            unit_mass, outside, entered,
            *op.strides, left_out.stride(0), bucket.stride(0),
            op.n, op.group, op.scale_log2, len(units), tiles, num_slots,
            **constants, IS_OFFSET=is_offset, STORE_TILES=store_tiles,
            num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip

    with device_guard(op.q):
        launches = [ScoreLaunch("triton", 64, num_warps, stages) for stages in (3, 2, 1)]
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


def _table_of_columns(
    op: ScoreOperands, budgets: Sequence[ColumnBudgets], columns: int
) -> tuple[Tensor, Tensor]:
    """Return the kernel's ``columns`` and ``bucket``."""
    table = np.zeros((3, columns), dtype=np.int32)
    table[1] = 31  # of places that no budget has: entry 0
    start = base = 0
    for one in budgets:
        mine = slice(start, start + one.num_columns)
        table[0, mine] = base
        table[1, mine] = one.table.tile.bit_length() - 1
        table[2, mine] = one.table.num_buckets
        start, base = mine.stop, base + one.table.bucket.shape[1]
    buckets = [one.table.bucket for one in budgets]
    if not buckets:
        buckets = [torch.zeros(op.num_heads, 1, device=op.q.device, dtype=torch.uint8)]
    bucket = buckets[0].contiguous() if len(buckets) == 1 else torch.cat(buckets, dim=1)
    return upload(table, op.q.device), bucket


def _near(op: ScoreOperands, budgets: Sequence[ColumnBudgets], tiles: int, span: int) -> Tensor:
    """Return the kernel's ``is_near``, for blocks of rows of at most ``span`` + 1 tiles."""
    near = torch.zeros(op.num_heads, tiles + 1, device=op.q.device)
    for one in budgets:
        inside = one.table.bucket < one.table.num_buckets
        if one.table.kind == "offset":
            inside, per_tile = inside.reshape(op.num_heads, -1, 64).any(2), 1
        else:
            per_tile = one.table.tile // 64
            inside = inside.repeat_interleave(per_tile, dim=1)
        inside = torch.nn.functional.pad(inside[:, :tiles].float(), (0, 1))
        # x tiles of 64 away is diagonal ⌊x / r⌋ or ⌈x / r⌉ of tiles of 64·r.
        slack = per_tile - 1
        padded = torch.nn.functional.pad(inside, (slack, span + slack))
        reach = torch.nn.functional.max_pool1d(padded[:, None], span + 2 * slack + 1, stride=1)
        near = torch.maximum(near, reach[:, 0])
    return near.to(torch.uint8)
