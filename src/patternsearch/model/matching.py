# SPDX-License-Identifier: Apache-2.0
"""Match two sets of head fingerprints: does every head find itself?

Distance of two heads: Euclidean over the square roots of the masses (Hellinger, so a small mass
counts as much as a large one's change) and the entropy. Partners come from an optimal one-to-one
assignment, not from nearest neighbours, so two heads never claim one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from patternsearch.errors import InputError
from patternsearch.schema.config import Fingerprints

__all__ = ["HeadMatch", "head_distances", "match_heads", "match_heads_within_layers"]

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HeadMatch:
    """Where one expected head is found.

    Attributes:
        layer: Expected layer.
        head: Expected global query head.
        found_layer: Layer of its partner in the assignment.
        found_head: Head of its partner.
        distance: To the partner.
        own_distance: To the head at its own place.
        runner_up_distance: To the nearest head that is not the partner; infinite if there is none.
    """

    layer: int
    head: int
    found_layer: int
    found_head: int
    distance: float
    own_distance: float
    runner_up_distance: float

    @property
    def is_at_home(self) -> bool:
        """Whether the head's partner is at its own place."""
        return (self.layer, self.head) == (self.found_layer, self.found_head)


def match_heads(expected: Fingerprints, found: Fingerprints) -> tuple[HeadMatch, ...]:
    """Match all heads of all full layers at once.

    Raises:
        InputError: If the two were made with different probes or for other shapes.
    """
    places = _common_places(expected, found)
    return _match(places, _table(expected, places), _table(found, places))


def match_heads_within_layers(expected: Fingerprints, found: Fingerprints) -> tuple[HeadMatch, ...]:
    """Match the heads of each layer among themselves.

    Raises:
        InputError: If the two were made with different probes or for other shapes.
    """
    places = _common_places(expected, found)
    matches: list[HeadMatch] = []
    for layer in sorted({layer for layer, _ in places}):
        here = [place for place in places if place[0] == layer]
        matches += _match(here, _table(expected, here), _table(found, here))
    return tuple(matches)


def head_distances(expected: Float, found: Float) -> Float:
    """Return the distances [A, B] of two tables of fingerprints [A, 12] and [B, 12]."""
    left, right = _embed(expected), _embed(found)
    squared = (left**2).sum(1)[:, None] + (right**2).sum(1)[None, :] - 2.0 * left @ right.T
    distances: Float = np.sqrt(np.maximum(squared, 0.0))
    return distances


def _embed(table: Float) -> Float:
    masses = np.sqrt(np.maximum(table[:, :-1], 0.0))
    return np.concatenate([masses, table[:, -1:]], axis=1)


def _match(
    places: list[tuple[int, int]],
    expected: Float,
    found: Float,
) -> tuple[HeadMatch, ...]:
    distances = head_distances(expected, found)
    nearest = distances.argmin(1)
    if len(set(nearest.tolist())) == len(nearest):
        partners = nearest  # every row at its minimum and no clash: already optimal
    else:
        partners = linear_sum_assignment(distances)[1]
    others = distances.copy()
    others[np.arange(len(places)), partners] = np.inf
    return tuple(
        HeadMatch(
            layer=layer,
            head=head,
            found_layer=places[partners[row]][0],
            found_head=places[partners[row]][1],
            distance=float(distances[row, partners[row]]),
            own_distance=float(distances[row, row]),
            runner_up_distance=float(others[row].min()),
        )
        for row, (layer, head) in enumerate(places)
    )


def _common_places(expected: Fingerprints, found: Fingerprints) -> list[tuple[int, int]]:
    if (expected.seed, expected.num_tokens) != (found.seed, found.num_tokens):
        raise InputError(
            f"the fingerprints come from different probes (seed {expected.seed}, "
            f"{expected.num_tokens} tokens; seed {found.seed}, {found.num_tokens} tokens); "
            "fingerprint again with the recorded seed"
        )
    shapes = [[len(layer) for layer in prints.values] for prints in (expected, found)]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"the fingerprints are of models of {len(shapes[0])} and {len(shapes[1])} layers, or "
            "their heads differ in number; only models of one shape can be matched"
        )
    return [(layer, head) for layer, heads in enumerate(shapes[0]) for head in range(heads)]


def _table(prints: Fingerprints, places: list[tuple[int, int]]) -> Float:
    return np.asarray([prints.values[layer][head] for layer, head in places], dtype=np.float64)
