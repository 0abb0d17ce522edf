# SPDX-License-Identifier: Apache-2.0
"""Read a comparison of head fingerprints: same heads, moved heads, or another model.

Works on two sets of fingerprints only, so whoever runs a model elsewhere (an engine, another
rank) can record its fingerprints and have them judged here. The thresholds were measured; the
table and the command that makes it are in ``docs/validation.md``.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from scipy.optimize import linear_sum_assignment

from patternsearch.errors import InputError
from patternsearch.model.matching import head_distances
from patternsearch.patterns.tensor_parallel import query_head_range
from patternsearch.schema.config import Fingerprints, ModelIdentity

__all__ = [
    "HOLD_SIMILARITY",
    "MOVED_RATIO",
    "SAME_LAYER_DISTANCE",
    "SAME_MEDIAN_DISTANCE",
    "Finding",
    "LayerMapping",
    "MappingReport",
    "Verdict",
    "compare_mapping",
    "cycles",
]

Float = NDArray[np.float64]
Verdict = Literal["same weights", "fine-tuned, patterns plausibly hold", "different model"]

MOVED_RATIO = 0.7
"""Heads count as moved if their partners are this much nearer, in sum, than their own places."""

SAME_MEDIAN_DISTANCE = 0.007
"""Median distance of a head to itself up to which only rounding differs (bfloat16: 0.004)."""

SAME_LAYER_DISTANCE = 0.06
"""The same for the median of any one layer (bfloat16: 0.040)."""

HOLD_SIMILARITY = 0.85
"""Similarity of the whole model from which patterns plausibly hold."""

_LAYER_FLOOR = 0.5
"""Similarity of a layer below which its heads are not the recorded ones."""

_TP_SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Finding(_Part):
    """One fault of the mapping, named."""

    kind: Literal[
        "swapped heads", "permuted heads", "shifted heads", "tensor-parallel offset",
        "kv groups permuted", "gqa map", "layers permuted", "changed layers",
    ]  # fmt: skip
    layers: tuple[int, ...]
    text: str


class LayerMapping(_Part):
    """How one full-attention layer's heads compare.

    ``similarity`` is 1 − (median distance of a head to itself) / (median distance of two heads of
    this layer), at least 0. ``holders[h]`` is the recorded head found at place h, itself unless it
    moved.
    """

    layer: int
    similarity: float
    median_distance: float
    worst_distance: float
    worst_head: int
    holders: tuple[int, ...]


class MappingReport(_Part):
    """The whole comparison."""

    verdict: Verdict
    similarity: float
    median_distance: float
    first_departure: int | None
    layers: tuple[LayerMapping, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether every head is where the config says, in a model like the recorded one."""
        return not self.findings and self.verdict != "different model"

    @property
    def summary(self) -> str:
        """Say the result in one sentence."""
        parts = [finding.text for finding in self.findings[:4]]
        if len(self.findings) > 4:
            parts.append(f"and {len(self.findings) - 4} more faults")
        return "; ".join(parts) or f"{self.verdict}, similarity {self.similarity:.2f}"


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
    findings: list[Finding] = list(_permuted_layers(tables))
    settled = {layer for finding in findings for layer in finding.layers}
    offsets = list(_rank_offsets({k: v for k, v in distances.items() if k not in settled}))
    findings += offsets
    layers = tuple(_layer(layer, distances[layer], spread[layer]) for layer in sorted(distances))
    if not offsets:
        findings += _moved_heads(
            [layer for layer in layers if layer.layer not in settled], identity
        )
    own = np.concatenate([np.diag(d) for d in distances.values()])
    median = float(np.median(own))
    similarity = max(0.0, 1.0 - median / max(float(np.median(list(spread.values()))), 1e-9))
    departed = [m for m in layers if m.median_distance > SAME_LAYER_DISTANCE]
    gqa = _modulo_map(layers, distances, identity)
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
                text=f"{_layers_text(lost)}: the heads match none of the recorded ones",
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


def cycles(permutation: NDArray[np.int64]) -> Iterator[list[int]]:
    """Return the cycles of a permutation that move something."""
    seen: set[int] = set()
    for start in range(len(permutation)):
        cycle = []
        place = start
        while place not in seen:
            seen.add(place)
            cycle.append(place)
            place = int(permutation[place])
        if len(cycle) > 1:
            yield cycle


# --- naming --------------------------------------------------------------------------------


def _moved_heads(layers: Sequence[LayerMapping], identity: ModelIdentity) -> Iterator[Finding]:
    """Name the moved heads; the same fault in several layers is one finding."""
    by_holders: dict[tuple[int, ...], list[int]] = {}
    for mapping in layers:
        if mapping.holders != tuple(range(len(mapping.holders))):
            by_holders.setdefault(mapping.holders, []).append(mapping.layer)
    for holders, where in by_holders.items():
        yield _named(holders, tuple(where), identity)


def _named(holders: tuple[int, ...], layers: tuple[int, ...], identity: ModelIdentity) -> Finding:
    where = _layers_text(layers)
    num_heads = len(holders)
    shift = (holders[0]) % num_heads
    if holders == tuple((place + shift) % num_heads for place in range(num_heads)) and shift:
        text = f"{where}: every head is shifted: place 0 holds head {shift}"
        return Finding(kind="shifted heads", layers=layers, text=text)
    group = num_heads // identity.num_kv_heads if identity.num_kv_heads <= num_heads else 0
    if group > 1 and _moves_groups(holders, group):
        moved = [
            f"group {place // group} holds group {holders[place] // group}"
            for place in range(0, num_heads, group)
            if holders[place] != place
        ]
        text = f"{where}: kv groups are permuted: {', '.join(moved)}"
        return Finding(kind="kv groups permuted", layers=layers, text=text)
    pairs = [(a, b) for a, b in enumerate(holders) if b > a and holders[b] == a]
    moved_places = [place for place, head in enumerate(holders) if place != head]
    if 2 * len(pairs) == len(moved_places):
        text = ", ".join(f"heads {a} and {b} are swapped" for a, b in pairs)
        return Finding(kind="swapped heads", layers=layers, text=f"{where}: {text}")
    text = ", ".join(f"place {place} holds head {holders[place]}" for place in moved_places)
    return Finding(kind="permuted heads", layers=layers, text=f"{where}: {text}")


def _moves_groups(holders: tuple[int, ...], group: int) -> bool:
    starts = range(0, len(holders), group)
    return all(
        holders[start] % group == 0
        and holders[start : start + group] == tuple(range(holders[start], holders[start] + group))
        for start in starts
    )


def _rank_offsets(distances: dict[int, Float]) -> Iterator[Finding]:
    """Find ranks that hold another rank's heads while that rank holds them too."""
    if not distances:
        return
    layers = tuple(sorted(distances))
    num_heads = len(next(iter(distances.values())))
    total: Float = np.sum(list(distances.values()), axis=0)
    explained: set[int] = set()
    for size in _TP_SIZES:
        if size > num_heads or num_heads % size:
            continue
        for rank in range(size):
            own = slice(*query_head_range(num_heads, size, rank))
            if explained & set(range(own.start, own.stop)):
                continue
            at_home = float(np.trace(total[own, own]))
            other = min((r for r in range(size) if r != rank),
                        key=lambda r: _block_cost(total, size, rank, r))  # fmt: skip
            cost = _block_cost(total, size, rank, other)
            # Where the other rank moved too, heads are permuted, and named as such elsewhere.
            theirs = slice(*query_head_range(num_heads, size, other))
            is_copy = float(np.trace(total[theirs, theirs])) < MOVED_RATIO * at_home
            if (
                cost < MOVED_RATIO * at_home
                and is_copy
                and _in_every_layer(distances, size, rank, other)
            ):
                explained |= set(range(own.start, own.stop))
                yield Finding(
                    kind="tensor-parallel offset",
                    layers=layers,
                    text=f"rank {rank} of {size} reads heads {theirs.start}–{theirs.stop - 1} "
                    f"instead of {own.start}–{own.stop - 1}",
                )


def _block_cost(table: Float, size: int, rank: int, other: int) -> float:
    """Return the distance of a rank's heads to another's, whichever side holds the copy."""
    own = slice(*query_head_range(len(table), size, rank))
    theirs = slice(*query_head_range(len(table), size, other))
    return float(min(np.trace(table[theirs, own]), np.trace(table[own, theirs])))


def _in_every_layer(distances: dict[int, Float], size: int, rank: int, other: int) -> bool:
    agree = 0
    for table in distances.values():
        own = slice(*query_head_range(len(table), size, rank))
        agree += _block_cost(table, size, rank, other) < float(np.trace(table[own, own]))
    return agree >= 0.9 * len(distances)


def _permuted_layers(tables: dict[int, tuple[Float, Float]]) -> Iterator[Finding]:
    layers = sorted(tables)
    if len({tables[layer][0].shape for layer in layers}) > 1 or len(layers) < 2:
        return
    old = _embedded([tables[layer][0] for layer in layers])
    new = _embedded([tables[layer][1] for layer in layers])
    # [old layer, new layer]: mean distance of the heads at equal places
    cost = np.stack([np.sqrt(((old - layer) ** 2).sum(-1)).mean(-1) for layer in new], axis=1)
    assigned = linear_sum_assignment(cost.T)[1]
    for cycle in cycles(assigned):
        here = np.asarray(cycle)
        # Heads permuted within a layer are no reason to look for the layer elsewhere.
        home = sum(_assigned_distance(*tables[layers[place]]) for place in cycle)
        if cost[assigned[here], here].sum() < MOVED_RATIO * home:
            said = ", ".join(
                f"layer {layers[place]} holds layer {layers[assigned[place]]}" for place in cycle
            )
            yield Finding(
                kind="layers permuted",
                layers=tuple(sorted(layers[place] for place in cycle)),
                text=f"layers are permuted: {said}",
            )


def _assigned_distance(old: Float, new: Float) -> float:
    distances = head_distances(old, new)
    return float(distances[linear_sum_assignment(distances)].mean())


def _embedded(tables: list[Float]) -> Float:
    stacked = np.stack(tables)
    masses = np.sqrt(np.maximum(stacked[..., :-1], 0.0))
    return np.concatenate([masses, stacked[..., -1:]], axis=-1)


def _modulo_map(
    layers: Sequence[LayerMapping], distances: dict[int, Float], identity: ModelIdentity
) -> Iterator[Finding]:
    """Recognise ``h % Hkv`` in place of ``h // g``: only heads on which both agree are themselves.

    Judged on the first layer that departs: what follows it sees other hidden states.
    """
    num_heads, num_kv = identity.num_query_heads, identity.num_kv_heads
    group = num_heads // num_kv
    agree = [head for head in range(num_heads) if head % num_kv == head // group]
    departed = [m for m in layers if m.worst_distance > SAME_LAYER_DISTANCE]
    if not departed or len(agree) in (0, num_heads) or departed[0].layer != layers[0].layer:
        return
    own = np.diag(distances[departed[0].layer])
    others = [head for head in range(num_heads) if head not in agree]
    if own[agree].max() < 0.25 * np.median(own[others]) and own[agree].max() < own[others].min():
        yield Finding(
            kind="gqa map",
            layers=(departed[0].layer,),
            text=f"from layer {departed[0].layer} on: heads read kv head h % {num_kv} instead of "
            f"h // {group}: only {agree} are themselves",
        )


def _layers_text(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    shown = ", ".join(map(str, layers[:6]))
    return f"layers {shown}" + (f", … ({len(layers)} layers)" if len(layers) > 6 else "")
