# SPDX-License-Identifier: Apache-2.0
"""``patternsearch import``: an engine's pattern file as a config."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from patternsearch.cli._options import JsonOpt, OfflineOpt, TrustOpt
from patternsearch.cli._output import Output, stderr_console
from patternsearch.cli._progress import progress_for
from patternsearch.errors import InputError


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A MInference pattern file.")],
    source: Annotated[
        Literal["minference", "vllm", "sglang"],
        typer.Option("--from", help="The engine that runs the file."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The config to write.")],
    model: Annotated[
        str | None,
        typer.Option(help="The model it is for; not needed for an unedited export of ours."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file that is not a patternsearch config.")
    ] = False,
    offline: OfflineOpt = False,
    trust: TrustOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Make a config of a pattern file; an export of ours comes back without loss.

    Example: patternsearch import best_pattern.json --from minference --model DIR -o model.yaml
    """
    from patternsearch.exchange.importing import (
        find_own_export,
        import_pattern_file,
        patterns_of_file,
    )
    from patternsearch.exchange.pattern_file import read_pattern_file
    from patternsearch.schema.io import dump_config

    out = Output(as_json=as_json)
    own = find_own_export(file) if file.exists() else None
    if own is not None and not own.is_edited and own.sidecar.consumer == source:
        config = own.sidecar.config
        out.note(f"{file} is an unedited export of patternsearch: its config comes back whole")
    else:
        if own is not None:
            why = "was edited since its export" if own.is_edited else "was exported for another"
            out.warn(f"{file} {why}: its masses and provenance are left behind")
        # Faults of the file come before the model's weights are read.
        patterns_of_file(read_pattern_file(file), source, None, name=str(file))
        if model is None:
            raise InputError("--model is needed: which model this bare pattern file is for")
        from patternsearch.model.identity import describe_model

        with progress_for(stderr_console()) as progress:
            identity = describe_model(
                model, trust_remote_code=trust, offline=offline, progress=progress
            )
        config, patterns = import_pattern_file(file, source, identity)
        out.note(f"scores of the file: {patterns.score_kind}; no masses were measured")
        if patterns.num_bumped:
            out.note(
                f"{patterns.num_bumped} heads say 30 columns, which {source} runs as 130: "
                "the config says 130"
            )
    dump_config(config, output, force=force)
    out.note(f"wrote {output}")
    out.data(
        {
            "path": str(output),
            "is_own_export": config.imported is None,
            "imported": config.imported and config.imported.model_dump(mode="json"),
        }
    )


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("import")(import_)
