# SPDX-License-Identifier: Apache-2.0
"""From arrays to the config's parts: head entries and the record of the selection.

Numbers are rounded here, once, so that a config dumps the same on every machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from patternsearch.patterns.candidates import Candidate
from patternsearch.schema.config import BreakEven, HeadAtLength, HeadEntry, RunnerUp, Selection
from patternsearch.selection.arrays import ScoreArrays
from patternsearch.selection.cost import CostModel
from patternsearch.selection.options import SelectionOptions
from patternsearch.selection.statistics import (
    MASS_DECIMALS,
    LengthStatistics,
    length_statistics,
)

__all__ = ["LengthTable", "head_entries", "length_tables", "min_length", "record"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MS_DECIMALS = 6


@dataclass(frozen=True, slots=True)
class LengthTable:
    """One length's statistics and each candidate's cost there, [L, H, C]; inf if not priced.

    Costs are those of ``num_tokens``, the samples' mean.
    """

    statistics: LengthStatistics
    num_tokens: int
    cost: Floats


def length_tables(
    scores: ScoreArrays, cost: CostModel, priced: NDArray[np.bool_]
) -> tuple[LengthTable, ...]:
    """Compute every length's table.

    Args:
        scores: the scores.
        cost: cost model.
        priced: bool [C], the candidates that any head may choose; a timing table need not cover
            the others.

    Raises:
        TimingError: the cost model does not cover a length or a priced candidate.
    """
    places = np.flatnonzero(priced)
    candidates = [scores.candidates[place] for place in places]
    tables = []
    for length in scores.lengths:
        statistics = length_statistics(length)
        num_tokens = round(float(length.num_tokens.mean()))
        costs = np.full(statistics.tiles.shape, np.inf)
        costs[..., places] = cost.head_cost(
            candidates,
            num_tokens,
            statistics.tiles[..., places],
            statistics.columns[..., places],
        )
        tables.append(LengthTable(statistics, num_tokens, costs))
    return tuple(tables)


def head_entries(
    scores: ScoreArrays,
    tables: Sequence[LengthTable],
    choice: Ints,
    runner_up: Ints,
    measured: bool,
) -> list[tuple[HeadEntry, ...]]:
    """Build the entries of every scored layer.

    Args:
        scores: the scores.
        tables: one a length, ascending.
        choice: [L, H], places on the candidates' axis.
        runner_up: [L, H]; −1 for none.
        measured: costs are milliseconds and may be recorded.
    """
    at_lengths = [_at_length(table, choice, measured) for table in tables]
    last = tables[-1]
    seconds = _runners_up(scores.candidates, last, runner_up, measured)
    num_heads = choice.shape[1]
    entries = []
    for layer in range(choice.shape[0]):
        first = layer * num_heads
        entries.append(
            tuple(
                HeadEntry(
                    pattern=scores.candidates[choice[layer, head]],
                    lengths=tuple(rows[first + head] for rows in at_lengths),
                    runner_up=seconds[first + head],
                )
                for head in range(num_heads)
            )
        )
    return entries


def _pick(values: Floats | None, choice: Ints, decimals: int) -> list[float | None]:
    """Return the chosen cells, flattened and rounded; None where unknown."""
    if values is None:
        return [None] * choice.size
    chosen = np.take_along_axis(values, np.maximum(choice, 0)[..., None], axis=-1).reshape(-1)
    return [None if math.isnan(value) else value for value in np.round(chosen, decimals).tolist()]


def _at_length(table: LengthTable, choice: Ints, measured: bool) -> list[HeadAtLength]:
    stats = table.statistics
    columns = {
        "mass_mean": stats.mean,
        "mass_worst": stats.worst,
        "mass_worst_region": stats.worst_region,
        "mass_std": stats.std,
        "heldout_mean": stats.heldout_mean,
        "heldout_worst_region": stats.heldout_worst_region,
        "oracle_mean": stats.oracle_mean,
        "density": stats.density,
        "tiles": stats.tiles,
        "columns": stats.columns,
    }
    chosen = {name: _pick(values, choice, MASS_DECIMALS) for name, values in columns.items()}
    chosen["predicted_ms"] = _pick(table.cost if measured else None, choice, _MS_DECIMALS)
    names = list(chosen)
    return [
        HeadAtLength.model_validate({"length": stats.length, **dict(zip(names, row, strict=True))})
        for row in zip(*chosen.values(), strict=True)
    ]


def _runners_up(
    candidates: Sequence[Candidate], table: LengthTable, runner_up: Ints, measured: bool
) -> list[RunnerUp | None]:
    mass = _pick(table.statistics.worst_region, runner_up, MASS_DECIMALS)
    density = _pick(table.statistics.density, runner_up, MASS_DECIMALS)
    times = _pick(table.cost if measured else None, runner_up, _MS_DECIMALS)
    return [
        None
        if place < 0
        else RunnerUp.model_validate(
            {
                "pattern": candidates[place],
                "mass_worst_region": mass[i],
                "density": density[i],
                "predicted_ms": times[i],
            }
        )
        for i, place in enumerate(runner_up.reshape(-1).tolist())
    ]


def record(
    options: SelectionOptions,
    cost: CostModel,
    budget: float | None,
    break_even: tuple[BreakEven, ...],
) -> Selection:
    """Return the config's record of how the selection was made.

    Args:
        options: the rule's parameters.
        cost: the cost model used.
        budget: the resolved budget in the cost model's unit.
        break_even: predicted times by length; empty when not measured.
    """
    return Selection(
        objective="work"
        if options.objective == "time" and not cost.measured
        else options.objective,
        target_mass=options.target_mass,
        budget_ms=round(budget, _MS_DECIMALS) if budget is not None and cost.measured else None,
        budget_fraction=options.budget_fraction,
        statistic=options.statistic,
        regions=options.regions,
        kinds=options.kinds,
        max_density=options.max_density,
        dense_layers=tuple(sorted(options.dense_layers)),
        tie_tolerance=options.tie_tolerance,
        tp_size=options.tp_size,
        measured=cost.measured,
        timings_sha256=cost.sha256,
        timings_device=cost.device,
        min_length=min_length(break_even) if break_even else None,
        break_even=break_even,
    )


def min_length(break_even: Sequence[BreakEven]) -> int:
    """Return the length from which on the selection is no slower than dense.

    What counts is the longer of the GPU's time and the host's launches, as if nothing hid them: in
    a large model they are hidden, but then attention of such a length is a small part of a layer.
    Never below the shortest calibrated length, where nothing was scored. Between two calibrated
    lengths the ratio of times is interpolated over the logarithm of the length, and rounded up.
    If dense wins at the longest calibrated length, the result is one token more; if because of
    launches, which stay as they are, it is where dense attention, as n², takes as long.
    """
    ordered = sorted(break_even, key=lambda point: point.length)
    slower = [point for point in ordered if _chosen_ms(point) > point.dense_ms]
    if not slower:
        return ordered[0].length
    last_slower = ordered.index(slower[-1])
    if last_slower == len(ordered) - 1:
        last = ordered[-1]
        launches = (last.launch_ms or 0.0) / last.dense_ms if last.dense_ms > 0 else 0.0
        return max(last.length + 1, math.ceil(last.length * math.sqrt(launches)))
    low, high = ordered[last_slower], ordered[last_slower + 1]
    a = math.log(_chosen_ms(low) / low.dense_ms)
    b = math.log(_chosen_ms(high) / high.dense_ms) if _chosen_ms(high) > 0 else -math.inf
    share = 0.0 if math.isinf(b) else a / (a - b)
    crossing = math.exp(math.log(low.length) + share * math.log(high.length / low.length))
    return min(high.length, math.ceil(crossing))


def _chosen_ms(point: BreakEven) -> float:
    return max(point.sparse_ms, point.launch_ms or 0.0)
