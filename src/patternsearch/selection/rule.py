# SPDX-License-Identifier: Apache-2.0
"""The rule that picks one candidate a head, on arrays; every objective and table uses this one.

Among the candidates that are allowed and reach the target, the cheapest wins; candidates whose
cost is within the tolerance of the cheapest are equal, and then the simpler kind wins, then the
higher mass, then the grid's order.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from patternsearch.patterns.candidates import KINDS, Candidate

__all__ = ["cheapest", "complexity"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def complexity(candidates: Sequence[Candidate]) -> NDArray[np.int64]:
    """Return each candidate's place in the order dense, a_shape, vertical_slash, block_sparse."""
    return np.array([KINDS.index(candidate.kind) for candidate in candidates], dtype=np.int64)


def cheapest(
    cost: Floats,
    mass: Floats,
    eligible: Bools,
    candidates: Sequence[Candidate],
    tie_tolerance: float,
) -> NDArray[np.int64]:
    """Apply the rule.

    Args:
        cost: [..., C].
        mass: [..., C].
        eligible: [..., C].
        candidates: the C candidates.
        tie_tolerance: relative.

    Returns:
        int64 [...], the chosen place on axis C, −1 where nothing is eligible.
    """
    masked = np.where(eligible, cost, np.inf)
    least = masked.min(axis=-1, keepdims=True)
    tied = eligible & (masked <= least * (1.0 + tie_tolerance))
    kind = np.where(tied, complexity(candidates), len(KINDS))
    tied &= kind == kind.min(axis=-1, keepdims=True)
    value = np.where(tied, mass, -np.inf)
    tied &= value == value.max(axis=-1, keepdims=True)
    return np.where(tied.any(axis=-1), tied.argmax(axis=-1), -1)
