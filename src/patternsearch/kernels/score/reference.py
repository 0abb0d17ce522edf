# SPDX-License-Identifier: Apache-2.0
"""The boring truth of the score operation: the n×n matrix, explicit masks. For tests only."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from patternsearch.kernels.score.tables import BucketTable, ScoreMasses
from patternsearch.patterns.geometry import NUM_REGIONS, num_tiles, query_segments

__all__ = ["attention_probabilities", "score_masses_reference"]


def attention_probabilities(
    q: Tensor, k: Tensor, *, scale: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the causal softmax probabilities as [Hq, n, n] of ``dtype``.

    Args:
        q: [1, Hq, n, d].
        k: [1, Hkv, n, d]; head h reads kv head h // (Hq / Hkv).
        scale: factor of the logits.
        dtype: precision of the whole computation.
    """
    num_heads, n = q.shape[1], q.shape[2]
    keys = k[0].to(dtype).repeat_interleave(num_heads // k.shape[1], dim=0)
    logits = torch.matmul(q[0].to(dtype), keys.transpose(1, 2)) * scale
    above = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(logits.masked_fill(above, float("-inf")), dim=-1)


def pair_buckets(table: BucketTable, n: int) -> Tensor:
    """Return the bucket of every pair as [Hq, n, n]; pairs above the diagonal hold anything."""
    device = table.bucket.device
    i = torch.arange(n, device=device)[:, None]
    j = torch.arange(n, device=device)[None, :]
    if table.kind == "tile":
        entry = i // table.tile - j // table.tile
    elif table.kind == "offset":
        entry = table.tile * (i // table.tile) - j + table.tile - 1
    else:
        entry = i - j
    return table.bucket[:, entry.clamp(min=0)]


def score_masses_reference(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    lse: Tensor | None = None,
    tables: Sequence[BucketTable] = (),
    column_sums: bool = False,
    offset_sums: bool = False,
    a_shape_sinks: Sequence[int] = (),
    a_shape_windows: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
) -> ScoreMasses:
    """Compute what :func:`patternsearch.kernels.score.score_masses` does, from the n×n matrix.

    Takes the same arguments; ``lse`` is not read, ``dtype`` is the precision of the computation
    and of the result.
    """
    del lse
    p = attention_probabilities(q, k, scale=scale, dtype=dtype)
    num_heads, n = p.shape[0], p.shape[1]
    i = torch.arange(n, device=q.device)[:, None]
    j = torch.arange(n, device=q.device)[None, :]

    bounds = [int(bound) for bound in query_segments(n, 64)[0]]
    count = num_tiles(n, 64)
    segment_mass = p.new_zeros(num_heads, len(bounds) - 1, count)
    for s, (first, last) in enumerate(pairwise(bounds)):
        for v in range(count):
            segment_mass[:, s, v] = p[:, first:last, 64 * v : 64 * v + 64].sum((1, 2))

    region = NUM_REGIONS * torch.arange(n, device=q.device) // n
    column_mass = []
    for table in tables:
        bucket = pair_buckets(table, n)
        mass = p.new_zeros(num_heads, table.num_buckets, NUM_REGIONS, n)
        for b in range(1, table.num_buckets + 1):
            for r in range(NUM_REGIONS):
                chosen = (bucket == b) & (region == r)[:, None]
                mass[:, b - 1, r] = torch.where(chosen, p, 0).sum(1)
        column_mass.append(mass)

    offset_sum = torch.stack([p.diagonal(-d, 1, 2).sum(1) for d in range(n)], 1)
    logical = None
    if a_shape_sinks and a_shape_windows:
        logical = p.new_zeros(num_heads, len(a_shape_sinks), len(a_shape_windows))
        for x, sink in enumerate(a_shape_sinks):
            for y, window in enumerate(a_shape_windows):
                logical[:, x, y] = torch.where((j < sink) | (i - j < window), p, 0).sum((1, 2))
    return ScoreMasses(
        segment_mass=segment_mass,
        column_mass=tuple(column_mass),
        column_sum=p.sum(1) if column_sums else None,
        offset_sum=offset_sum if offset_sums else None,
        a_shape_logical=logical,
    )
