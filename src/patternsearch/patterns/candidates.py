# SPDX-License-Identifier: Apache-2.0
"""The pattern kinds as small strict models: what a head may run, and what a grid proposes.

One definition serves grids, scores and configs. Budgets are *nominal*: what was asked for. How a
budget is raised to the forced entries or clamped to a sequence is geometry
(:mod:`patternsearch.patterns.geometry`), so that the same candidate means the same rule at every
length.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

__all__ = [
    "CANDIDATE_COLUMNS",
    "KINDS",
    "AShape",
    "BlockSparse",
    "Candidate",
    "Dense",
    "Estimator",
    "Index",
    "Kind",
    "Tile",
    "VerticalSlash",
    "VerticalSlashLastQ",
    "VerticalSlashSpread",
    "candidate_adapter",
    "candidate_columns",
    "candidate_from_columns",
    "describe",
]

Kind = Literal["dense", "a_shape", "vertical_slash", "block_sparse"]
Estimator = Literal["spread", "last_q", "pooled_query", "pooled"]
Index = Literal["none", "online", "oracle"]
Tile = Literal[64, 128]

KINDS: tuple[Kind, ...] = ("dense", "a_shape", "vertical_slash", "block_sparse")
"""From the simplest to the most complex: the order that breaks ties in selection."""

CANDIDATE_COLUMNS: tuple[str, ...] = (
    "kind",
    "sink",
    "window",
    "vertical",
    "slash",
    "diagonals",
    "blocks",
    "tile",
    "last_q",
    "spread_rows",
    "estimator",
)
"""The columns of the scores table that name a candidate, in their order there."""


class _Pattern(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Dense(_Pattern):
    """All j ≤ i."""

    kind: Literal["dense"] = "dense"


class AShape(_Pattern):
    """Keys j < ``sink`` (tokens) and keys with i − j < ``window`` (tokens)."""

    kind: Literal["a_shape"] = "a_shape"
    sink: int = Field(ge=0)
    window: int = Field(ge=1)
    tile: Tile


class VerticalSlashSpread(_Pattern):
    """``vertical`` columns and ``diagonals`` tile diagonals, ranked from two sampled row sets.

    The row sets are the last ``last_q`` rows and ``spread_rows`` rows spread over the prompt.
    """

    kind: Literal["vertical_slash"] = "vertical_slash"
    estimator: Literal["spread"] = "spread"
    vertical: int = Field(ge=0)
    diagonals: int = Field(ge=0)
    tile: Tile
    last_q: int = Field(default=64, ge=1)
    spread_rows: int = Field(default=64, ge=1)


class VerticalSlashLastQ(_Pattern):
    """``vertical`` columns and ``slash`` offsets, ranked from the last ``last_q`` rows.

    MInference's estimator, for its consumers.
    """

    kind: Literal["vertical_slash"] = "vertical_slash"
    estimator: Literal["last_q"] = "last_q"
    vertical: int = Field(ge=0)
    slash: int = Field(ge=0)
    tile: Tile
    last_q: int = Field(default=64, ge=1)


class BlockSparse(_Pattern):
    """``blocks`` key tiles for each query tile, always with its diagonal tile."""

    kind: Literal["block_sparse"] = "block_sparse"
    estimator: Literal["pooled_query", "pooled"] = "pooled_query"
    blocks: int = Field(ge=1)
    tile: Tile


VerticalSlash = Annotated[
    VerticalSlashSpread | VerticalSlashLastQ, Field(discriminator="estimator")
]
Candidate = Annotated[Dense | AShape | VerticalSlash | BlockSparse, Field(discriminator="kind")]

candidate_adapter: TypeAdapter[Any] = TypeAdapter(Candidate)
"""Validates a mapping into a candidate."""


def candidate_columns(candidate: Candidate) -> dict[str, Any]:
    """Return the candidate as scores-table columns; None where the kind has no such parameter."""
    values = candidate.model_dump()
    return {name: values.get(name) for name in CANDIDATE_COLUMNS}


def candidate_from_columns(row: dict[str, Any]) -> Candidate:
    """Build the candidate that a scores row names (the inverse of :func:`candidate_columns`).

    Missing values may be None or NaN; integral floats are accepted, since a data frame column
    with gaps holds floats.
    """
    values: dict[str, Any] = {}
    for name in CANDIDATE_COLUMNS:
        value = row.get(name)
        if value is None or value != value:
            continue
        values[name] = str(value) if name in ("kind", "estimator") else int(value)
    result: Candidate = candidate_adapter.validate_python(values)
    return result


def describe(candidate: Candidate) -> str:
    """Return a short name such as ``a_shape(sink=128, window=1024, tile=64)``."""
    values = candidate.model_dump(exclude={"kind"})
    inner = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"{candidate.kind}({inner})" if inner else candidate.kind
