# SPDX-License-Identifier: Apache-2.0
"""``patternsearch env``: what a bug report needs to know of this machine."""

import typer

from patternsearch.cli._options import JsonOpt
from patternsearch.cli._output import Output


def env(as_json: JsonOpt = False) -> None:
    """Show versions and devices, for bug reports.

    Example: patternsearch env --json
    """
    from patternsearch.cli._tables import plain_table
    from patternsearch.timing.environment import describe_environment

    out = Output(as_json=as_json)
    facts = describe_environment()
    table = plain_table("", "name", "value", left=("name", "value"), heads=False)
    for name, value in facts.items():
        table.add_row(name, "not installed" if value is None else str(value))
    out.show(table)
    out.data(facts)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("env")(env)
