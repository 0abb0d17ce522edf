# SPDX-License-Identifier: Apache-2.0
"""A stratified sample of query segments, and unbiased sums over all rows from it.

The population is the segments of :func:`~patternsearch.patterns.geometry.query_segments` for tiles
of 64. Partial segments and the first and last tiles are always in the sample; every quarter of the
rows is cut into strata of consecutive whole segments, and each stratum gives at least two of its
own at random. So a sum over rows is estimated without bias, and its variance from the differences
within strata (Cochran, Sampling Techniques, 3rd ed., §5.4). What a fixed budget captures changes
with the logarithm of the position, so strata grow with it: small ones where rows are short.
"""

import hashlib
import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from patternsearch.patterns.geometry import NUM_REGIONS, query_segments

__all__ = ["EDGE_TILES", "SEGMENT", "RowSample", "sample_rows"]

SEGMENT = 64
"""Rows of a whole segment."""
EDGE_TILES = 4
"""Query tiles of 64 at the beginning and at the end that are always scored."""
_PER_STRATUM = 2
_PER_REGION = 8
"""Segments of a quarter that are scored at least, beside the ones that always are."""

Int = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RowSample:
    """Which segments are scored, and what they stand for.

    Attributes:
        segments: int64 [m], places in ``query_segments(n, 64)``, ascending.
        first_row: int64 [m], first row of each.
        end_row: int64 [m], row past the last of each.
        region: int64 [m], quarter of each.
        stratum: int64 [m], ascending; a stratum lies in one region.
        sizes: int64 [strata], segments of each stratum in the population.
        chosen: int64 [strata], segments of each stratum in the sample.
    """

    segments: Int
    first_row: Int
    end_row: Int
    region: Int
    stratum: Int
    sizes: Int
    chosen: Int

    @property
    def weights(self) -> Floats:
        """How many segments of the population each one stands for, float64 [m]."""
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
        without bias: N²·(1 − m/N) / (m·(m − 1)) for m of N segments; 0 where all were taken.
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
    """Choose the segments of a sample.

    Args:
        n: real tokens.
        fraction: of the whole segments of each region, in (0, 1]; at least eight are taken.
        seed: of the choice.
        key: more numbers that the choice depends on, such as the layer.

    Returns:
        The sample; the same arguments give the same one everywhere.
    """
    assert 0.0 < fraction <= 1.0
    bounds, region = query_segments(n, SEGMENT)
    first, end = bounds[:-1], bounds[1:]
    tile = first // SEGMENT
    edge = (tile < EDGE_TILES) | ((n - 1) // SEGMENT - tile < EDGE_TILES)
    always = (end - first < SEGMENT) | edge
    lottery = _lottery(len(region), (seed, n, *key))
    strata: list[tuple[Int, Int]] = [(np.array([at]), np.array([at])) for at in always.nonzero()[0]]
    for r in range(NUM_REGIONS):
        members = np.flatnonzero((region == r) & ~always)
        wanted = min(len(members), max(_PER_REGION, math.ceil(fraction * len(members))))
        for stratum in _strata(members, wanted):
            num_chosen = min(_PER_STRATUM, len(stratum))
            tickets = np.argsort(lottery[stratum], kind="stable")
            strata.append((stratum, np.sort(stratum[tickets[:num_chosen]])))
    strata.sort(key=lambda pair: int(pair[0][0]))
    # Always-scored segments may lie between those of a stratum, so segments are sorted again.
    segments = np.concatenate([chosen for _, chosen in strata])
    number = np.repeat(np.arange(len(strata)), [len(chosen) for _, chosen in strata])
    order = np.argsort(segments, kind="stable")
    segments = segments[order]
    return RowSample(
        segments=segments,
        first_row=first[segments],
        end_row=end[segments],
        region=region[segments],
        stratum=number[order],
        sizes=np.array([len(stratum) for stratum, _ in strata], dtype=np.int64),
        chosen=np.array([len(chosen) for _, chosen in strata], dtype=np.int64),
    )


def _strata(members: Int, wanted: int) -> list[Int]:
    """Cut consecutive segments into strata whose sizes grow with their position.

    Two of each make at least ``wanted``. Where that would be all of them, each stands for itself.
    """
    num_strata = -(-wanted // _PER_STRATUM)
    if len(members) <= _PER_STRATUM * num_strata:
        return [members[at : at + 1] for at in range(len(members))]
    grown = np.geomspace(members[0], members[-1] + 1, num_strata + 1) - members[0]
    cuts = [0]
    for place in range(1, num_strata):
        room_after = len(members) - _PER_STRATUM * (num_strata - place)
        cuts.append(min(max(round(grown[place]), cuts[-1] + _PER_STRATUM), room_after))
    cuts.append(len(members))
    return [members[a:b] for a, b in itertools.pairwise(cuts)]


def _lottery(size: int, key: tuple[int, ...]) -> NDArray[np.uint64]:
    """Return random 64-bit numbers that depend on the key alone, whatever the NumPy version."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    raw: NDArray[np.uint64] = generator.random_raw(size)
    return raw
