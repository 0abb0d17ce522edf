# SPDX-License-Identifier: Apache-2.0
"""The quality level: every head's captured mass and output error on real prompts.

Two passes a sample. The first is dense: each layer's q, k and v are scored and attended sparsely
on the side, so every layer is judged on exact inputs, which is what running only that layer sparse
would show at its output. The second runs all layers sparse and shows how errors add up.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patternsearch.calibration.sample_scores import dense_attention_for
from patternsearch.calibration.samples import Sample
from patternsearch.exchange.words import short_pattern
from patternsearch.model.capture import AttentionInputs, run_with_capture
from patternsearch.model.loading import LoadedModel
from patternsearch.model.support import attention_modules
from patternsearch.patterns.candidates import Candidate
from patternsearch.progress import Progress, Silent
from patternsearch.runtime.attach import attach
from patternsearch.runtime.sparse import SparseBackend, sparse_attention_of
from patternsearch.schema.config import HeadEntry, PatternConfig
from patternsearch.scoring.engine import LayerScorer, LayerScores
from patternsearch.validation.quality_report import HeadQuality, LayerQuality, QualityReport
from patternsearch.validation.remedies import find_remedies
from patternsearch.validation.samples import JudgingSamples
from patternsearch.validation.swaps import recorded_mass, swapped_entries

__all__ = ["measure_quality"]

_TASK = "quality"
_SAMPLED_ROWS = 256
_ROUNDING = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative error of an attention output that rounding explains."""
_MASS_ROUNDING = 1e-4

Float = NDArray[np.float64]


@dataclass
class _Sums:
    """One layer at one length, added up over samples."""

    num_samples: int = 0
    mass: Float = field(default_factory=lambda: np.zeros(0))
    worst_region: Float = field(default_factory=lambda: np.zeros(0))
    worst_sample: list[int] = field(default_factory=list)
    oracle: Float = field(default_factory=lambda: np.zeros(0))
    density: Float = field(default_factory=lambda: np.zeros(0))
    error: Float = field(default_factory=lambda: np.zeros(0))
    norm: Float = field(default_factory=lambda: np.zeros(0))
    cosine: Float = field(default_factory=lambda: np.zeros(0))
    over_bound: Float = field(default_factory=lambda: np.zeros(0))
    entry_on_head: Float = field(default_factory=lambda: np.zeros((0, 0)))


@dataclass(frozen=True, slots=True)
class _HeadErrors:
    """Per head, [Hq]: squared error and norm, mean cosine, mean row error and its scale."""

    squared_error: Float
    squared_norm: Float
    cosine: Float
    row_error: Float
    row_norm: Float
    largest_value: Float


def measure_quality(
    loaded: LoadedModel,
    config: PatternConfig,
    judging: JudgingSamples,
    *,
    progress: Progress | None = None,
) -> QualityReport:
    """Judge every head of a config on samples.

    Args:
        loaded: the model.
        config: the config; its shape must be the model's.
        judging: the samples.
        progress: told about samples.

    Raises:
        ModelError: the model gives values that are not finite.
    """
    progress = progress or Silent()
    backend: SparseBackend = "triton" if loaded.device.type == "cuda" else "torch"
    consumer = config.calibration.consumer if config.calibration else "patternsearch"
    scorers = {
        layer: LayerScorer(_distinct(entries), oracle=True, consumer=consumer, backend=backend)
        for layer, entries in enumerate(config.heads)
        if entries is not None
    }
    sums: dict[tuple[int, int], _Sums] = defaultdict(_Sums)
    layer_errors: dict[tuple[int, int], list[float]] = defaultdict(list)
    final: dict[int, list[float]] = defaultdict(list)
    progress.start(_TASK, float(sum(s.num_tokens for s in judging.samples)), "tokens")
    for index, sample in enumerate(judging.samples):
        judge = _Judge(config, scorers, backend, sample, index, sums)
        dense_rows, dense_final = _dense_pass(loaded, sample, judge)
        sparse_rows, sparse_final = _sparse_pass(loaded, config, sample)
        for layer, rows in dense_rows.items():
            error = _relative(sparse_rows[layer], rows)
            layer_errors[layer, sample.length].append(error)
        final[sample.length].append(_relative(sparse_final, dense_final))
        progress.advance(_TASK, float(sample.num_tokens), sample.sample_id)
    progress.finish(_TASK)
    heads = tuple(_head_rows(config, judging, sums))
    target = config.selection.target_mass if config.selection else None
    worst_samples = {(layer, length): part.worst_sample for (layer, length), part in sums.items()}
    remedies = find_remedies(
        loaded, config, judging.samples, heads, worst_samples, target, consumer, backend
    )
    return QualityReport(
        origin=judging.origin,
        samples=tuple(sample.sample_id for sample in judging.samples),
        backend=backend,
        dtype=str(loaded.dtype).removeprefix("torch."),
        target_mass=target,
        heads=heads,
        layers=tuple(_layer_rows(sums, layer_errors)),
        remedies=remedies,
        final_error={length: float(np.mean(values)) for length, values in final.items()},
        swapped=swapped_entries(
            config,
            judging,
            {key: part.entry_on_head / part.num_samples for key, part in sums.items()},
        ),
    )


@dataclass
class _Judge:
    """Looks at each layer of one dense pass."""

    config: PatternConfig
    scorers: dict[int, LayerScorer]
    backend: SparseBackend
    sample: Sample
    index: int
    sums: dict[tuple[int, int], _Sums]

    def __call__(self, inputs: AttentionInputs) -> None:
        entries = self.config.heads[inputs.layer]
        assert entries is not None
        scores = self.scorers[inputs.layer].score(
            inputs.q, inputs.k, scale=inputs.scale, lse=inputs.lse, layer=inputs.layer
        )
        out = sparse_attention_of(
            [entry.pattern for entry in entries],
            inputs.q,
            inputs.k,
            inputs.v,
            scale=inputs.scale,
            backend=self.backend,
        )
        errors = _head_errors(out, inputs.output, inputs.v)
        tolerance = _ROUNDING[inputs.q.dtype]
        self._add(self.sums[inputs.layer, self.sample.length], entries, scores, errors, tolerance)

    def _add(
        self,
        part: _Sums,
        entries: Sequence[HeadEntry],
        scores: LayerScores,
        errors: _HeadErrors,
        tolerance: float,
    ) -> None:
        rows = _row_numbers(scores)
        heads = np.arange(len(entries))
        online = np.asarray([rows[entry.pattern, False] for entry in entries])
        oracle = np.asarray([rows[entry.pattern, True] for entry in entries])
        mass = scores.mass[heads, online, 0]
        region = np.nanmin(scores.mass[heads, online], axis=1)
        allowed = 2 * (1 - mass + _MASS_ROUNDING) * errors.largest_value
        allowed = allowed + tolerance * errors.row_norm
        new = {
            "mass": mass,
            "oracle": scores.mass[heads, oracle, 0],
            "density": scores.density[heads, online],
            "error": errors.squared_error,
            "norm": errors.squared_norm,
            "cosine": errors.cosine,
            "entry_on_head": scores.mass[:, online, 0].T,
        }
        over = errors.row_error / np.maximum(allowed, 1e-30)
        if part.num_samples == 0:
            part.worst_region, part.over_bound = region, over
            part.worst_sample = [self.index] * len(entries)
            for name, value in new.items():
                setattr(part, name, value.astype(np.float64))
        else:
            for head in np.flatnonzero(region < part.worst_region):
                part.worst_sample[head] = self.index
            part.worst_region = np.minimum(part.worst_region, region)
            part.over_bound = np.maximum(part.over_bound, over)
            for name, value in new.items():
                setattr(part, name, getattr(part, name) + value)
        part.num_samples += 1


def _distinct(entries: Sequence[HeadEntry]) -> list[Candidate]:
    return list(dict.fromkeys(entry.pattern for entry in entries))


def _row_numbers(scores: LayerScores) -> dict[tuple[Candidate, bool], int]:
    """Return the row of each candidate, by (candidate, oracle?); static ones serve as both."""
    rows: dict[tuple[Candidate, bool], int] = {}
    for row, (candidate, index) in enumerate(scores.specs):
        if index != "oracle":
            rows[candidate, False] = row
        if index != "online":
            rows[candidate, True] = row
    return rows


def _head_errors(sparse: Tensor, dense: Tensor, v: Tensor) -> _HeadErrors:
    """Compare outputs [1, Hq, n, d] one head at a time, in float32."""
    group = sparse.shape[1] // v.shape[1]
    columns: list[list[Tensor]] = []
    largest = v[0].float().norm(dim=-1).amax(-1)
    for head in range(sparse.shape[1]):
        ours, theirs = sparse[0, head].float(), dense[0, head].float()
        row_error, row_norm = (ours - theirs).norm(dim=-1), theirs.norm(dim=-1)
        columns.append(
            [
                (row_error**2).sum(),
                (row_norm**2).sum(),
                torch.cosine_similarity(ours, theirs, dim=-1).mean(),
                row_error.mean(),
                row_norm.mean(),
                largest[head // group],
            ]
        )
    table = torch.stack([torch.stack(column) for column in columns]).double().cpu().numpy()
    return _HeadErrors(*table.T)


# --- passes --------------------------------------------------------------------------------


def _dense_pass(
    loaded: LoadedModel, sample: Sample, judge: Callable[[AttentionInputs], None]
) -> tuple[dict[int, Tensor], Tensor]:
    rows: dict[int, Tensor] = {}
    with _sampled_outputs(loaded, sample.num_tokens, rows):
        hidden = run_with_capture(
            loaded, _ids(sample), judge, dense_attention=dense_attention_for(loaded.device)
        )
    return rows, _sampled(hidden, sample.num_tokens)


def _sparse_pass(
    loaded: LoadedModel, config: PatternConfig, sample: Sample
) -> tuple[dict[int, Tensor], Tensor]:
    rows: dict[int, Tensor] = {}
    with (
        attach(loaded.model, config, strict=False, min_length=1),
        _sampled_outputs(loaded, sample.num_tokens, rows),
        torch.inference_mode(),
    ):
        hidden = loaded.backbone(
            input_ids=_ids(sample).to(loaded.device), use_cache=False
        ).last_hidden_state
    return rows, _sampled(hidden, sample.num_tokens)


@contextmanager
def _sampled_outputs(
    loaded: LoadedModel, num_tokens: int, rows: dict[int, Tensor]
) -> Iterator[None]:
    """Keep some rows of every full layer's attention output while a model runs."""
    hooks = []
    for layer, module in attention_modules(loaded.model).items():
        if layer not in loaded.full_layers:
            continue

        def keep(_module: Any, _args: Any, output: Any, layer: int = layer) -> None:
            rows[layer] = _sampled(output[0], num_tokens)

        hooks.append(module.register_forward_hook(keep))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _sampled(hidden: Tensor, num_tokens: int) -> Tensor:
    places = np.unique(np.linspace(0, num_tokens - 1, _SAMPLED_ROWS).round().astype(np.int64))
    return hidden[0, torch.from_numpy(places).to(hidden.device)].float()


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


def _ids(sample: Sample) -> Tensor:
    return torch.from_numpy(sample.token_ids.astype(np.int64))[None]


# --- rows ----------------------------------------------------------------------------------


def _head_rows(
    config: PatternConfig, judging: JudgingSamples, sums: dict[tuple[int, int], _Sums]
) -> Iterator[HeadQuality]:
    for (layer, length), part in sorted(sums.items()):
        entries = config.heads[layer]
        assert entries is not None
        count = part.num_samples
        relative = np.sqrt(part.error / np.maximum(part.norm, 1e-30))
        for head, entry in enumerate(entries):
            yield HeadQuality(
                layer=layer,
                head=head,
                pattern=short_pattern(entry.pattern),
                length=length,
                recorded_mass=recorded_mass(entry, length, judging.split),
                mass=float(part.mass[head] / count),
                worst_region=float(part.worst_region[head]),
                oracle_mass=float(part.oracle[head] / count),
                density=float(part.density[head] / count),
                relative_error=float(relative[head]),
                cosine=float(part.cosine[head] / count),
                error_over_bound=float(part.over_bound[head]),
            )


def _layer_rows(
    sums: dict[tuple[int, int], _Sums], accumulated: dict[tuple[int, int], list[float]]
) -> Iterator[LayerQuality]:
    for (layer, length), part in sorted(sums.items()):
        yield LayerQuality(
            layer=layer,
            length=length,
            own_error=float(np.sqrt(part.error.sum() / max(part.norm.sum(), 1e-30))),
            accumulated_error=float(np.mean(accumulated[layer, length])),
        )
