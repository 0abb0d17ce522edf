# SPDX-License-Identifier: Apache-2.0
"""``patternsearch validate``: does this config still fit this model, and is it still good?

Example: patternsearch validate llama.yaml ./Llama-3.1-8B --level quality
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from patternsearch.cli._options import (
    DeviceOpt,
    DtypeOpt,
    JsonOpt,
    LengthsOpt,
    ModelArg,
    OfflineOpt,
    RecipeOpt,
    SamplesOpt,
    TrustOpt,
    parse_lengths,
)
from patternsearch.cli._output import Output, stderr_console
from patternsearch.cli._progress import progress_for


class Level(StrEnum):
    """How far to check; each level includes the ones before."""

    identity = "identity"
    mapping = "mapping"
    quality = "quality"
    task = "task"


class Engine(StrEnum):
    """Whose rules the config must keep."""

    minference = "minference"
    vllm = "vllm"
    sglang = "sglang"


def validate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Config to check.")],
    model: ModelArg,
    level: Annotated[
        Level,
        typer.Option(
            help="identity: files only. mapping: every head finds itself. quality: captured mass "
            "and output error on held-out samples. task: the whole model."
        ),
    ] = Level.mapping,
    tp_size: Annotated[
        int, typer.Option(help="Tensor-parallel size of the deployment.", min=1)
    ] = 1,
    consumer: Annotated[
        Engine | None, typer.Option(help="Also check what this engine would trip over.")
    ] = None,
    weights: Annotated[
        bool,
        typer.Option("--weights/--no-weights", help="Digest the weights (reads every byte)."),
    ] = True,
    recipe: RecipeOpt = None,
    lengths: LengthsOpt = None,
    samples: SamplesOpt = None,
    device: DeviceOpt = None,
    dtype: DtypeOpt = None,
    trust_remote_code: TrustOpt = False,
    offline: OfflineOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Check a config against a model.

    Exit code 0: nothing says no; 1: a check differs; 2: bad input; 3: something is missing here.

    Example: patternsearch validate llama.yaml ./Llama-3.1-8B --level quality

    Running ranks: torchrun --nproc-per-node 4 -m patternsearch validate … --tp-size 4 loads a shard
    a rank and compares the heads that each holds with the entries that it reads.
    """
    from patternsearch.calibration.distributed import PeerError, is_first_process, world_size
    from patternsearch.cli._validate_view import validation_tables
    from patternsearch.timing.devices import default_device
    from patternsearch.validation.api import ValidationRequest, validate_on_ranks
    from patternsearch.validation.api import validate as run_validation

    out = Output(as_json=as_json)
    request = ValidationRequest(
        config=config,
        model=model,
        level=level.value,
        weights=weights,
        tp_size=tp_size,
        consumer=consumer.value if consumer else None,
        recipe=recipe,
        lengths=parse_lengths(lengths),
        samples=samples,
        device=device or default_device(),
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        offline=offline,
    )
    run = run_validation if world_size() == 1 else validate_on_ranks
    try:
        if not is_first_process():
            run(request)
            return
        with progress_for(stderr_console()) as progress:
            report = run(request, progress=progress, note=out.note)
    except PeerError as stopped:
        if is_first_process():
            raise
        raise typer.Exit(stopped.exit_code) from None
    assert report is not None
    out.show(*validation_tables(report))
    out.data(report.model_dump(mode="json"))
    raise typer.Exit(report.exit_code)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("validate")(validate)
