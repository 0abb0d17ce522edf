# SPDX-License-Identifier: Apache-2.0
"""Selection: one candidate a head, from scores, under the user's options and a cost model.

Costs are compared at the longest calibrated length, where prefill hurts; a candidate must reach
the target at every length, on calibration and on held-out samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from patternsearch.errors import InputError, ScoresError
from patternsearch.patterns.candidates import describe
from patternsearch.schema.config import HeadEntry, Selection
from patternsearch.schema.scores import ScoresFolder
from patternsearch.selection.arrays import ScoreArrays
from patternsearch.selection.balance import RankCosts, fill_slack, rank_costs, solve_balanced
from patternsearch.selection.cost import CostModel, Work
from patternsearch.selection.entries import LengthTable, head_entries, length_tables, record
from patternsearch.selection.knapsack import Front, hull, pareto, solve
from patternsearch.selection.measured import at_choice, break_even, heads_by_backend
from patternsearch.selection.options import SelectionOptions
from patternsearch.selection.reading import load_scores, scores_from_frame
from patternsearch.selection.rows import some
from patternsearch.selection.rule import cheapest, complexity
from patternsearch.selection.statistics import reached_mass

__all__ = ["Problem", "SelectedHeads", "Upgrade", "pose", "select_heads"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Problem:
    """What the rule decides on.

    Attributes:
        scores: the scores.
        options: the user's wishes.
        tables: statistics and costs of each length, ascending.
        cost: [L, H, C] at the longest length.
        mass: [L, H, C], the mass that is reached everywhere.
        allowed: bool [L, H, C], by kind, consumer, density and dense layers; dense always is, and
            nothing else that reads every pair.
        eligible: ``allowed`` and the target reached; dense always is.
    """

    scores: ScoreArrays
    options: SelectionOptions
    tables: tuple[LengthTable, ...]
    cost: Floats
    mass: Floats
    allowed: Bools
    eligible: Bools


@dataclass(frozen=True, slots=True)
class Upgrade:
    """The next step up of one head's efficient frontier, with its exchange rate."""

    layer: int
    head: int
    to: str
    extra_cost: float
    extra_mass: float


@dataclass(frozen=True, slots=True)
class SelectedHeads:
    """A selection.

    Attributes:
        heads: [layer][head]; None for a layer that is not in the scores.
        record: how it was made, for the config.
        choice: int64 [L, H], places on the candidates' axis.
        unit: ``pairs`` or ``ms``.
        dense_cost, cost: all heads at the longest length, one device.
        ranks_before, ranks_after: by rank, each head chosen without regard to ranks, and chosen.
        shadow_price: mass of one head that one more unit of cost buys (objective ``mass``).
        optimality_gap: summed mass by which a better selection may exist; 0 when proved best.
        upgrades: objective ``mass``: each head's next step, best exchange rate first.
        backends: heads by the backend that the time model names for them at the longest length,
            the most first; empty when not measured.
    """

    heads: tuple[tuple[HeadEntry, ...] | None, ...]
    record: Selection
    choice: Ints
    unit: str
    dense_cost: float
    cost: float
    ranks_before: RankCosts
    ranks_after: RankCosts
    shadow_price: float | None = None
    optimality_gap: float = 0.0
    upgrades: tuple[Upgrade, ...] = ()
    backends: Mapping[str, int] = field(default_factory=dict)


def pose(
    scores: ScoreArrays | pd.DataFrame | ScoresFolder | Path,
    options: SelectionOptions,
    cost: CostModel | None = None,
) -> Problem:
    """Turn scores, options and costs into the arrays that a rule decides on.

    Raises:
        ScoresError: bad scores.
        InputError: options that do not fit the scores.
        TimingError: the cost model does not cover a length or candidate.
    """
    if isinstance(scores, pd.DataFrame):
        scores = scores_from_frame(scores)
    elif not isinstance(scores, ScoreArrays):
        scores = load_scores(scores)
    cost = cost if cost is not None else Work()
    unknown = [layer for layer in options.dense_layers if layer not in scores.layers]
    if unknown:
        raise InputError(
            f"dense layers {some([str(layer) for layer in unknown])} are not among the scored "
            f"layers {scores.layers[0]}..{scores.layers[-1]}: name full-attention layers"
        )
    allowed = _allowed(scores, options)
    tables = length_tables(scores, cost, np.asarray(allowed.any(axis=(0, 1))))
    mass = reached_mass(scores, options.statistic, options.regions)
    eligible = allowed.copy()
    if options.target_mass is not None:
        eligible &= mass >= options.target_mass
    eligible[..., scores.dense_index] = True
    return Problem(
        scores=scores,
        options=options,
        tables=tables,
        cost=tables[-1].cost,
        mass=mass,
        allowed=allowed,
        eligible=eligible,
    )


def _allowed(scores: ScoreArrays, options: SelectionOptions) -> Bools:
    by_candidate = np.array([options.allows(candidate) for candidate in scores.candidates])
    shape = (len(scores.layers), scores.num_heads, len(scores.candidates))
    allowed = np.broadcast_to(by_candidate, shape).copy()
    if options.max_density is not None:
        for length in scores.lengths:
            allowed &= length.density.mean(axis=0) <= options.max_density
    # What reads every pair at every length is dense by another name, and no simpler.
    allowed &= np.any([length.density.min(axis=0) < 1.0 for length in scores.lengths], axis=0)
    allowed[np.isin(scores.layers, options.dense_layers)] = False
    allowed[..., scores.dense_index] = True
    return allowed


def select_heads(
    scores: ScoreArrays | pd.DataFrame | ScoresFolder | Path,
    options: SelectionOptions | None = None,
    cost: CostModel | None = None,
    *,
    num_layers: int | None = None,
) -> SelectedHeads:
    """Choose one candidate a head.

    Args:
        scores: a scores folder, data frame or arrays.
        options: the rule's parameters.
        cost: cost model; without one, pairs executed, and the result says it is not measured.
        num_layers: layers of the model; by default up to the last scored one.

    Returns:
        The entries for a config, the record of the selection, and a report.

    Raises:
        ScoresError, InputError, TimingError: see :func:`pose`; InputError also when a budget is
            below the cheapest selection or ranks do not divide the heads.
    """
    options = options if options is not None else SelectionOptions()
    cost = cost if cost is not None else Work()
    problem = pose(scores, options, cost)
    scores = problem.scores
    if num_layers is not None and num_layers <= scores.layers[-1]:
        raise ScoresError(
            f"the scores hold layer {scores.layers[-1]}, the model has {num_layers} layers: the "
            f"scores belong to another model"
        )
    dense = problem.cost[..., scores.dense_index]
    if options.objective == "time":
        before = cheapest(
            problem.cost, problem.mass, problem.eligible, scores.candidates, options.tie_tolerance
        )
        choice = before
        if options.tp_size > 1:
            choice = fill_slack(
                problem.cost, problem.mass, problem.eligible, complexity(scores.candidates),
                before, options.tp_size,
            )  # fmt: skip
        bought = _Bought(choice=choice, before=before)
        budget = None
    else:
        budget = _budget(options, cost, dense)
        bought = _buy(problem, budget, cost.unit)
    runner_up = _runner_up(problem, bought)
    chosen_cost = at_choice(problem.cost, bought.choice)
    entries = head_entries(scores, problem.tables, bought.choice, runner_up, cost.measured)
    by_layer: list[tuple[HeadEntry, ...] | None] = [None] * (num_layers or scores.layers[-1] + 1)
    for layer, heads in zip(scores.layers, entries, strict=True):
        by_layer[layer] = heads
    measured = scores, problem.tables, bought.choice, cost
    return SelectedHeads(
        heads=tuple(by_layer),
        record=record(options, cost, budget, break_even(*measured, options.tp_size)),
        choice=bought.choice,
        unit=cost.unit,
        dense_cost=float(dense.sum()),
        cost=float(chosen_cost.sum()),
        ranks_before=rank_costs(at_choice(problem.cost, bought.before), options.tp_size),
        ranks_after=rank_costs(chosen_cost, options.tp_size),
        shadow_price=bought.price,
        optimality_gap=bought.gap,
        upgrades=_upgrades(problem, bought),
        backends=heads_by_backend(*measured),
    )


# --- objective mass --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bought:
    choice: Ints
    before: Ints
    fronts: tuple[tuple[Front, ...], ...] = ()
    places: Ints | None = None
    price: float | None = None
    gap: float = 0.0


def _budget(options: SelectionOptions, cost: CostModel, dense: Floats) -> float:
    """Return the budget in the cost model's unit: what the slowest ranks may take together."""
    if options.budget_fraction is not None:
        return options.budget_fraction * rank_costs(dense, options.tp_size).slowest
    if not cost.measured:
        raise InputError(
            "a budget in ms needs measured times: give --timings, or --budget-fraction"
        )
    assert options.budget_ms is not None
    return options.budget_ms


def _buy(problem: Problem, budget: float, unit: str) -> _Bought:
    scores, tp_size = problem.scores, problem.options.tp_size
    preference = complexity(scores.candidates)
    shape = problem.cost.shape
    fronts = tuple(
        tuple(
            pareto(problem.cost[at], problem.mass[at], problem.eligible[at], preference)
            for at in ((layer, head) for head in range(shape[1]))
        )
        for layer in range(shape[0])
    )
    flat = [front for heads in fronts for front in heads]
    least = np.array([front.cost[0] for front in flat]).reshape(shape[:2])
    slowest = rank_costs(least, tp_size).slowest
    if slowest > budget:
        raise InputError(
            f"the budget is {budget:.6g} {unit}, the cheapest selection that the options allow "
            f"costs {slowest:.6g} {unit}: raise the budget, lower the target mass or allow more "
            "patterns"
        )
    apart = solve(flat, budget * tp_size)
    places = apart.place.reshape(shape[:2])
    before = _options(fronts, places)
    if tp_size == 1:
        return _Bought(before, before, fronts, places, apart.price, apart.bound - apart.value)
    by_layer, balanced = solve_balanced(fronts, budget, tp_size)
    places = np.array(by_layer, dtype=np.int64)
    return _Bought(
        choice=_options(fronts, places),
        before=before,
        fronts=fronts,
        places=places,
        price=balanced.price,
        gap=balanced.bound - balanced.value,
    )


def _options(fronts: tuple[tuple[Front, ...], ...], places: Ints) -> Ints:
    return np.array(
        [
            [front.option[place] for front, place in zip(heads, row, strict=True)]
            for heads, row in zip(fronts, places, strict=True)
        ],
        dtype=np.int64,
    )


def _next_places(bought: _Bought) -> Ints:
    """Return each head's next corner of its hull, [L, H]; −1 at the top."""
    assert bought.places is not None
    following = np.full(bought.places.shape, -1, dtype=np.int64)
    for layer, heads in enumerate(bought.fronts):
        for head, front in enumerate(heads):
            later = [p for p in hull(front) if p > bought.places[layer, head]]
            if later:
                following[layer, head] = later[0]
    return following


def _upgrades(problem: Problem, bought: _Bought) -> tuple[Upgrade, ...]:
    if bought.places is None:
        return ()
    following = _next_places(bought)
    upgrades = []
    for at, front in enumerate(front for heads in bought.fronts for front in heads):
        layer, head = divmod(at, following.shape[1])
        place, now = int(following[layer, head]), int(bought.places[layer, head])
        if place >= 0:
            upgrades.append(
                Upgrade(
                    layer=problem.scores.layers[layer],
                    head=head,
                    to=describe(problem.scores.candidates[int(front.option[place])]),
                    extra_cost=float(front.cost[place] - front.cost[now]),
                    extra_mass=round(float(front.value[place] - front.value[now]), 6),
                )
            )
    return tuple(sorted(upgrades, key=lambda u: (-u.extra_mass / u.extra_cost, u.layer, u.head)))


# --- what the config tells beside the choice ---------------------------------------------------


def _runner_up(problem: Problem, bought: _Bought) -> Ints:
    """Return the next best candidate, [L, H]; −1 for none.

    Objective ``time``: what the rule would choose without the chosen one. Objective ``mass``: the
    next step up of the head's frontier.
    """
    if bought.places is not None:
        following = _next_places(bought)
        upgraded = _options(bought.fronts, np.maximum(following, 0))
        return np.where(following >= 0, upgraded, -1)
    others = problem.eligible.copy()
    np.put_along_axis(others, bought.choice[..., None], False, axis=-1)
    return cheapest(
        problem.cost,
        problem.mass,
        others,
        problem.scores.candidates,
        problem.options.tie_tolerance,
    )
