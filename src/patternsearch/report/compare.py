# SPDX-License-Identifier: Apache-2.0
"""The page data of two configs side by side: the diff, and both sides' heads as arrays."""

from pathlib import Path
from typing import Any

import numpy as np

from patternsearch.exchange.diff import diff_sides
from patternsearch.exchange.diff_output import FIELD_PARTS, diff_document, field_value
from patternsearch.exchange.ranks import Heads
from patternsearch.exchange.sides import Side, load_sides
from patternsearch.exchange.words import short_pattern
from patternsearch.patterns.candidates import KINDS
from patternsearch.report.packing import pack_floats, pack_integers
from patternsearch.report.words import KIND_LABELS
from patternsearch.schema.reading import collector_paused

__all__ = ["compare_document"]

_CHANGES = ("same", "numbers", "budget", "pattern")
"""From no difference to another kind; places of the change map."""


def compare_document(a: Path, b: Path) -> dict[str, Any]:
    """Return what the compare page shows as plain JSON values.

    Raises:
        ConfigError: a file is neither a config nor a pattern file.
    """
    with collector_paused():
        sides = load_sides(a, b)
        diff = diff_sides(*sides)
        document = diff_document(diff)
    changes = {
        (layer["layer"], head["head"]): head["what"]
        for layer in document["layers"]
        for head in layer["heads"]
    }
    num_layers, num_heads = diff.shape[0]
    maps = None
    if diff.has_same_shape:
        maps = {
            "num_layers": num_layers,
            "num_heads": num_heads,
            "what": pack_integers(
                [
                    [_CHANGES.index(changes.get((i, h), "same")) for h in range(num_heads)]
                    for i in range(num_layers)
                ]
            ),
            "sides": [
                _side(side, num_heads, diff.length, diff.is_score_comparable) for side in sides
            ],
        }
    shown = {name: document[name] for name in ("a", "b", "differs", "length", "scores", "heads")}
    return {
        "title": f"{a.name} against {b.name}",
        "subtitle": "what differs, by meaning",
        "kinds": [{"kind": kind, "label": KIND_LABELS[kind]} for kind in KINDS],
        "changes": list(_CHANGES),
        **shown,
        "totals": document["totals"],
        "notes": document["notes"],
        "fields": [
            {
                "part": part.replace("_", " "),
                "field": change["field"],
                "a": field_value(change["a"]),
                "b": field_value(change["b"]),
            }
            for part in (*FIELD_PARTS, "provenance")
            for change in document[part]
        ],
        "layers": [
            {name: layer[name] for name in layer if name != "heads"} for layer in document["layers"]
        ],
        "stale": [
            [layer["layer"], head["head"]]
            for layer in document["layers"]
            for head in layer["heads"]
            if head["stale"]
        ],
        "maps": maps,
    }


def _side(side: Side, width: int, length: int | None, is_comparable: bool) -> dict[str, Any]:
    """Pack one side's patterns and its numbers at the common length, [layer, head]."""
    names: dict[str, int] = {}
    kinds: list[list[int]] = []
    patterns: list[list[int]] = []
    for layer in side.heads:
        row = layer or ()
        pad = [-1] * (width - len(row))
        kinds.append([KINDS.index(entry.pattern.kind) for entry in row] + pad)
        shorts = (short_pattern(entry.pattern) for entry in row)
        patterns.append([names.setdefault(short, len(names)) for short in shorts] + pad)
    numbers = {
        name: pack_floats(_numbers(side.heads, width, length, name))
        for name in ("mass_worst_region", "density", "predicted_ms")
    }
    if not is_comparable:
        numbers.pop("mass_worst_region")
    config = side.config
    return {
        "kind": pack_integers(kinds),
        "pattern": pack_integers(patterns),
        "names": list(names),
        "measured": bool(config and config.selection and config.selection.measured),
        **numbers,
    }


def _numbers(heads: Heads, width: int, length: int | None, name: str) -> list[list[float]]:
    rows = []
    for layer in heads:
        row = [np.nan] * width
        for head, entry in enumerate(layer or ()):
            at = next((x for x in entry.lengths if x.length == length), None)
            value = None if at is None else getattr(at, name)
            if at is None and name == "mass_worst_region":
                value = entry.imported_score
            row[head] = np.nan if value is None else float(value)
        rows.append(row)
    return rows
