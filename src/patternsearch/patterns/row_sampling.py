# SPDX-License-Identifier: Apache-2.0
"""A stratified sample of query rows, and unbiased sums over all rows from it.

What is drawn are units: rows of one tile of 64, evenly spaced in it. Neighbouring tiles attend
differently, so a few rows of every tile say more than all rows of a few tiles. The units of a
quarter of the rows, in order, are cut into strata that each give two of their own at random, which
is what an unbiased variance needs (Cochran, Sampling Techniques, 3rd ed., §5.4). Up to 128k tokens
a stratum is one tile, beyond that a few. The last tiles, and tiles that a quarter's bound or the
end of the prompt cuts, are scored whole.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from patternsearch.patterns.geometry import NUM_REGIONS, query_segments

__all__ = ["EDGE_TILES", "MIN_ROWS", "SEGMENT", "RowSample", "sample_rows"]

SEGMENT = 64
"""Rows of a tile."""
EDGE_TILES = 4
"""Tiles at the end that are always scored."""
MIN_ROWS = 2048
"""Rows that are scored at least: the error depends on their number, hardly on the fraction."""
_PER_STRATUM = 2
_MIN_UNIT_ROWS = 4
_MAX_UNITS = 4096
"""Units drawn at most, while they have fewer rows than a tile: what follows the products costs
time by the unit."""

Int = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RowSample:
    """Which units are scored, and what they stand for.

    Attributes:
        stride: distance of the rows of a unit, a divisor of 64.
        first_row: int64 [m], first row of each unit.
        num_rows: int64 [m], rows of each; 64 / stride, or fewer of a cut tile.
        region: int64 [m], quarter of each, ascending.
        stratum: int64 [m], ascending; a stratum lies in one region.
        sizes: int64 [strata], units of each stratum in the population.
        chosen: int64 [strata], units of each stratum in the sample.
        row_stratum: int64 [n], the stratum of each row's unit.
    """

    stride: int
    first_row: Int
    num_rows: Int
    region: Int
    stratum: Int
    sizes: Int
    chosen: Int
    row_stratum: Int

    @cached_property
    def units(self) -> tuple[range, ...]:
        """The rows of each unit."""
        return tuple(
            range(first, first + self.stride * count, self.stride)
            for first, count in zip(self.first_row.tolist(), self.num_rows.tolist(), strict=True)
        )

    @property
    def weights(self) -> Floats:
        """How many units of the population each one stands for, float64 [m]."""
        return (self.sizes / self.chosen)[self.stratum]

    @property
    def stratum_region(self) -> Int:
        """Region of each stratum, int64 [strata]."""
        region = np.empty(len(self.sizes), dtype=np.int64)
        region[self.stratum] = self.region
        return region

    @property
    def variance_weights(self) -> Floats:
        """Factor of each stratum's sum of squared deviations, float64 [strata].

        Σ over strata of it times Σ (y − mean of the stratum)² estimates the variance of the sum
        without bias: N²·(1 − m/N) / (m·(m − 1)) for m of N units; 0 where all were taken.
        """
        m, size = self.chosen, self.sizes
        factor = size * (size - m) / np.maximum(m * (m - 1), 1)
        return np.where(m == size, 0.0, factor)

    @property
    def degrees_of_freedom(self) -> Int:
        """Of the variance in each region, int64 [4]; 0 where the region was scored whole."""
        free = np.where(self.chosen == self.sizes, 0, self.chosen - 1)
        return np.bincount(self.stratum_region, weights=free, minlength=NUM_REGIONS).astype(
            np.int64
        )


def sample_rows(n: int, fraction: float, seed: int, *key: int) -> RowSample:
    """Choose the rows of a sample.

    Args:
        n: real tokens.
        fraction: of the rows of whole tiles in each region, in (0, 1]; raised to that of
            ``MIN_ROWS`` of n.
        seed: of the choice.
        key: more numbers that the choice depends on, such as the layer.

    Returns:
        The sample; the same arguments give the same one everywhere.
    """
    assert 0.0 < fraction <= 1.0
    fraction = min(1.0, max(fraction, MIN_ROWS / n))
    stride = SEGMENT // _unit_rows(n, fraction)
    bounds, segment_region = query_segments(n, SEGMENT)
    length = np.diff(bounds)
    last_tile = (n - 1) // SEGMENT
    always = (length < SEGMENT) | (last_tile - bounds[:-1] // SEGMENT < EDGE_TILES)
    # The units of a segment of fewer rows than the stride are single rows.
    per_segment = np.minimum(length, stride)
    segment = np.repeat(np.arange(len(length)), per_segment)
    offset = np.arange(len(segment)) - np.repeat(per_segment.cumsum() - per_segment, per_segment)
    first_row = bounds[segment] + offset
    num_rows = -(-(length[segment] - offset) // stride)
    region = segment_region[segment]

    starts = always[segment]  # units that begin a stratum; a whole segment's are their own
    for r in range(NUM_REGIONS):
        members = np.flatnonzero((region == r) & ~always[segment])
        starts[members[_cuts(len(members), math.ceil(fraction * len(members)))]] = True
    stratum = starts.cumsum() - 1
    sizes = np.bincount(stratum)
    order = np.lexsort((_lottery(len(segment), (seed, n, *key)), stratum))
    place = np.arange(len(order)) - (sizes.cumsum() - sizes)[stratum[order]]
    chosen = np.sort(order[place < _PER_STRATUM])
    row_segment = np.repeat(np.arange(len(length)), length)
    row_offset = (np.arange(n) - bounds[row_segment]) % stride
    return RowSample(
        stride=stride,
        first_row=first_row[chosen],
        num_rows=num_rows[chosen],
        region=region[chosen],
        stratum=stratum[chosen],
        sizes=sizes,
        chosen=np.minimum(sizes, _PER_STRATUM),
        row_stratum=stratum[(per_segment.cumsum() - per_segment)[row_segment] + row_offset],
    )


def _unit_rows(n: int, fraction: float) -> int:
    """Return a power of two: two units a tile if that is not too many, or as few as allowed."""
    rows = _MIN_UNIT_ROWS
    while rows < SEGMENT and (
        _PER_STRATUM * 2 * rows <= fraction * SEGMENT or fraction * n > _MAX_UNITS * rows
    ):
        rows *= 2
    return rows


def _cuts(num_units: int, wanted: int) -> Int:
    """Return where the strata of some units begin: of nearly equal size, two of each ``wanted``.

    Where that would be all of them, each stands for itself.
    """
    num_strata = -(-wanted // _PER_STRATUM)
    if num_units <= _PER_STRATUM * num_strata:
        return np.arange(num_units)
    return num_units * np.arange(num_strata) // num_strata


def _lottery(size: int, key: tuple[int, ...]) -> NDArray[np.uint64]:
    """Return random 64-bit numbers that depend on the key alone, whatever the NumPy version."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    raw: NDArray[np.uint64] = generator.random_raw(size)
    return raw
