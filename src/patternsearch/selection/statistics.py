# SPDX-License-Identifier: Apache-2.0
"""Statistics over samples: what one head and candidate do at one length, without groupby.

All arrays are [L, H, C] float64. NaN masses (regions without rows) are ignored.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from patternsearch.selection.arrays import LengthScores, ScoreArrays

__all__ = [
    "LengthStatistics",
    "Regions",
    "Statistic",
    "length_statistics",
    "over_samples",
    "reached_mass",
]

Statistic = Literal["worst", "p05", "mean"]
Regions = Literal["each", "all"]
Floats = NDArray[np.float64]

MASS_DECIMALS = 6
"""Masses are compared and recorded with this many decimals."""


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """One length's statistics, each [L, H, C].

    The mass statistics are over calibration samples and all rows, ``worst_region`` over the worst
    sample and region; ``heldout_*`` are the same over held-out samples, None without any.
    ``oracle_mean`` is over all samples, NaN where no oracle index was scored. ``density``,
    ``tiles`` and ``columns`` are means over all samples.
    """

    length: int
    mean: Floats
    worst: Floats
    worst_region: Floats
    std: Floats
    p05: Floats
    heldout_mean: Floats | None
    heldout_worst: Floats | None
    heldout_worst_region: Floats | None
    oracle_mean: Floats
    density: Floats
    tiles: Floats
    columns: Floats


def over_samples(values: Floats, statistic: Statistic) -> Floats:
    """Reduce axis 0 (samples), ignoring NaN; all-NaN gives NaN.

    ``p05`` is the 5th percentile with linear interpolation between order statistics.
    """
    if statistic == "worst":
        return np.asarray(np.fmin.reduce(values, axis=0))
    valid = ~np.isnan(values)
    count = valid.sum(axis=0)
    if statistic == "mean":
        total = np.where(valid, values, 0.0).sum(axis=0)
        return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan))
    ordered = np.sort(values, axis=0)
    place = 0.05 * np.maximum(count - 1, 0)
    low = np.floor(place).astype(np.int64)
    high = np.minimum(low + 1, np.maximum(count - 1, 0))
    below = np.take_along_axis(ordered, low[None], axis=0)[0]
    above = np.take_along_axis(ordered, high[None], axis=0)[0]
    return np.asarray(below + (place - low) * (above - below))


def length_statistics(scores: LengthScores) -> LengthStatistics:
    """Reduce one length's samples."""
    calibration, heldout = scores.mass[:, ~scores.heldout], scores.mass[:, scores.heldout]
    has_heldout = bool(scores.heldout.any())
    return LengthStatistics(
        length=scores.length,
        mean=over_samples(calibration[0], "mean"),
        worst=over_samples(calibration[0], "worst"),
        worst_region=_worst_region(calibration),
        std=calibration[0].std(axis=0),
        p05=over_samples(calibration[0], "p05"),
        heldout_mean=over_samples(heldout[0], "mean") if has_heldout else None,
        heldout_worst=over_samples(heldout[0], "worst") if has_heldout else None,
        heldout_worst_region=_worst_region(heldout) if has_heldout else None,
        oracle_mean=over_samples(scores.oracle, "mean"),
        density=scores.density.mean(axis=0),
        tiles=scores.tiles.mean(axis=0),
        columns=scores.columns.mean(axis=0),
    )


def _worst_region(mass: Floats) -> Floats:
    return np.asarray(np.fmin.reduce(mass, axis=(0, 1)))


def reached_mass(scores: ScoreArrays, statistic: Statistic, regions: Regions) -> Floats:
    """Return the mass that each head and candidate is sure of, [L, H, C].

    The statistic over samples is taken for each length, for calibration and held-out samples
    separately, and with ``each`` for each region separately (and all rows); the least of them is
    what the candidate reaches. Of a sample of rows, masses are their lower confidence bounds.
    Rounded to the precision of the document, so that a config never shows a mass below the target
    it was chosen for.
    """
    reached: Floats | None = None
    for length in scores.lengths:
        mass = length.sure if regions == "each" else length.sure[:1]
        for split in (~length.heldout, length.heldout):
            if not split.any():
                continue
            for region in mass:
                value = over_samples(region[split], statistic)
                reached = value if reached is None else np.fmin(reached, value)
    assert reached is not None
    return np.round(reached, MASS_DECIMALS)
