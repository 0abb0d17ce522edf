# SPDX-License-Identifier: Apache-2.0
"""What quality costs: target mass against cost and density, and estimator against estimator."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from patternsearch.errors import InputError
from patternsearch.patterns.candidates import (
    KINDS,
    BlockSparse,
    Candidate,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.schema.scores import ScoresFolder
from patternsearch.selection.arrays import ScoreArrays
from patternsearch.selection.cost import CostModel, Work
from patternsearch.selection.options import SelectionOptions
from patternsearch.selection.rule import cheapest
from patternsearch.selection.select import Problem, pose
from patternsearch.selection.statistics import over_samples

__all__ = ["DEFAULT_TARGETS", "EstimatorRow", "Frontier", "FrontierPoint", "frontier"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DEFAULT_TARGETS = (0.80, 0.85, 0.90, 0.925, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995)


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One target mass at one calibrated length.

    Attributes:
        target_mass: what every head must reach.
        length: tokens.
        cost: of all heads, in the frontier's unit.
        speed_up: dense cost / cost.
        density: mean over heads.
        mass_mean: mean captured mass over heads and samples.
        heads_by_kind: number of heads that run each kind.
    """

    target_mass: float
    length: int
    cost: float
    speed_up: float
    density: float
    mass_mean: float
    heads_by_kind: dict[str, int]


@dataclass(frozen=True, slots=True)
class EstimatorRow:
    """One way to build an index, at one length, over the budgets that all its variants share.

    Attributes:
        kind, estimator, tile, last_q, spread_rows: what it is; None where it has no such
            parameter.
        length: tokens.
        num_budgets: candidates averaged.
        density: mean of what they read; equal budgets of two families need not be equal work.
        mass_online: mean captured mass over heads, samples and budgets.
        mass_oracle: the same with the oracle index; None where it was not scored.
        gap: oracle − online; None likewise.
        index_cost: of one head's index, in the frontier's unit (for ``pairs``: products computed).
        cost_at_target: cost of all heads, as a fraction of dense, if each could only choose among
            these candidates and dense.
    """

    kind: str
    estimator: str
    tile: int
    last_q: int | None
    spread_rows: int | None
    length: int
    num_budgets: int
    density: float
    mass_online: float
    mass_oracle: float | None
    gap: float | None
    index_cost: float
    cost_at_target: float


@dataclass(frozen=True, slots=True)
class Frontier:
    """Both tables of a scores folder.

    Attributes:
        unit: ``pairs`` or ``ms``.
        measured: costs come from a timing table.
        device: the measured device, None without.
        target_mass: target of the estimator table.
        points: by target, then by length.
        estimators: by family, then by sampled rows.
    """

    unit: str
    measured: bool
    device: str | None
    target_mass: float
    points: tuple[FrontierPoint, ...]
    estimators: tuple[EstimatorRow, ...]

    def as_document(self) -> dict[str, Any]:
        """Return a JSON-able mapping."""
        return asdict(self)


def frontier(
    scores: ScoreArrays | pd.DataFrame | ScoresFolder | Path,
    options: SelectionOptions | None = None,
    cost: CostModel | None = None,
    targets: Sequence[float] = DEFAULT_TARGETS,
) -> Frontier:
    """Sweep the target mass and compare the estimators in a scores folder.

    Args:
        scores: a scores folder, data frame or arrays.
        options: restrictions and statistic; its target is that of the estimator table.
        cost: cost model; without one, pairs executed.
        targets: fractions, any order.

    Raises:
        ScoresError, InputError, TimingError: see :func:`patternsearch.selection.select.pose`.
    """
    options = options if options is not None else SelectionOptions()
    if options.objective != "time" or options.target_mass is None:
        raise InputError("a frontier sweeps the target of the objective time: give no budget")
    bad = [target for target in targets if not 0.0 <= target <= 1.0]
    if bad or not targets:
        raise InputError(f"targets {bad or 'are empty'}: give fractions between 0 and 1")
    cost = cost if cost is not None else Work()
    problem = pose(scores, options, cost)
    points = tuple(point for target in sorted(set(targets)) for point in _points(problem, target))
    return Frontier(
        unit=cost.unit,
        measured=cost.measured,
        device=cost.device,
        target_mass=options.target_mass,
        points=points,
        estimators=_estimators(problem, options.target_mass, cost),
    )


def _choose(problem: Problem, target: float, among: NDArray[np.bool_] | None = None) -> Ints:
    eligible = problem.allowed & (problem.mass >= target)
    if among is not None:
        eligible &= among
    eligible[..., problem.scores.dense_index] = True
    return cheapest(
        problem.cost,
        problem.mass,
        eligible,
        problem.scores.candidates,
        problem.options.tie_tolerance,
    )


def _at(values: Floats, choice: Ints) -> Floats:
    return np.take_along_axis(values, choice[..., None], axis=-1)[..., 0]


def _points(problem: Problem, target: float) -> list[FrontierPoint]:
    choice = _choose(problem, target)
    kinds = [candidate.kind for candidate in problem.scores.candidates]
    chosen = [kinds[place] for place in choice.reshape(-1).tolist()]
    by_kind = {str(kind): chosen.count(kind) for kind in KINDS}
    points = []
    for table, scores in zip(problem.tables, problem.scores.lengths, strict=True):
        total = float(_at(table.cost, choice).sum())
        dense = float(table.cost[..., problem.scores.dense_index].sum())
        points.append(
            FrontierPoint(
                target_mass=target,
                length=scores.length,
                cost=total,
                speed_up=dense / total,
                density=float(_at(table.statistics.density, choice).mean()),
                mass_mean=float(_at(scores.mass[0].mean(axis=0), choice).mean()),
                heads_by_kind=by_kind,
            )
        )
    return points


# --- estimators ------------------------------------------------------------------------------

_Variant = tuple[str, str, int, int | None, int | None]
"""kind, estimator, tile, last_q, spread_rows."""

_Budget = tuple[int, ...]


def _variant(candidate: Candidate) -> tuple[_Variant, _Budget] | None:
    match candidate:
        case VerticalSlashSpread():
            rows = (candidate.last_q, candidate.spread_rows)
            budget = (candidate.vertical, candidate.diagonals)
            return (candidate.kind, candidate.estimator, candidate.tile, *rows), budget
        case VerticalSlashLastQ():
            budget = (candidate.vertical, candidate.slash)
            return (candidate.kind, "last_q", candidate.tile, candidate.last_q, None), budget
        case BlockSparse():
            variant = (candidate.kind, candidate.estimator, candidate.tile, None, None)
            return variant, (candidate.blocks,)
        case _:
            return None


def _estimators(problem: Problem, target: float, cost: CostModel) -> tuple[EstimatorRow, ...]:
    candidates = problem.scores.candidates
    usable = np.asarray(problem.allowed.any(axis=(0, 1)))
    places: dict[_Variant, dict[_Budget, int]] = {}
    for place, candidate in enumerate(candidates):
        named = _variant(candidate)
        if named is not None and usable[place]:
            places.setdefault(named[0], {})[named[1]] = place
    rows = []
    for variant in sorted(places, key=lambda v: tuple(-1 if x is None else x for x in v)):
        family = [other for other in places if _family(other) == _family(variant)]
        shared = set.intersection(*(set(places[other]) for other in family))
        budgets = sorted(shared) or sorted(places[variant])
        axis = np.array([places[variant][budget] for budget in budgets])
        among = np.zeros(len(candidates), dtype=np.bool_)
        among[list(places[variant].values())] = True
        choice = _choose(problem, target, among)
        for table, scores in zip(problem.tables, problem.scores.lengths, strict=True):
            online = float(scores.mass[0][..., axis].mean())
            oracle = float(over_samples(scores.oracle[..., axis].reshape(-1), "mean"))
            dense = float(table.cost[..., problem.scores.dense_index].sum())
            has_oracle = not np.isnan(oracle)
            tokens = round(float(scores.num_tokens.mean()))
            rows.append(
                EstimatorRow(
                    *variant,
                    length=scores.length,
                    num_budgets=len(budgets),
                    density=float(table.statistics.density[..., axis].mean()),
                    mass_online=online,
                    mass_oracle=oracle if has_oracle else None,
                    gap=oracle - online if has_oracle else None,
                    index_cost=float(cost.index_cost([candidates[axis[0]]], tokens)[0]),
                    cost_at_target=float(_at(table.cost, choice).sum()) / dense,
                )
            )
    return tuple(rows)


def _family(variant: _Variant) -> tuple[str, bool, int]:
    """Variants whose budgets mean the same thing: they differ in estimator or rows only."""
    kind, estimator, tile = variant[:3]
    return kind, estimator == "last_q", tile
