# SPDX-License-Identifier: Apache-2.0
"""The run loop: samples through the model, every layer scored as it passes, one part a sample.

The forward stays dense. Each full-attention layer hands its q and k to the scorer and is then
forgotten, so memory does not grow with depth. A finished sample is on disk before the next one
starts; a run that is cut short continues where it stopped and ends with the same files. Of
several processes the leader runs this, the others ``follower.follow``.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

from patternsearch._version import __version__
from patternsearch.calibration.clock import PhaseClock
from patternsearch.calibration.distributed import Team
from patternsearch.calibration.estimate import WorkEstimate, estimate_work, sample_work
from patternsearch.calibration.loading import import_model_library, open_for_team
from patternsearch.calibration.lock import exclusive
from patternsearch.calibration.loop import Meter, rank_report, score_share
from patternsearch.calibration.plan import ResolvedRecipe, resolve
from patternsearch.calibration.recipes import HubSource, Recipe, load_recipe, recipe_path
from patternsearch.calibration.request import CalibrationRequest, score_request
from patternsearch.calibration.run_log import RunLog
from patternsearch.calibration.samples import Sample, draw_samples
from patternsearch.calibration.shares import balanced_order, share_of
from patternsearch.calibration.store import ScoresStore
from patternsearch.calibration.tokens import Tokenizer
from patternsearch.errors import InputError, PatternsearchError
from patternsearch.model.background import Background
from patternsearch.model.fingerprints import fingerprint_heads
from patternsearch.model.loading import LoadedModel
from patternsearch.patterns.grids import Grid
from patternsearch.progress import Progress, Silent
from patternsearch.schema.config import Calibration, ModelIdentity, Provenance, SampleRecord
from patternsearch.schema.io import load_grid
from patternsearch.schema.scores import ScoresFolder, scores_folder_of
from patternsearch.scoring.engine import LayerScorer
from patternsearch.selection.document import RunRecord
from patternsearch.timing.environment import describe_environment

__all__ = ["CalibrationRun", "calibrate_scores"]

FINGERPRINT_SEED = 20260101

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """What a finished run knows beside its scores folder.

    Attributes:
        folder: the scores.
        loaded: the model, still in memory.
        record: what a config is made of beside its heads.
        num_resumed: samples that an earlier process had finished.
        log: writes run.json; what is clocked later can be added to it.
    """

    folder: ScoresFolder
    loaded: LoadedModel
    record: RunRecord
    num_resumed: int
    log: RunLog

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by phase, over all processes that led this run."""
        return self.log.seconds()


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The request with its files read."""

    request: CalibrationRequest
    recipe: Recipe
    resolved: ResolvedRecipe
    grid: Grid
    grid_sha256: str

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(counts.tokens for counts in self.resolved.lengths)


def calibrate_scores(
    request: CalibrationRequest,
    *,
    team: Team | None = None,
    clock: PhaseClock | None = None,
    progress: Progress | None = None,
    note: Note | None = None,
) -> CalibrationRun:
    """Score every sample of the recipe and return the finished run.

    Args:
        request: what to do.
        team: the processes of the run, of which this one is the leader; None runs alone.
        clock: gets the phases; None is a new one.
        progress: receives the tasks ``digest``, ``samples`` and ``calibrate``; the first two from
            threads of their own.
        note: told in one line each what a person wants to know before the work starts.

    Raises:
        PatternsearchError: bad input or environment; what was finished stays on disk.
        KeyboardInterrupt: as it came; what was finished stays on disk.
    """
    team = team or Team()
    assert team.is_leader
    inputs = _read_inputs(request)
    folder = scores_folder_of(request.output)
    ScoresStore.refuse_foreign(folder)
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder.root} cannot be made ({error.strerror}): choose an output you may write to"
        ) from None
    with exclusive(folder.root / ".lock"):
        team.share("checked", True)
        clock = clock or PhaseClock()
        return _run(inputs, folder, team, clock, progress or Silent(), note or (lambda _: None))


def _read_inputs(request: CalibrationRequest) -> _Inputs:
    recipe = load_recipe(request.recipe)
    resolved = resolve(recipe, lengths=request.lengths, samples=request.samples, seed=request.seed)
    if request.offline and any(isinstance(source, HubSource) for source in resolved.sources):
        raise InputError(
            f"recipe {recipe.name!r} streams from a hub and --offline forbids it: "
            "use a recipe of local sources, such as offline"
        )
    grid, grid_sha256 = load_grid(request.grid)
    inputs = _Inputs(request, recipe, resolved, grid, grid_sha256)
    for length in inputs.lengths:
        if length < grid.min_tokens:
            raise InputError(
                f"length {length} is below the {grid.min_tokens} tokens at which the budgets of "
                f"grid {grid.name!r} begin to mean something: use longer samples or another grid"
            )
    return inputs


def _run(
    inputs: _Inputs,
    folder: ScoresFolder,
    team: Team,
    clock: PhaseClock,
    progress: Progress,
    note: Note,
) -> CalibrationRun:
    request = inputs.request
    started = time.time()
    scorer_backend = _backend_for(request.device)
    scorer = LayerScorer(
        inputs.grid.expand(),
        oracle=request.oracle,
        consumer=request.consumer,
        backend=scorer_backend,
        row_sample=request.row_sample,
        row_seed=inputs.resolved.seed,
    )
    with clock.phase("start"):
        import_model_library(team.device(request.device))
    with clock.phase("load"):
        opened = open_for_team(request, team, leads=True)
    extrapolated = _check_positions(inputs.lengths, opened.identity, request.allow_extrapolation)
    # Tokenizing needs no weights.
    with Background(lambda tell: _draw(inputs, opened.tokenizer, tell), progress) as drawing:
        with clock.phase("load"):
            loaded = opened.load(progress=progress)
        clock.device = loaded.device
        store = ScoresStore(folder, _score_request(inputs, loaded, scorer_backend))
        resumed = store.open(fresh=request.fresh)
        before = store.read_run() if resumed else {}
        for skipped in inputs.resolved.skipped:
            note(f"source {skipped.name} is left out: {skipped.reason}")
        with clock.phase("draw"):
            samples = drawing.result()
            _keep_samples(samples, store)
    log = RunLog(
        store=store,
        clock=clock,
        document=_run_document(inputs, loaded, samples, scorer_backend),
        earlier=before.get("timings", {}),
        dates={"started": before.get("dates", {}).get("started", started), "finished": None},
    )
    log.write()
    waiting = [i for i, sample in enumerate(samples) if not store.has_part(i, sample)]
    work = [sample_work(loaded, samples[i].num_tokens, oracle=request.oracle) for i in waiting]
    order = [waiting[at] for at in balanced_order(work, team.num_copies)]
    team.share(
        "plan",
        {
            "request": store.request,
            "grid": inputs.grid.model_dump(mode="json"),
            "backend": scorer_backend,
            "row_seed": inputs.resolved.seed,
            "fingerprint_seed": FINGERPRINT_SEED,
            "order": order,
        },
    )
    with clock.phase("fingerprint"):
        fingerprints = fingerprint_heads(loaded, seed=FINGERPRINT_SEED)
    if len(waiting) < len(samples):
        note(f"{len(samples) - len(waiting)} of {len(samples)} samples are already scored")
    note(_estimate(inputs, loaded, team, [samples[i] for i in waiting], clock).sentence())
    share = share_of(order, team.copy, team.num_copies) if team.size > 1 else waiting
    meter = Meter(team, loaded, progress, sum(work))
    meter.start()
    try:
        score_share(
            samples,
            share,
            store=store,
            loaded=loaded,
            scorer=scorer,
            clock=clock,
            meter=meter,
        )
        with clock.phase("wait"):
            team.finish(rank_report(loaded, clock, share))
            team.wait(lambda ranks: meter.refresh(f"waiting for {ranks} ranks"))
    except BaseException:
        with suppress(PatternsearchError):  # the disk may be what failed
            log.write()
        raise
    meter.finish()
    store.remove_other_parts(len(samples))
    log.dates["finished"] = time.time()
    record = RunRecord(
        model=loaded.identity,
        calibration=_calibration(inputs, samples, extrapolated),
        fingerprints=fingerprints,
        provenance=_provenance(log.document, scorer_backend),
    )
    log.document |= record.model_dump(mode="json")
    log.document["ranks"] = team.reports() or [rank_report(loaded, clock, share)]
    log.status = "complete"
    log.write()
    return CalibrationRun(
        folder=folder,
        loaded=loaded,
        record=record,
        num_resumed=len(samples) - len(waiting),
        log=log,
    )


def _backend_for(device: str) -> Literal["torch", "triton"]:
    if device == "auto":
        return "triton" if torch.cuda.is_available() else "torch"
    return "triton" if device.startswith("cuda") else "torch"


def _draw(inputs: _Inputs, tokenizer: Tokenizer | None, progress: Progress) -> list[Sample]:
    request = inputs.request
    assert tokenizer is not None
    return draw_samples(
        inputs.recipe,
        tokenizer,
        lengths=request.lengths,
        samples=request.samples,
        seed=request.seed,
        base_dir=recipe_path(request.recipe).parent,
        progress=progress,
    )


def _keep_samples(samples: Sequence[Sample], store: ScoresStore) -> None:
    """Write the samples; on a resumed run they must be the ones on disk."""
    if store.has_samples():
        store.check_samples(samples)
    else:
        store.write_samples(samples)


def _check_positions(lengths: Sequence[int], identity: ModelIdentity, allowed: bool) -> bool:
    """Return whether any length is beyond the model's positions; refuse it unless allowed."""
    limit = identity.max_positions
    beyond = [length for length in lengths if limit is not None and length > limit]
    if beyond and not allowed:
        raise InputError(
            f"length {max(beyond)} is beyond the {limit} positions this model was made for: "
            "use shorter lengths, or pass --allow-extrapolation (it is recorded)"
        )
    return bool(beyond)


def _score_request(inputs: _Inputs, loaded: LoadedModel, backend: str) -> dict[str, Any]:
    return score_request(
        inputs.request,
        identity=loaded.identity,
        dtype=str(loaded.dtype).removeprefix("torch."),
        backend=backend,
        recipe_sha256=inputs.resolved.sha256,
        grid_sha256=inputs.grid_sha256,
        lengths=inputs.lengths,
        seed=inputs.resolved.seed,
    )


def _estimate(
    inputs: _Inputs,
    loaded: LoadedModel,
    team: Team,
    samples: Sequence[Sample],
    clock: PhaseClock,
) -> WorkEstimate:
    return estimate_work(
        loaded,
        [sample.num_tokens for sample in samples],
        oracle=inputs.request.oracle,
        probe_seconds=clock.seconds["fingerprint"],
        num_copies=team.num_copies,
        tp_size=team.tp_size,
    )


def _run_document(
    inputs: _Inputs, loaded: LoadedModel, samples: Sequence[Sample], backend: str
) -> dict[str, Any]:
    """Return the part of run.json that is the same however often the run was interrupted."""
    return {
        "versions": describe_environment(),
        "device": str(loaded.device),
        "backend": backend,
        "model": loaded.identity.model_dump(mode="json"),
        "recipe": inputs.resolved.model_dump(mode="json"),
        "grid": inputs.grid.model_dump(mode="json"),
        "documents": {
            sample.sample_id: [span._asdict() for span in sample.documents] for sample in samples
        },
    }


def _calibration(inputs: _Inputs, samples: Sequence[Sample], extrapolated: bool) -> Calibration:
    request = inputs.request
    return Calibration(
        recipe=inputs.resolved.name,
        recipe_sha256=inputs.resolved.sha256,
        grid=inputs.grid.name,
        grid_sha256=inputs.grid_sha256,
        seed=inputs.resolved.seed,
        lengths=inputs.lengths,
        consumer=request.consumer,
        oracle=request.oracle,
        row_sample=request.row_sample,
        extrapolated=extrapolated,
        samples=tuple(
            SampleRecord(
                sample_id=sample.sample_id,
                source=sample.source,
                split=sample.split,
                length=sample.length,
                num_tokens=sample.num_tokens,
                sha256=sample.sha256,
            )
            for sample in samples
        ),
    )


def _provenance(document: dict[str, Any], backend: str) -> Provenance:
    versions = document["versions"]
    return Provenance(
        patternsearch=__version__,
        torch=versions["torch"],
        triton=versions["triton"],
        transformers=versions["transformers"],
        device=versions.get("gpu_0") if document["device"].startswith("cuda") else "cpu",
        backend=backend,
    )
