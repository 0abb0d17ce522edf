# SPDX-License-Identifier: Apache-2.0
"""What one screen says about a config: totals, a map of its heads, the worst of them, ranks."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from patternsearch.errors import InputError
from patternsearch.exchange.ranks import rank_layout
from patternsearch.exchange.words import letter
from patternsearch.schema.config import HeadEntry, PatternConfig, RankSlice

__all__ = [
    "RankView",
    "Summary",
    "WorstHead",
    "config_document",
    "layer_heads",
    "rank_view",
    "summarise",
]

_NUM_WORST = 10


@dataclass(frozen=True, slots=True)
class WorstHead:
    """A head among the worst.

    Attributes:
        layer, head: global numbers.
        entry: what it runs.
        score: its worst-region mass over lengths, or its file score.
        length: where; None for a file score.
    """

    layer: int
    head: int
    entry: HeadEntry
    score: float
    length: int | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of a config, at its longest calibrated length.

    Attributes:
        kinds: number of heads by kind.
        length: the longest calibrated length; None for an imported config.
        density: mean over heads.
        worst_mass: least worst-region mass of any head and length.
        predicted_ms: attention of all heads; None when not measured.
        map: for each layer a letter a head, ``None`` for a layer that is not full attention.
        worst: up to ten heads, the worst first.
    """

    kinds: dict[str, int]
    length: int | None
    density: float | None
    worst_mass: float | None
    predicted_ms: float | None
    map: tuple[str | None, ...]
    worst: tuple[WorstHead, ...]


@dataclass(frozen=True, slots=True)
class RankView:
    """What one rank of a tensor-parallel layout runs.

    Attributes:
        size: number of ranks.
        slice: its heads and predicted time.
        slowest: the rank that takes longest, if times are known.
        kinds: number of its heads by kind.
        map: for each layer a letter for each of its heads.
        density: mean density of its heads at the longest length.
    """

    size: int
    slice: RankSlice
    slowest: RankSlice | None
    kinds: dict[str, int]
    map: tuple[str | None, ...]
    density: float | None


def summarise(config: PatternConfig) -> Summary:
    """Compute the totals of a config."""
    heads = [head for layer in config.heads for head in layer or ()]
    last = [head.lengths[-1] for head in heads if head.lengths]
    times = [at.predicted_ms for at in last if at.predicted_ms is not None]
    return Summary(
        kinds=_kinds(heads),
        length=last[0].length if last else None,
        density=sum(at.density for at in last) / len(last) if last else None,
        worst_mass=min(
            (at.mass_worst_region for head in heads for at in head.lengths), default=None
        ),
        predicted_ms=sum(times) if heads and len(times) == len(heads) else None,
        map=_map(config, (0, config.model.num_query_heads)),
        worst=_worst(config),
    )


def _kinds(heads: Iterable[HeadEntry]) -> dict[str, int]:
    counts = Counter(head.pattern.kind for head in heads)
    return {kind: counts[kind] for kind in sorted(counts)}


def _map(config: PatternConfig, heads: tuple[int, int]) -> tuple[str | None, ...]:
    return tuple(
        None if layer is None else "".join(letter(head.pattern) for head in layer[slice(*heads)])
        for layer in config.heads
    )


def _worst(config: PatternConfig) -> tuple[WorstHead, ...]:
    is_count = config.imported is not None and config.imported.score_kind == "mismatch_count"
    found = []
    for layer, heads in enumerate(config.heads):
        for head, entry in enumerate(heads or ()):
            if entry.lengths:
                at = min(entry.lengths, key=lambda x: x.mass_worst_region)
                found.append(WorstHead(layer, head, entry, at.mass_worst_region, at.length))
            elif entry.imported_score is not None:
                found.append(WorstHead(layer, head, entry, entry.imported_score, None))
    found.sort(key=lambda x: (-x.score if is_count else x.score, x.layer, x.head))
    return tuple(found[:_NUM_WORST])


def layer_heads(config: PatternConfig, layer: int) -> tuple[HeadEntry, ...]:
    """Return the heads of one layer.

    Raises:
        InputError: no such layer, or it is not full attention.
    """
    if not 0 <= layer < config.model.num_layers:
        raise InputError(f"layer {layer}: the model has layers 0..{config.model.num_layers - 1}")
    heads = config.heads[layer]
    if heads is None:
        raise InputError(f"layer {layer} is {config.model.layer_types[layer]} attention: no heads")
    return heads


def rank_view(config: PatternConfig, size: int, rank: int) -> RankView:
    """Return what rank ``rank`` of ``size`` runs.

    Raises:
        InputError: the heads do not divide over so many ranks, or there is no such rank.
    """
    if not 0 <= rank < size:
        raise InputError(f"rank {rank}: ranks of size {size} are 0..{size - 1}")
    layout = rank_layout(config.model, config.heads, size)
    mine = layout.ranks[rank]
    heads = [head for layer in config.heads for head in (layer or ())[slice(*mine.query_heads)]]
    densities = [head.lengths[-1].density for head in heads if head.lengths]
    is_timed = all(x.predicted_ms is not None for x in layout.ranks)
    return RankView(
        size=size,
        slice=mine,
        slowest=max(layout.ranks, key=lambda x: x.predicted_ms or 0.0) if is_timed else None,
        kinds=_kinds(heads),
        map=_map(config, mine.query_heads),
        density=sum(densities) / len(densities) if densities else None,
    )


def config_document(config: PatternConfig) -> dict[str, Any]:
    """Return the summary as plain JSON values: the config without its long lists, and totals."""
    values = config.model_dump(mode="json", exclude={"heads", "fingerprints"})
    values["model"].pop("attention_sha256")
    for rope in values["model"]["rope"].values():
        rope.pop("inverse_frequencies")
    if values["calibration"] is not None:
        values["calibration"]["num_samples"] = len(values["calibration"].pop("samples"))
    summary = summarise(config)
    return {
        **values,
        "totals": {
            "kinds": summary.kinds,
            "length": summary.length,
            "density": summary.density,
            "worst_mass": summary.worst_mass,
            "predicted_ms": summary.predicted_ms,
        },
        "map": list(summary.map),
        "worst_heads": [
            {
                "layer": x.layer,
                "head": x.head,
                "pattern": x.entry.pattern.model_dump(),
                "score": x.score,
                "length": x.length,
            }
            for x in summary.worst
        ],
    }
