# SPDX-License-Identifier: Apache-2.0
"""The scores table summed up per head, candidate and length, for people and reports."""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from patternsearch.patterns.candidates import (
    CANDIDATE_COLUMNS,
    AShape,
    BlockSparse,
    Candidate,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
    candidate_columns,
)
from patternsearch.selection.arrays import LengthScores, ScoreArrays
from patternsearch.selection.cost import CostModel, Work
from patternsearch.selection.reading import scores_from_frame
from patternsearch.selection.rule import cheapest
from patternsearch.selection.statistics import MASS_DECIMALS, length_statistics

__all__ = ["aggregate", "budget_neighbours"]

Floats = NDArray[np.float64]


def aggregate(
    scores: ScoreArrays | pd.DataFrame,
    *,
    target_mass: float = 0.95,
    cost: CostModel | None = None,
    tie_tolerance: float = 0.02,
) -> pd.DataFrame:
    """Sum up samples: one row a layer × head × candidate × length.

    Args:
        scores: arrays, or a data frame with the columns of the scores table.
        target_mass: target of ``share_won``.
        cost: cost model of ``share_won``; pairs executed by default.
        tie_tolerance: tolerance of ``share_won``.

    Returns:
        ``layer, head, length``, the candidate's columns, ``num_samples, num_heldout``, then
        ``mass_mean, mass_worst, mass_worst_region, mass_std, mass_p05`` (calibration samples),
        ``share_won`` (fraction of calibration samples on which, alone, the rule would choose this
        candidate), ``heldout_mean, heldout_worst, heldout_worst_region``, ``oracle_mean,
        oracle_gap`` (oracle − online over all samples), ``density, tiles, columns`` and
        ``mass_half_budget, mass_double_budget`` (mean mass of the candidate that differs only in
        half or twice the window, diagonals, slashes or blocks; NaN where the grid lacks it).

    Raises:
        ScoresError: see :func:`~patternsearch.selection.arrays.scores_from_frame`.
    """
    if isinstance(scores, pd.DataFrame):
        scores = scores_from_frame(scores)
    cost = cost if cost is not None else Work()
    frames = [
        _length_frame(scores, length, cost, target_mass, tie_tolerance) for length in scores.lengths
    ]
    return pd.concat(frames, ignore_index=True)


def _length_frame(
    scores: ScoreArrays,
    length: LengthScores,
    cost: CostModel,
    target_mass: float,
    tie_tolerance: float,
) -> pd.DataFrame:
    stats = length_statistics(length)
    shape = stats.mean.shape
    layers, heads, places = np.indices(shape)
    columns: dict[str, object] = {
        "layer": np.asarray(scores.layers)[layers.reshape(-1)],
        "head": heads.reshape(-1),
        "length": length.length,
    }
    named = pd.DataFrame([candidate_columns(c) for c in scores.candidates])
    place = places.reshape(-1)
    for name in CANDIDATE_COLUMNS:
        values = named[name].astype("string" if name in ("kind", "estimator") else "Int64")
        columns[name] = values.array.take(place)
    columns["num_samples"] = int((~length.heldout).sum())
    columns["num_heldout"] = int(length.heldout.sum())
    nothing = np.full(shape, np.nan)
    online_mean = length.mass[0].mean(axis=0)
    half, double = (
        _mass_at(stats.mean, places_of) for places_of in budget_neighbours(scores.candidates)
    )
    for name, values in {
        "mass_mean": stats.mean,
        "mass_worst": stats.worst,
        "mass_worst_region": stats.worst_region,
        "mass_std": stats.std,
        "mass_p05": stats.p05,
        "share_won": _share_won(scores, length, cost, target_mass, tie_tolerance),
        "heldout_mean": nothing if stats.heldout_mean is None else stats.heldout_mean,
        "heldout_worst": nothing if stats.heldout_worst is None else stats.heldout_worst,
        "heldout_worst_region": (
            nothing if stats.heldout_worst_region is None else stats.heldout_worst_region
        ),
        "oracle_mean": stats.oracle_mean,
        "oracle_gap": stats.oracle_mean - online_mean,
        "density": stats.density,
        "tiles": stats.tiles,
        "columns": stats.columns,
        "mass_half_budget": half,
        "mass_double_budget": double,
    }.items():
        columns[name] = values.reshape(-1)
    return pd.DataFrame(columns)


def _mass_at(mass: Floats, places: NDArray[np.int64]) -> Floats:
    return np.where(places >= 0, mass[..., places], np.nan)


def _share_won(
    scores: ScoreArrays,
    length: LengthScores,
    cost: CostModel,
    target_mass: float,
    tie_tolerance: float,
) -> Floats:
    samples = np.flatnonzero(~length.heldout)
    won = np.zeros(length.mass.shape[2:])
    layers, heads = np.indices(won.shape[:2])
    for sample in samples:
        worst = np.asarray(np.fmin.reduce(length.sure[:, sample], axis=0))
        reached = np.round(worst, MASS_DECIMALS)
        eligible = reached >= target_mass
        eligible[..., scores.dense_index] = True
        costs = cost.head_cost(
            scores.candidates,
            int(length.num_tokens[sample]),
            length.tiles[sample],
            length.columns[sample],
        )
        chosen = cheapest(costs, reached, eligible, scores.candidates, tie_tolerance)
        won[layers, heads, chosen] += 1.0
    return won / len(samples)


def budget_neighbours(
    candidates: tuple[Candidate, ...],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each candidate, the places of those with half and with twice its budget.

    The budget is the one that carries the cost: the window, tile diagonals, slashes or blocks;
    everything else is equal. −1 where the grid has no such candidate.
    """
    place = {candidate: index for index, candidate in enumerate(candidates)}
    half = np.full(len(candidates), -1, dtype=np.int64)
    double = np.full(len(candidates), -1, dtype=np.int64)
    for index, candidate in enumerate(candidates):
        match candidate:
            case Dense():
                continue
            case AShape():
                name = "window"
            case VerticalSlashSpread():
                name = "diagonals"
            case VerticalSlashLastQ():
                name = "slash"
            case BlockSparse():
                name = "blocks"
        twice = place.get(candidate.model_copy(update={name: 2 * getattr(candidate, name)}))
        if twice is not None and twice != index:
            double[index], half[twice] = twice, index
    return half, double
