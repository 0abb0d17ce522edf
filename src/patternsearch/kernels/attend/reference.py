# SPDX-License-Identifier: Apache-2.0
"""Masked attention over explicit n×n masks, and the masks that the patterns mean.

The truth that kernels and plans are tested against: float32 or better, no tricks, small n only.
The masks are written from the definition of each physical set, not from a plan.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = [
    "a_shape_mask",
    "attend_reference",
    "attend_row_reference",
    "block_sparse_mask",
    "causal_mask",
    "vertical_slash_mask",
]


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over exactly the pairs of a mask.

    Args:
        q: [1, Hq, n, d].
        k: [1, Hkv, n, d]; kv head of query head h is h // (Hq / Hkv).
        v: like k.
        scale: factor of the logits.
        mask: bool [Hq, n, n]; every row holds a pair.

    Returns:
        float64 out [1, Hq, n, d] and natural-log LSE [Hq, n].
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q[0].double(), k[0].double(), v[0].double()
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    logits = (q @ k.transpose(-1, -2)) * scale
    logits = logits.masked_fill(~mask.to(logits.device), float("-inf"))
    lse = logits.logsumexp(-1)
    return ((logits - lse[..., None]).exp() @ v)[None], lse


def attend_row_reference(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, keys: Tensor, head: int, row: int
) -> tuple[Tensor, Tensor]:
    """Attention of one row over given keys: spot checks where n×n does not fit.

    Args:
        q: [1, Hq, n, d].
        k: [1, Hkv, n, d].
        v: like k.
        scale: factor of the logits.
        keys: int64, the keys of the row's query tile; those after the row are left out.
        head: query head.
        row: i.

    Returns:
        float64 out [d] and its LSE.
    """
    kv = head // (q.shape[1] // k.shape[1])
    keys = keys[keys <= row].to(k.device)
    logits = (k[0, kv, keys].double() @ q[0, head, row].double()) * scale
    lse = logits.logsumexp(0)
    return (logits - lse).exp() @ v[0, kv, keys].double(), lse


def causal_mask(n: int) -> Tensor:
    """Return bool [n, n]: j ≤ i."""
    return torch.ones(n, n, dtype=torch.bool).tril()


def a_shape_mask(n: int, *, tile: int, sink: int, window: int) -> Tensor:
    """Return bool [n, n]: causal pairs of tiles with T·v < sink or max(0, T·D − (T−1)) < window."""
    u, v = _tile_grid(n, tile)
    nearest = (tile * (u - v) - (tile - 1)).clamp(min=0)
    return causal_mask(n) & ((tile * v < sink) | (nearest < window))


def vertical_slash_mask(
    n: int, *, tile: int, columns: Iterable[int], diagonals: Iterable[int]
) -> Tensor:
    """Return bool [n, n]: causal pairs on chosen tile diagonals or in chosen columns."""
    u, v = _tile_grid(n, tile)
    chosen = torch.zeros(n, n, dtype=torch.bool)
    for diagonal in diagonals:
        chosen |= u - v == diagonal
    for column in columns:
        chosen[:, column] = True
    return causal_mask(n) & chosen


def block_sparse_mask(n: int, *, tile: int, tiles: Sequence[Iterable[int]]) -> Tensor:
    """Return bool [n, n]: causal pairs of the key tiles ``tiles[u]`` and of the diagonal tiles."""
    u, v = _tile_grid(n, tile)
    chosen = u == v
    for query_tile, key_tiles in enumerate(tiles):
        for key_tile in key_tiles:
            chosen |= (u == query_tile) & (v == key_tile)
    return causal_mask(n) & chosen


def _tile_grid(n: int, tile: int) -> tuple[Tensor, Tensor]:
    index = torch.arange(n) // tile
    return index[:, None].expand(n, n), index[None, :].expand(n, n)
