# SPDX-License-Identifier: Apache-2.0
"""Scores this process's share of the samples, one after another, and tells how far the run is."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from patternsearch.calibration.clock import PhaseClock
from patternsearch.calibration.distributed import Team
from patternsearch.calibration.estimate import format_bytes, sample_work
from patternsearch.calibration.sample_scores import score_sample
from patternsearch.calibration.samples import Sample
from patternsearch.calibration.store import ScoresStore
from patternsearch.model.loading import LoadedModel
from patternsearch.progress import Progress
from patternsearch.scoring.engine import LayerScorer
from patternsearch.scoring.table import sample_table

__all__ = ["Meter", "rank_report", "score_share"]

_TASK = "calibrate"


@dataclass
class Meter:
    """Turns finished layers into progress of the whole run.

    Attributes:
        team: the processes whose work is added up.
        loaded: the model, for its number of layers and its device.
        progress: told about the task ``calibrate``; only the leader's is watched.
        total: multiply-adds of all waiting samples, of all processes.
    """

    team: Team
    loaded: LoadedModel
    progress: Progress
    total: float
    _started: float = field(default_factory=time.monotonic)
    _work: float = 0.0
    _layer_tokens: int = 0

    def start(self) -> None:
        """Begin the task."""
        self._started = time.monotonic()
        self.progress.start(_TASK, self.total, "multiply-adds")

    def layer_done(self, work: float, tokens: int, what: str) -> None:
        """Count one layer of one sample."""
        self.team.advance(work, tokens)
        if self.team.size == 1:
            self._layer_tokens += tokens
            self.progress.advance(_TASK, work, f"{what}, {self._speed()}")
        elif self.team.is_leader:
            self.refresh(what)

    def refresh(self, what: str) -> None:
        """Show what all processes have done."""
        before = self._work
        self._work, self._layer_tokens = self.team.done()
        self.progress.advance(_TASK, self._work - before, f"{what}, {self._speed()}")

    def finish(self) -> None:
        """End the task."""
        self.progress.finish(_TASK)

    def _speed(self) -> str:
        """Return tokens through the whole model per second, and the GPU's peak memory."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        text = f"{self._layer_tokens / len(self.loaded.full_layers) / seconds:,.0f} tokens/s"
        if self.loaded.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.loaded.device)
            text += f", GPU {format_bytes(peak)}"
        return text


def score_share(
    samples: Sequence[Sample],
    share: Sequence[int],
    *,
    store: ScoresStore,
    loaded: LoadedModel,
    scorer: LayerScorer,
    clock: PhaseClock,
    meter: Meter,
) -> None:
    """Score some samples and write a part for each.

    Args:
        samples: all samples of the run.
        share: places in ``samples`` of those that this process scores.
        store: receives the parts.
        loaded: the model.
        scorer: what scores a layer.
        clock: gets the phases ``forward``, ``score``, ``aggregate`` and ``write``.
        meter: told about each layer.

    Raises:
        PeerError: another process of the run stopped with an error.
    """
    num_layers = len(loaded.full_layers)
    for done, index in enumerate(share):
        meter.team.check()
        sample = samples[index]
        step = sample_work(loaded, sample.num_tokens, oracle=scorer.oracle) / num_layers
        what = f"sample {done + 1}/{len(share)}, {sample.length} tokens"

        def on_layer(
            layer: int, step: float = step, n: int = sample.num_tokens, what: str = what
        ) -> None:
            meter.layer_done(step, n, f"{what}, layer {layer}")

        scores = score_sample(loaded, sample, scorer, clock, on_layer)
        if not meter.team.writes:
            continue
        with clock.phase("aggregate"):
            table = sample_table(
                scores,
                sample_id=sample.sample_id,
                source=sample.source,
                split=sample.split,
                length=sample.length,
                num_tokens=sample.num_tokens,
            )
        with clock.phase("write"):
            store.write_part(index, sample, table)


def rank_report(loaded: LoadedModel, clock: PhaseClock, share: Sequence[int]) -> dict[str, Any]:
    """Return what a process spent: samples, seconds by phase, and the GPU's peak in bytes."""
    is_cuda = loaded.device.type == "cuda"
    return {
        "device": str(loaded.device),
        "samples": len(share),
        "seconds": dict(clock.seconds),
        "peak_bytes": torch.cuda.max_memory_allocated(loaded.device) if is_cuda else None,
    }
