# SPDX-License-Identifier: Apache-2.0
"""Curves through measured points: over what a launch reads at one length, and over lengths.

At one length, time is close to linear in what is read, with a start-up share; where few programs
run, it bends, so one-dimensional families are interpolated between their points. Between two
lengths, time per unit (query tile, token) is interpolated geometrically over log n at the same
reading per unit: it is flat where the GPU is full and falls where it is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

__all__ = ["Curve", "Plane", "Polyline", "Slice", "curve"]

Floats = NDArray[np.float64]


class Slice(Protocol):
    """Time per unit at one length, as a function of what is read per unit."""

    def __call__(self, features: Floats) -> Floats:
        """Return [...] ms per unit for features [..., F]."""


class Polyline:
    """Piecewise linear in the first feature, continued with the slope of the last piece.

    Args:
        features: [N, F]; only the first is used, repeated values are averaged.
        values: [N], ms per unit, positive.
    """

    def __init__(self, features: Floats, values: Floats) -> None:
        self._x, place = np.unique(features[:, 0], return_inverse=True)
        self._y = np.bincount(place, values) / np.bincount(place)

    def __call__(self, features: Floats) -> Floats:
        """Interpolate; see :class:`Slice`. Below the first point time does not fall."""
        x = features[..., 0]
        inside = np.interp(x, self._x, self._y)
        if len(self._x) < 2:
            # One point: in proportion beyond it (or constant, where nothing is read).
            return np.asarray(inside * np.maximum(x / max(self._x[0], 1e-30), 1.0))
        slope = max((self._y[-1] - self._y[-2]) / (self._x[-1] - self._x[-2]), 0.0)
        return np.asarray(inside + slope * np.maximum(x - self._x[-1], 0.0))


class Plane:
    """A start-up share plus a non-negative rate for each feature, least relative squares.

    Args:
        features: [N, F]; a feature that never varies adds nothing.
        values: [N], ms per unit, positive.
    """

    def __init__(self, features: Floats, values: Floats) -> None:
        self._varies = np.ptp(features, axis=0) > 0
        design = np.column_stack([np.ones(len(values)), features[:, self._varies]])
        # Columns are scaled to like size, rows by the value: the error counts as a fraction.
        size = design.max(axis=0)
        weights, _ = nnls(design / size / values[:, None], np.ones(len(values)))
        self._weights = weights / size

    def __call__(self, features: Floats) -> Floats:
        """Evaluate; see :class:`Slice`."""
        return np.asarray(self._weights[0] + features[..., self._varies] @ self._weights[1:])


@dataclass(frozen=True, slots=True)
class Curve:
    """Slices at ascending lengths.

    Attributes:
        lengths: measured lengths in tokens, ascending.
        slices: one for each.
    """

    lengths: tuple[int, ...]
    slices: tuple[Slice, ...]

    def covers(self, num_tokens: int) -> bool:
        """Return whether a length lies between measured ones."""
        return self.lengths[0] <= num_tokens <= self.lengths[-1]

    def __call__(self, num_tokens: int, features: Floats) -> Floats:
        """Return [...] ms per unit for features [..., F] at a covered length."""
        assert self.covers(num_tokens)
        above = int(np.searchsorted(self.lengths, num_tokens))
        high = self.slices[above](features)
        if self.lengths[above] == num_tokens:
            return high
        low = self.slices[above - 1](features)
        ends = np.log([self.lengths[above - 1], self.lengths[above]])
        share = (np.log(num_tokens) - ends[0]) / (ends[1] - ends[0])
        return np.asarray(low ** (1.0 - share) * high**share)


def curve(
    lengths: Sequence[int],
    features: Floats,
    values: Floats,
    make: type[Polyline] | type[Plane],
) -> Curve:
    """Fit one slice a length.

    Args:
        lengths: [N], the length of each point.
        features: [N, F], per unit.
        values: [N], ms per unit.
        make: the kind of slice.
    """
    at = np.asarray(lengths)
    ascending = np.unique(at)
    return Curve(
        lengths=tuple(int(length) for length in ascending),
        slices=tuple(make(features[at == n], values[at == n]) for n in ascending),
    )
