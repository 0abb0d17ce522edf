# SPDX-License-Identifier: Apache-2.0
"""``patternsearch export``: a config as the file that an engine reads."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from patternsearch.cli._options import JsonOpt
from patternsearch.cli._output import Output
from patternsearch.errors import InputError


def export(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A patternsearch config.")],
    to: Annotated[
        Literal["minference", "vllm", "sglang"],
        typer.Option("--to", help="The engine that will read the file."),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The JSON file, or the model's folder.")
    ],
    reselect: Annotated[
        bool, typer.Option("--reselect", help="Select anew among what the engine can run.")
    ] = False,
    scores: Annotated[
        Path | None, typer.Option(help="Scores for --reselect; by default beside CONFIG.")
    ] = None,
    timings: Annotated[
        Path | None, typer.Option(help="Timing table for --reselect; without, work decides.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file that patternsearch did not write.")
    ] = False,
    as_json: JsonOpt = False,
) -> None:
    """Write a config for MInference, vLLM or SGLang, with a sidecar that keeps the rest.

    Example: patternsearch export model.yaml --to minference -o best_pattern.json
    """
    from patternsearch.exchange.export import export_config, write_export
    from patternsearch.schema.io import load_config
    from patternsearch.schema.scores import ScoresFolder, scores_folder_of

    if not reselect and (scores is not None or timings is not None):
        raise InputError("--scores and --timings are for --reselect: add it, or leave them out")
    out = Output(as_json=as_json)
    loaded = load_config(config)
    if reselect:
        from patternsearch.cli._selection import time_model_for
        from patternsearch.exchange.reselect import reselect as select_anew

        folder = ScoresFolder(scores) if scores is not None else scores_folder_of(config)
        cost = time_model_for(timings, loaded.model, None)
        loaded = select_anew(loaded, to, folder, cost)
    done = export_config(loaded, to)
    path, sidecar = write_export(done, output, force=force)
    for note in done.notes:
        out.note(f"note: {note}")
    out.note(f"wrote {path} and its sidecar {sidecar}, for {done.consumer.title}")
    if done.model_config:
        out.note("merge this into the model's config.json:")
        if not as_json:
            out.text(json.dumps(done.model_config, indent=2) + "\n")
    out.data(
        {
            "path": str(path),
            "sidecar": str(sidecar),
            "consumer": to,
            "model_config": done.model_config,
            "notes": list(done.notes),
        }
    )


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("export")(export)
