# SPDX-License-Identifier: Apache-2.0
"""``patternsearch select``: another config from the same scores; the model is never run.

Example: patternsearch select llama.scores -o llama.yaml --timings h200.json --target-mass 0.97
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from patternsearch.cli._options import JsonOpt, TpSizeOpt
from patternsearch.cli._output import Output
from patternsearch.cli._selection import (
    TARGET_MASS_HELP,
    ConsumerOpt,
    DenseLayersOpt,
    KindsOpt,
    MaxDensityOpt,
    RegionsOpt,
    ScoresArg,
    ServeDtypeOpt,
    StatisticOpt,
    TimingsOpt,
    selection_options,
    target_of,
    time_model_for,
)

if TYPE_CHECKING:
    from patternsearch.selection.select import SelectedHeads

_SHOWN_UPGRADES = 5
_ONE = {"pairs": "pair", "ms": "ms"}


def select(
    scores: ScoresArg,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="CONFIG", help="Config to write (.yaml or .json)."),
    ],
    target_mass: Annotated[float | None, typer.Option(help=TARGET_MASS_HELP)] = None,
    objective: Annotated[
        Literal["time", "mass"],
        typer.Option(
            help="time: cheapest that reaches the target. mass: most mass within a budget."
        ),
    ] = "time",
    budget_ms: Annotated[
        float | None,
        typer.Option(help="Budget of --objective mass: attention at the longest length, ms."),
    ] = None,
    budget_fraction: Annotated[
        float | None, typer.Option(help="Budget of --objective mass as a fraction of dense.")
    ] = None,
    statistic: StatisticOpt = "worst",
    regions: RegionsOpt = "each",
    kinds: KindsOpt = None,
    consumer: ConsumerOpt = None,
    max_density: MaxDensityOpt = None,
    dense_layers: DenseLayersOpt = None,
    tp_size: TpSizeOpt = 1,
    timings: TimingsOpt = None,
    serve_dtype: ServeDtypeOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Choose every head's pattern from scores and write a config; never runs the model.

    Example: patternsearch select llama.scores -o llama.yaml --timings h200.json
    """
    from patternsearch.cli._summary import kinds_by_layer
    from patternsearch.schema.io import dump_config
    from patternsearch.schema.scores import ScoresFolder
    from patternsearch.selection.document import load_run_record, select_config

    out = Output(as_json=as_json)
    folder = ScoresFolder(scores)
    record = load_run_record(folder)
    options = selection_options(
        record,
        target_mass=target_of(target_mass, objective),
        objective=objective,
        budget_ms=budget_ms,
        budget_fraction=budget_fraction,
        statistic=statistic,
        regions=regions,
        kinds=kinds,
        consumer=consumer,
        max_density=max_density,
        dense_layers=dense_layers,
        tp_size=tp_size,
    )
    cost = time_model_for(timings, record.model, serve_dtype)
    result = select_config(folder, options, cost, record)
    dump_config(result.config, output)
    out.show(kinds_by_layer(result.config), *_lines(result.selected), f"config    {output}")
    out.data({"config": str(output), "scores": str(scores), **result.as_document()})


def _lines(selected: "SelectedHeads") -> Iterator[Any]:
    from patternsearch.cli._summary import backends_line

    record, unit = selected.record, selected.unit
    if record.measured:
        yield f"times     predicted for {record.timings_device}, measured: true"
        for point in record.break_even:
            yield (
                f"attention {point.length} tokens: dense {point.dense_ms:.3f} ms, chosen "
                f"{point.sparse_ms:.3f} ms, its launches {point.launch_ms:.1f} ms"
            )
        yield backends_line(selected)
        yield f"dense     runs below {record.min_length} tokens (min_length)"
    else:
        share = selected.cost / selected.dense_cost
        yield f"work      {share:.1%} of the dense pairs at the longest length; measured: false"
    if record.tp_size > 1:
        for name, ranks in (("before", selected.ranks_before), ("after", selected.ranks_after)):
            shares = ", ".join(f"{cost:.4g}" for cost in ranks.by_rank)
            yield (
                f"ranks     {name}: slowest {ranks.slowest:.4g} {unit}, imbalance "
                f"{ranks.imbalance:.1%} ({shares})"
            )
    if selected.shadow_price is not None:
        yield (
            f"price     {selected.shadow_price:.3g} mass of one head per {_ONE[unit]}; "
            f"proved best to {selected.optimality_gap:.2g}"
        )
        for upgrade in selected.upgrades[:_SHOWN_UPGRADES]:
            yield (
                f"upgrade   layer {upgrade.layer} head {upgrade.head} to {upgrade.to}: "
                f"+{upgrade.extra_mass:.4f} mass for {upgrade.extra_cost:.4g} {unit}"
            )


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("select")(select)
