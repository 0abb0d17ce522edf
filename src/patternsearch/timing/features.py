# SPDX-License-Identifier: Apache-2.0
"""What a time depends on: the operation, what is read for a query tile, the units of work."""

import numpy as np
from numpy.typing import NDArray

from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Candidate,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.patterns.geometry import effective_blocks, effective_vertical, num_tiles
from patternsearch.timing.table import TimingRow

__all__ = [
    "Key",
    "features_of",
    "index_operation",
    "launched_index",
    "operation_of",
    "row_features",
    "row_key",
    "spell",
    "units_of",
]

Floats = NDArray[np.float64]

Key = tuple[str, int | None]
"""Operation and tile."""


def operation_of(candidate: Candidate) -> Key:
    """Return the operation of a candidate's kernel; of dense attention for dense."""
    match candidate:
        case Dense():
            return "dense", None
        case AShape():
            return "attend_a_shape", candidate.tile
        case VerticalSlashSpread() | VerticalSlashLastQ():
            return "attend_vertical_slash", candidate.tile
        case BlockSparse():
            return "attend_block_sparse", candidate.tile


def features_of(candidate: Candidate, n: int, tiles: Floats, columns: Floats) -> Floats:
    """Return what one query tile reads, [..., 2]: tiles and gathered columns."""
    if isinstance(candidate, Dense):
        return np.zeros((*np.shape(tiles), 2))
    query_tiles = num_tiles(n, candidate.tile)
    return np.stack([tiles / query_tiles, columns / query_tiles], axis=-1)


def index_operation(candidate: Candidate, n: int) -> tuple[Key | None, Floats]:
    """Return the index op and its features: sampled rows, and columns or blocks."""
    match candidate:
        case Dense() | AShape():
            return None, np.zeros(2)
        case VerticalSlashSpread():
            rows = candidate.last_q + candidate.spread_rows
            budget = effective_vertical(n, candidate.vertical)
            return ("index_spread", candidate.tile), np.array([rows, budget], np.float64)
        case VerticalSlashLastQ():
            budget = effective_vertical(n, candidate.vertical)
            features = np.array([candidate.last_q, budget], np.float64)
            return ("index_last_q", candidate.tile), features
        case BlockSparse():
            budget = effective_blocks(n, candidate.tile, candidate.blocks)
            key = (f"index_{candidate.estimator}", candidate.tile)
            return key, np.array([0.0, budget])


def launched_index(candidate: Candidate) -> tuple[Key | None, int]:
    """Return the index op and its sampled rows: heads that share both share their launches."""
    key, features = index_operation(candidate, 1)
    return key, int(features[0])


def row_key(row: TimingRow) -> Key:
    """Return the operation that a row measured."""
    return row.op, row.tile


def row_features(row: TimingRow) -> Floats:
    """Return the features of a row, [2], as those of a candidate."""
    if row.op == "dense":
        return np.zeros(2)
    if row.op.startswith("index"):
        return np.array([row.rows or 0, row.budget or 0], np.float64)
    assert row.tile is not None
    assert row.tiles is not None
    assert row.columns is not None
    query_tiles = num_tiles(row.num_tokens, row.tile)
    return np.array([row.tiles / query_tiles, row.columns / query_tiles])


def units_of(key: Key, n: int) -> float:
    """Return the units of work that time is divided by before it is compared over lengths."""
    op, tile = key
    if op == "dense":
        return float(n) * n
    if op.startswith("attend"):
        assert tile is not None
        return float(num_tiles(n, tile))
    return float(n)


def spell(key: Key) -> str:
    """Return the operation's name for people."""
    op, tile = key
    return op if tile is None else f"{op} tile {tile}"
