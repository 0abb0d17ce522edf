# SPDX-License-Identifier: Apache-2.0
"""What the score operation takes and gives: bucket tables in, sufficient statistics out.

Rank buckets turn a grid of budgets into one pass. The entries of an index (tile diagonals or
offsets) are ranked; bucket b holds the entries that the b-th smallest budget selects and no
smaller one does; entries that no budget selects are in bucket B. Selected sets are nested, so the
mass outside the set of budget m is the mass in buckets m+1..B.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

__all__ = ["BucketTable", "ScoreMasses"]


@dataclass(frozen=True, slots=True)
class BucketTable:
    """Which bucket each pair (i, j) is in, as a table over what the pair has in common.

    Attributes:
        kind: ``tile``: over the tile diagonal D = i//T − j//T, ``bucket`` is [Hq, num_tiles(n, T)].
            ``offset``: over e = T·(i//T) − j + (T−1), ``bucket`` is [Hq, T·num_tiles(n, T)]; the
            geometry of the MInference family's kernels, where a whole query tile reads the same
            keys. ``slash``: over δ = i − j, ``bucket`` is [Hq, n]; logical sets.
        tile: T. Not used by ``slash``.
        bucket: integer tensor of values 0..num_buckets.
        num_buckets: B, the number of distinct budgets in ascending order.
    """

    kind: Literal["tile", "offset", "slash"]
    tile: int
    bucket: Tensor
    num_buckets: int


@dataclass(frozen=True, slots=True)
class ScoreMasses:
    """Sums of dense softmax probabilities p_ij of one layer; all float32.

    Attributes:
        segment_mass: [Hq, segments, num_tiles(n, 64)]: over the rows of a segment
            (:func:`patternsearch.patterns.geometry.query_segments` with tile 64) and the keys of a
            tile of 64.
        column_mass: for each table, [Hq, B, 4, n]: entry [h, b−1, r, j] sums p_ij over the rows i
            of region r whose pair (i, j) is in bucket b, for b = 1..B. Bucket 0 follows, since
            each row sums to 1.
        column_sum: [Hq, n], Σ_i p_ij; None unless asked for.
        offset_sum: [Hq, n], Σ_i p_{i, i−δ} at δ; None unless asked for.
        a_shape_logical: [Hq, sinks, windows], the logical mass of each A-shape summed over rows;
            None unless asked for.
    """

    segment_mass: Tensor
    column_mass: tuple[Tensor, ...]
    column_sum: Tensor | None
    offset_sum: Tensor | None
    a_shape_logical: Tensor | None
