# SPDX-License-Identifier: Apache-2.0
"""``patternsearch schema``: the JSON Schema of the config document."""

import typer

from patternsearch.cli._options import JsonOpt
from patternsearch.cli._output import Output


def schema(as_json: JsonOpt = True) -> None:
    """Print the JSON Schema of the config document.

    Example: patternsearch schema > config.schema.json
    """
    from patternsearch.schema.json_schema import config_json_schema_text

    Output(as_json=as_json).text(config_json_schema_text())


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("schema")(schema)
