# SPDX-License-Identifier: Apache-2.0
"""Dense against sparse on one model: what changes in its answers, and where prefill time goes."""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from patternsearch.calibration.samples import Sample
from patternsearch.errors import BackendMissing, InputError
from patternsearch.model.loading import LoadedModel, load_model
from patternsearch.progress import Progress, Silent
from patternsearch.runtime.fit import compare_identity, structural
from patternsearch.runtime.prefill_timing import (
    PrefillTime,
    time_dense_prefill,
    time_prefill,
)
from patternsearch.schema.config import PatternConfig
from patternsearch.schema.io import config_digest, load_config
from patternsearch.timing.environment import describe_environment
from patternsearch.timing.execution import execution_on
from patternsearch.timing.table import TimingTable, load_timings
from patternsearch.validation.samples import JudgingSamples, judging_samples
from patternsearch.validation.task import measure_task
from patternsearch.validation.task_report import TaskReport

__all__ = ["EvaluationReport", "EvaluationRequest", "Speedup", "evaluate"]

_TASK = "prefill"
_WARM_UP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """What to evaluate.

    Attributes:
        model: checkpoint folder, hub id or ``.gguf`` file.
        config: path of the config.
        lengths: prompt lengths; None is the calibrated ones.
        samples: at most so many samples a length; None is all held-out ones.
        recipe: another recipe; None is the config's.
        quality: also compare answers, not only time.
        repetitions: timed prefills a length.
        device: torch device.
        dtype: name of a torch dtype; None is the checkpoint's on CUDA and float32 on the CPU.
        trust_remote_code: run code that comes with the checkpoint.
        offline: never open a network connection.
        timings: this GPU's timing table: heads run as it measured to be fastest.
    """

    model: str | os.PathLike[str]
    config: Path
    lengths: tuple[int, ...] | None = None
    samples: int | None = None
    recipe: str | None = None
    quality: bool = True
    repetitions: int = 3
    device: str = "cpu"
    dtype: str | None = None
    trust_remote_code: bool = False
    offline: bool = False
    timings: Path | None = None


@dataclass(frozen=True, slots=True)
class Speedup:
    """Dense over sparse at one length; above 1 is faster."""

    num_tokens: int
    attention: float
    prefill: float
    density: float


class EvaluationReport(BaseModel):
    """The result, for people and programs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["patternsearch/evaluation"] = "patternsearch/evaluation"
    schema_version: Literal[1] = 1
    model: str
    config: str
    config_sha256: str
    origin: str
    dtype: str
    device: str
    environment: dict[str, Any]
    warm_up: int
    repetitions: int
    density: dict[int, float]
    prefill: tuple[PrefillTime, ...]
    task: TaskReport | None

    def speedups(self) -> Iterator[Speedup]:
        """Compare the runs of each length; a sparse run's attention includes its index."""
        for row in self.prefill:
            if row.run != "sparse":
                continue
            dense = next(
                r for r in self.prefill if r.run == "dense" and r.num_tokens == row.num_tokens
            )
            yield Speedup(
                num_tokens=row.num_tokens,
                attention=dense.attention_ms / max(row.attention_ms + row.index_ms, 1e-9),
                prefill=dense.total_ms / max(row.total_ms, 1e-9),
                density=self.density.get(row.num_tokens, float("nan")),
            )


def evaluate(
    request: EvaluationRequest,
    *,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> EvaluationReport:
    """Run the model dense and sparse.

    Args:
        request: what to do.
        progress: receives progress.
        note: told what a person should know: a measured backend that is not installed; None
            leaves it a warning, as attaching does.

    Raises:
        InputError: the config is for a model of another shape or RoPE.
        PatternsearchError: the config, the model or the samples cannot be had.
    """
    progress = progress or Silent()
    config = load_config(request.config)
    timings = None if request.timings is None else load_timings(request.timings)
    execution = None
    if timings is not None:
        execution = execution_on(timings, torch.device(request.device))
    loaded = load_model(
        request.model,
        device=request.device,
        dtype=request.dtype,
        trust_remote_code=request.trust_remote_code,
        digests=False,
        offline=request.offline,
        progress=progress,
    )
    differences = structural(compare_identity(config.model, loaded.identity))
    if differences:
        said = "; ".join(f"{d.name}: config {d.expected}, model {d.found}" for d in differences)
        raise InputError(
            f"the config does not fit this model ({said}): `patternsearch validate` says more"
        )
    dtype = str(loaded.dtype).removeprefix("torch.")
    lack = None if execution is None else execution.lack(dtype, loaded.identity.head_dim)
    if lack is not None and note is not None:
        note(lack)
    judging = judging_samples(
        config,
        loaded,
        config_path=request.config,
        recipe=request.recipe,
        lengths=request.lengths,
        max_samples=request.samples,
        progress=progress,
    )
    task = measure_task(loaded, config, judging, progress=progress) if request.quality else None
    with warnings.catch_warnings():
        if lack is not None and note is not None:  # told already
            warnings.filterwarnings("ignore", re.escape(lack), BackendMissing)
        prefill = tuple(_prefills(loaded, config, judging, request.repetitions, timings, progress))
    return EvaluationReport(
        model=os.fspath(request.model),
        config=str(request.config),
        config_sha256=config_digest(config),
        origin=judging.origin,
        dtype=dtype,
        device=str(loaded.device),
        environment=describe_environment(),
        warm_up=_WARM_UP,
        repetitions=request.repetitions,
        density=mean_density(config),
        prefill=prefill,
        task=task,
    )


def mean_density(config: PatternConfig) -> dict[int, float]:
    """Return the recorded density by length, mean over all heads of full layers."""
    values: dict[int, list[float]] = {}
    for entries in config.heads:
        for entry in entries or ():
            for at in entry.lengths:
                values.setdefault(at.length, []).append(at.density)
    return {length: float(np.mean(found)) for length, found in sorted(values.items())}


def _prefills(
    loaded: LoadedModel,
    config: PatternConfig,
    judging: JudgingSamples,
    repetitions: int,
    timings: TimingTable | None,
    progress: Progress,
) -> Iterator[PrefillTime]:
    """Time the first sample of each length, dense and sparse."""
    first: dict[int, Sample] = {}
    for sample in judging.samples:
        first.setdefault(sample.length, sample)
    progress.start(_TASK, 2.0 * len(first), "prompts")
    for length, sample in sorted(first.items()):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        yield time_dense_prefill(
            loaded.model, config, ids, repetitions=repetitions, warm_up=_WARM_UP
        )
        progress.advance(_TASK, 1.0, f"{length} tokens, dense")
        yield time_prefill(
            loaded.model, config, ids, run="sparse", repetitions=repetitions, warm_up=_WARM_UP,
            timings=timings,
        )  # fmt: skip
        progress.advance(_TASK, 1.0, f"{length} tokens, sparse")
    progress.finish(_TASK)
