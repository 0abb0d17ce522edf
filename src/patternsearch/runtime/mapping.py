# SPDX-License-Identifier: Apache-2.0
"""Read a comparison of head fingerprints: same heads, moved heads, or another model.

Works on two sets of fingerprints only, so whoever runs a model elsewhere (an engine, another
rank) can record its fingerprints and have them judged here. The thresholds were measured; the
table and the command that makes it are in ``docs/validation.md``.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from patternsearch.errors import InputError
from patternsearch.model.matching import head_distances
from patternsearch.runtime.mapping_faults import (
    MOVED_RATIO,
    cycles,
    layers_text,
    modulo_map,
    moved_heads,
    permuted_layers,
    rank_offsets,
)
from patternsearch.runtime.mapping_report import (
    SAME_LAYER_DISTANCE,
    SAME_MEDIAN_DISTANCE,
    Finding,
    LayerMapping,
    MappingReport,
    Verdict,
)
from patternsearch.schema.config import Fingerprints, ModelIdentity

__all__ = [
    "HOLD_SIMILARITY",
    "SAME_LAYER_DISTANCE",
    "SAME_MEDIAN_DISTANCE",
    "Finding",
    "LayerMapping",
    "MappingReport",
    "Verdict",
    "compare_mapping",
]

Float = NDArray[np.float64]

HOLD_SIMILARITY = 0.85
"""Similarity of the whole model from which patterns plausibly hold."""

_LAYER_FLOOR = 0.5
"""Similarity of a layer below which its heads are not the recorded ones."""


def compare_mapping(
    expected: Fingerprints,
    found: Fingerprints,
    identity: ModelIdentity,
    *,
    weights_changed: bool | None = None,
) -> MappingReport:
    """Compare a model's fingerprints with the recorded ones.

    Args:
        expected: of the config.
        found: made with the same probe.
        identity: tells heads from kv groups.
        weights_changed: what digests say, None if unknown; changed weights are never called
            ``same weights``.

    Raises:
        InputError: other probes, or other numbers of layers or heads.
    """
    tables = _tables(expected, found)
    distances = {layer: head_distances(old, new) for layer, (old, new) in tables.items()}
    spread = {layer: _spread(old) for layer, (old, _) in tables.items()}
    findings: list[Finding] = list(permuted_layers(tables))
    settled = {layer for finding in findings for layer in finding.layers}
    offsets = list(rank_offsets({k: v for k, v in distances.items() if k not in settled}))
    findings += offsets
    layers = tuple(_layer(layer, distances[layer], spread[layer]) for layer in sorted(distances))
    if not offsets:
        findings += moved_heads([layer for layer in layers if layer.layer not in settled], identity)
    own = np.concatenate([np.diag(d) for d in distances.values()])
    median = float(np.median(own))
    similarity = max(0.0, 1.0 - median / max(float(np.median(list(spread.values()))), 1e-9))
    departed = [m for m in layers if m.median_distance > SAME_LAYER_DISTANCE]
    gqa = modulo_map(layers, distances, identity)
    findings += gqa
    lost = tuple(
        m.layer
        for m in layers
        if m.similarity < _LAYER_FLOOR and m.layer not in {x for f in findings for x in f.layers}
    )
    verdict = _verdict(median, bool(departed), similarity, weights_changed)
    if lost and verdict != "different model" and not findings:
        findings.append(
            Finding(
                kind="changed layers",
                layers=lost,
                text=f"{layers_text(lost)}: the heads match none of the recorded ones",
            )
        )
    return MappingReport(
        verdict=verdict,
        similarity=similarity,
        median_distance=median,
        first_departure=departed[0].layer if departed else None,
        layers=layers,
        findings=tuple(findings),
    )


def _verdict(median: float, departed: bool, similarity: float, changed: bool | None) -> Verdict:
    if changed is False:
        return "same weights"
    if changed is None and median <= SAME_MEDIAN_DISTANCE and not departed:
        return "same weights"
    if similarity >= HOLD_SIMILARITY:
        return "fine-tuned, patterns plausibly hold"
    return "different model"


def _tables(expected: Fingerprints, found: Fingerprints) -> dict[int, tuple[Float, Float]]:
    if (expected.seed, expected.num_tokens) != (found.seed, found.num_tokens):
        raise InputError(
            f"the fingerprints come from different probes (seed {expected.seed}, "
            f"{expected.num_tokens} tokens; seed {found.seed}, {found.num_tokens} tokens): "
            "fingerprint again with the recorded seed"
        )
    shapes = [tuple(map(len, prints.values)) for prints in (expected, found)]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"the fingerprints are of {len(shapes[0])} and {len(shapes[1])} layers, or differ in "
            "heads: only models of one shape can be compared"
        )
    return {
        layer: (np.asarray(old, dtype=np.float64), np.asarray(new, dtype=np.float64))
        for layer, (old, new) in enumerate(zip(expected.values, found.values, strict=True))
        if len(old)
    }


def _spread(table: Float) -> float:
    """Return the median distance of two heads of a layer."""
    distances = head_distances(table, table)
    pairs = distances[np.triu_indices(len(table), 1)]
    return float(np.median(pairs)) if pairs.size else 1.0


def _layer(layer: int, distances: Float, spread: float) -> LayerMapping:
    own = np.diag(distances)
    worst = int(own.argmax())
    median = float(np.median(own))
    return LayerMapping(
        layer=layer,
        similarity=max(0.0, 1.0 - median / max(spread, 1e-9)),
        median_distance=median,
        worst_distance=float(own[worst]),
        worst_head=worst,
        holders=_holders(distances),
    )


def _holders(distances: Float) -> tuple[int, ...]:
    """Return which recorded head each place holds, by assignment; doubtful cycles stay at home."""
    num_heads = len(distances)
    assigned = linear_sum_assignment(distances.T)[1]  # place → recorded head
    holders = np.arange(num_heads)
    noise = float(np.median(distances[assigned, np.arange(num_heads)]))
    for cycle in cycles(assigned):
        here = np.asarray(cycle)
        away, home = distances[assigned[here], here].sum(), distances[here, here].sum()
        # In a layer that changed, like heads drift into each other's places: ask for more.
        least = 0.0 if noise <= SAME_LAYER_DISTANCE else 2.0 * noise * len(here)
        if away < MOVED_RATIO * home and home - away > least:
            holders[here] = assigned[here]
    return tuple(int(head) for head in holders)
