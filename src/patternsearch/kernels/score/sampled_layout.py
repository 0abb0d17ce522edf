# SPDX-License-Identifier: Apache-2.0
"""What the host lays out for the kernel of sampled rows: blocks of rows, tables of budgets."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from patternsearch.kernels._common.upload import upload
from patternsearch.kernels.score.sampled import BLOCK_ROWS, unit_rows
from patternsearch.kernels.score.tables import BucketTable
from patternsearch.kernels.score.triton_launch import ScoreOperands

__all__ = [
    "ColumnBudgets",
    "blocks_of_rows",
    "budgets_by_launch",
    "in_slots",
    "near_tiles",
    "table_of_columns",
]

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


def budgets_by_launch(budgets: Sequence[ColumnBudgets]) -> list[list[int]]:
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


def blocks_of_rows(units: tuple[range, ...]) -> Tensor:
    """Lay out the rows of units in blocks of 64 rows.

    Returns:
        int32 [blocks, units of a block, rows of a unit] on the CPU, −1 where there is no row; a
        unit has a power of two of places, at least two.
    """
    rows = unit_rows(units)
    if rows.shape[2] == 1:
        rows = torch.nn.functional.pad(rows, (0, 1), value=-1).view(-1, BLOCK_ROWS // 2, 2)
    return rows


def in_slots(rows: Tensor) -> tuple[Tensor, dict[str, int]]:
    """Put the rows of each block into the order that the kernel adds up; return its constants too.

    Args:
        rows: int32 [blocks, units, rows of a unit].

    Returns:
        int32 [blocks, 64]; UNITS of a block, and how many LANES and sets of lanes (MIDDLE) hold
        two rows each of a unit.
    """
    blocks, units, places = rows.shape
    lanes = min(8, places // 2)
    middle, other = places // (2 * lanes), 8 // lanes
    by_place = rows.view(blocks, units // other, other, middle, 2, lanes)
    slots = by_place.permute(0, 1, 3, 4, 2, 5).reshape(blocks, -1).contiguous()
    return slots, {"UNITS": units, "MIDDLE": middle, "LANES": lanes}


def table_of_columns(
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


def near_tiles(
    op: ScoreOperands, budgets: Sequence[ColumnBudgets], tiles: int, span: int
) -> Tensor:
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
