# SPDX-License-Identifier: Apache-2.0
"""Candidates whose physical set is whole tiles by query tile: dense, A-shape, Block-Sparse.

All of them read the probability mass of 64-key tiles in query segments, computed once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patternsearch.kernels._common.upload import upload
from patternsearch.kernels.index import rank_blocks
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

__all__ = ["SelectTop", "TileMasses", "put_a_shape", "put_block_sparse", "put_dense", "rank_tiles"]

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
    # Sinks and windows are short against a row; the windows of a segment end with its query tile.
    last = np.stack(row_ends).max(0)
    sink_width = int(np.max(sink_ends))
    width = int((last - np.stack(window_starts).min(0)).max())
    first = upload(last - width, device)  # [segments]
    sink, start, end = (
        upload(np.stack(values), device) for values in (sink_ends, window_starts, row_ends)
    )
    segment = torch.arange(len(last), device=device)
    place = first + torch.arange(width, device=device)[:, None]
    parts = []
    for heads in masses.head_blocks(width):
        mass = masses.segment_mass[heads]
        strip = mass[:, segment, place.clamp(min=0)].masked_fill_(place < 0, 0)
        before = _running(strip)
        window = before[:, end - first, segment] - before[:, start - first, segment]
        of_sinks = _running(mass[..., :sink_width].transpose(1, 2))
        parts.append(of_sinks[:, sink, segment] + window)
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
    """Return [heads, m + 1, segments], the sums of the first 0, 1, …, m of [heads, m, segments].

    CUDA sums along the last of many short rows an order of magnitude slower.
    """
    return torch.nn.functional.pad(mass, (0, 0, 1, 0)).cumsum(1)


def rank_tiles(scores: Tensor, budget: int, select_top: SelectTop | None = None) -> Tensor:
    """Rank the key tiles of each query tile, as ``rank_blocks`` of the index does.

    Args:
        scores: float32 [heads, tiles, tiles], contiguous; −inf where v > u, or with ``select_top``
            anything.
        budget: how many of the ranked are wanted.
        select_top: the index's, where it is faster than sorting all tiles.

    Returns:
        int64 [heads, tiles, budget]. Where a query tile has fewer, tiles that nothing of it
        attends to fill up.
    """
    if select_top is not None:
        return _rank_selected(scores, budget, select_top)
    step = max(1, _LIMIT // scores[0].numel())
    parts = [
        rank_blocks(scores[first : first + step])[..., :budget].clone()
        for first in range(0, len(scores), step)
    ]
    return torch.cat(parts)


def put_block_sparse(
    accounts: Accounts,
    masses: TileMasses,
    rows: Sequence[int],
    candidates: Sequence[BlockSparse],
    order: Tensor | None,
) -> None:
    """Enter Block-Sparse candidates of one tile size and one index.

    Args:
        accounts: receives the rows.
        masses: of the layer.
        rows: place of each candidate.
        candidates: to score.
        order: int64 [Hq, tiles, at least the largest budget], the online index's, of
            :func:`rank_tiles`; None for the oracle's, which ranks by the tiles' true masses.
    """
    n, tile, device = masses.n, candidates[0].tile, masses.segment_mass.device
    budgets = [effective_blocks(n, tile, candidate.blocks) for candidate in candidates]
    most, query = max(budgets), masses.query_tiles(tile)
    within = upload(
        (np.arange(most)[:, None] < np.asarray(budgets)).astype(np.float32), device
    )  # [most, G]
    parts = []
    for heads in masses.head_blocks(most if order is not None else num_tiles(n, tile)):
        if order is not None:
            mine = order[heads, :, :most]
        else:
            true_mass = masses.by_query_tile(heads, tile)
            key = torch.arange(true_mass.shape[2], device=device)
            mine = rank_tiles(true_mass.masked_fill(key > key[:, None], float("-inf")), most)
        ranked = masses.of_tiles(heads, tile, mine[:, query])
        parts.append((ranked @ within).transpose(1, 2))
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
