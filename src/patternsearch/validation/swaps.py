# SPDX-License-Identifier: Apache-2.0
"""Find entries that stand at each other's heads, from the masses that they recorded.

A fingerprint belongs to a head, not to an entry, so exchanging two entries in a file leaves the
mapping untouched. The recorded masses give it away: on the very samples they were measured on,
each entry must show its own record at its own head.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from patternsearch.runtime.mapping_faults import cycles
from patternsearch.schema.config import HeadEntry, PatternConfig
from patternsearch.validation.samples import JudgingSamples

__all__ = ["MASS_TOLERANCE", "recorded_mass", "swapped_entries"]

MASS_TOLERANCE = 0.01
"""Recorded and measured mean mass of one head on the same samples agree within this: another
dtype or device may choose other entries of nearly equal score."""

_RELUCTANCE = 1e-5
"""A dense entry fits every head alike; this keeps it where it is unless another needs its place."""

_NEARER = 0.3
"""Entries count as swapped if they are this much nearer, in sum, at each other's heads."""


def swapped_entries(
    config: PatternConfig,
    judging: JudgingSamples,
    entry_on_head: Mapping[tuple[int, int], NDArray[np.float64]],
) -> tuple[str, ...]:
    """Name the entries whose records fit each other's heads.

    Args:
        config: the config.
        judging: tells at which lengths the recorded samples are all there.
        entry_on_head: by (layer, length): mean mass [entry, head] of each entry's pattern on each
            head.
    """
    layers = sorted(
        {layer for layer, length in entry_on_head if length in judging.complete_lengths}
    )
    found: list[str] = []
    for layer in layers:
        entries = config.heads[layer]
        assert entries is not None
        costs = []
        for at, length in entry_on_head:
            if at != layer or length not in judging.complete_lengths:
                continue
            records = np.asarray(
                [recorded_mass(entry, length, judging.split) for entry in entries],
                dtype=np.float64,
            )
            costs.append(np.abs(entry_on_head[at, length] - records[:, None]))
        cost = np.mean(costs, axis=0)
        if not np.isfinite(cost).all():
            continue
        found += _swaps(layer, cost)
    return tuple(found)


def recorded_mass(entry: HeadEntry, length: int, split: str) -> float | None:
    """Return the recorded mean mass of an entry at a length over the samples of a split."""
    for at in entry.lengths:
        if at.length == length:
            return at.heldout_mean if split == "heldout" else at.mass_mean
    return None


def _swaps(layer: int, cost: NDArray[np.float64]) -> list[str]:
    """Assign entries to heads by cost [entry, head]; what has no reason to move stays at home."""
    home = np.diag(cost)
    if home.max() <= MASS_TOLERANCE:
        return []
    reluctant = cost + _RELUCTANCE * (1 - np.eye(len(cost)))
    place = linear_sum_assignment(reluctant)[1]
    texts = []
    for cycle in cycles(place):
        here = np.asarray(cycle)
        away = cost[here, place[here]].sum()
        if home[here].max() <= MASS_TOLERANCE or away > _NEARER * home[here].sum():
            continue
        if len(cycle) == 2:
            a, b = sorted(cycle)
            texts.append(f"layer {layer}: the entries of heads {a} and {b} are swapped")
        else:
            texts += [
                f"layer {layer}: the entry of head {entry} fits head {place[entry]}"
                for entry in cycle
            ]
    return texts
