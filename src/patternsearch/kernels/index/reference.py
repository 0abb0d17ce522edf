# SPDX-License-Identifier: Apache-2.0
"""The online index in plain PyTorch: what a runtime may look at before it attends.

Exact rules, any device, float32, memory flat in the number of heads and query tiles. Scores of
different devices differ by rounding; ranks of equal scores never do: ties go to the lower index.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from patternsearch.patterns.geometry import num_tiles, spread_row_positions, tile_rows

__all__ = [
    "block_scores",
    "last_q_scores",
    "rank",
    "rank_blocks",
    "spread_scores",
    "spread_scores_by_tile",
]

_LIMIT = {"cpu": 2**22, "cuda": 2**27}
"""Largest number of logits held at a time, by device type; at least one kv head's."""


def spread_scores(
    q: Tensor, k: Tensor, *, scale: float, last_q: int, spread_rows: int, tile: int
) -> tuple[Tensor, Tensor]:
    """Score columns and tile diagonals from the last rows and from rows spread over the prompt.

    Args:
        q: [1, Hq, n, d], floating, any strides; computed in float32.
        k: [1, Hkv, n, d]; head h reads kv head h // (Hq / Hkv).
        scale: factor of the logits.
        last_q: number of last rows (all if n is shorter).
        spread_rows: R of the spread rows ⌊(r+1)·n/R⌋ − 1.
        tile: T of the tile diagonals.

    Returns:
        Column scores [Hq, n] and tile-diagonal scores [Hq, num_tiles(n, tile)], float32: the mean
        over the last rows plus the mean over the spread rows of p_ij, and of Σ_j p_ij over the
        keys of tile diagonal D.
    """
    column, diagonals = spread_scores_by_tile(
        q, k, scale=scale, last_q=last_q, spread_rows=spread_rows, tiles=(tile,)
    )
    return column, diagonals[tile]


def spread_scores_by_tile(
    q: Tensor, k: Tensor, *, scale: float, last_q: int, spread_rows: int, tiles: Sequence[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Do what :func:`spread_scores` does for several tile sizes, computing the rows once.

    Returns:
        Column scores [Hq, n], and tile-diagonal scores by tile size.
    """
    n = q.shape[2]
    column = _new_scores(q, n)
    diagonal = {tile: _new_scores(q, num_tiles(n, tile)) for tile in tiles}
    last = torch.arange(max(0, n - last_q), n, device=q.device)
    spread = torch.from_numpy(spread_row_positions(n, spread_rows)).to(q.device)
    for positions in (last, spread):
        for heads, p in _rows_of_probabilities(q, k, scale, positions):
            column[heads] += p.mean(1)
            for tile, scores in diagonal.items():
                by_tile = _sum_tiles(p, tile)
                # Tile diagonal D of row i is key tile i // T − D; below tile 0 there is none.
                key_tile = torch.arange(by_tile.shape[2], device=q.device)
                key_tile = positions[:, None] // tile - key_tile
                mass = by_tile.gather(2, key_tile.clamp(min=0).expand(p.shape[0], -1, -1))
                scores[heads] += torch.where(key_tile >= 0, mass, 0).mean(1)
    return column, diagonal


def last_q_scores(q: Tensor, k: Tensor, *, scale: float, last_q: int) -> tuple[Tensor, Tensor]:
    """Score columns and slash offsets from the last rows, as MInference does.

    Args:
        q: [1, Hq, n, d], floating, any strides; computed in float32.
        k: [1, Hkv, n, d]; head h reads kv head h // (Hq / Hkv).
        scale: factor of the logits.
        last_q: number of last rows (all if n is shorter).

    Returns:
        Column scores and offset scores, both float32 [Hq, n]: the sums over those rows of p_ij by
        j and by δ = i − j.
    """
    n = q.shape[2]
    column, offset = _new_scores(q, n), _new_scores(q, n)
    positions = torch.arange(max(0, n - last_q), n, device=q.device)
    key = positions[:, None] - torch.arange(n, device=q.device)  # [rows, δ]
    for heads, p in _rows_of_probabilities(q, k, scale, positions):
        column[heads] += p.sum(1)
        mass = p.gather(2, key.clamp(min=0).expand(p.shape[0], -1, -1))
        offset[heads] += torch.where(key >= 0, mass, 0).sum(1)
    return column, offset


def block_scores(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    tile: int,
    estimator: Literal["pooled_query", "pooled"],
) -> Tensor:
    """Score key tiles for each query tile.

    ``pooled_query``: log-sum-exp over the keys j of the key tile, up to the query tile's last
    row, of scale · q̄ · k_j, q̄ the mean of the query tile's real rows. ``pooled``: scale · q̄ · k̄,
    k̄ the mean of the key tile's real rows.

    Args:
        q: [1, Hq, n, d], floating, any strides; computed in float32.
        k: [1, Hkv, n, d]; head h reads kv head h // (Hq / Hkv).
        scale: factor of the logits.
        tile: T of query and key tiles.
        estimator: which score.

    Returns:
        float32 [Hq, tiles, tiles], entry [h, u, v]; −inf where v > u.
    """
    num_heads, n = q.shape[1], q.shape[2]
    group = num_heads // k.shape[1]
    tiles = num_tiles(n, tile)
    queries = _tile_means(q[0], tile) * scale  # [Hq, tiles, d]
    scores = q.new_full((num_heads, tiles, tiles), float("-inf"), dtype=torch.float32)
    if estimator == "pooled":
        for kv in range(k.shape[1]):
            heads = slice(kv * group, (kv + 1) * group)
            scores[heads] = queries[heads] @ _tile_means(k[0, kv : kv + 1], tile).transpose(1, 2)
    else:
        step = max(1, _limit(q) // (group * n))
        for kv in range(k.shape[1]):
            heads = slice(kv * group, (kv + 1) * group)
            for first in range(0, tiles, step):
                last = min(first + step, tiles)
                # The keys of a tile v < u all come before the query tile's last row; those of
                # tile u that exist do too.
                keys = k[0, kv, : last * tile].float()
                logits = queries[heads, first:last] @ keys.T
                pad = last * tile - keys.shape[0]
                logits = torch.nn.functional.pad(logits, (0, pad), value=float("-inf"))
                by_tile = logits.view(group, last - first, last, tile).logsumexp(-1)
                scores[heads, first:last, :last] = by_tile
    tile_index = torch.arange(tiles, device=q.device)
    return scores.masked_fill_(tile_index > tile_index[:, None], float("-inf"))


def rank(scores: Tensor, num_forced: int) -> Tensor:
    """Order the entries of each row of scores, the forced ones first.

    Args:
        scores: float [..., entries], no NaN.
        num_forced: entries 0..num_forced−1 come first, in this order (fewer if there are fewer).

    Returns:
        int64 of the shape of ``scores``: entry numbers by descending score, ties by number.
    """
    forced = scores.clone()
    forced[..., :num_forced] = float("inf")
    return torch.sort(forced, dim=-1, descending=True, stable=True).indices


def rank_blocks(scores: Tensor) -> Tensor:
    """Order the key tiles of each query tile, its diagonal tile first.

    Args:
        scores: float [..., tiles, tiles], entry [u, v], no NaN; −inf where v > u.

    Returns:
        int64 of the shape of ``scores``: key tiles by descending score, ties to the lower; the
        tiles v > u come last.
    """
    forced = scores.clone()
    forced.diagonal(dim1=-2, dim2=-1).fill_(float("inf"))
    return torch.sort(forced, dim=-1, descending=True, stable=True).indices


def _limit(q: Tensor) -> int:
    return _LIMIT.get(q.device.type, _LIMIT["cuda"])


def _new_scores(q: Tensor, entries: int) -> Tensor:
    return q.new_zeros((q.shape[1], entries), dtype=torch.float32)


def _rows_of_probabilities(
    q: Tensor, k: Tensor, scale: float, positions: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (heads, causal probabilities [heads, rows, n]) of the rows at ``positions``."""
    num_heads, n = q.shape[1], q.shape[2]
    num_kv = k.shape[1]
    group = num_heads // num_kv
    step = max(1, _limit(q) // (group * len(positions) * n))
    after = torch.arange(n, device=q.device) > positions[:, None]
    for first in range(0, num_kv, step):
        last = min(first + step, num_kv)
        heads = slice(first * group, last * group)
        rows = q[0, heads][:, positions].float() * scale
        rows = rows.reshape(last - first, -1, rows.shape[-1])
        logits = torch.bmm(rows, k[0, first:last].float().transpose(1, 2))
        logits = logits.view(heads.stop - heads.start, len(positions), n)
        yield heads, torch.softmax(logits.masked_fill_(after, float("-inf")), dim=-1)


def _sum_tiles(p: Tensor, tile: int) -> Tensor:
    """Sum [..., n] over the keys of each tile: [..., tiles]."""
    n = p.shape[-1]
    tiles = num_tiles(n, tile)
    if tiles * tile > n:
        p = torch.nn.functional.pad(p, (0, tiles * tile - n))
    return p.view(*p.shape[:-1], tiles, tile).sum(-1)


def _tile_means(x: Tensor, tile: int) -> Tensor:
    """Return the mean of the real rows of each tile: [heads, n, d] to float32 [heads, tiles, d]."""
    rows = torch.from_numpy(tile_rows(x.shape[1], tile)).to(x.device)
    pad = len(rows) * tile - x.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, pad))
    return padded.view(x.shape[0], len(rows), tile, -1).sum(2) / rows[:, None]
