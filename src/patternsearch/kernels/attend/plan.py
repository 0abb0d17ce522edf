# SPDX-License-Identifier: Apache-2.0
"""What every head and query tile of one layer reads: sets in, flat lists on the device out.

Three families of sets cover all patterns. *Implicit* sets (dense, A-shape) follow from two
numbers a head. *Diagonal* sets (Vertical-Slash) are tile diagonals common to all query tiles plus
columns; a column is gathered only for query tiles that do not read its tile, so that no pair is
read twice. *Listed* sets (Block-Sparse) name the key tiles of each query tile.

Every query tile reads its diagonal tile, and reads it first: all other tiles and all gathered
columns then lie wholly below the diagonal and need no mask. Nothing here waits for the device:
sizes follow from budgets, contents stay on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patternsearch.errors import InputError
from patternsearch.kernels._common.upload import column_spans, upload
from patternsearch.kernels.index import select
from patternsearch.kernels.index.select import COLUMN_PADDING
from patternsearch.patterns.geometry import num_tiles, tile_rows

__all__ = [
    "AttendPlan",
    "DiagonalSets",
    "ImplicitSets",
    "ListedSets",
    "PlanCounts",
    "TilePlan",
    "make_plan",
]

META_WINDOW, META_IS_DIAGONAL, META_USES_LIST, META_LIST, META_LIST_STRIDE = 1, 2, 3, 4, 5
META_COLUMNS, META_COLUMN_STRIDE, META_FIELDS = 6, 7, 8
"""Columns of :attr:`TilePlan.meta`; column 0 is the head."""


@dataclass(frozen=True, slots=True)
class ImplicitSets:
    """Heads whose query tile u reads the key tiles v < sink_tiles and u − v < window_diagonals.

    Attributes:
        heads: global query heads.
        tile: T.
        sink_tiles: one for each head.
        window_diagonals: one for each head, at least 1; as many as there are tiles makes a head
            dense.
    """

    heads: tuple[int, ...]
    tile: int
    sink_tiles: tuple[int, ...]
    window_diagonals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DiagonalSets:
    """Heads that read chosen tile diagonals and chosen columns.

    Attributes:
        heads: global query heads, G of them.
        tile: T.
        chosen: uint8 or bool [G, num_tiles(n, T)]: is tile diagonal D read; D = 0 always is.
        columns: int32 [Σ num_columns], each head's columns in ascending order, one head after the
            other.
        num_columns: columns of each head.
    """

    heads: tuple[int, ...]
    tile: int
    chosen: Tensor
    columns: Tensor
    num_columns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ListedSets:
    """Heads that read listed key tiles.

    Attributes:
        heads: global query heads.
        tile: T.
        tiles: int32 [Σ num_tiles(n, T) · budget]: for each head and query tile u, min(budget, u+1)
            key tiles in descending order, the first of them u; the rest of the row is unused.
        budgets: key tiles per query tile of each head.
    """

    heads: tuple[int, ...]
    tile: int
    tiles: Tensor
    budgets: tuple[int, ...]


Sets = ImplicitSets | DiagonalSets | ListedSets


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The heads of one layer that share a tile size, as the kernels read them.

    Attributes:
        tile: T.
        heads: global query heads, G of them, in the order of all rows below.
        meta: int64 [G, 8]: head; window W; is the list one of tile diagonals; is there a list;
            where it starts in ``lists``; its stride over query tiles (0: common to all); where
            the columns start in ``columns``; their stride over query tiles.
        tile_count: int32 [G, num_tiles(n, T)]: key tiles read, diagonal tile included. Key tile t
            of query tile u is: without a list, u − t for t < W, else count − 1 − t; with one, the
            entry itself or u − entry.
        column_count: int32 [G, num_tiles(n, T)]: columns gathered.
        lists: int32, flat.
        columns: int32, flat; every row is filled up with zeros to a multiple of
            ``COLUMN_PADDING``.
        order: int32 [G · num_tiles(n, T)]: work items g · num_tiles + u, the longest first.
        max_tiles: the most key tiles that a query tile may read.
        has_columns: does any head gather columns.
    """

    tile: int
    heads: tuple[int, ...]
    meta: Tensor
    tile_count: Tensor
    column_count: Tensor
    lists: Tensor
    columns: Tensor
    order: Tensor
    max_tiles: int
    has_columns: bool


@dataclass(frozen=True, slots=True)
class PlanCounts:
    """How much each head reads, on the plan's device.

    Attributes:
        tiles: int64 [Hq], causal tiles of the head's own size.
        columns: int64 [Hq], gathered columns summed over query tiles.
        pairs: int64 [Hq], causal pairs.
        density: float64 [Hq], pairs over all causal pairs.
    """

    tiles: Tensor
    columns: Tensor
    pairs: Tensor
    density: Tensor


@dataclass(frozen=True, slots=True)
class AttendPlan:
    """The physical sets of all heads of one layer.

    Attributes:
        n: tokens.
        num_heads: Hq; every head is in exactly one tile plan.
        tile_plans: one for each tile size in use.
    """

    n: int
    num_heads: int
    tile_plans: tuple[TilePlan, ...]

    @property
    def device(self) -> torch.device:
        """Where the lists are."""
        return self.tile_plans[0].meta.device

    def counts(self) -> PlanCounts:
        """Count tiles, gathered columns and pairs of each head (no host synchronisation)."""
        shape, device = (self.num_heads,), self.device
        tiles = torch.zeros(shape, dtype=torch.int64, device=device)
        columns, pairs = torch.zeros_like(tiles), torch.zeros_like(tiles)
        for part in self.tile_plans:
            rows = upload(tile_rows(self.n, part.tile), device)
            head = part.meta[:, 0]
            read_tiles, read_columns = part.tile_count.long(), part.column_count.long()
            tiles[head] = read_tiles.sum(-1)
            columns[head] = read_columns.sum(-1)
            full = (read_tiles - 1) * part.tile + read_columns
            pairs[head] = (rows * full + rows * (rows + 1) // 2).sum(-1)
        total = self.n * (self.n + 1) // 2
        return PlanCounts(tiles, columns, pairs, pairs.double() / total)


def make_plan(
    n: int, num_heads: int, sets: Sequence[Sets], *, device: torch.device | str
) -> AttendPlan:
    """Turn the sets of all heads into a plan, with no host synchronisation on CUDA.

    Args:
        n: tokens.
        num_heads: Hq.
        sets: together they name each of the heads 0..Hq−1 once.
        device: where the sets' tensors are and the plan will be.

    Raises:
        InputError: heads are missing, repeated or unknown, or tensors have the wrong shape.
    """
    device = torch.device(device)
    named = sorted(head for part in sets for head in part.heads)
    if named != list(range(num_heads)):
        raise InputError(
            f"the sets name the heads {named}, but each of 0..{num_heads - 1} must be named once; "
            "give every head a set (a dense head is an implicit set as wide as the sequence)"
        )
    tiles = sorted({part.tile for part in sets})
    plans = tuple(
        _tile_plan(n, tile, [part for part in sets if part.tile == tile], device) for tile in tiles
    )
    return AttendPlan(n, num_heads, plans)


def _tile_plan(n: int, tile: int, sets: list[Sets], device: torch.device) -> TilePlan:
    count = num_tiles(n, tile)
    meta, tile_counts, column_counts, lists, columns = [], [], [], [], []
    list_start = column_start = max_tiles = 0
    lists_of: Any = select
    if device.type == "cuda":
        from patternsearch.kernels.index import select_triton

        lists_of = select_triton
    for part in sets:
        _check_shapes(part, count)
        rows = np.zeros((len(part.heads), META_FIELDS), dtype=np.int64)
        rows[:, 0] = part.heads
        no_columns = upload(np.zeros((len(part.heads), count), dtype=np.int32), device)
        if isinstance(part, ImplicitSets):
            rows[:, META_WINDOW] = part.window_diagonals
            widths = tuple(
                s + w for s, w in zip(part.sink_tiles, part.window_diagonals, strict=True)
            )
            max_tiles = max(max_tiles, *widths)
            tile_counts.append(_capped_counts(widths, count, device))
            column_counts.append(no_columns)
        elif isinstance(part, ListedSets):
            budgets = np.asarray(part.budgets, dtype=np.int64)
            rows[:, META_USES_LIST] = 1
            rows[:, META_LIST] = list_start + _starts(budgets * count)
            rows[:, META_LIST_STRIDE] = budgets
            max_tiles = max(max_tiles, *part.budgets)
            tile_counts.append(_capped_counts(part.budgets, count, device))
            column_counts.append(no_columns)
            lists.append(part.tiles)
            list_start += int(part.tiles.numel())
        else:
            chosen = part.chosen.to(torch.uint8).contiguous()
            diagonals, counts = lists_of.compact_diagonals(chosen)
            gathered, gathered_count = lists_of.loose_columns(
                part.columns, part.num_columns, chosen, tile
            )
            spans, _ = column_spans(part.num_columns, count, COLUMN_PADDING, torch.device("cpu"))
            rows[:, META_IS_DIAGONAL] = rows[:, META_USES_LIST] = 1
            rows[:, META_LIST] = list_start + np.arange(len(part.heads)) * count
            rows[:, META_COLUMNS] = column_start + spans[2].numpy()
            rows[:, META_COLUMN_STRIDE] = spans[3].numpy()
            max_tiles = count
            tile_counts.append(counts)
            column_counts.append(gathered_count)
            lists.append(diagonals.reshape(-1))
            columns.append(gathered)
            list_start += int(diagonals.numel())
            column_start += int(gathered.numel())
        meta.append(rows)
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    tile_count, column_count = torch.cat(tile_counts), torch.cat(column_counts)
    work = tile_count * tile + column_count
    return TilePlan(
        tile=tile,
        heads=tuple(head for part in sets for head in part.heads),
        meta=upload(np.concatenate(meta), device),
        tile_count=tile_count,
        column_count=column_count,
        lists=torch.cat(lists) if lists else nothing,
        columns=torch.cat(columns) if columns else nothing,
        order=work.reshape(-1).argsort(descending=True, stable=True).int(),
        max_tiles=min(max_tiles, count),
        has_columns=bool(columns),
    )


def _check_shapes(part: Sets, count: int) -> None:
    heads = len(part.heads)
    if isinstance(part, DiagonalSets):
        if part.chosen.shape != (heads, count):
            raise InputError(
                f"chosen has shape {tuple(part.chosen.shape)}; {heads} heads and {count} tile "
                f"diagonals need {(heads, count)}"
            )
        sizes, given, what = part.num_columns, part.columns, "columns"
        expected = sum(sizes)
    elif isinstance(part, ListedSets):
        sizes, given, what = part.budgets, part.tiles, "tiles"
        expected = sum(sizes) * count
    else:
        if len(part.sink_tiles) != heads or min(part.window_diagonals, default=1) < 1:
            raise InputError(
                f"sink_tiles {part.sink_tiles} and window_diagonals {part.window_diagonals} must "
                f"hold one number for each of {heads} heads, windows at least 1"
            )
        return
    if len(sizes) != heads or given.numel() != expected:
        raise InputError(
            f"{what} holds {given.numel()} numbers for the sizes {sizes} of {heads} heads; it "
            f"must hold {expected}"
        )


def _starts(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)


def _capped_counts(widths: tuple[int, ...], count: int, device: torch.device) -> Tensor:
    """Return int32 [heads, tiles]: min(u + 1, width)."""
    causal = np.arange(1, count + 1, dtype=np.int32)[None]
    return upload(np.minimum(causal, np.asarray(widths, dtype=np.int32)[:, None]), device)
