# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: a layer takes as long as its slowest rank.

Rank r of T holds the query heads [r·H/T, (r+1)·H/T) of every layer. The cost of a selection is
Σ over layers of the largest rank cost, so mass on the other ranks is free up to there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from patternsearch.errors import InputError
from patternsearch.selection.knapsack import Front, Solution, pareto, solve

__all__ = ["RankCosts", "fill_slack", "rank_costs", "solve_balanced"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

_MAX_FRONT = 512
"""States kept of one rank's front; beyond it, the best of each of as many equal cost bins."""


@dataclass(frozen=True, slots=True)
class RankCosts:
    """Cost of a selection under tensor parallelism, in the cost model's unit.

    Attributes:
        by_rank: Σ over layers, one a rank.
        slowest: Σ over layers of the slowest rank: what the model waits for.
        mean: Σ over layers of the mean rank: what perfect balance would give.
    """

    by_rank: tuple[float, ...]
    slowest: float
    mean: float

    @property
    def imbalance(self) -> float:
        """Return by which fraction the slowest ranks exceed perfect balance."""
        return self.slowest / self.mean - 1.0 if self.mean else 0.0


def rank_costs(head_cost: Floats, tp_size: int) -> RankCosts:
    """Sum the cost of the chosen candidates, [L, H], over ranks.

    Raises:
        InputError: the heads do not divide over the ranks.
    """
    by_rank = head_cost.reshape(len(head_cost), tp_size, _heads_per_rank(head_cost, tp_size))
    layer_rank = by_rank.sum(axis=2)
    return RankCosts(
        by_rank=tuple(float(value) for value in layer_rank.sum(axis=0)),
        slowest=float(layer_rank.max(axis=1).sum()),
        mean=float(layer_rank.mean(axis=1).sum()),
    )


def _heads_per_rank(head_cost: Floats, tp_size: int) -> int:
    num_heads = head_cost.shape[1]
    if num_heads % tp_size:
        raise InputError(
            f"{num_heads} query heads do not divide over {tp_size} ranks: give a tp size that "
            f"divides the heads"
        )
    return int(num_heads // tp_size)


def fill_slack(
    cost: Floats, mass: Floats, eligible: Bools, preference: Ints, choice: Ints, tp_size: int
) -> Ints:
    """Give the ranks that wait for a slower one the most mass that keeps them no slower.

    Args:
        cost: [L, H, C].
        mass: [L, H, C].
        eligible: [L, H, C].
        preference: [C], the simpler of equal candidates.
        choice: [L, H], each head's choice on its own.
        tp_size: T.

    Returns:
        [L, H]; Σ over layers of the slowest rank is unchanged, no rank has less mass.
    """
    filled = choice.copy()
    chosen_cost = np.take_along_axis(cost, choice[..., None], axis=-1)[..., 0]
    width = _heads_per_rank(chosen_cost, tp_size)
    for layer in range(len(choice)):
        spent = chosen_cost[layer].reshape(tp_size, width).sum(axis=1)
        for rank in np.flatnonzero(spent < spent.max()):
            heads = np.arange(rank * width, (rank + 1) * width)
            fronts = [
                pareto(cost[layer, h], mass[layer, h], eligible[layer, h], preference)
                for h in heads
            ]
            solution = solve(fronts, float(spent.max()))
            before = mass[layer, heads, choice[layer, heads]].sum()
            if solution.value > before + 1e-9:
                filled[layer, heads] = [
                    front.option[place] for front, place in zip(fronts, solution.place, strict=True)
                ]
    return filled


def solve_balanced(
    fronts: Sequence[Sequence[Front]], budget: float, tp_size: int
) -> tuple[list[list[int]], Solution]:
    """Most mass with Σ over layers of the slowest rank's cost ≤ budget.

    Each rank's heads are combined into one front, the ranks of a layer into one front over the
    layer's time, and the layers are a knapsack again.

    Args:
        fronts: [L][H].
        budget: in the unit of cost.
        tp_size: T, divides H.

    Returns:
        The chosen place in each head's front, [L][H], and the solution over layers.

    Raises:
        ValueError: even the cheapest options exceed the budget.
    """
    layers = [_Layer(heads, tp_size) for heads in fronts]
    solution = solve([layer.front for layer in layers], budget)
    places = [
        layer.places(float(layer.front.cost[place]))
        for layer, place in zip(layers, solution.place, strict=True)
    ]
    return places, solution


class _Layer:
    """Fronts of a layer's ranks, and of the layer over the time of its slowest rank."""

    def __init__(self, heads: Sequence[Front], tp_size: int) -> None:
        width = len(heads) // tp_size
        self._ranks = [_Rank(heads[r * width : (r + 1) * width]) for r in range(tp_size)]
        start = max(float(rank.cost[0]) for rank in self._ranks)
        times = np.unique(np.concatenate([rank.cost for rank in self._ranks]))
        times = times[times >= start]
        value = np.sum([rank.best_value(times) for rank in self._ranks], axis=0)
        options = np.arange(len(times), dtype=np.int64)
        self.front = pareto(times, value, np.ones(len(times), dtype=np.bool_), options)

    def places(self, time: float) -> list[int]:
        """Return each head's place when no rank may take longer than ``time``."""
        return [place for rank in self._ranks for place in rank.places(time)]


class _Rank:
    """All undominated sums over a rank's heads, with the way back to each head's option."""

    def __init__(self, heads: Sequence[Front]) -> None:
        self.cost, self._value = np.zeros(1), np.zeros(1)
        self._trail: list[tuple[Ints, Ints]] = []
        for head in heads:
            cost = (self.cost[:, None] + head.cost[None]).reshape(-1)
            value = (self._value[:, None] + head.value[None]).reshape(-1)
            options = np.arange(len(cost), dtype=np.int64)
            front = pareto(cost, value, np.ones(len(cost), dtype=np.bool_), options)
            kept = _thin(front)
            rows = front.option[kept]
            self._trail.append((rows // len(head.cost), rows % len(head.cost)))
            self.cost, self._value = front.cost[kept], front.value[kept]

    def best_value(self, times: Floats) -> Floats:
        """Return the most value within each time (each at least the cheapest)."""
        return np.asarray(self._value[np.searchsorted(self.cost, times, side="right") - 1])

    def places(self, time: float) -> list[int]:
        row = int(np.searchsorted(self.cost, time, side="right")) - 1
        places = []
        for parents, options in reversed(self._trail):
            places.append(int(options[row]))
            row = int(parents[row])
        return places[::-1]


def _thin(front: Front) -> Ints:
    """Return the places to keep: the ends, and the best of each cost bin."""
    if len(front.cost) <= _MAX_FRONT:
        return np.arange(len(front.cost), dtype=np.int64)
    span = front.cost[-1] - front.cost[0]
    bins = ((front.cost - front.cost[0]) / span * (_MAX_FRONT - 1)).astype(np.int64)
    last = np.flatnonzero(np.diff(bins, append=_MAX_FRONT))
    return np.unique(np.concatenate([[0], last]))
