# SPDX-License-Identifier: Apache-2.0
"""Multiple-choice knapsack: one option a group, the most value within a budget, exactly.

A Lagrangian price gives an upper bound and a feasible solution that differ by less than one
group's step. Options whose reduced value says that no solution using them can beat the feasible
one are struck out; what is left of the groups is solved by dynamic programming over undominated
(cost, value) states, cut by the same bound. See Pisinger, "A minimal algorithm for the
multiple-choice knapsack problem", EJOR 83 (1995).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["Front", "Solution", "hull", "pareto", "solve"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_EPSILON = 1e-9
"""Gains below this are no gains; masses have 6 decimals."""

_MAX_STATES = 200_000


@dataclass(frozen=True, slots=True)
class Front:
    """Undominated options of one group, cost and value strictly ascending.

    Attributes:
        cost, value: float64 [k].
        option: int64 [k], what the caller calls each of them.
    """

    cost: Floats
    value: Floats
    option: Ints


@dataclass(frozen=True, slots=True)
class Solution:
    """One option a group.

    Attributes:
        place: int64 [G], place of the choice in the group's front.
        cost, value: sums over groups.
        bound: no solution has more value than this.
        price: value that one more unit of cost buys at the margin (the Lagrangian multiplier);
            0 when the budget does not bind.
        is_exact: False only if the state limit was met; then ``bound - value`` is the gap.
    """

    place: Ints
    cost: float
    value: float
    bound: float
    price: float
    is_exact: bool


def pareto(cost: Floats, value: Floats, allowed: NDArray[np.bool_], preference: Ints) -> Front:
    """Return the undominated options of one group.

    Args:
        cost: [C].
        value: [C].
        allowed: [C].
        preference: [C]; of options equal in both, the lowest stays, then the first.
    """
    options = np.flatnonzero(allowed)
    order = options[np.lexsort((options, preference[options], -value[options], cost[options]))]
    best_before = np.concatenate([[-np.inf], np.maximum.accumulate(value[order])[:-1]])
    kept = order[value[order] > best_before]
    return Front(cost[kept], value[kept], kept)


def hull(front: Front) -> Ints:
    """Return the places of a front's upper convex hull, from the cheapest option on."""
    corners: list[int] = []
    for place in range(len(front.cost)):
        while len(corners) >= 2:
            a, b = corners[-2], corners[-1]
            rise = (front.value[b] - front.value[a]) * (front.cost[place] - front.cost[b])
            if rise > (front.value[place] - front.value[b]) * (front.cost[b] - front.cost[a]):
                break
            corners.pop()
        corners.append(place)
    return np.array(corners, dtype=np.int64)


def solve(fronts: Sequence[Front], budget: float, max_states: int = _MAX_STATES) -> Solution:
    """Choose one option a group so that the summed value is greatest and the cost ≤ budget.

    Args:
        fronts: one a group, none empty.
        budget: in the unit of cost.
        max_states: limit of the dynamic programme; beyond it the solution may be inexact.

    Raises:
        ValueError: even the cheapest options exceed the budget.
    """
    least = sum(float(front.cost[0]) for front in fronts)
    budget = budget * (1 + 1e-12)
    if least > budget:
        raise ValueError(f"the cheapest options cost {least}, the budget is {budget}")
    place, price = _greedy(fronts, budget)
    if price == 0.0:
        return _solution(fronts, place, bound=None, price=0.0, is_exact=True)
    best = _solution(fronts, place, bound=None, price=price, is_exact=True)
    core = _Core(fronts, price, budget)
    place, is_exact = core.improve(best.place, best.value, max_states)
    return _solution(
        fronts, place, bound=None if is_exact else core.bound, price=price, is_exact=is_exact
    )


def _solution(
    fronts: Sequence[Front], place: Ints, *, bound: float | None, price: float, is_exact: bool
) -> Solution:
    cost = float(sum(front.cost[p] for front, p in zip(fronts, place, strict=True)))
    value = float(sum(front.value[p] for front, p in zip(fronts, place, strict=True)))
    return Solution(place, cost, value, value if bound is None else bound, price, is_exact)


def _greedy(fronts: Sequence[Front], budget: float) -> tuple[Ints, float]:
    """Climb the hulls by value per cost; return a feasible solution and the break step's price."""
    place = np.zeros(len(fronts), dtype=np.int64)
    spent = sum(float(front.cost[0]) for front in fronts)
    steps: list[tuple[float, int, int, float]] = []
    for group, front in enumerate(fronts):
        corners = hull(front)
        for a, b in pairwise(corners.tolist()):
            extra = float(front.cost[b] - front.cost[a])
            steps.append((float(front.value[b] - front.value[a]) / extra, group, b, extra))
    steps.sort(key=lambda step: (-step[0], step[1], step[2]))
    price, stopped = 0.0, set()
    for ratio, group, corner, extra in steps:
        if group in stopped:
            continue
        if spent + extra > budget:
            price = price or ratio
            stopped.add(group)
            continue
        place[group], spent = corner, spent + extra
    return place, price


class _Core:
    """What is left to decide once the price has struck out the hopeless options."""

    def __init__(self, fronts: Sequence[Front], price: float, budget: float) -> None:
        self._fronts, self._price, self._budget = fronts, price, budget
        reduced = [front.value - price * front.cost for front in fronts]
        self._loss = [values.max() - values for values in reduced]
        self.bound = float(sum(values.max() for values in reduced)) + price * budget

    def improve(self, place: Ints, value: float, max_states: int) -> tuple[Ints, bool]:
        """Return a best solution and whether it is proved best; ``place`` is feasible."""
        gap = self.bound - value
        open_places = [np.flatnonzero(loss < gap - _EPSILON) for loss in self._loss]
        base = np.array([int(loss.argmin()) for loss in self._loss], dtype=np.int64)
        groups = [group for group, places in enumerate(open_places) if len(places) > 1]
        # The closest calls first: they move the solution most for the least loss.
        groups.sort(key=lambda group: float(np.partition(self._loss[group], 1)[1]))
        if any(len(places) == 0 for places in open_places):
            return place, True
        for group, places in enumerate(open_places):
            if len(places) == 1:
                base[group] = places[0]
        return self._search(place, value, base, groups, open_places, max_states)

    def _search(
        self,
        place: Ints,
        value: float,
        base: Ints,
        groups: list[int],
        open_places: list[Ints],
        max_states: int,
    ) -> tuple[Ints, bool]:
        """Decide the open groups one by one; undecided ones stand at their ``base`` option."""
        fronts, budget = self._fronts, self._budget
        base_cost = [float(front.cost[p]) for front, p in zip(fronts, base, strict=True)]
        base_value = [float(front.value[p]) for front, p in zip(fronts, base, strict=True)]
        base_loss = [float(loss[p]) for loss, p in zip(self._loss, base, strict=True)]
        cost, gain = np.array([sum(base_cost)]), np.array([sum(base_value)])
        loss = np.array([sum(base_loss)])
        down = [float(fronts[g].cost[open_places[g]].min()) - base_cost[g] for g in groups]
        up = [float(fronts[g].cost[open_places[g]].max()) - base_cost[g] for g in groups]
        trail: list[tuple[Ints, Ints]] = []
        is_exact = True
        if cost[0] <= budget and gain[0] > value + _EPSILON:
            place, value = base, float(gain[0])
        for step, group in enumerate(groups):
            places, front = open_places[group], fronts[group]
            cost = (cost[:, None] + (front.cost[places] - base_cost[group])).reshape(-1)
            gain = (gain[:, None] + (front.value[places] - base_value[group])).reshape(-1)
            loss = (loss[:, None] + (self._loss[group][places] - base_loss[group])).reshape(-1)
            feasible = np.flatnonzero(cost <= budget)
            if len(feasible):
                top = int(feasible[np.argmax(gain[feasible])])
                if gain[top] > value + _EPSILON:
                    place, value = base.copy(), float(gain[top])
                    place[group] = places[top % len(places)]
                    _trace(place, groups, trail, top // len(places))
            unspent = np.maximum(budget - cost - sum(up[step + 1 :]), 0.0)
            can_win = self.bound - loss - self._price * unspent > value + _EPSILON
            can_fit = cost + sum(down[step + 1 :]) <= budget
            rows = _undominated(cost, gain, np.flatnonzero(can_win & can_fit))
            if len(rows) > max_states:
                is_exact = False
                rows = rows[np.argsort(loss[rows], kind="stable")[:max_states]]
            if not len(rows):
                break
            trail.append((rows // len(places), places[rows % len(places)]))
            cost, gain, loss = cost[rows], gain[rows], loss[rows]
        return place, is_exact


def _trace(place: Ints, groups: list[int], trail: list[tuple[Ints, Ints]], row: int) -> None:
    """Write the decisions that led to a state into ``place``."""
    for step in reversed(range(len(trail))):
        group, (parents, places) = groups[step], trail[step]
        place[group] = places[row]
        row = int(parents[row])


def _undominated(cost: Floats, value: Floats, rows: Ints) -> Ints:
    order = rows[np.lexsort((-value[rows], cost[rows]))]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(value[order])[:-1]])
    kept: Ints = order[value[order] > before]
    return kept
