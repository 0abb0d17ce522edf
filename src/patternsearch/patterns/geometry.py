# SPDX-License-Identifier: Apache-2.0
"""Exact geometry of the patterns: tiles, forced entries, clamps, counts and regions.

Everything here depends on lengths and budgets only, never on attention values, and needs nothing
but NumPy. n is the number of real tokens, T the tile, u = i // T the query tile, v = j // T the
key tile, D = u − v the tile diagonal, δ = i − j the slash offset.
"""

import numpy as np
from numpy.typing import NDArray

from patternsearch.patterns.forced import FORCED_COLUMNS, FORCED_DIAGONALS, FORCED_SLASHES

__all__ = [
    "FORCED_COLUMNS",
    "FORCED_DIAGONALS",
    "FORCED_SLASHES",
    "NUM_REGIONS",
    "a_shape_counts",
    "a_shape_sink_tiles",
    "a_shape_tiles",
    "a_shape_window_diagonals",
    "block_sparse_counts",
    "causal_pairs",
    "diagonal_tiles",
    "effective_blocks",
    "effective_diagonals",
    "effective_slash",
    "effective_vertical",
    "num_tiles",
    "query_segments",
    "region_bounds",
    "region_rows",
    "slash_diagonals",
    "spread_row_positions",
    "tile_rows",
]

NUM_REGIONS = 4

Int = NDArray[np.int64]


def num_tiles(n: int, tile: int) -> int:
    """Return how many tiles cover ``n`` positions."""
    return -(-n // tile)


def tile_rows(n: int, tile: int) -> Int:
    """Return the number of real positions in each tile, shape [tiles]; only the last is partial."""
    starts = np.arange(num_tiles(n, tile), dtype=np.int64) * tile
    return np.minimum(starts + tile, n) - starts


def causal_pairs(n: int) -> int:
    """Return n(n+1)/2, the number of pairs j ≤ i."""
    return n * (n + 1) // 2


def region_bounds(n: int) -> tuple[int, ...]:
    """Return the five row bounds of the regions: region r holds rows [bounds[r], bounds[r+1]).

    The region of row i is ⌊4·i/n⌋, so its first row is ⌈r·n/4⌉. For n < 4 some are empty.
    """
    return tuple(-(-r * n // NUM_REGIONS) for r in range(NUM_REGIONS + 1))


def region_rows(n: int) -> Int:
    """Return the number of rows in each region, shape [4]."""
    bounds = np.asarray(region_bounds(n), dtype=np.int64)
    return bounds[1:] - bounds[:-1]


def query_segments(n: int, tile: int) -> tuple[Int, Int]:
    """Cut the rows at every tile and region bound.

    A segment is a run of rows within one tile and one region; most tiles are one segment, a tile
    that straddles regions is two or more.

    Returns:
        ``bounds``, shape [segments + 1], and ``region``, shape [segments]. The tile of segment s
        is ``bounds[s] // tile``.
    """
    cuts = np.concatenate(
        [np.arange(0, n, tile, dtype=np.int64), np.asarray(region_bounds(n), dtype=np.int64)]
    )
    bounds = np.unique(np.append(cuts, n))
    region = NUM_REGIONS * bounds[:-1] // n
    return bounds, region


def spread_row_positions(n: int, rows: int) -> Int:
    """Return the distinct positions i_r = ⌊(r+1)·n/R⌋ − 1 that are ≥ 0, ascending."""
    rows = min(rows, n)  # n rows are all positions, and so are more
    positions = (np.arange(1, rows + 1, dtype=np.int64) * n) // rows - 1
    return np.unique(positions[positions >= 0])


# --- budgets ---------------------------------------------------------------------------------


def effective_vertical(n: int, vertical: int) -> int:
    """Return the column budget that runs: raised to the forced columns, clamped to n."""
    return min(n, max(vertical, FORCED_COLUMNS))


def effective_slash(n: int, slash: int) -> int:
    """Return the offset budget that runs: raised to the forced offsets, clamped to n."""
    return min(n, max(slash, FORCED_SLASHES))


def effective_diagonals(n: int, tile: int, diagonals: int) -> int:
    """Return the tile-diagonal budget that runs: raised to the forced two, clamped."""
    return min(num_tiles(n, tile), max(diagonals, FORCED_DIAGONALS))


def effective_blocks(n: int, tile: int, blocks: int) -> int:
    """Return the block budget that runs: at least the diagonal tile, clamped to the tiles."""
    return min(num_tiles(n, tile), max(blocks, 1))


# --- sets ------------------------------------------------------------------------------------


def a_shape_sink_tiles(n: int, tile: int, sink: int) -> int:
    """Return S such that the sink reads the key tiles v < S (those with T·v < sink)."""
    return min(num_tiles(n, tile), num_tiles(sink, tile))


def a_shape_window_diagonals(n: int, tile: int, window: int) -> int:
    """Return W such that the window reads the tile diagonals D < W.

    A tile meets the window if max(0, T·D − (T−1)) < window.
    """
    return min(num_tiles(n, tile), (window - 1 + tile - 1) // tile + 1)


def a_shape_tiles(n: int, tile: int, sink: int, window: int) -> NDArray[np.bool_]:
    """Return the physical tiles of an A-shape as a [tiles, tiles] mask (for tests and drawings)."""
    u = np.arange(num_tiles(n, tile))[:, None]
    v = np.arange(num_tiles(n, tile))[None, :]
    reads = (v < a_shape_sink_tiles(n, tile, sink)) | (
        u - v < a_shape_window_diagonals(n, tile, window)
    )
    mask: NDArray[np.bool_] = reads & (v <= u)
    return mask


def slash_diagonals(offsets: Int, tile: int) -> Int:
    """Return the tile diagonals that the offsets touch: {⌊δ/T⌋, ⌈δ/T⌉}, ascending."""
    offsets = np.asarray(offsets, dtype=np.int64)
    return np.unique(np.concatenate([offsets // tile, -(-offsets // tile)]))


# --- counts ----------------------------------------------------------------------------------


def diagonal_tiles(n: int, tile: int) -> Int:
    """Return the number of causal tiles on each tile diagonal, shape [tiles]."""
    count = num_tiles(n, tile)
    return count - np.arange(count, dtype=np.int64)


def _pairs_of_rows(n: int, tile: int, tiles_per_query_tile: Int) -> int:
    """Return the causal pairs of sets that hold each query tile's diagonal tile.

    Off-diagonal key tiles are full, since v < u; the diagonal tile holds r(r+1)/2 pairs.
    """
    rows = tile_rows(n, tile)
    return int((rows * (tiles_per_query_tile - 1) * tile + rows * (rows + 1) // 2).sum())


def a_shape_counts(n: int, tile: int, sink: int, window: int) -> tuple[int, int]:
    """Return (causal tiles read, causal pairs read) of an A-shape."""
    causal = np.arange(1, num_tiles(n, tile) + 1, dtype=np.int64)
    sinks = a_shape_sink_tiles(n, tile, sink)
    diagonals = a_shape_window_diagonals(n, tile, window)
    per_query_tile = np.minimum(causal, sinks + diagonals)
    return int(per_query_tile.sum()), _pairs_of_rows(n, tile, per_query_tile)


def block_sparse_counts(n: int, tile: int, blocks: int) -> tuple[int, int]:
    """Return (causal tiles read, causal pairs read) of a Block-Sparse set, any choice of tiles."""
    causal = np.arange(1, num_tiles(n, tile) + 1, dtype=np.int64)
    per_query_tile = np.minimum(causal, max(blocks, 1))
    return int(per_query_tile.sum()), _pairs_of_rows(n, tile, per_query_tile)
