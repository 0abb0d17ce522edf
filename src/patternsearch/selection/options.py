# SPDX-License-Identifier: Apache-2.0
"""What the user may ask of a selection, and which candidates those wishes allow."""

from dataclasses import dataclass
from typing import Literal

from patternsearch.errors import InputError
from patternsearch.patterns.candidates import KINDS, Candidate, Dense, Kind
from patternsearch.patterns.consumers import Consumer, is_expressible
from patternsearch.selection.statistics import Regions, Statistic

__all__ = ["Consumer", "SelectionOptions", "is_expressible"]


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """The rule's parameters.

    Attributes:
        target_mass: captured mass that every head must reach (objective ``time``); with ``mass``
            it is a floor below which no head may fall, or None for none.
        objective: ``time``: each head's cheapest candidate that reaches the target. ``mass``: the
            most mass within a budget.
        budget_ms: total attention time of all heads at the longest length, for ``mass``.
        budget_fraction: the same as a fraction of dense attention; exactly one of the two.
        statistic, regions: see :func:`patternsearch.selection.statistics.reached_mass`.
        kinds: pattern kinds that may be chosen; dense always may.
        consumer: only candidates that this consumer can run.
        max_density: densest candidate allowed at any length; dense is exempt.
        dense_layers: layers kept dense.
        tp_size: tensor-parallel ranks that share the heads of a layer.
        tie_tolerance: costs within this fraction of the cheapest count as equal.
    """

    target_mass: float | None = 0.95
    objective: Literal["time", "mass"] = "time"
    budget_ms: float | None = None
    budget_fraction: float | None = None
    statistic: Statistic = "worst"
    regions: Regions = "each"
    kinds: tuple[Kind, ...] = KINDS
    consumer: Consumer = "patternsearch"
    max_density: float | None = None
    dense_layers: tuple[int, ...] = ()
    tp_size: int = 1
    tie_tolerance: float = 0.02

    def __post_init__(self) -> None:
        for name in ("target_mass", "max_density"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 1.0:
                raise InputError(f"{name} is {value}: give a fraction between 0 and 1")
        if self.objective == "time":
            if self.target_mass is None:
                raise InputError("objective time needs a target mass: give --target-mass")
            if self.budget_ms is not None or self.budget_fraction is not None:
                raise InputError("a budget needs the objective mass: give --objective mass")
        elif (self.budget_ms is None) == (self.budget_fraction is None):
            raise InputError(
                "objective mass needs exactly one budget: give --budget-ms or --budget-fraction"
            )
        for name in ("budget_ms", "budget_fraction"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < float("inf"):
                raise InputError(f"{name} is {value}: give a positive number")
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise InputError(
                f"kinds is {', '.join(self.kinds) or 'empty'}: choose from {', '.join(KINDS)}"
            )
        if self.tp_size < 1:
            raise InputError(f"tp_size is {self.tp_size}: give at least 1")
        if not 0.0 <= self.tie_tolerance < 1.0:
            raise InputError(f"tie_tolerance is {self.tie_tolerance}: give a fraction below 1")

    def allows(self, candidate: Candidate) -> bool:
        """Return whether kind and consumer allow the candidate; dense is always allowed."""
        if isinstance(candidate, Dense):
            return True
        return candidate.kind in self.kinds and is_expressible(candidate, self.consumer)
