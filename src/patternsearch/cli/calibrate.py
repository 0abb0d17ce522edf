# SPDX-License-Identifier: Apache-2.0
"""``patternsearch calibrate``: from a model and a recipe to a config and its scores.

Example: patternsearch calibrate ./Llama-3.1-8B -o llama.yaml --lengths 8k,32k
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from patternsearch.cli._options import (
    DeviceOpt,
    DtypeOpt,
    JsonOpt,
    ModelArg,
    OfflineOpt,
    TpSizeOpt,
    TrustOpt,
    parse_fraction,
    parse_lengths,
)
from patternsearch.cli._output import Output, stderr_console
from patternsearch.cli._progress import progress_for
from patternsearch.cli._selection import TARGET_MASS_HELP, ServeDtypeOpt, target_of

_SEARCH = "Search"
_SELECT = "Selection"
_RUN = "Run"


def calibrate(
    model: ModelArg,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="CONFIG", help="Config to write (.yaml or .json)."),
    ],
    recipe: Annotated[
        str, typer.Option(help="Recipe file or name.", rich_help_panel=_SEARCH)
    ] = "offline",
    grid: Annotated[
        str, typer.Option(help="Budget grid, file or name.", rich_help_panel=_SEARCH)
    ] = "default",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Sample lengths in tokens, such as 4096,32768; by default the recipe's.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Samples a length; by default the recipe's.", rich_help_panel=_SEARCH),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="By default the recipe's.", rich_help_panel=_SEARCH)
    ] = None,
    consumer: Annotated[
        Literal["patternsearch", "minference", "vllm", "sglang"],
        typer.Option(help="Whose kernels will run the config.", rich_help_panel=_SEARCH),
    ] = "patternsearch",
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Score oracle indices too.", rich_help_panel=_SEARCH)
    ] = False,
    row_sample: Annotated[
        str,
        typer.Option(
            metavar="FRACTION",
            help="Score this part of the query rows, such as 1/8; masses get standard errors.",
            rich_help_panel=_SEARCH,
        ),
    ] = "1",
    target_mass: Annotated[
        float | None, typer.Option(help=TARGET_MASS_HELP, rich_help_panel=_SELECT)
    ] = None,
    objective: Annotated[
        Literal["time", "mass"],
        typer.Option(
            help="time: cheapest that reaches the target. mass: most mass within a budget.",
            rich_help_panel=_SELECT,
        ),
    ] = "time",
    budget_fraction: Annotated[
        float | None,
        typer.Option(help="Budget of --objective mass, of dense.", rich_help_panel=_SELECT),
    ] = None,
    timings: Annotated[
        Path | None,
        typer.Option(
            metavar="TABLE",
            help="Timing table; without one, work decides.",
            rich_help_panel=_SELECT,
        ),
    ] = None,
    serve_dtype: ServeDtypeOpt = None,
    tp_size: TpSizeOpt = 1,
    tp_ranks: Annotated[
        int,
        typer.Option(
            help="Under torchrun: processes that hold one copy of the model together.",
            min=1,
            rich_help_panel=_RUN,
        ),
    ] = 1,
    device: DeviceOpt = None,
    dtype: DtypeOpt = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--fresh", help="Continue an earlier run, or discard it.", rich_help_panel=_RUN
        ),
    ] = True,
    allow_extrapolation: Annotated[
        bool,
        typer.Option(
            "--allow-extrapolation",
            help="Allow lengths beyond the model's positions.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    trust_remote_code: TrustOpt = False,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help="Read a checkpoint that has only .bin files, as plain tensors.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    offline: OfflineOpt = False,
    log_json: Annotated[
        bool,
        typer.Option("--log-json", help="Progress as JSON events on stderr.", rich_help_panel=_RUN),
    ] = False,
    as_json: JsonOpt = False,
) -> None:
    """Score every head's candidates on real text and write the config that meets the target.

    Example: patternsearch calibrate ./Llama-3.1-8B -o llama.yaml --lengths 8k,32k

    Several GPUs: torchrun --nproc-per-node 8 -m patternsearch calibrate … (add --tp-ranks 4 for
    two copies of the model on four GPUs each).
    """
    from patternsearch.calibration.clock import PhaseClock

    clock = PhaseClock()
    from patternsearch.calibration.api import calibrate as run_calibration
    from patternsearch.calibration.distributed import PeerError, is_first_process
    from patternsearch.calibration.request import CalibrationRequest
    from patternsearch.cli._summary import calibration_summary
    from patternsearch.selection.options import SelectionOptions
    from patternsearch.timing.devices import default_device

    out = Output(as_json=as_json)
    request = CalibrationRequest(
        model=model,
        output=output,
        recipe=recipe,
        grid=grid,
        lengths=parse_lengths(lengths),
        samples=samples,
        seed=seed,
        consumer=consumer,
        oracle=oracle,
        row_sample=parse_fraction(row_sample),
        tp_ranks=tp_ranks,
        device=device or default_device(),
        dtype=dtype,
        allow_extrapolation=allow_extrapolation,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        offline=offline,
        fresh=not resume,
    )
    options = SelectionOptions(
        target_mass=target_of(target_mass, objective),
        objective=objective,
        budget_fraction=budget_fraction,
        consumer=consumer,
        tp_size=tp_size,
    )
    try:
        if not is_first_process():
            run_calibration(request, options, clock=clock)
            return
        with progress_for(stderr_console(), log_json=log_json) as progress:
            outcome = run_calibration(
                request,
                options,
                timings=timings,
                serve_dtype=serve_dtype,
                progress=progress,
                note=out.note,
                clock=clock,
            )
    except PeerError as stopped:
        if is_first_process():
            raise
        raise typer.Exit(stopped.exit_code) from None
    except KeyboardInterrupt:
        if not is_first_process():
            raise typer.Exit(130) from None
        out.note("interrupted: finished samples are kept; run the same command again to continue")
        raise typer.Exit(130) from None
    assert outcome is not None
    out.show(*calibration_summary(outcome))
    out.data(outcome.as_document())


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("calibrate")(calibrate)
