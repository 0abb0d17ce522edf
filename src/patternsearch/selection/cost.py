# SPDX-License-Identifier: Apache-2.0
"""What a candidate costs. Selection asks only this protocol, so the rule is the same for counted
work and for measured time.
"""  # noqa: D205

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Candidate,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.patterns.geometry import causal_pairs, num_tiles

__all__ = ["CostModel", "Work"]

Floats = NDArray[np.float64]


class CostModel(Protocol):
    """Cost of one head's attention."""

    @property
    def unit(self) -> Literal["pairs", "ms"]:
        """What the numbers count."""

    @property
    def measured(self) -> bool:
        """True only if the numbers come from a timing table."""

    @property
    def device(self) -> str | None:
        """The device that was measured; None when not measured."""

    @property
    def sha256(self) -> str | None:
        """Digest of the timing table; None when not measured."""

    def head_cost(
        self, candidates: Sequence[Candidate], num_tokens: int, tiles: Floats, columns: Floats
    ) -> Floats:
        """Return the cost of one head at ``num_tokens``, index included.

        Args:
            candidates: the C candidates of the last axis.
            num_tokens: n.
            tiles: [..., C], causal tiles read.
            columns: [..., C], gathered columns summed over query tiles.

        Returns:
            [..., C] float64, ≥ 0.
        """

    def index_cost(self, candidates: Sequence[Candidate], num_tokens: int) -> Floats:
        """Return the cost of building one head's index, [C]; 0 for static patterns."""

    def launch_cost(
        self, candidates: Sequence[Candidate], num_tokens: int, tiles: Floats, columns: Floats
    ) -> float:
        """Return the milliseconds that the host launches for in a layer.

        Args:
            candidates: of the layer's H heads.
            num_tokens: n.
            tiles: [H], causal tiles read.
            columns: [H], gathered columns summed over query tiles.
        """

    def layer_backends(
        self, candidates: Sequence[Candidate], num_tokens: int, tiles: Floats, columns: Floats
    ) -> tuple[str, ...]:
        """Return the names of what runs a layer's heads, arguments as for ``launch_cost``; empty
        when not measured.
        """  # noqa: D205


class Work:
    """Pairs that a tiled kernel executes: tiles·T² + columns·T; dense: its causal pairs.

    A head's cost leaves the index out and every pair costs the same, so this is an order, not a
    time.
    """

    unit: Literal["pairs", "ms"] = "pairs"
    measured = False
    device: str | None = None
    sha256: str | None = None

    def head_cost(
        self, candidates: Sequence[Candidate], num_tokens: int, tiles: Floats, columns: Floats
    ) -> Floats:
        """Return pairs, [..., C]; see :class:`CostModel`."""
        tile = np.array([0 if isinstance(c, Dense) else c.tile for c in candidates], np.float64)
        pairs = tiles * tile**2 + columns * tile
        return np.where(tile == 0, float(causal_pairs(num_tokens)), pairs)

    def index_cost(self, candidates: Sequence[Candidate], num_tokens: int) -> Floats:
        """Return the query-key products that an index computes, [C]."""
        return np.array([_index_products(c, num_tokens) for c in candidates], dtype=np.float64)

    def launch_cost(
        self, candidates: Sequence[Candidate], num_tokens: int, tiles: Floats, columns: Floats
    ) -> float:
        """Return 0: launches are not counted."""
        return 0.0

    def layer_backends(
        self, candidates: Sequence[Candidate], num_tokens: int, tiles: Floats, columns: Floats
    ) -> tuple[str, ...]:
        """Return nothing: whatever runs the heads counts the same."""
        return ()


def _index_products(candidate: Candidate, n: int) -> int:
    match candidate:
        case Dense() | AShape():
            return 0
        case VerticalSlashSpread():
            return n * (min(candidate.last_q, n) + min(candidate.spread_rows, n))
        case VerticalSlashLastQ():
            return n * min(candidate.last_q, n)
        case BlockSparse():
            tiles = num_tiles(n, candidate.tile)
            return tiles * (n if candidate.estimator == "pooled_query" else tiles)
