# SPDX-License-Identifier: Apache-2.0
"""Patterns and numbers in a few characters, for tables that fit a terminal."""

from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Candidate,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)

__all__ = ["LETTERS", "letter", "number", "short_pattern"]

LETTERS = {"dense": "D", "a_shape": "A", "vertical_slash": "V", "block_sparse": "B"}
"""One letter a kind, so that a map of heads reads without colour."""


def letter(pattern: Candidate) -> str:
    """Return the letter of the pattern's kind."""
    return LETTERS[pattern.kind]


def short_pattern(pattern: Candidate | None) -> str:
    """Return a name such as ``vertical_slash 1000+6096``; what is usual is left out.

    After Vertical-Slash: columns + slashes, or columns + tile diagonals with a ``d``; after
    A-shape: sink + window; after block-sparse: key tiles per query tile. Tile 128, other row
    counts and pooled keys are named.
    """
    match pattern:
        case None:
            return "none"
        case Dense():
            return "dense"
        case AShape():
            text, extra = f"{pattern.sink}+{pattern.window}", ""
        case VerticalSlashSpread():
            text, extra = f"{pattern.vertical}+{pattern.diagonals}d", ""
            if (pattern.last_q, pattern.spread_rows) != (64, 64):
                extra = f" rows {pattern.last_q}+{pattern.spread_rows}"
        case VerticalSlashLastQ():
            text = f"{pattern.vertical}+{pattern.slash}"
            extra = f" rows {pattern.last_q}" if pattern.last_q != 64 else ""
        case BlockSparse():
            text, extra = str(pattern.blocks), " pooled" if pattern.estimator == "pooled" else ""
    tile = " T128" if pattern.tile == 128 else ""
    return f"{pattern.kind} {text}{tile}{extra}"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with fixed digits, counts above 1000 whole; a dash for None."""
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"
