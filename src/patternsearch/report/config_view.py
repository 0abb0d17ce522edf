# SPDX-License-Identifier: Apache-2.0
"""What a page draws from the config alone: its facts in words, and its heads as arrays."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from patternsearch.exchange.summary import summarise
from patternsearch.patterns.candidates import KINDS, Candidate
from patternsearch.report.packing import finite, pack_floats, pack_integers
from patternsearch.report.words import KIND_LABELS, pattern_document
from patternsearch.schema.config import HeadEntry, PatternConfig

__all__ = ["LENGTH_FIELDS", "config_view", "facts", "headline", "title_facts"]

_OBJECTIVES = {
    "work": "cheapest by counted work",
    "time": "cheapest by predicted time",
    "mass": "most mass within a budget",
}
LENGTH_FIELDS = (
    "mass_mean",
    "mass_worst",
    "mass_worst_region",
    "mass_std",
    "heldout_mean",
    "heldout_worst_region",
    "oracle_mean",
    "density",
    "tiles",
    "columns",
    "predicted_ms",
)
"""Fields of a head at one length that the page holds."""

Facts = list[tuple[str, list[tuple[str, str]]]]


def config_view(config: PatternConfig) -> dict[str, Any]:
    """Return names, arrays and totals of a config for the script.

    Arrays are ``[layer, head]`` or ``[length, layer, head]``; layers that are not full attention
    hold missing values.
    """
    summary = summarise(config)
    lengths = _lengths(config)
    patterns = _Patterns()
    choice = _grid(config, lambda entry: patterns.place(entry.pattern), -1)
    second = _grid(
        config, lambda entry: patterns.place(entry.runner_up.pattern) if entry.runner_up else -1, -1
    )
    selection = config.selection
    return {
        "kinds": [{"kind": kind, "label": KIND_LABELS[kind]} for kind in KINDS],
        "num_layers": config.model.num_layers,
        "num_heads": config.model.num_query_heads,
        "group": config.model.num_query_heads // config.model.num_kv_heads,
        "layer_types": list(config.model.layer_types),
        "lengths": lengths,
        "target": selection.target_mass if selection else None,
        "objective": selection.objective if selection else None,
        "measured": bool(selection and selection.measured),
        "device": selection.timings_device if selection else None,
        "patterns": [pattern_document(pattern) for pattern in patterns.all],
        "choice": pack_integers(choice),
        "runner_up": {
            "pattern": pack_integers(second),
            **{
                name: pack_floats(_grid(config, lambda e, n=name: _of(e.runner_up, n), np.nan))
                for name in ("mass_worst_region", "density", "predicted_ms")
            },
        },
        "at": {
            name: pack_floats(
                [
                    _grid(config, lambda e, k=k, n=name: _of(_nth(e, k), n), np.nan)
                    for k in range(len(lengths))
                ]
                or np.empty((0, config.model.num_layers, config.model.num_query_heads))
            )
            for name in LENGTH_FIELDS
        },
        "oracle_gap": pack_floats(_oracle_gaps(config, lengths)),
        "file_score": _file_scores(config),
        "totals": {
            "kinds": summary.kinds,
            "density": summary.density,
            "worst_mass": summary.worst_mass,
            "predicted_ms": summary.predicted_ms,
        },
        "by_length": [_length_totals(config, k, length) for k, length in enumerate(lengths)],
        "break_even": [p.model_dump() for p in selection.break_even] if selection else [],
        "min_length": selection.min_length if selection else None,
        "tp_size": config.tensor_parallel.size,
    }


class _Patterns:
    """Distinct patterns in the order they are first seen."""

    def __init__(self) -> None:
        self._places: dict[Candidate, int] = {}

    def place(self, pattern: Candidate) -> int:
        return self._places.setdefault(pattern, len(self._places))

    @property
    def all(self) -> tuple[Candidate, ...]:
        return tuple(self._places)


def _lengths(config: PatternConfig) -> list[int]:
    if config.calibration is not None:
        return list(config.calibration.lengths)
    return sorted({at.length for layer in config.heads for e in layer or () for at in e.lengths})


def _grid(config: PatternConfig, value: Any, missing: float) -> list[list[float]]:
    width = config.model.num_query_heads
    return [
        [missing] * width if layer is None else [value(entry) for entry in layer]
        for layer in config.heads
    ]


def _of(part: Any, name: str) -> float:
    value = None if part is None else getattr(part, name)
    return float("nan") if value is None else float(value)


def _nth(entry: HeadEntry, place: int) -> Any:
    return entry.lengths[place] if place < len(entry.lengths) else None


def _oracle_gaps(config: PatternConfig, lengths: list[int]) -> Any:
    """Return oracle − online mean over all samples, [length, layer, head]; NaN if not scored."""
    shape = (config.model.num_layers, config.model.num_query_heads)
    gaps = np.full((len(lengths), *shape), np.nan)
    samples = config.calibration.samples if config.calibration else ()
    for k, length in enumerate(lengths):
        mine = [sample.split for sample in samples if sample.length == length]
        share = mine.count("heldout") / len(mine) if mine else 0.0
        for layer, entries in enumerate(config.heads):
            for head, entry in enumerate(entries or ()):
                at = _nth(entry, k)
                if at is None or at.oracle_mean is None:
                    continue
                heldout = at.mass_mean if at.heldout_mean is None else at.heldout_mean
                online = (1 - share) * at.mass_mean + share * heldout
                gaps[k, layer, head] = at.oracle_mean - online
    return gaps


def _file_scores(config: PatternConfig) -> dict[str, Any] | None:
    if config.imported is None:
        return None
    scores = _grid(config, lambda entry: _of(entry, "imported_score"), np.nan)
    return {"kind": config.imported.score_kind, "values": pack_floats(scores)}


def _length_totals(config: PatternConfig, place: int, length: int) -> dict[str, Any]:
    """Sum a length by kind: heads, mean density and milliseconds."""
    heads = [(e, _nth(e, place)) for layer in config.heads for e in layer or ()]
    counts = Counter(entry.pattern.kind for entry, _ in heads)
    by_kind = {}
    for kind in KINDS:
        at = [x for entry, x in heads if entry.pattern.kind == kind and x is not None]
        times = [x.predicted_ms for x in at]
        by_kind[kind] = {
            "heads": counts[kind],
            "density": float(np.mean([x.density for x in at])) if at else None,
            "pairs": sum(x.density for x in at) * length * (length + 1) / 2,
            "ms": None if None in times else float(sum(times)),
        }
    return {"length": length, "by_kind": by_kind}


# --- words -----------------------------------------------------------------------------------


def facts(config: PatternConfig) -> Facts:
    """Return groups of facts, each (name, value) as text."""
    groups = [
        ("Model", list(_model(config))),
        ("RoPE", list(_rope(config))),
        ("Calibration", list(_calibration(config))),
        ("Selection", list(_selection(config))),
        ("Made with", list(_provenance(config))),
    ]
    return [group for group in groups if group[1]]


def _model(config: PatternConfig) -> Iterator[tuple[str, str]]:
    model = config.model
    yield "reference", model.reference
    yield "architecture", f"{model.architecture} ({model.model_type}), {model.dtype}"
    yield "weights", f"{model.weights_sha256 or 'no digest'} ({model.weights_format})"
    others = [f"{model.layer_types.count(t)} {t}" for t in ("full", "sliding", "linear")]
    yield "layers", f"{model.num_layers}: " + ", ".join(x for x in others if not x.startswith("0 "))
    group = model.num_query_heads // model.num_kv_heads
    shape = f"{model.num_query_heads} query heads over {model.num_kv_heads} kv heads"
    yield "heads", f"{shape} (GQA group {group}), head_dim {model.head_dim}"
    yield "attention scale", f"{model.attention_scale:.6g}"
    if model.sliding_window is not None:
        yield "sliding window", f"{model.sliding_window} tokens"
    yield "positions", str(model.max_positions or "no limit recorded")
    ranks = config.tensor_parallel.size
    yield "tensor parallel", f"{ranks} rank{'s' if ranks > 1 else ''}; head numbers are global"
    if config.fingerprints is not None:
        probe = config.fingerprints
        yield "fingerprints", f"12 numbers a head on {probe.num_tokens} tokens, seed {probe.seed}"


def _rope(config: PatternConfig) -> Iterator[tuple[str, str]]:
    for layer_type, rope in config.model.rope.items():
        values = ", ".join(f"{k} {v}" for k, v in rope.parameters.items() if k != "rope_type")
        yield (
            f"{layer_type} layers",
            f"{rope.rope_type}: {values}; attention factor {rope.attention_factor:g}",
        )


def _calibration(config: PatternConfig) -> Iterator[tuple[str, str]]:
    if (imported := config.imported) is not None:
        yield "imported", f"from {imported.format}; nothing here was measured by patternsearch"
        yield "file", imported.file_sha256
        yield "file scores", imported.score_kind.replace("_", " ")
        return
    c = config.calibration
    assert c is not None
    heldout = sum(sample.split == "heldout" for sample in c.samples)
    yield "recipe", f"{c.recipe} ({c.recipe_sha256[:12]}), seed {c.seed}"
    yield "grid", f"{c.grid} ({c.grid_sha256[:12]})"
    yield "lengths", ", ".join(map(str, c.lengths)) + " tokens"
    yield "samples", f"{len(c.samples) - heldout} for calibration, {heldout} held out"
    yield "sources", ", ".join(sorted({sample.source for sample in c.samples}))
    yield "consumer", c.consumer
    yield "oracle index", "scored" if c.oracle else "not scored"
    if c.row_sample < 1:
        yield "row sample", f"{c.row_sample:g} of the query rows"
    if c.extrapolated:
        yield "extrapolated", "lengths beyond the model's positions were allowed"


def _selection(config: PatternConfig) -> Iterator[tuple[str, str]]:
    s = config.selection
    if s is None:
        return
    target = "none" if s.target_mass is None else f"{s.target_mass:g}"
    yield (
        "objective",
        _OBJECTIVES[s.objective],
    )
    yield "target mass", f"{target}; {s.statistic} sample, regions: {s.regions}"
    if s.tie_tolerance is not None:
        yield "ties", f"costs within {s.tie_tolerance:.0%} count as equal: the simpler kind wins"
    if s.budget_ms is not None:
        yield "budget", f"{s.budget_ms:g} ms"
    yield "kinds allowed", ", ".join(KIND_LABELS[kind] for kind in s.kinds)
    if s.max_density is not None:
        yield "densest allowed", f"{s.max_density:g}"
    if s.dense_layers:
        yield "layers kept dense", ", ".join(map(str, s.dense_layers))
    if s.measured:
        yield "times", f"measured on {s.timings_device}, table {(s.timings_sha256 or '')[:12]}"
        yield "break-even", f"dense runs below {s.min_length} tokens"
    else:
        yield "times", "measured: false, no GPU was timed; costs are counted pairs"


def _provenance(config: PatternConfig) -> Iterator[tuple[str, str]]:
    for name, value in config.provenance.model_dump().items():
        if value is not None:
            yield name, str(value)


def title_facts(config: PatternConfig) -> list[tuple[str, str]]:
    """Return what stands under the title, each (name, value) in a few words."""
    model, calibration, selection = config.model, config.calibration, config.selection
    ropes = ", ".join(
        f"{rope.rope_type} θ {rope.parameters.get('rope_theta', '?')}"
        + (f", factor {rope.attention_factor:g}" if rope.attention_factor != 1.0 else "")
        for rope in model.rope.values()
    )
    group = model.num_query_heads // model.num_kv_heads
    found = [
        (
            "model",
            f"{model.architecture}, {model.dtype}, {(model.weights_sha256 or 'no digest')[:12]}",
        ),
        ("RoPE", ropes or "none"),
        ("GQA", f"{model.num_query_heads} over {model.num_kv_heads} heads ({group}:1)"),
        ("TP", f"{config.tensor_parallel.size}"),
    ]
    if calibration is not None:
        lengths = ", ".join(map(str, calibration.lengths))
        found.append(
            (
                "calibration",
                f"{calibration.recipe}, {len(calibration.samples)} samples at {lengths}",
            )
        )
    if config.imported is not None:
        found.append(("imported", f"from {config.imported.format}"))
    if selection is not None:
        target = "no target" if selection.target_mass is None else f"mass {selection.target_mass:g}"
        found.append(
            (
                "selection",
                f"{_OBJECTIVES[selection.objective]}, {target}, {selection.statistic} sample",
            )
        )
    is_measured = selection is not None and selection.measured
    device = selection.timings_device if selection is not None and is_measured else None
    found.append(("measured", f"true, on {device}" if is_measured else "false"))
    return found


def headline(config: PatternConfig) -> dict[str, float | None]:
    """Return the totals of the first line: density, worst mass, milliseconds, speed-up."""
    summary = summarise(config)
    points = config.selection.break_even if config.selection else ()
    last = points[-1] if points else None
    return {
        "density": finite(summary.density),
        "worst_mass": finite(summary.worst_mass),
        "predicted_ms": finite(summary.predicted_ms),
        "speed_up": last.dense_ms / last.sparse_ms if last and last.sparse_ms else None,
    }
