# SPDX-License-Identifier: Apache-2.0
"""``patternsearch frontier``: what quality costs, from scores alone.

Example: patternsearch frontier llama.scores --timings h200.json
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from patternsearch.cli._options import JsonOpt
from patternsearch.cli._output import Output
from patternsearch.cli._selection import (
    ConsumerOpt,
    DenseLayersOpt,
    KindsOpt,
    MaxDensityOpt,
    RegionsOpt,
    ScoresArg,
    ServeDtypeOpt,
    StatisticOpt,
    TargetMassOpt,
    TimingsOpt,
    selection_options,
    time_model_for,
)
from patternsearch.errors import InputError

if TYPE_CHECKING:
    from patternsearch.selection.frontier import Frontier


def frontier(
    scores: ScoresArg,
    targets: Annotated[
        str | None, typer.Option(metavar="LIST", help="Target masses, such as 0.9,0.95,0.99.")
    ] = None,
    target_mass: TargetMassOpt = 0.95,
    statistic: StatisticOpt = "worst",
    regions: RegionsOpt = "each",
    kinds: KindsOpt = None,
    consumer: ConsumerOpt = None,
    max_density: MaxDensityOpt = None,
    dense_layers: DenseLayersOpt = None,
    timings: TimingsOpt = None,
    serve_dtype: ServeDtypeOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Show target mass against speed-up and density, and estimator against estimator.

    The estimator table is made at --target-mass.

    Example: patternsearch frontier llama.scores --timings h200.json
    """
    from patternsearch.schema.scores import ScoresFolder
    from patternsearch.selection.document import load_run_record
    from patternsearch.selection.frontier import DEFAULT_TARGETS
    from patternsearch.selection.frontier import frontier as sweep

    out = Output(as_json=as_json)
    folder = ScoresFolder(scores)
    record = load_run_record(folder)
    options = selection_options(
        record,
        target_mass=target_mass,
        statistic=statistic,
        regions=regions,
        kinds=kinds,
        consumer=consumer,
        max_density=max_density,
        dense_layers=dense_layers,
    )
    cost = time_model_for(timings, record.model, serve_dtype)
    found = sweep(folder, options, cost, _parse_targets(targets) or DEFAULT_TARGETS)
    out.show(*_tables(found))
    out.data(found.as_document())


def _parse_targets(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(item) for item in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"targets {text!r}: write them as 0.9,0.95,0.99") from None


def _tables(found: "Frontier") -> list[Any]:
    from patternsearch.cli._tables import KIND_HEADS, plain_table
    from patternsearch.exchange.words import number

    source = f"predicted for {found.device}" if found.measured else "counted pairs, measured: false"
    gain = "speed-up" if found.measured else "work saved"
    names = ("target", "length", gain, "density", "mean mass", *KIND_HEADS.values())
    curve = plain_table(f"What a target costs ({source})", *names)
    for point in found.points:
        curve.add_row(
            f"{point.target_mass:g}",
            str(point.length),
            f"{point.speed_up:.2f}×",
            f"{point.density:.3f}",
            f"{point.mass_mean:.4f}",
            *(str(point.heads_by_kind[kind]) for kind in KIND_HEADS),
        )
    title = f"Estimators, equal budgets (cost at target {found.target_mass:g}, fraction of dense)"
    names = ("estimator", "rows", "length", "budgets", "density", "online\nmass", "index\ngap",
             "index\nms" if found.measured else "index\nproducts", "cost")  # fmt: skip
    estimators = plain_table(title, *names, left=("estimator", "rows"), gap=1)
    for row in found.estimators:
        estimators.add_row(
            f"{KIND_HEADS[row.kind]} {row.estimator}{' T128' if row.tile == 128 else ''}",
            "+".join(str(rows) for rows in (row.last_q, row.spread_rows) if rows is not None),
            str(row.length),
            str(row.num_budgets),
            f"{row.density:.3f}",
            f"{row.mass_online:.4f}",
            number(row.gap, 4),
            f"{row.index_cost:.3g}",
            f"{row.cost_at_target:.3f}",
        )
    return [curve, estimators] if found.estimators else [curve]


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("frontier")(frontier)
