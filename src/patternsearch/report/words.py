# SPDX-License-Identifier: Apache-2.0
"""The labels of a page, and a candidate in the words of its readers."""

from typing import Any

from patternsearch.exchange.words import short_pattern
from patternsearch.patterns.candidates import Candidate, describe

__all__ = ["KIND_LABELS", "pattern_document", "plain_pattern"]

KIND_LABELS = {
    "dense": "Dense",
    "a_shape": "A-shape",
    "vertical_slash": "Vertical-Slash",
    "block_sparse": "Block-Sparse",
}

_BUDGETS = {
    "dense": (),
    "a_shape": ("sink", "window"),
    "vertical_slash": ("vertical", "diagonals", "slash"),
    "block_sparse": ("blocks",),
}


def plain_pattern(pattern: Candidate) -> str:
    """Return a name such as ``Vertical-Slash 128 columns + 8 tile diagonals, tile 64``."""
    label = KIND_LABELS[pattern.kind]
    values = pattern.model_dump()
    tile = f", tile {values['tile']}" if "tile" in values else ""
    match pattern.kind:
        case "dense":
            return label
        case "a_shape":
            inner = f"sink {values['sink']} + window {values['window']} tokens"
        case "vertical_slash":
            lines = (
                f"{values['diagonals']} tile diagonals"
                if "diagonals" in values
                else f"{values['slash']} slashes"
            )
            inner = f"{values['vertical']} columns + {lines}"
        case "block_sparse":
            inner = f"{values['blocks']} key tiles a query tile"
    estimator = f", {values['estimator']}" if "estimator" in values else ""
    return f"{label} {inner}{tile}{estimator}"


def pattern_document(pattern: Candidate) -> dict[str, Any]:
    """Return what the page shows of a candidate.

    ``line`` names the candidates that one curve joins (all but the budget that carries the cost),
    ``budget`` orders them along it.
    """
    values = pattern.model_dump()
    budgets = [name for name in _BUDGETS[pattern.kind] if name in values]
    rest = {k: v for k, v in values.items() if not budgets or k != budgets[-1]}
    return {
        "kind": pattern.kind,
        "short": short_pattern(pattern),
        "plain": plain_pattern(pattern),
        "name": describe(pattern),
        "line": " ".join(f"{k}={v}" for k, v in rest.items()),
        "budget": values[budgets[-1]] if budgets else 0,
    }
