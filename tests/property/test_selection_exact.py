"""Selection equals the best of all combinations, on instances small enough to try them all."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patternsearch.errors import InputError
from patternsearch.selection.knapsack import hull, pareto, solve
from patternsearch.selection.options import SelectionOptions
from patternsearch.selection.reading import scores_from_frame
from patternsearch.selection.select import pose, select_heads
from support.scores_factory import SMALL_GRID, scores_frame

numbers = st.integers(0, 40)
groups = st.lists(
    st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5), min_size=1, max_size=6
)


def fronts_of(instance):
    return [
        pareto(
            np.array([cost for cost, _ in group], float) / 8,
            np.array([value for _, value in group], float) / 8,
            np.ones(len(group), bool),
            np.zeros(len(group), np.int64),
        )
        for group in instance
    ]


def best_of_all(instance, budget):
    best = None
    for options in product(*instance):
        if sum(cost for cost, _ in options) <= budget:
            value = sum(value for _, value in options)
            best = value if best is None else max(best, value)
    return best


@settings(max_examples=300, deadline=None)
@given(groups, st.integers(0, 200))
def test_knapsack_is_the_best_of_all_combinations(instance, budget):
    fronts, best = fronts_of(instance), best_of_all(instance, budget)
    if best is None:
        with pytest.raises(ValueError, match="cheapest options cost"):
            solve(fronts, budget / 8)
        return
    solution = solve(fronts, budget / 8)
    assert solution.is_exact
    assert solution.value == pytest.approx(best / 8, abs=1e-9)
    assert solution.bound == pytest.approx(best / 8, abs=1e-9)
    chosen = [(f.cost[p], f.value[p]) for f, p in zip(fronts, solution.place, strict=True)]
    assert sum(cost for cost, _ in chosen) == pytest.approx(solution.cost)
    assert solution.cost <= budget / 8 + 1e-9


@settings(max_examples=100, deadline=None)
@given(groups, st.integers(0, 200))
def test_knapsack_with_few_states_stays_feasible_and_bounded(instance, budget):
    best = best_of_all(instance, budget)
    if best is None:
        return
    solution = solve(fronts_of(instance), budget / 8, max_states=1)
    assert solution.cost <= budget / 8 + 1e-9
    assert solution.value <= best / 8 + 1e-9 <= solution.bound + 2e-9
    if solution.is_exact:
        assert solution.value == pytest.approx(best / 8, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=12))
def test_front_is_what_nothing_dominates_and_hull_is_concave(options):
    (front,) = fronts_of([options])
    kept = {(c * 8, v * 8) for c, v in zip(front.cost, front.value, strict=True)}
    undominated = {
        (c, v)
        for c, v in options
        if not any((a <= c and b >= v) and (a, b) != (c, v) for a, b in options)
    }
    assert kept == undominated
    corners = hull(front)
    assert corners[0] == 0
    assert corners[-1] == len(front.cost) - 1
    rates = np.diff(front.value[corners]) / np.diff(front.cost[corners])
    assert (np.diff(rates) < 0).all()


# --- whole selections ------------------------------------------------------------------------

CANDIDATES = (SMALL_GRID[0], SMALL_GRID[1], SMALL_GRID[3], SMALL_GRID[6])


def small_scores(seed, num_layers, num_heads, candidates=CANDIDATES):
    return scores_from_frame(
        scores_frame(
            candidates,
            lengths=(1024, 2048),
            num_layers=num_layers,
            num_heads=num_heads,
            calibration=2,
            heldout=1,
            seed=seed,
        )
    )


class NoisyTimes:
    """Measured-looking costs that rise with density but in no strict order."""

    unit, measured, device, sha256 = "ms", True, "test device", "0" * 64

    def __init__(self, seed):
        self.seed = seed

    def head_cost(self, candidates, num_tokens, tiles, columns):
        rng = np.random.default_rng([self.seed, num_tokens])
        return rng.integers(1, 60, tiles.shape) / 16

    def launch_cost(self, candidates, num_tokens, tiles, columns):
        return 0.0

    def layer_backends(self, candidates, num_tokens, tiles, columns):
        return ("kernel",) * len(candidates)


def combinations(problem):
    """Every choice of eligible candidates as an array [combinations, L, H]."""
    shape = problem.cost.shape
    options = [
        np.flatnonzero(problem.eligible[layer, head])
        for layer in range(shape[0])
        for head in range(shape[1])
    ]
    return np.array(list(product(*options))).reshape(-1, *shape[:2])


def totals(problem, choices, tp_size):
    layers, heads = np.indices(choices.shape[1:])
    cost = problem.cost[layers, heads, choices]
    mass = problem.mass[layers, heads, choices].sum(axis=(1, 2))
    by_rank = cost.reshape(*cost.shape[:2], tp_size, -1).sum(axis=3)
    return by_rank.max(axis=2).sum(axis=1), mass


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_time_objective_is_the_best_of_all_combinations(seed, tp_size):
    options = SelectionOptions(target_mass=0.8, tp_size=tp_size, tie_tolerance=0.0)
    scores, times = small_scores(seed, 2, 2), NoisyTimes(seed)
    problem = pose(scores, options, times)
    selected = select_heads(scores, options, times)
    time, _ = totals(problem, combinations(problem), tp_size)
    least = time.min()
    assert selected.ranks_after.slowest == pytest.approx(least)
    own_time, _ = totals(problem, selected.choice[None], tp_size)
    assert own_time[0] == pytest.approx(least)
    if tp_size > 1:
        # With the slowest ranks given, slack is worth the most mass at the layers' own times.
        before = selected.ranks_before
        assert before.slowest == pytest.approx(least)
        for layer in range(2):
            limit = max(problem.cost[layer, h, selected.choice[layer, h]] for h in range(2))
            for head in range(2):
                fits = problem.eligible[layer, head] & (problem.cost[layer, head] <= limit + 1e-12)
                got = problem.mass[layer, head, selected.choice[layer, head]]
                spent = problem.cost[layer, head, selected.choice[layer, head]]
                if spent < limit:
                    assert got == pytest.approx(problem.mass[layer, head][fits].max())


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("fraction", [0.4, 0.7, 1.0, 1.6])
@pytest.mark.parametrize("seed", range(6))
def test_mass_objective_is_the_best_of_all_combinations(seed, fraction, tp_size):
    scores, times = small_scores(seed, 2, 2), NoisyTimes(seed)
    options = SelectionOptions(
        objective="mass", target_mass=None, budget_fraction=fraction, tp_size=tp_size
    )
    problem = pose(scores, options, times)
    time, mass = totals(problem, combinations(problem), tp_size)
    dense = np.full((1, 2, 2), scores.dense_index)
    budget = fraction * totals(problem, dense, tp_size)[0][0]
    fits = time <= budget + 1e-9
    if not fits.any():
        with pytest.raises(InputError, match="the cheapest selection"):
            select_heads(scores, options, times)
        return
    selected = select_heads(scores, options, times)
    own_time, own_mass = totals(problem, selected.choice[None], tp_size)
    assert own_time[0] <= budget + 1e-9
    assert own_mass[0] == pytest.approx(mass[fits].max(), abs=1e-9)
    assert selected.optimality_gap == pytest.approx(0.0, abs=1e-9)
    assert selected.record.budget_ms == pytest.approx(budget, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_mass_objective_keeps_a_floor(seed):
    scores, times = small_scores(seed, 2, 3), NoisyTimes(seed)
    options = SelectionOptions(objective="mass", target_mass=0.85, budget_fraction=3.0)
    problem = pose(scores, options, times)
    choice = select_heads(scores, options, times).choice
    reached = np.take_along_axis(problem.mass, choice[..., None], axis=-1)
    assert (reached >= 0.85).all()


def test_balance_over_more_heads_keeps_every_promise():
    """Too many combinations to try: the promises are checked one by one."""
    scores, times = small_scores(5, 4, 8, SMALL_GRID), NoisyTimes(9)
    options = SelectionOptions(target_mass=0.8, tp_size=4, tie_tolerance=0.0)
    alone = select_heads(scores, SelectionOptions(target_mass=0.8, tie_tolerance=0.0), times)
    balanced = select_heads(scores, options, times)
    problem = pose(scores, options, times)
    mass = [
        np.take_along_axis(problem.mass, s.choice[..., None], axis=-1).reshape(4, 4, 2).sum(-1)
        for s in (alone, balanced)
    ]
    assert balanced.ranks_after.slowest == pytest.approx(balanced.ranks_before.slowest)
    assert (mass[1] >= mass[0] - 1e-12).all()
    assert mass[1].sum() > mass[0].sum()
    assert balanced.ranks_after.imbalance < balanced.ranks_before.imbalance
