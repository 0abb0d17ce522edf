# SPDX-License-Identifier: Apache-2.0
"""``patternsearch report``: a config as one page that works offline."""

from pathlib import Path
from typing import Annotated

import typer

from patternsearch.cli._options import JsonOpt
from patternsearch.cli._output import Output
from patternsearch.errors import InputError

_DATA = "Data"


def report(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A patternsearch config.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PAGE", help="HTML file to write.")
    ],
    against: Annotated[
        Path | None,
        typer.Option(metavar="B", help="Compare with this config or pattern file instead."),
    ] = None,
    scores: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Scores folder; by default the one beside the config.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    timings: Annotated[
        Path | None,
        typer.Option(
            metavar="TABLE",
            help="Timing table for the times of candidates; without one, counted work.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    serve_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Torch dtype that will serve, to look up times; by default the checkpoint's.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """Write a config as one self-contained HTML page, or the difference of two.

    The page opens offline and asks the network for nothing.

    Example: patternsearch report llama.yaml -o llama.html
    """
    from patternsearch.report.build import compare_page, report_page
    from patternsearch.report.page import write_page

    out = Output(as_json=as_json)
    if against is not None:
        if scores is not None or timings is not None:
            raise InputError("--against compares two configs: leave --scores and --timings out")
        page = compare_page(config, against)
    else:
        page = report_page(config, scores=scores, timings=timings, serve_dtype=serve_dtype)
    write_page(page, output)
    size = output.stat().st_size
    out.show(f"page      {output} ({size / 1e6:.1f} MB)")
    out.data({"page": str(output), "size_bytes": size})


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("report")(report)
