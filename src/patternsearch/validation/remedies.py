# SPDX-License-Identifier: Apache-2.0
"""What budget would mend a head that loses too much mass: its pattern, doubled step by step."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from patternsearch.calibration.sample_scores import dense_attention_for
from patternsearch.calibration.samples import Sample
from patternsearch.exchange.words import short_pattern
from patternsearch.model.capture import AttentionInputs, run_with_capture
from patternsearch.model.loading import LoadedModel
from patternsearch.patterns.candidates import Candidate, Dense
from patternsearch.patterns.consumers import Consumer
from patternsearch.runtime.sparse import SparseBackend
from patternsearch.schema.config import PatternConfig
from patternsearch.scoring.engine import LayerScorer
from patternsearch.validation.quality_report import HeadQuality, Remedy

__all__ = ["find_remedies", "ladder"]

_STEPS = (2, 4, 8)
_BUDGETS = ("sink", "window", "vertical", "slash", "diagonals", "blocks")
MARGIN = 0.02
"""How far below its target a head's worst region may fall on new samples before it is mended."""


def ladder(pattern: Candidate) -> list[Candidate]:
    """Return the pattern with its budgets doubled, twice and thrice doubled, then dense."""
    if isinstance(pattern, Dense):
        return [pattern]
    grown: list[Candidate] = []
    for step in _STEPS:
        larger = {
            name: getattr(pattern, name) * step for name in _BUDGETS if hasattr(pattern, name)
        }
        grown.append(pattern.model_copy(update=larger))
    return [*grown, Dense()]


def find_remedies(
    loaded: LoadedModel,
    config: PatternConfig,
    samples: Sequence[Sample],
    heads: Sequence[HeadQuality],
    worst_samples: Mapping[tuple[int, int], Sequence[int]],
    target: float | None,
    consumer: Consumer,
    backend: SparseBackend,
) -> tuple[Remedy, ...]:
    """Score larger budgets for every head below target, on the sample where it does worst.

    Args:
        loaded: the model.
        config: the config.
        samples: what was judged on.
        heads: how each head did.
        worst_samples: by (layer, length): for each head, the sample of its worst region.
        target: mass to reach in the worst region; None mends nothing.
        consumer: whose physical sets count.
        backend: of the scoring.
    """
    if target is None:
        return ()
    by_sample: dict[int, dict[int, list[HeadQuality]]] = defaultdict(lambda: defaultdict(list))
    for head in heads:
        if head.worst_region < target - MARGIN:
            index = worst_samples[head.layer, head.length][head.head]
            by_sample[index][head.layer].append(head)
    remedies: list[Remedy] = []
    for index, by_layer in sorted(by_sample.items()):
        remedies += _on_sample(loaded, config, samples[index], by_layer, target, consumer, backend)
    return tuple(sorted(remedies, key=lambda r: (r.worst_region, r.layer, r.head)))


def _on_sample(
    loaded: LoadedModel,
    config: PatternConfig,
    sample: Sample,
    by_layer: Mapping[int, Sequence[HeadQuality]],
    target: float,
    consumer: Consumer,
    backend: SparseBackend,
) -> list[Remedy]:
    remedies: list[Remedy] = []

    def look(inputs: AttentionInputs) -> None:
        mend = by_layer.get(inputs.layer)
        if not mend:
            return
        entries = config.heads[inputs.layer]
        assert entries is not None
        steps = {head.head: ladder(entries[head.head].pattern) for head in mend}
        candidates = list(dict.fromkeys(c for chain in steps.values() for c in chain))
        scores = LayerScorer(candidates, consumer=consumer, backend=backend).score(
            inputs.q, inputs.k, scale=inputs.scale, lse=inputs.lse, layer=inputs.layer
        )
        rows = {candidate: row for row, (candidate, _) in enumerate(scores.specs)}
        for head in mend:
            for candidate in steps[head.head]:
                mass = float(np.nanmin(scores.mass[head.head, rows[candidate]]))
                if mass >= target or isinstance(candidate, Dense):
                    remedies.append(
                        Remedy(
                            layer=head.layer,
                            head=head.head,
                            length=head.length,
                            pattern=head.pattern,
                            worst_region=head.worst_region,
                            mended=short_pattern(candidate),
                            mended_worst_region=min(mass, 1.0),
                        )
                    )
                    break

    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    run_with_capture(loaded, ids, look, dense_attention=dense_attention_for(loaded.device))
    return remedies
