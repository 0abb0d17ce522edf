# SPDX-License-Identifier: Apache-2.0
"""Candidates whose physical set is whole tiles by query tile: dense, A-shape, Block-Sparse.

All of them read the probability mass of 64-key tiles in query segments, computed once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patternsearch.kernels._common.upload import upload
from patternsearch.patterns.candidates import AShape, BlockSparse
from patternsearch.patterns.geometry import (
    a_shape_counts,
    a_shape_sink_tiles,
    a_shape_window_diagonals,
    block_sparse_counts,
    causal_pairs,
    effective_blocks,
    num_tiles,
    query_segments,
    region_rows,
)
from patternsearch.scoring.accounts import Accounts
from patternsearch.scoring.regions import Regions, SampledRegions

__all__ = ["SelectTop", "TileMasses", "put_a_shape", "put_block_sparse", "put_dense"]

SelectTop = Callable[..., Any]
"""One of the functions ``patternsearch.kernels.index.select.select_top``."""

_LIMIT = 2**26
"""Largest number of elements in a temporary array; heads are taken in blocks that respect it."""


class TileMasses:
    """Mass of key tiles by query segment, and by query tile, of either tile size.

    Args:
        segment_mass: [Hq, segments, num_tiles(n, 64)]; of a sample, its units are the segments.
        n: real tokens.
        regions: of a sample, how its units become regions; None for all rows.
    """

    def __init__(
        self,
        segment_mass: Tensor,
        n: int,
        regions: SampledRegions | None = None,
    ) -> None:
        self.n = n
        self.segment_mass = segment_mass
        self.regions: Regions | SampledRegions
        if regions is None:
            bounds, region = query_segments(n, 64)
            self.first_row = bounds[:-1]
            self.regions = Regions(n, region.tolist())
        else:
            self.regions = regions
            self.first_row = regions.tables.sample.first_row

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.segment_mass.shape[0]

    def head_blocks(self, width: int) -> list[slice]:
        """Return blocks of heads small enough for temporaries of ``width`` numbers a segment."""
        step = max(1, _LIMIT // (self.segment_mass.shape[1] * max(1, width)))
        return [slice(h, h + step) for h in range(0, self.num_heads, step)]

    def query_tiles(self, tile: int) -> Tensor:
        """Return the query tile of each segment, int64 [segments]."""
        return upload(self.first_row // tile, self.segment_mass.device)

    def of_tiles(self, heads: slice, tile: int, keys: Tensor) -> Tensor:
        """Return the mass of some key tiles of each segment.

        Args:
            heads: which heads.
            tile: size of the key tiles.
            keys: int64 [heads, segments, m], key tiles.

        Returns:
            [heads, segments, m].
        """
        mass = self.segment_mass[heads]
        if tile == 64:
            return mass.gather(2, keys)
        parts = [
            mass.gather(2, place.clamp(max=mass.shape[2] - 1)).masked_fill_(
                place >= mass.shape[2], 0
            )
            for place in (keys * (tile // 64) + part for part in range(tile // 64))
        ]
        return functools.reduce(torch.add, parts)

    def by_segment(self, heads: slice, tile: int) -> Tensor:
        """Return [heads, segments, num_tiles(n, tile)]."""
        mass = self.segment_mass[heads]
        per_tile = tile // 64
        if per_tile == 1:
            return mass
        if pad := num_tiles(self.n, tile) * per_tile - mass.shape[2]:
            mass = torch.nn.functional.pad(mass, (0, pad))
        parts = mass.view(*mass.shape[:2], -1, per_tile).unbind(-1)
        return functools.reduce(torch.add, parts)  # a sum over so few is slow on CUDA

    def by_query_tile(self, heads: slice, tile: int) -> Tensor:
        """Return [heads, query tiles, key tiles], the mass of each tile."""
        mass = self.by_segment(heads, tile)
        query = self.first_row // tile
        first = np.searchsorted(query, np.arange(num_tiles(self.n, tile)))
        count = np.diff(np.append(first, len(query)))
        total = mass[:, torch.from_numpy(first).to(mass.device)].clone()
        for extra in range(1, int(count.max())):
            more = np.flatnonzero(count > extra)
            at = torch.from_numpy(more).to(mass.device)
            total[:, at] += mass[:, torch.from_numpy(first[more] + extra).to(mass.device)]
        return total

    def diagonal_sums(self, tile: int) -> Tensor:
        """Return [Hq, num_tiles(n, tile)], the mass of each tile diagonal D = u − v."""
        parts = []
        for heads in self.head_blocks(num_tiles(self.n, tile)):
            mass = self.by_query_tile(heads, tile)
            tiles = mass.shape[1]
            # Key tile u − D of query tile u; those below 0 do not exist.
            key = torch.arange(tiles, device=mass.device)
            key = key[:, None] - key
            shifted = mass.gather(2, key.clamp(min=0).expand(mass.shape[0], -1, -1))
            parts.append(torch.where(key >= 0, shifted, 0).sum(1))
        return torch.cat(parts)


def put_dense(accounts: Accounts, masses: TileMasses, row: int) -> None:
    """Enter the dense candidate, whose mass and density are 1 by definition."""
    device = masses.segment_mass.device
    rows = upload(np.asarray(region_rows(masses.n), dtype=np.float64), device)
    count = num_tiles(masses.n, 64)
    accounts.put(
        [row],
        captured=rows.expand(masses.num_heads, 1, -1),
        pairs=upload(np.asarray([causal_pairs(masses.n)]), device),
        tiles=upload(np.asarray([count * (count + 1) // 2]), device),
    )


def put_a_shape(
    accounts: Accounts,
    masses: TileMasses,
    rows: Sequence[int],
    candidates: Sequence[AShape],
    logical: Tensor | None,
) -> None:
    """Enter A-shape candidates.

    Args:
        accounts: receives the rows.
        masses: of the layer.
        rows: place of each candidate.
        candidates: to score.
        logical: [Hq, G], the logical mass of each, summed over rows; None where not computed.
    """
    n, device = masses.n, masses.segment_mass.device
    if logical is None:
        logical = torch.full((masses.num_heads, len(rows)), float("nan"), device=device)
    count = num_tiles(n, 64)
    sink_ends, window_starts, row_ends = [], [], []
    for candidate in candidates:
        tile, per_tile = candidate.tile, candidate.tile // 64
        query_tile = masses.first_row // tile
        row_end = np.minimum((query_tile + 1) * per_tile, count)
        sinks = a_shape_sink_tiles(n, tile, candidate.sink) * per_tile
        diagonals = a_shape_window_diagonals(n, tile, candidate.window)
        sink_ends.append(np.minimum(sinks, row_end))
        window_starts.append(
            np.maximum(np.maximum(query_tile - diagonals + 1, 0) * per_tile, sink_ends[-1])
        )
        row_ends.append(row_end)
    sink, start, end = (
        upload(np.stack(values), device) for values in (sink_ends, window_starts, row_ends)
    )
    # Sinks and windows are short against a row; the windows of a segment end with its query tile.
    sink_width, last = int(np.max(sink_ends)), np.stack(row_ends).max(0)
    width = int((last - np.stack(window_starts).min(0)).max())
    first = upload(last - width, device)
    sink, start, end = (
        upload(np.stack(values), device) for values in (sink_ends, window_starts, row_ends)
    )
    segment = torch.arange(len(last), device=device)
    place = first[:, None] + torch.arange(width, device=device)
    parts = []
    for heads in masses.head_blocks(width):
        mass = masses.segment_mass[heads]
        strip = mass[:, segment[:, None], place.clamp(min=0)].masked_fill_(place < 0, 0)
        before = _running(strip)
        window = before[:, segment, end - first] - before[:, segment, start - first]
        parts.append(_running(mass[..., :sink_width])[:, segment, sink] + window)
    counts = [a_shape_counts(n, c.tile, c.sink, c.window) for c in candidates]
    tiles, pairs = upload(np.asarray(counts), device).unbind(1)
    accounts.put(
        rows,
        captured=masses.regions.sum(torch.cat(parts)),
        pairs=pairs,
        tiles=tiles,
        logical=logical,
    )


def _running(mass: Tensor) -> Tensor:
    """Return [..., m + 1], the sums of the first 0, 1, …, m of [..., m]."""
    return torch.nn.functional.pad(mass, (1, 0)).cumsum(-1)


def put_block_sparse(
    accounts: Accounts,
    masses: TileMasses,
    rows: Sequence[int],
    candidates: Sequence[BlockSparse],
    scores: Tensor | None,
    select_top: SelectTop | None = None,
) -> None:
    """Enter Block-Sparse candidates of one tile size and one index.

    Args:
        accounts: receives the rows.
        masses: of the layer.
        rows: place of each candidate.
        candidates: to score.
        scores: [Hq, tiles, tiles], the online block scores; None for the oracle's, which are the
            tiles' true masses.
        select_top: the index's, where it is faster than sorting all tiles.
    """
    n, tile, device = masses.n, candidates[0].tile, masses.segment_mass.device
    budgets = [effective_blocks(n, tile, candidate.blocks) for candidate in candidates]
    query = masses.query_tiles(tile)
    last = upload(np.asarray(budgets) - 1, device)
    parts = []
    # What selects takes few temporaries; what sorts, ones of the size of the scores.
    width = max(budgets) if select_top is not None else num_tiles(n, tile)
    for heads in masses.head_blocks(width):
        if scores is None:
            true_mass = masses.by_query_tile(heads, tile)
            key = torch.arange(true_mass.shape[2], device=device)
            score = true_mass.masked_fill(key > key[:, None], float("-inf"))
        else:
            score = scores[heads]
        if select_top is not None:
            order = _rank_selected(score, max(budgets), select_top)[:, query]
        else:
            order = _rank_rows(score, masses.first_row // tile, max(budgets))
        ranked = masses.of_tiles(heads, tile, order).cumsum(-1)
        parts.append(ranked[..., last].transpose(1, 2))
    counts = [block_sparse_counts(n, tile, budget) for budget in budgets]
    tiles, pairs = upload(np.asarray(counts), device).unbind(1)
    accounts.put(rows, captured=masses.regions.sum(torch.cat(parts)), pairs=pairs, tiles=tiles)


def _rank_selected(scores: Tensor, budget: int, select_top: SelectTop) -> Tensor:
    """Rank as :func:`patternsearch.kernels.index.rank_blocks` does, the first of each query tile.

    Args:
        scores: float32 [heads, tiles, tiles], contiguous.
        budget: how many of the ranked are wanted.
        select_top: takes them, in no order of their scores.

    Returns:
        int64 [heads, tiles, budget]; where fewer come before the query tile's end, a later tile,
        which nothing of it attends to, fills up.
    """
    heads, tiles = scores.shape[:2]
    query = torch.arange(tiles, device=scores.device)[:, None]
    lists = (query + 1).clamp(max=tiles - 1).int().expand(tiles, budget)
    lists = lists.repeat(heads, 1, 1).contiguous()
    budgets = (budget,) * heads
    select_top(scores, budgets, out=lists.view(-1), with_mask=False, num_forced=0, causal_from=0)
    # A list is in descending order of tiles; the lower of equal scores comes first.
    taken = lists.flip(-1).long()
    score = scores.gather(2, taken)
    score = score.masked_fill(taken == query, float("inf"))
    score = score.masked_fill(taken > query, float("-inf"))
    return taken.gather(2, torch.sort(score, dim=-1, descending=True, stable=True).indices)


def _rank_rows(scores: Tensor, query: NDArray[np.int64], budget: int) -> Tensor:
    """Rank as :func:`patternsearch.kernels.index.rank_blocks` does, but for some query tiles.

    Args:
        scores: [heads, tiles, tiles]; −inf above the diagonal.
        query: int64 [segments], the query tile of each.
        budget: how many of the ranked are wanted.

    Returns:
        int64 [heads, segments, budget].
    """
    of_segment = np.unique(query, return_inverse=True)
    tiles, place = (upload(values, scores.device) for values in of_segment)
    mine = scores[:, tiles]
    mine.scatter_(2, tiles[None, :, None].expand(len(mine), -1, -1), float("inf"))
    order = torch.sort(mine, dim=-1, descending=True, stable=True).indices
    return order[:, place, :budget]
