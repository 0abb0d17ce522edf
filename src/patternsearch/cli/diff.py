# SPDX-License-Identifier: Apache-2.0
"""``patternsearch diff``: what differs between two configs, by meaning."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from patternsearch.cli._options import JsonOpt
from patternsearch.cli._output import Output


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="Config, export or MInference JSON.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same; what A is compared with.")],
    form: Annotated[
        Literal["table", "json", "markdown"], typer.Option("--format", help="Output form.")
    ] = "table",
    fail_on: Annotated[
        Literal["any", "pattern", "budget", "identity", "never"],
        typer.Option(help="Exit with 1 if there is a difference of this sort."),
    ] = "any",
    as_json: JsonOpt = False,
) -> None:
    """Show what differs between two configs: model, calibration, selection, heads.

    Exit code 0: nothing that --fail-on minds; 1: differences; 2: a file cannot be read.

    Example: patternsearch diff old.yaml new.yaml --fail-on budget
    """
    from patternsearch.cli._diff_tables import diff_tables
    from patternsearch.exchange.diff import diff_files
    from patternsearch.exchange.diff_output import diff_document, diff_markdown

    result = diff_files(a, b)
    out = Output(as_json=as_json or form == "json")
    if out.as_json:
        out.data(diff_document(result))
    elif form == "markdown":
        out.text(diff_markdown(result))
    else:
        out.show(*diff_tables(result))
    if result.differs(fail_on):
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("diff")(diff)
