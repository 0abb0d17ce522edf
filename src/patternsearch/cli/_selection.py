# SPDX-License-Identifier: Apache-2.0
"""Selection options that ``select`` and ``frontier`` share, and how they become objects."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from patternsearch.errors import InputError

if TYPE_CHECKING:
    from patternsearch.patterns.candidates import Kind
    from patternsearch.patterns.consumers import Consumer
    from patternsearch.schema.config import ModelIdentity
    from patternsearch.selection.document import RunRecord
    from patternsearch.selection.options import SelectionOptions
    from patternsearch.timing.model import TimeModel

__all__ = [
    "TARGET_MASS_HELP",
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
    "parse_layers",
    "selection_options",
    "target_of",
    "time_model_for",
]

_RESTRICT = "Restrictions"
_COST = "Cost"
_LAYER_DIGITS = 6

ScoresArg = Annotated[
    Path, typer.Argument(metavar="SCORES", help="Scores folder that calibrate wrote (x.scores).")
]
TargetMassOpt = Annotated[float, typer.Option(help="Captured mass every head must reach.")]
TARGET_MASS_HELP = (
    "Captured mass every head must reach; by default 0.95, and none with --objective mass."
)
"""Of the commands that have an objective; see :func:`target_of`."""
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


def selection_options(
    record: "RunRecord",
    *,
    kinds: str | None,
    consumer: "Consumer | None",
    dense_layers: str | None,
    **options: Any,
) -> "SelectionOptions":
    """Return the options of a selection from these scores; what needs no parsing passes through.

    Args:
        record: of the run that wrote the scores.
        kinds: such as ``a_shape,block_sparse``; None is every kind.
        consumer: None is the one that was scored.
        dense_layers: such as ``0,1,30-31``.
        options: other fields of :class:`SelectionOptions`.
    """
    from patternsearch.patterns.candidates import KINDS
    from patternsearch.selection.options import SelectionOptions

    allowed = KINDS if kinds is None else tuple(item.strip() for item in kinds.split(","))
    return SelectionOptions(
        kinds=cast("tuple[Kind, ...]", allowed),
        consumer=consumer or record.calibration.consumer,
        dense_layers=parse_layers(dense_layers),
        **options,
    )


def target_of(given: float | None, objective: Literal["time", "mass"]) -> float | None:
    """Return the target mass, or None for none; without one, only the objective time has any."""
    return 0.95 if given is None and objective == "time" else given


def parse_layers(text: str | None) -> tuple[int, ...]:
    """Parse ``0,1,30-31`` into ascending layers.

    Raises:
        InputError: an item is neither a layer nor an ascending range.
    """
    layers: set[int] = set()
    for item in (text or "").split(",") if text else ():
        first, dash, last = item.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() and len(end) <= _LAYER_DIGITS for end in ends):
            raise InputError(f"layer {item.strip()!r}: write layers as 0,1,30-31")
        low, high = map(int, ends)
        if high < low:
            raise InputError(f"layers {item.strip()!r} run backwards: write {high}-{low}")
        layers.update(range(low, high + 1))
    return tuple(sorted(layers))


def time_model_for(
    timings: Path | None, model: "ModelIdentity", dtype: str | None
) -> "TimeModel | None":
    """Load the time model of a model's attention shape; None without a table.

    Raises:
        TimingError: the table is invalid, does not cover the shape, or is of other kernels.
    """
    if timings is None:
        return None
    from patternsearch.timing.model import load_time_model

    return load_time_model(timings, dtype=dtype or model.dtype, head_dim=model.head_dim)
