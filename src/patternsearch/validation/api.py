# SPDX-License-Identifier: Apache-2.0
"""Validation as one call: the levels in order, each including the ones before."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from patternsearch.calibration.distributed import Team, joined, world_size
from patternsearch.errors import InputError
from patternsearch.exchange.consumers import ConsumerName
from patternsearch.model.identity import describe_model
from patternsearch.model.sources import ModelSource, resolve_model
from patternsearch.patterns.candidates import VerticalSlashLastQ
from patternsearch.progress import Progress
from patternsearch.runtime.mapping import compare_mapping
from patternsearch.schema.config import ModelIdentity, PatternConfig
from patternsearch.schema.io import config_digest, load_config
from patternsearch.validation.checks import (
    LEVELS,
    Check,
    Level,
    ValidationReport,
    overall_status,
)
from patternsearch.validation.consumer import check_consumer
from patternsearch.validation.identity import check_identity, check_tensor_parallel
from patternsearch.validation.mapping import cannot_map, check_mapping
from patternsearch.validation.ranks import copied_ranks, describe_rank, entries_read, probe_of

if TYPE_CHECKING:
    from patternsearch.model.loading import LoadedModel
    from patternsearch.validation.samples import JudgingSamples

__all__ = ["ValidationRequest", "validate", "validate_on_ranks"]

_PROBE = "probe"
_SHAPE = ("num_layers", "layer_types", "num_query_heads", "num_kv_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRequest:
    """What to validate, and how far.

    Attributes:
        config: path of the config.
        model: checkpoint folder, hub id or ``.gguf`` file.
        level: the last level to run.
        weights: False skips the digests, which read every byte of the checkpoint.
        tp_size: tensor-parallel size of the deployment.
        consumer: an engine whose rules the config must keep.
        recipe: another recipe to judge quality on.
        lengths: lengths to judge on; None is the calibrated ones.
        samples: at most so many samples a length; None is all held-out ones.
        device: torch device of the levels that run the model.
        dtype: name of a torch dtype; None is the checkpoint's on CUDA and float32 on the CPU.
        trust_remote_code: run code that comes with the checkpoint.
        offline: never open a network connection.
    """

    config: Path
    model: str | os.PathLike[str]
    level: Level = "mapping"
    weights: bool = True
    tp_size: int = 1
    consumer: ConsumerName | None = None
    recipe: str | None = None
    lengths: tuple[int, ...] | None = None
    samples: int | None = None
    device: str = "cpu"
    dtype: str | None = None
    trust_remote_code: bool = False
    offline: bool = False


def validate(
    request: ValidationRequest,
    *,
    team: Team | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> ValidationReport:
    """Run the checks.

    A model of another shape ends the work after the identity level: nothing above it would mean
    anything.

    Args:
        request: what to do.
        team: the ranks of one copy of the model, of which this process is the leader; None runs
            alone.
        progress: receives progress.
        note: told one line each.

    Raises:
        PatternsearchError: the config or the model cannot be read at all.
    """
    config = load_config(request.config)
    source = resolve_model(request.model, offline=request.offline)
    say = note or (lambda _message: None)
    if not request.weights:
        say("weights are not digested (--no-weights): a change of them shows at --level mapping")
    found = describe_model(
        source,
        weights=request.weights,
        trust_remote_code=request.trust_remote_code,
        offline=request.offline,
        progress=progress,
    )
    run = _Run(request, config, source, found, team or Team(), progress)
    run.checks += check_identity(config, found, weights=request.weights)
    run.checks += check_tensor_parallel(config, found, request.tp_size)
    wanted = LEVELS[: LEVELS.index(request.level) + 1]
    is_run = len(wanted) > 1 and _same_shape(config.model, found)
    probe = run.probe() if is_run else None
    run.team.share(_PROBE, probe)
    if is_run:
        run.run_model(wanted, probe)
    elif len(wanted) > 1:
        run.notes.append(f"the model has another shape, so {', '.join(wanted[1:])} were not run")
    if request.consumer is not None:
        folder = source.folder if source.gguf_file is None else None
        run.checks += check_consumer(
            config, request.consumer, model_folder=folder, tp_size=request.tp_size
        )
    return run.report()


def validate_on_ranks(
    request: ValidationRequest,
    *,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> ValidationReport | None:
    """Run the checks on the running tensor-parallel ranks of one copy of the model.

    Each rank loads its shard; the mapping level compares the heads that it holds with the entries
    that it reads.

    Args:
        request: what to do; its ``tp_size`` is the number of processes that torchrun started.
        progress: receives progress, on the first process.
        note: told one line each, on the first process.

    Returns:
        The report; None on every process but the first.

    Raises:
        InputError: another number of processes than ``tp_size``, or a level above mapping.
        PatternsearchError: the config or the model cannot be read at all.
    """
    with joined(world_size(), request.device) as team:
        if team.is_leader:
            _check_ranks(request, team.size)
            return validate(request, team=team, progress=progress, note=note)
        probe = team.share(_PROBE)
        if probe is not None:
            describe_rank(_load(request, request.model, team), team, probe)
        return None


def _check_ranks(request: ValidationRequest, size: int) -> None:
    if size != request.tp_size:
        raise InputError(
            f"{size} ranks were started for --tp-size {request.tp_size}: start one a rank, "
            f"with torchrun --nproc-per-node {request.tp_size}, or a single one without torchrun"
        )
    if LEVELS.index(request.level) > LEVELS.index("mapping"):
        raise InputError(
            f"--level {request.level} runs in one process, not on {size} ranks: start it without "
            "torchrun; ranks are checked up to --level mapping"
        )


def _load(
    request: ValidationRequest,
    source: ModelSource | str | os.PathLike[str],
    team: Team,
    *,
    require_tokenizer: bool = False,
    progress: Progress | None = None,
) -> "LoadedModel":
    """Load the model, or this rank's part of it."""
    from patternsearch.model.loading import load_model

    return load_model(
        source,
        device=team.device(request.device),
        dtype=request.dtype,
        trust_remote_code=request.trust_remote_code,
        require_tokenizer=require_tokenizer,
        digests=False,
        offline=request.offline,
        tensor_parallel=team.tp_size,
        progress=progress,
    )


class _Run:
    """One validation in progress."""

    def __init__(
        self,
        request: ValidationRequest,
        config: PatternConfig,
        source: ModelSource,
        found: ModelIdentity,
        team: Team,
        progress: Progress | None,
    ) -> None:
        self.request = request
        self.config = config
        self.source = source
        self.found = found
        self.team = team
        self.progress = progress
        self.checks: list[Check] = []
        self.notes: list[str] = []
        self.parts: dict[str, object] = {}

    def probe(self) -> dict[str, int] | None:
        """Return how every rank describes its heads, or note why they cannot be compared."""
        recorded = self.config.fingerprints
        if recorded is None:
            self.checks.append(cannot_map("the config has no fingerprints (an imported one)"))
            return None
        if self.config.model.vocab_size != self.found.vocab_size:
            self.checks.append(cannot_map("the vocabulary differs, so the probe's tokens do"))
            return None
        return probe_of(recorded)

    def run_model(self, levels: Sequence[Level], probe: dict[str, int] | None) -> None:
        if probe is None and len(levels) == 2:
            return
        loaded = _load(
            self.request,
            self.source,
            self.team,
            require_tokenizer=len(levels) > 2,
            progress=self.progress,
        )
        if probe is not None:
            self._map(loaded, probe)
        if len(levels) > 2:
            judging = self._judging(loaded)
            self._quality(loaded, judging)
            if len(levels) > 3:
                self._task(loaded, judging)

    def _map(self, loaded: "LoadedModel", probe: dict[str, int]) -> None:
        assert self.config.fingerprints is not None
        found = describe_rank(loaded, self.team, probe)
        expected = entries_read(self.config.fingerprints, self.team)
        mapping = compare_mapping(
            expected, found, self.found, weights_changed=self._weights_changed()
        )
        if self.team.size > 1:
            self.notes.append(f"mapping was read from {self.team.size} running ranks")
            if copies := copied_ranks(self.config.fingerprints, found, self.team.size):
                mapping = mapping.model_copy(update={"findings": copies})
        self.parts["mapping"] = mapping
        self.checks += check_mapping(mapping)

    def _weights_changed(self) -> bool | None:
        (weights,) = (c for c in self.checks if c.group == "identity" and c.name == "weights")
        return {"ok": False, "differs": True}.get(weights.status)

    def _judging(self, loaded: "LoadedModel") -> "JudgingSamples":
        from patternsearch.validation.samples import judging_samples

        request = self.request
        return judging_samples(
            self.config,
            loaded,
            config_path=request.config,
            recipe=request.recipe,
            lengths=request.lengths,
            max_samples=request.samples,
            progress=self.progress,
        )

    def _quality(self, loaded: "LoadedModel", judging: "JudgingSamples") -> None:
        from patternsearch.validation.quality import measure_quality
        from patternsearch.validation.quality_checks import check_quality

        report = measure_quality(loaded, self.config, judging, progress=self.progress)
        self.parts["quality"] = report
        self.checks += check_quality(
            report, judging, executed_as_scored=_executed_as_scored(self.config)
        )

    def _task(self, loaded: "LoadedModel", judging: "JudgingSamples") -> None:
        from patternsearch.validation.task import measure_task
        from patternsearch.validation.task_checks import check_task

        report = measure_task(loaded, self.config, judging, progress=self.progress)
        self.parts["task"] = report
        self.checks += check_task(report)

    def report(self) -> ValidationReport:
        checks = tuple(self.checks)
        return ValidationReport.model_validate(
            {
                "config": str(self.request.config),
                "config_sha256": config_digest(self.config),
                "model": os.fspath(self.request.model),
                "level": self.request.level,
                "status": overall_status(checks),
                "checks": checks,
                "notes": tuple(self.notes),
                **self.parts,
            }
        )


def _same_shape(expected: ModelIdentity, found: ModelIdentity) -> bool:
    return all(getattr(expected, name) == getattr(found, name) for name in _SHAPE)


def _executed_as_scored(config: PatternConfig) -> bool:
    if config.calibration is None or config.calibration.consumer == "patternsearch":
        return True
    return not any(
        isinstance(entry.pattern, VerticalSlashLastQ)
        for entries in config.heads
        for entry in entries or ()
    )
