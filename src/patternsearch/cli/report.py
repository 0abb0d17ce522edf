# SPDX-License-Identifier: Apache-2.0
"""``patternsearch report``: a config as one page that works offline."""

from pathlib import Path
from typing import Annotated, Any

import typer

from patternsearch.cli._options import JsonOpt
from patternsearch.cli._output import Output
from patternsearch.errors import InputError

_DATA = "Data"
_DRAW = "Drawings"

DrawDeviceOpt = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Torch device of --thumbnails; by default cuda if there is one, else cpu.",
        rich_help_panel=_DRAW,
    ),
]


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
    thumbnails: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Run this model once on a calibration sample and draw heads' attention.",
            rich_help_panel=_DRAW,
        ),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Heads to draw, such as 3:5,0:1 (layer:head); by default two of each kind.",
            rich_help_panel=_DRAW,
        ),
    ] = None,
    device: DrawDeviceOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Write a config as one self-contained HTML page, or the difference of two.

    The page opens offline and asks the network for nothing.

    Example: patternsearch report llama.yaml -o llama.html
    """
    from patternsearch.report.build import compare_page, report_page
    from patternsearch.report.page import write_page
    from patternsearch.schema.scores import scores_folder_of

    out = Output(as_json=as_json)
    if against is not None:
        if any(value is not None for value in (scores, timings, thumbnails, heads)):
            raise InputError(
                "--against compares two configs: leave --scores, --timings, --thumbnails and "
                "--heads out"
            )
        page = compare_page(config, against)
    else:
        if heads is not None and thumbnails is None:
            raise InputError("--heads names heads to draw: give the model with --thumbnails")
        drawings = None if thumbnails is None else _draw(config, scores, thumbnails, heads, device)
        page = report_page(
            config, scores=scores, timings=timings, serve_dtype=serve_dtype, thumbnails=drawings
        )
        beside = scores_folder_of(config).root
        if scores is None and not beside.exists():
            out.note(
                f"no scores at {beside}: the page has no curves, samples and frontier "
                "(--scores names another folder)"
            )
    write_page(page, output)
    size = output.stat().st_size
    out.show(f"page      {output} ({size / 1e6:.1f} MB)")
    out.data({"page": str(output), "size_bytes": size})


def _draw(
    config: Path, scores: Path | None, model: str, heads: str | None, device: str | None
) -> dict[str, Any]:
    from patternsearch.model.loading import load_model
    from patternsearch.report.thumbnails import draw_heads, pick_heads
    from patternsearch.schema.io import load_config
    from patternsearch.schema.scores import ScoresFolder, scores_folder_of
    from patternsearch.timing.devices import default_device

    loaded_config = load_config(config)
    folder = scores_folder_of(config) if scores is None else ScoresFolder(scores)
    if not folder.samples.exists():
        raise InputError(f"{folder.root} has no samples.parquet: give the scores with --scores")
    wanted = pick_heads(loaded_config) if heads is None else parse_heads(heads)
    loaded = load_model(model, device=device or default_device(), require_tokenizer=False)
    return draw_heads(loaded_config, folder, loaded, wanted)


def parse_heads(text: str) -> tuple[tuple[int, int], ...]:
    """Parse ``3:5,0:1`` into (layer, head) pairs.

    Raises:
        InputError: an item is not layer:head.
    """
    heads = []
    for item in text.split(","):
        layer, colon, head = item.strip().partition(":")
        if not (colon and layer.isdecimal() and head.isdecimal()):
            raise InputError(f"head {item.strip()!r}: write heads as 3:5,0:1 (layer:head)")
        heads.append((int(layer), int(head)))
    return tuple(dict.fromkeys(heads))


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("report")(report)
