# SPDX-License-Identifier: Apache-2.0
"""What measured times say of a whole selection: where it breaks even, and which backends run it."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from patternsearch.patterns.candidates import Candidate
from patternsearch.schema.config import BreakEven
from patternsearch.selection.arrays import ScoreArrays
from patternsearch.selection.balance import rank_costs
from patternsearch.selection.cost import CostModel
from patternsearch.selection.entries import LengthTable

__all__ = ["at_choice", "break_even", "heads_by_backend"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MS_DECIMALS = 6


def at_choice(values: Floats, choice: Ints) -> Floats:
    """Return the chosen cells [L, H] of values [L, H, C]."""
    return np.take_along_axis(values, choice[..., None], axis=-1)[..., 0]


def break_even(
    scores: ScoreArrays,
    tables: Sequence[LengthTable],
    choice: Ints,
    cost: CostModel,
    tp_size: int,
) -> tuple[BreakEven, ...]:
    """Return dense and chosen times of every length, on the slowest rank; empty if not measured.

    Args:
        scores: the scores.
        tables: one a length, ascending.
        choice: [L, H], places on the candidates' axis.
        cost: the cost model of the tables.
        tp_size: tensor-parallel ranks.
    """
    if not cost.measured:
        return ()
    dense = scores.dense_index
    return tuple(
        BreakEven(
            length=table.statistics.length,
            dense_ms=round(rank_costs(table.cost[..., dense], tp_size).slowest, _MS_DECIMALS),
            sparse_ms=round(
                rank_costs(at_choice(table.cost, choice), tp_size).slowest, _MS_DECIMALS
            ),
            launch_ms=round(_launch_ms(scores, table, choice, cost), _MS_DECIMALS),
        )
        for table in tables
    )


def heads_by_backend(
    scores: ScoreArrays, tables: Sequence[LengthTable], choice: Ints, cost: CostModel
) -> dict[str, int]:
    """Count heads by the backend that the time model names at the longest length, the most first.

    Empty if not measured; the arguments are as for :func:`break_even`.
    """
    counts = Counter(
        name
        for layer in _layers(scores, tables[-1], choice)
        for name in cost.layer_backends(*layer)
    )
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _launch_ms(scores: ScoreArrays, table: LengthTable, choice: Ints, cost: CostModel) -> float:
    """Return the host's launches in all layers but those of dense heads only, which need none."""
    return sum(
        cost.launch_cost(*layer)
        for layer, chosen in zip(_layers(scores, table, choice), choice.tolist(), strict=True)
        if set(chosen) != {scores.dense_index}
    )


def _layers(
    scores: ScoreArrays, table: LengthTable, choice: Ints
) -> Iterator[tuple[list[Candidate], int, Floats, Floats]]:
    """Yield each layer's chosen candidates, n, and the tiles and columns that they read."""
    tiles = at_choice(table.statistics.tiles, choice)
    columns = at_choice(table.statistics.columns, choice)
    for layer, chosen in enumerate(choice.tolist()):
        candidates = [scores.candidates[place] for place in chosen]
        yield candidates, table.num_tokens, tiles[layer], columns[layer]
