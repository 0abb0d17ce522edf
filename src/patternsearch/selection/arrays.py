# SPDX-License-Identifier: Apache-2.0
"""Scores as dense arrays: what a scores folder or data frame holds, ready for maths.

The scores table has one row a sample × layer × head × candidate × index. Everything downstream
works on arrays over [sample, layer, head, candidate], one set per calibrated length, since the
samples of different lengths have nothing in common but their heads and candidates.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from patternsearch.patterns.candidates import Candidate, Dense

__all__ = ["Floats", "LengthScores", "ScoreArrays"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LengthScores:
    """Scores of all samples of one length bucket.

    Attributes:
        length: the bucket, in tokens.
        sample_ids, sources: one a sample, in the order of the table.
        heldout: bool [S].
        num_tokens: int64 [S], real tokens.
        mass: float64 [5, S, L, H, C], physical captured mass of the index that a runtime can
            build (``none`` or ``online``): over all rows, then by region; NaN for an empty region.
        sure: like ``mass``, what selection may rely on: ``mass`` itself, or its lower confidence
            bound where a sample of the rows was scored.
        oracle: float64 [S, L, H, C], all rows, oracle index; NaN where it was not scored.
        density, tiles, columns: float64 [S, L, H, C].
    """

    length: int
    sample_ids: tuple[str, ...]
    sources: tuple[str, ...]
    heldout: NDArray[np.bool_]
    num_tokens: NDArray[np.int64]
    mass: Floats
    sure: Floats
    oracle: Floats
    density: Floats
    tiles: Floats
    columns: Floats


@dataclass(frozen=True, slots=True)
class ScoreArrays:
    """A scores table as arrays.

    Attributes:
        candidates: in the order of the table, which is the grid's; axis C.
        layers: the scored (full-attention) layers, ascending; axis L.
        num_heads: query heads a layer; axis H.
        lengths: one entry a length bucket, ascending.
    """

    candidates: tuple[Candidate, ...]
    layers: tuple[int, ...]
    num_heads: int
    lengths: tuple[LengthScores, ...]

    @property
    def dense_index(self) -> int:
        """Place of the dense candidate on axis C."""
        return self.candidates.index(Dense())
