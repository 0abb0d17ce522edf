# SPDX-License-Identifier: Apache-2.0
"""Budget grids: the candidates that a calibration scores, as a strict versioned document.

A grid lists blocks of axes; each block is the product of its axes. Grids are data
(``configs/grids/*.yaml``); reading the file is :mod:`patternsearch.schema.io`'s work.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Candidate,
    Dense,
    Tile,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)

__all__ = [
    "MAX_CANDIDATES",
    "AShapeAxes",
    "BlockSparseAxes",
    "Grid",
    "VerticalSlashLastQAxes",
    "VerticalSlashSpreadAxes",
]

MAX_CANDIDATES = 4096
"""Candidates that a grid may expand to."""

_MAX_BUDGET = 2**31 - 1
_Budgets = Annotated[tuple[Annotated[int, Field(ge=1, le=_MAX_BUDGET)], ...], Field(min_length=1)]
_Budgets0 = Annotated[tuple[Annotated[int, Field(ge=0, le=_MAX_BUDGET)], ...], Field(min_length=1)]
_Tiles = Annotated[tuple[Tile, ...], Field(min_length=1)]


class _Axes(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def num_candidates(self) -> int:
        """Return how many candidates the product of the axes has, without building it."""
        axes = [getattr(self, name) for name in type(self).model_fields]
        return math.prod(len(axis) for axis in axes if isinstance(axis, tuple))


class AShapeAxes(_Axes):
    """sink × window × tile."""

    kind: Literal["a_shape"]
    sink: _Budgets0
    window: _Budgets
    tile: _Tiles

    def candidates(self) -> Iterator[Candidate]:
        """Yield the product of the axes, the first axis slowest."""
        for tile, sink, window in product(self.tile, self.sink, self.window):
            yield AShape(sink=sink, window=window, tile=tile)


class VerticalSlashSpreadAxes(_Axes):
    """Estimator ``spread``: vertical × diagonals × tile × last_q × spread_rows."""

    kind: Literal["vertical_slash"]
    estimator: Literal["spread"]
    vertical: _Budgets0
    diagonals: _Budgets0
    tile: _Tiles
    last_q: _Budgets = (64,)
    spread_rows: _Budgets = (64,)

    def candidates(self) -> Iterator[Candidate]:
        """Yield the product of the axes, the sampled rows slowest."""
        for last_q, rows, tile, vertical, diagonals in product(
            self.last_q, self.spread_rows, self.tile, self.vertical, self.diagonals
        ):
            yield VerticalSlashSpread(
                vertical=vertical,
                diagonals=diagonals,
                tile=tile,
                last_q=last_q,
                spread_rows=rows,
            )


class VerticalSlashLastQAxes(_Axes):
    """Estimator ``last_q``: vertical × slash × tile × last_q."""

    kind: Literal["vertical_slash"]
    estimator: Literal["last_q"]
    vertical: _Budgets0
    slash: _Budgets0
    tile: _Tiles
    last_q: _Budgets = (64,)

    def candidates(self) -> Iterator[Candidate]:
        """Yield the product of the axes, the sampled rows slowest."""
        for last_q, tile, vertical, slash in product(
            self.last_q, self.tile, self.vertical, self.slash
        ):
            yield VerticalSlashLastQ(vertical=vertical, slash=slash, tile=tile, last_q=last_q)


class BlockSparseAxes(_Axes):
    """estimator × blocks × tile."""

    kind: Literal["block_sparse"]
    estimator: Annotated[tuple[Literal["pooled_query", "pooled"], ...], Field(min_length=1)]
    blocks: _Budgets
    tile: _Tiles

    def candidates(self) -> Iterator[Candidate]:
        """Yield the product of the axes, the estimator slowest."""
        for estimator, tile, blocks in product(self.estimator, self.tile, self.blocks):
            yield BlockSparse(estimator=estimator, blocks=blocks, tile=tile)


_AnyVerticalSlashAxes = Annotated[
    VerticalSlashSpreadAxes | VerticalSlashLastQAxes, Field(discriminator="estimator")
]
Axes = Annotated[AShapeAxes | _AnyVerticalSlashAxes | BlockSparseAxes, Field(discriminator="kind")]


class Grid(BaseModel):
    """A named, versioned list of candidates.

    ``dense`` is a candidate of every grid and is never listed. ``min_tokens`` is the shortest
    sample on which the grid's budgets still mean something; shorter lengths are refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["patternsearch/grid"]
    schema_version: Literal[1]
    name: str = Field(min_length=1)
    min_tokens: int = Field(ge=1)
    candidates: Annotated[tuple[Axes, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _bounded(self) -> "Grid":
        number = sum(axes.num_candidates() for axes in self.candidates)
        if number > MAX_CANDIDATES:
            raise ValueError(f"{number} candidates; a grid has at most {MAX_CANDIDATES}")
        return self

    def expand(self) -> tuple[Candidate, ...]:
        """Return every candidate once, dense first, then in the order of the document."""
        seen: dict[Candidate, None] = {Dense(): None}
        for axes in self.candidates:
            seen.update(dict.fromkeys(axes.candidates()))
        return tuple(seen)
