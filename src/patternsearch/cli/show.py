# SPDX-License-Identifier: Apache-2.0
"""``patternsearch show``: a config on one screen."""

from pathlib import Path
from typing import Annotated

import typer

from patternsearch.cli._options import JsonOpt
from patternsearch.cli._output import Output
from patternsearch.errors import InputError


def show(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A patternsearch config.")],
    layer: Annotated[int | None, typer.Option(help="Show every head of this layer.")] = None,
    tp_size: Annotated[
        int | None, typer.Option(help="Show one rank of this many; the config's by default.", min=1)
    ] = None,
    rank: Annotated[int | None, typer.Option(help="The rank to show, from 0.", min=0)] = None,
    as_json: JsonOpt = False,
) -> None:
    """Show a config: model, calibration, selection, a map of its heads and the worst of them.

    Example: patternsearch show model.yaml --tp-size 4 --rank 1
    """
    from patternsearch.cli import _config_view as view
    from patternsearch.exchange.summary import config_document, layer_heads, rank_view, summarise
    from patternsearch.schema.io import load_config

    if layer is not None and (rank is not None or tp_size is not None):
        raise InputError("--layer and --rank answer different questions: give one of them")
    if tp_size is not None and rank is None:
        raise InputError("--tp-size needs --rank: which of the ranks to show")
    out = Output(as_json=as_json)
    loaded = load_config(config)
    if layer is not None:
        heads = layer_heads(loaded, layer)
        out.show(view.layer_view(layer, heads))
        out.data({"layer": layer, "heads": [head.model_dump(mode="json") for head in heads]})
    elif rank is not None:
        mine = rank_view(loaded, tp_size or loaded.tensor_parallel.size, rank)
        out.show(*view.rank_tables(loaded, mine))
        out.data(
            {
                "size": mine.size,
                **mine.slice.model_dump(mode="json"),
                "kinds": mine.kinds,
                "density": mine.density,
                "map": list(mine.map),
                "slowest": mine.slowest and mine.slowest.model_dump(mode="json"),
            }
        )
    else:
        out.show(*view.config_view(loaded, summarise(loaded)))
        out.data(config_document(loaded))


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("show")(show)
