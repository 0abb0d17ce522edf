# SPDX-License-Identifier: Apache-2.0
"""``patternsearch evaluate``: dense against sparse, in quality and in prefill time.

Example: patternsearch evaluate ./Llama-3.1-8B --config llama.yaml
"""

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


def evaluate(
    model: ModelArg,
    config: Annotated[Path, typer.Option("--config", metavar="CONFIG", help="Config to run.")],
    recipe: RecipeOpt = None,
    lengths: LengthsOpt = None,
    samples: SamplesOpt = None,
    quality: Annotated[
        bool,
        typer.Option("--quality/--no-quality", help="Compare logits, retrieval, continuations."),
    ] = True,
    repetitions: Annotated[
        int, typer.Option(help="Timed runs a length; one warm-up run is not counted.", min=1)
    ] = 3,
    timings: Annotated[
        Path | None,
        typer.Option(
            metavar="TABLE", help="This GPU's timing table: run heads as it measured fastest."
        ),
    ] = None,
    device: DeviceOpt = None,
    dtype: DtypeOpt = None,
    trust_remote_code: TrustOpt = False,
    offline: OfflineOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Run a model dense and sparse: perplexity, logits, retrieval, and where prefill time goes.

    Example: patternsearch evaluate ./Llama-3.1-8B --config llama.yaml --lengths 8k,32k
    """
    from patternsearch.cli._validate_view import evaluation_tables
    from patternsearch.timing.devices import default_device
    from patternsearch.validation.evaluation import EvaluationRequest
    from patternsearch.validation.evaluation import evaluate as run_evaluation

    out = Output(as_json=as_json)
    request = EvaluationRequest(
        model=model,
        config=config,
        lengths=parse_lengths(lengths),
        samples=samples,
        recipe=recipe,
        quality=quality,
        repetitions=repetitions,
        device=device or default_device(),
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        offline=offline,
        timings=timings,
    )
    with progress_for(stderr_console()) as progress:
        report = run_evaluation(request, progress=progress, note=out.warn)
    out.show(*evaluation_tables(report))
    out.data(report.model_dump(mode="json"))


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("evaluate")(evaluate)
