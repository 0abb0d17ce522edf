# SPDX-License-Identifier: Apache-2.0
"""The online index in Triton: the scores of ``reference.py``, of some or all heads of a layer.

Sampled rows are read twice against all keys: once for their log-sum-exp, once for the sums.
Nothing is added atomically, so equal inputs give equal bits. No n×n array, no host
synchronisation.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import triton
from torch import Tensor

from patternsearch.kernels._common.checks import (
    check_attention_inputs,
    device_guard,
    padded_head_dim,
)
from patternsearch.kernels._common.upload import head_index, upload
from patternsearch.kernels.index.kernels_triton import (
    block_scores_fwd_kernel,
    row_lse_fwd_kernel,
    row_mass_fwd_kernel,
    skewed_sum_fwd_kernel,
    tile_mean_fwd_kernel,
)
from patternsearch.patterns.geometry import num_tiles, spread_row_positions

__all__ = ["block_scores", "last_q_scores", "spread_scores", "spread_scores_by_tile"]

LOG2_E = 1.4426950408889634
ROWS = 64
"""Sampled rows are padded to a multiple of this."""
KEYS_PER_PROGRAM = 2048
LONG_TILES = 128
"""Beyond so many key tiles, block scores take a launch of their own for those at the end; with
fewer a launch costs more than the checks."""
SCRATCH_BYTES = 2**28
"""Probabilities held at a time by ``last_q``, which skews them afterwards."""


def spread_scores(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    last_q: int,
    spread_rows: int,
    tile: int,
    heads: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Score columns and tile diagonals from the last rows and from rows spread over the prompt.

    Args:
        q: [1, Hq, n, d], float16, bfloat16 or float32, any strides.
        k: [1, Hkv, n, d], the same dtype.
        scale: factor of the logits.
        last_q: number of last rows (all if n is shorter).
        spread_rows: R of the spread rows ⌊(r+1)·n/R⌋ − 1.
        tile: T of the tile diagonals.
        heads: global query heads to score, in this order; all by default.

    Returns:
        Column scores [heads, n] and tile-diagonal scores [heads, num_tiles(n, tile)], float32, as
        :func:`patternsearch.kernels.index.reference.spread_scores` defines them.

    Raises:
        InputError: a shape, dtype or device is not allowed.
        EnvironmentLacks: there is no CUDA device and Triton does not interpret.
    """
    column, diagonals = spread_scores_by_tile(
        q, k, scale=scale, last_q=last_q, spread_rows=spread_rows, tiles=(tile,), heads=heads
    )
    return column, diagonals[tile]


def spread_scores_by_tile(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    last_q: int,
    spread_rows: int,
    tiles: Sequence[int],
    heads: tuple[int, ...] | None = None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Do what :func:`spread_scores` does for several tile sizes, reading the keys once for all.

    Each tile size is a multiple of the smallest.

    Returns:
        Column scores [heads, n], and tile-diagonal scores by tile size.
    """
    check_attention_inputs(q, k)
    n, least = q.shape[2], min(tiles)
    last = np.arange(max(0, n - last_q), n)
    spread = spread_row_positions(n, spread_rows)
    positions = np.concatenate([last, spread])
    weights = np.concatenate(
        [np.full(len(last), 1 / len(last)), np.full(len(spread), 1 / len(spread))]
    )
    diagonals = {}
    with device_guard(q):
        rows = _Rows(q, k, scale, heads, positions, weights)
        column, by_least = rows.masses(tile=least)
        for tile in dict.fromkeys(tiles):
            by_tile, count = by_least, num_tiles(n, tile)
            if tile > least:
                by_tile = torch.nn.functional.pad(
                    by_least, (0, count * (tile // least) - by_least.shape[2])
                )
                by_tile = by_tile.unflatten(2, (count, tile // least)).sum(3)
            diagonals[tile] = rows.skewed_sum(by_tile, positions // tile, count)
    return column, diagonals


def last_q_scores(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    last_q: int,
    heads: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Score columns and slash offsets from the last rows, as MInference does.

    Args:
        q: [1, Hq, n, d], float16, bfloat16 or float32, any strides.
        k: [1, Hkv, n, d], the same dtype.
        scale: factor of the logits.
        last_q: number of last rows (all if n is shorter).
        heads: global query heads to score, in this order; all by default.

    Returns:
        Column scores and offset scores, both float32 [heads, n], as
        :func:`patternsearch.kernels.index.reference.last_q_scores` defines them.

    Raises:
        InputError: a shape, dtype or device is not allowed.
        EnvironmentLacks: there is no CUDA device and Triton does not interpret.
    """
    check_attention_inputs(q, k)
    n = q.shape[2]
    heads = heads if heads is not None else tuple(range(q.shape[1]))
    positions = np.arange(max(0, n - last_q), n)
    step = max(1, SCRATCH_BYTES // (4 * n * (-(-len(positions) // ROWS) * ROWS)))
    columns, offsets = [], []
    with device_guard(q):
        for first in range(0, len(heads), step):
            part = heads[first : first + step]
            rows = _Rows(q, k, scale, part, positions, np.ones(len(positions)))
            column, probability = rows.masses(tile=1)
            columns.append(column)
            offsets.append(rows.skewed_sum(probability, positions, n))
    return torch.cat(columns), torch.cat(offsets)


def block_scores(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    tile: int,
    estimator: Literal["pooled_query", "pooled"],
    heads: tuple[int, ...] | None = None,
    query_tiles: range | None = None,
    fill_above: bool = True,
) -> Tensor:
    """Score key tiles for each query tile.

    Args:
        q: [1, Hq, n, d], float16, bfloat16 or float32, any strides.
        k: [1, Hkv, n, d], the same dtype.
        scale: factor of the logits.
        tile: T of query and key tiles.
        estimator: which score.
        heads: global query heads to score, in this order; all by default.
        query_tiles: a run of query tiles, where memory is too small for all, the default.
        fill_above: write −inf where v > u; otherwise those entries are undefined.

    Returns:
        float32 [heads, query tiles, tiles], −inf where v > u, as
        :func:`patternsearch.kernels.index.reference.block_scores` defines them.

    Raises:
        InputError: a shape, dtype or device is not allowed.
        EnvironmentLacks: there is no CUDA device and Triton does not interpret.
    """
    check_attention_inputs(q, k)
    heads = heads if heads is not None else tuple(range(q.shape[1]))
    tiles = query_tiles if query_tiles is not None else range(num_tiles(q.shape[2], tile))
    group = q.shape[1] // k.shape[1]
    with device_guard(q):
        means = _tile_means(q, tile, heads)
        if estimator == "pooled":
            return _pooled_scores(means, k, scale, tile, heads, group, tiles, fill_above)
        return _pooled_query_scores(means, k, scale, tile, heads, group, tiles, fill_above)


def _tile_means(x: Tensor, tile: int, heads: tuple[int, ...]) -> Tensor:
    """Average x [1, H, n, d] over the real rows of each tile: float32 [heads, tiles, d]."""
    _, _, n, head_dim = x.shape
    count = num_tiles(n, tile)
    means = torch.empty((len(heads), count, head_dim), dtype=torch.float32, device=x.device)
    tile_mean_fwd_kernel[(count, len(heads))](
        x, head_index(heads, x.device), means, n, count, *x.stride()[1:],
        D=head_dim, D_PAD=padded_head_dim(head_dim), TILE=tile, num_warps=4,
    )  # fmt: skip
    return means


def _pooled_scores(
    means: Tensor, k: Tensor, scale: float, tile: int, heads: tuple[int, ...], group: int,
    query_tiles: range, fill_above: bool,
) -> Tensor:  # fmt: skip
    kv_heads = tuple(sorted({head // group for head in heads}))
    keys = _tile_means(k, tile, kv_heads)
    index = head_index(tuple(kv_heads.index(head // group) for head in heads), k.device)
    queries = means[:, query_tiles.start : query_tiles.stop] * scale
    scores = torch.bmm(queries, keys[index.long()].transpose(1, 2))
    if not fill_above:
        return scores
    tiles = torch.arange(means.shape[1], device=k.device)
    above = tiles > tiles[query_tiles.start : query_tiles.stop, None]
    return scores.masked_fill_(above, float("-inf"))


def _pooled_query_scores(
    means: Tensor, k: Tensor, scale: float, tile: int, heads: tuple[int, ...], group: int,
    query_tiles: range, fill_above: bool,
) -> Tensor:  # fmt: skip
    _, _, n, head_dim = k.shape
    count, first, rows = means.shape[1], query_tiles.start, len(query_tiles)
    scores = torch.empty((len(heads), rows, count), dtype=torch.float32, device=k.device)
    if fill_above:
        scores.fill_(float("-inf"))
    narrow = head_dim <= 128 and k.element_size() == 2
    block_u, step = (128, max(1, 128 // tile)) if narrow else (64, 1)
    end = first + rows
    per_program = 64 if end > 512 else 16  # a short prompt has to fill the GPU too
    whole = min(end, n // tile) // step * step if end > LONG_TILES else 0
    for begin, stop, is_whole in ((0, whole, True), (whole, end, False)):
        if begin == stop:
            continue
        grid = (triton.cdiv(rows, block_u), triton.cdiv(stop - begin, per_program), len(heads))
        block_scores_fwd_kernel[grid](
            means, k, head_index(heads, k.device), scores,
            n, count, first, rows, begin, stop, group, scale * LOG2_E, *k.stride()[1:],
            D=head_dim, D_PAD=padded_head_dim(head_dim), TILE=tile, BLOCK_U=block_u, STEP=step,
            TILES_PER_PROGRAM=per_program, IS_WHOLE=is_whole, PRECISION=_precision(k),
            num_warps=8 if narrow else 4, num_stages=2 if narrow else 1,
        )  # fmt: skip
    return scores


class _Rows:
    """Sampled rows of some heads, their log-sum-exp, and sums of their probabilities."""

    def __init__(
        self, q: Tensor, k: Tensor, scale: float, heads: tuple[int, ...] | None,
        positions: np.ndarray, weights: np.ndarray,
    ) -> None:  # fmt: skip
        heads = heads if heads is not None else tuple(range(q.shape[1]))
        _, _, n, head_dim = q.shape
        padded = -(-len(positions) // ROWS) * ROWS
        table = np.zeros((2, padded), dtype=np.float64)
        table[0] = -1.0
        table[0, : len(positions)], table[1, : len(positions)] = positions, weights
        on_device = upload(table, q.device)
        self.positions, self.weights = on_device[0].int(), on_device[1].float()
        self.num_rows, self.num_heads = padded, len(heads)
        self.programs = triton.cdiv(n, KEYS_PER_PROGRAM)
        self.q, self.k, self.n = q, k, n
        self.arguments = (
            q, k, head_index(heads, q.device), self.positions,
            n, q.shape[1] // k.shape[1], scale * LOG2_E, *q.stride()[1:], *k.stride()[1:],
        )  # fmt: skip
        wide = head_dim > 128 or q.element_size() == 4
        block_rows = 32 if wide else (128 if padded % 128 == 0 else 64)
        # More than one block of rows is loaded anew for every block of keys; pipelining those
        # loads would hold all rows in shared memory once a stage.
        pipelined = padded <= block_rows
        self.constants = {
            "D": head_dim,
            "D_PAD": padded_head_dim(head_dim),
            "NUM_ROWS": padded,
            "BLOCK_R": block_rows,
            "BLOCK_K": 128,
            "KEYS": KEYS_PER_PROGRAM,
            "PRECISION": _precision(q),
            "num_warps": 8,
            "num_stages": 3 if pipelined else 1,
        }
        parts = torch.empty(
            (self.num_heads, self.programs, padded), dtype=torch.float32, device=q.device
        )
        row_lse_fwd_kernel[(self.programs, self.num_heads)](
            *self.arguments, parts, **self.constants
        )
        self.lse = parts.logsumexp(1)

    def masses(self, tile: int) -> tuple[Tensor, Tensor]:
        """Return weighted column sums [heads, n] and row sums by key tile [heads, rows, tiles]."""
        count = num_tiles(self.n, tile)
        column = torch.empty((self.num_heads, self.n), dtype=torch.float32, device=self.q.device)
        by_tile = torch.empty(
            (self.num_heads, self.num_rows, count), dtype=torch.float32, device=self.q.device
        )
        row_mass_fwd_kernel[(self.programs, self.num_heads)](
            *self.arguments, self.lse, self.weights, column, by_tile, count,
            TILE=tile, **self.constants,
        )  # fmt: skip
        return column, by_tile

    def skewed_sum(self, values: Tensor, origin: np.ndarray, length: int) -> Tensor:
        """Return Σ_r weight_r · values[:, r, origin_r − D] for D = 0..length−1, where it exists."""
        padded = np.full(self.num_rows, -1, dtype=np.int32)
        padded[: len(origin)] = origin
        out = torch.empty((self.num_heads, length), dtype=torch.float32, device=values.device)
        block = 256
        skewed_sum_fwd_kernel[(triton.cdiv(length, block), self.num_heads)](
            values, upload(padded, values.device), self.weights, out, length,
            NUM_ROWS=self.num_rows, BLOCK_R=16, BLOCK=block, num_warps=4,
        )  # fmt: skip
        return out


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
