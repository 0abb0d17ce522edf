# SPDX-License-Identifier: Apache-2.0
"""One sample through the model, every full-attention layer scored as it passes."""

from collections.abc import Callable
from typing import Any

import torch

from patternsearch.calibration.clock import PhaseClock
from patternsearch.calibration.samples import Sample
from patternsearch.model.capture import AttentionInputs, run_with_capture
from patternsearch.model.loading import LoadedModel
from patternsearch.scoring.engine import LayerScorer, LayerScores

__all__ = ["dense_attention_for", "score_sample"]


def dense_attention_for(device: torch.device) -> Any:
    """Return the dense attention of the forward: on CUDA one that also gives the log-sum-exp."""
    if device.type != "cuda":
        return None
    from patternsearch.kernels.score.lse import attention_with_lse

    def attention(q: Any, k: Any, v: Any, *, scale: float) -> tuple[Any, Any]:
        out, lse, _ = attention_with_lse(q, k, v, scale=scale)
        return out, lse

    return attention


def score_sample(
    loaded: LoadedModel,
    sample: Sample,
    scorer: LayerScorer,
    clock: PhaseClock,
    on_layer: Callable[[int], None],
) -> dict[int, LayerScores]:
    """Run the dense forward of one sample and score each full-attention layer.

    Args:
        loaded: the model.
        sample: its tokens, no padding.
        scorer: what scores a layer.
        clock: gets the phases ``forward`` and ``score``.
        on_layer: called after each scored layer.

    Returns:
        Scores by layer, on the CPU.
    """
    scores: dict[int, LayerScores] = {}

    def on_attention(inputs: AttentionInputs) -> None:
        with clock.phase("score"):
            scores[inputs.layer] = scorer.score(
                inputs.q, inputs.k, scale=inputs.scale, lse=inputs.lse, layer=inputs.layer
            )
        on_layer(inputs.layer)

    token_ids = torch.from_numpy(sample.token_ids.astype("int64"))[None]
    with clock.phase("forward"):
        run_with_capture(
            loaded, token_ids, on_attention, dense_attention=dense_attention_for(loaded.device)
        )
    return scores
