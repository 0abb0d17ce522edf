# SPDX-License-Identifier: Apache-2.0
"""Name the faults of a mapping: which heads, ranks, kv groups or layers changed places."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from patternsearch.model.matching import head_distances
from patternsearch.patterns.tensor_parallel import query_head_range
from patternsearch.runtime.mapping_report import SAME_LAYER_DISTANCE, Finding, LayerMapping
from patternsearch.schema.config import ModelIdentity

__all__ = [
    "MOVED_RATIO",
    "cycles",
    "layers_text",
    "modulo_map",
    "moved_heads",
    "permuted_layers",
    "rank_offsets",
]

Float = NDArray[np.float64]

MOVED_RATIO = 0.7
"""Heads count as moved if their partners are this much nearer, in sum, than their own places."""

_TP_SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64)


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


def moved_heads(layers: Sequence[LayerMapping], identity: ModelIdentity) -> Iterator[Finding]:
    """Name the moved heads; the same fault in several layers is one finding."""
    by_holders: dict[tuple[int, ...], list[int]] = {}
    for mapping in layers:
        if mapping.holders != tuple(range(len(mapping.holders))):
            by_holders.setdefault(mapping.holders, []).append(mapping.layer)
    for holders, where in by_holders.items():
        yield _named(holders, tuple(where), identity)


def _named(holders: tuple[int, ...], layers: tuple[int, ...], identity: ModelIdentity) -> Finding:
    where = layers_text(layers)
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


def rank_offsets(distances: dict[int, Float]) -> Iterator[Finding]:
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


def permuted_layers(tables: dict[int, tuple[Float, Float]]) -> Iterator[Finding]:
    """Name layers whose heads are found in one another's places."""
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


def modulo_map(
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


def layers_text(layers: Sequence[int]) -> str:
    """Return ``layer 3`` or a short list of layers."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    shown = ", ".join(map(str, layers[:6]))
    return f"layers {shown}" + (f", … ({len(layers)} layers)" if len(layers) > 6 else "")
