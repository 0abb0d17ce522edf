# SPDX-License-Identifier: Apache-2.0
"""Selection options that ``select`` and ``frontier`` share, and how they become objects."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from patternsearch.cli._output import Output
from patternsearch.errors import InputError

if TYPE_CHECKING:
    from patternsearch.schema.config import ModelIdentity
    from patternsearch.timing.model import TimeModel

__all__ = [
    "ConsumerOpt",
    "DenseLayersOpt",
    "KindsOpt",
    "MaxDensityOpt",
    "RegionsOpt",
    "ScoresArg",
    "ServeDtypeOpt",
    "StatisticOpt",
    "TargetMassOpt",
    "TimingsOpt",
    "parse_kinds",
    "parse_layers",
    "time_model_for",
]

_RESTRICT = "Restrictions"
_COST = "Cost"

ScoresArg = Annotated[
    Path, typer.Argument(metavar="SCORES", help="Scores folder that calibrate wrote (x.scores).")
]
TargetMassOpt = Annotated[float, typer.Option(help="Captured mass every head must reach.")]
StatisticOpt = Annotated[
    Literal["worst", "p05", "mean"], typer.Option(help="Over samples, at every length and split.")
]
RegionsOpt = Annotated[
    Literal["each", "all"],
    typer.Option(help="each: every quarter of the rows must reach the target. all: their mean."),
]
KindsOpt = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Kinds that may be chosen, such as a_shape,vertical_slash; dense always may.",
        rich_help_panel=_RESTRICT,
    ),
]
ConsumerOpt = Annotated[
    Literal["patternsearch", "minference", "vllm", "sglang"] | None,
    typer.Option(
        help="Whose kernels will run the config; by default the one that was scored.",
        rich_help_panel=_RESTRICT,
    ),
]
MaxDensityOpt = Annotated[
    float | None,
    typer.Option(help="Densest sparse candidate allowed.", rich_help_panel=_RESTRICT),
]
DenseLayersOpt = Annotated[
    str | None,
    typer.Option(
        metavar="LIST", help="Layers kept dense, such as 0,1,30-31.", rich_help_panel=_RESTRICT
    ),
]
TimingsOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="TABLE",
        help="Timing table of the GPU that will serve; without one, counted work decides.",
        rich_help_panel=_COST,
    ),
]
ServeDtypeOpt = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Torch dtype that will serve, to look up times; by default the checkpoint's.",
        rich_help_panel=_COST,
    ),
]


def parse_kinds(text: str | None) -> tuple[str, ...]:
    """Parse ``a_shape,block_sparse``; None is every kind. Unknown kinds are refused later."""
    from patternsearch.patterns.candidates import KINDS

    return KINDS if text is None else tuple(item.strip() for item in text.split(","))


def parse_layers(text: str | None) -> tuple[int, ...]:
    """Parse ``0,1,30-31`` into ascending layers.

    Raises:
        InputError: an item is neither a layer nor a range.
    """
    layers: set[int] = set()
    for item in (text or "").split(",") if text else ():
        first, dash, last = item.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise InputError(f"layer {item.strip()!r}: write layers as 0,1,30-31")
        layers.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(layers))


def time_model_for(
    timings: Path | None, model: "ModelIdentity", dtype: str | None, out: Output
) -> "TimeModel | None":
    """Load the time model of a model's attention shape; None without a table.

    Warns if the kernels have changed since the table was measured.

    Raises:
        TimingError: the table is invalid or does not cover the shape.
    """
    if timings is None:
        return None
    from patternsearch.timing.model import load_time_model

    found = load_time_model(timings, dtype=dtype or model.dtype, head_dim=model.head_dim)
    if not found.is_of_these_kernels:
        out.warn(
            f"{timings} was measured with other kernels than this installation's: "
            "measure again with `patternsearch bench` on the GPU that will serve"
        )
    return found
