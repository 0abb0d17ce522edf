"""Scores by brute force: float64, n×n probabilities, explicit boolean sets of pairs.

Written from the design's definitions alone; shares no geometry with the package.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass
class NaiveRow:
    mass: list[float]  # all, q1..q4
    logical: float
    density: float
    tiles: int
    columns: int


def probabilities(q, k, scale):
    """float64 [Hq, n, n] from torch tensors [1, Hq, n, d] and [1, Hkv, n, d]."""
    q, k = q[0].double().numpy(), k[0].double().numpy()
    num_heads, n, _ = q.shape
    p = np.zeros((num_heads, n, n))
    for h in range(num_heads):
        logits = scale * q[h] @ k[h * k.shape[0] // num_heads].T
        logits[np.triu_indices(n, 1)] = -np.inf
        e = np.exp(logits - logits.max(1, keepdims=True))
        p[h] = e / e.sum(1, keepdims=True)
    return p


def order_of(scores, forced):
    """Entries by descending score, forced ones first, ties to the lower number."""
    return sorted(range(len(scores)), key=lambda e: (e not in forced, -scores[e], e))


def spread_scores(p, last_q, spread_rows, tile):
    """Column and tile-diagonal scores of one head from its probabilities [n, n]."""
    n = len(p)
    tiles = math.ceil(n / tile)
    last = list(range(n))[-last_q:]
    spread = sorted({(r + 1) * n // spread_rows - 1 for r in range(spread_rows)} - {-1})
    columns = p[last].mean(0) + p[spread].mean(0)
    diagonals = np.zeros(tiles)
    for rows in (last, spread):
        for i in rows:
            for j in range(i + 1):
                diagonals[i // tile - j // tile] += p[i, j] / len(rows)
    return columns, diagonals


def last_q_scores(p, last_q):
    n = len(p)
    rows = list(range(n))[-last_q:]
    offsets = np.zeros(n)
    for i in rows:
        for j in range(i + 1):
            offsets[i - j] += p[i, j]
    return p[rows].sum(0), offsets


def offset_sums(p):
    return np.array([np.trace(p, -d) for d in range(len(p))])


def block_scores(q, k, scale, tile, estimator):
    """[tiles, tiles] of one head from q, k [n, d] float64."""
    n = len(q)
    tiles = math.ceil(n / tile)
    scores = np.full((tiles, tiles), -np.inf)
    for u in range(tiles):
        mean_q = q[u * tile : (u + 1) * tile].mean(0)
        for v in range(u + 1):
            keys = k[v * tile : (v + 1) * tile]
            if estimator == "pooled":
                scores[u, v] = scale * mean_q @ keys.mean(0)
            else:
                last_row = min(n, (u + 1) * tile) - 1
                keys = [key for j, key in enumerate(keys, v * tile) if j <= last_row]
                scores[u, v] = np.logaddexp.reduce([scale * mean_q @ key for key in keys])
    return scores


def tile_masses(p, tile):
    tiles = math.ceil(len(p) / tile)
    return np.array(
        [
            [
                p[u * tile : (u + 1) * tile, v * tile : (v + 1) * tile].sum() if v <= u else -np.inf
                for v in range(tiles)
            ]
            for u in range(tiles)
        ]
    )


class _Sets:
    """Sets of pairs of one head as [n, n] masks, not yet cut to the causal half."""

    def __init__(self, n):
        self.n = n
        self.i = np.arange(n)[:, None]
        self.j = np.arange(n)[None, :]
        self.causal = self.j <= self.i

    def with_columns(self, tile_mask, columns, tile):
        """Add columns outside the tiles; returns the mask and how many were gathered."""
        n = self.n
        mask = tile_mask | np.isin(self.j, columns)
        gathered = 0
        for first in range(0, n, tile):
            last = min(n, first + tile) - 1
            gathered += sum(1 for j in columns if j <= last and not tile_mask[first, j])
        return mask, gathered

    def causal_tiles(self, tile_mask, tile):
        rows = range(0, self.n, tile)
        return sum(bool(tile_mask[u, v]) for u in rows for v in range(0, u + 1, tile))


def naive_row(p, q, k, scale, candidate, index, consumer="patternsearch"):
    """Score one head: p [n, n] float64; q and k [n, d] float64 of the head."""
    n = len(p)
    sets = _Sets(n)
    i, j = sets.i, sets.j
    kind, tile = candidate.kind, getattr(candidate, "tile", 64)
    u, v = i // tile, j // tile
    columns = 0
    if kind == "dense":
        mask = logical = np.ones((n, n), bool)
        tiles = sets.causal_tiles(mask, 64)
    elif kind == "a_shape":
        logical = (j < candidate.sink) | (i - j < candidate.window)
        mask = (tile * v < candidate.sink) | (
            np.maximum(0, tile * (u - v) - (tile - 1)) < candidate.window
        )
        tiles = sets.causal_tiles(mask, tile)
    elif kind == "block_sparse":
        if index == "oracle":
            scores = tile_masses(p, tile)
        else:
            scores = block_scores(q, k, scale, tile, candidate.estimator)
        mask = np.zeros((n, n), bool)
        for tile_u in range(math.ceil(n / tile)):
            chosen = order_of(scores[tile_u, : tile_u + 1], {tile_u})[: candidate.blocks]
            mask |= (u == tile_u) & np.isin(v, chosen)
        logical = mask
        tiles = sets.causal_tiles(mask, tile)
    elif candidate.estimator == "spread":
        if index == "oracle":
            diagonal_score = np.zeros(math.ceil(n / tile))
            np.add.at(diagonal_score, (u - v)[sets.causal], p[sets.causal])
            column_score = p.sum(0)
        else:
            column_score, diagonal_score = spread_scores(
                p, candidate.last_q, candidate.spread_rows, tile
            )
        chosen = order_of(diagonal_score, {0, 1})[: max(candidate.diagonals, 2)]
        picked = order_of(column_score, set(range(30)))[: max(candidate.vertical, 30)]
        tile_mask = np.isin(u - v, chosen)
        tiles = sets.causal_tiles(tile_mask, tile)
        mask, columns = sets.with_columns(tile_mask, picked, tile)
        logical = mask
    else:
        if index == "oracle":
            column_score, offset_score = p.sum(0), offset_sums(p)
        else:
            column_score, offset_score = last_q_scores(p, candidate.last_q)
        vertical = candidate.vertical
        if consumer in ("vllm", "sglang") and vertical == 30:
            vertical = 130
        offsets = order_of(offset_score, set(range(100)))[: max(candidate.slash, 100)]
        picked = order_of(column_score, set(range(30)))[: max(vertical, 30)]
        logical = np.isin(j, picked) | np.isin(i - j, offsets)
        if consumer == "patternsearch":
            chosen = {d // tile for d in offsets} | {math.ceil(d / tile) for d in offsets}
            tile_mask = np.isin(u - v, list(chosen))
            tiles = sets.causal_tiles(tile_mask, tile)
        else:
            tile_mask = np.zeros((n, n), bool)
            tiles = 0
            for first in range(0, n, 64):
                end = first + 64  # one past the tile, real or not
                keys = {key for d in offsets for key in range(first - d, end - d) if key >= 0}
                tile_mask[first:end, sorted(key for key in keys if key < n)] = True
                for key in keys:
                    if key + 1 not in keys:  # the end of a run
                        start = key
                        while start - 1 in keys:
                            start -= 1
                        tiles += math.ceil((key + 1 - start) / 64)
        mask, columns = sets.with_columns(tile_mask, picked, tile)
    mask, logical = mask & sets.causal, logical & sets.causal
    captured = (p * mask).sum(1)
    region = 4 * np.arange(n) // n
    by_region = [
        captured[region == r].mean() if (region == r).any() else math.nan for r in range(4)
    ]
    return NaiveRow(
        mass=[captured.mean(), *by_region],
        logical=(p * logical).sum(1).mean(),
        density=mask.sum() / (n * (n + 1) / 2),
        tiles=tiles,
        columns=columns,
    )
