# SPDX-License-Identifier: Apache-2.0
"""One sample through the model, every full-attention layer scored as it passes."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from patternsearch.calibration.clock import PhaseClock
from patternsearch.calibration.samples import Sample
from patternsearch.model.capture import AttentionInputs, run_with_capture
from patternsearch.model.chunked_mlp import chunked_mlps
from patternsearch.model.loading import LoadedModel
from patternsearch.model.tensor_parallel import gather_heads
from patternsearch.scoring.engine import LayerScorer, LayerScores

__all__ = ["dense_attention_for", "score_sample"]


def dense_attention_for(device: torch.device, *, with_lse: bool = False) -> Any:
    """Return the dense attention of the forward; on CUDA one that also gives the log-sum-exp.

    Args:
        device: where the model runs.
        with_lse: give it on the CPU too.
    """
    if device.type != "cuda" and not with_lse:
        return None
    from patternsearch.kernels.score.lse import attention_with_lse

    return attention_with_lse


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
        Scores of all heads by layer, on the CPU, on every tensor-parallel rank.
    """
    scores: dict[int, LayerScores] = {}

    def on_attention(inputs: AttentionInputs) -> None:
        with clock.phase("score"):
            scores[inputs.layer] = scorer.score(
                inputs.q, inputs.k, scale=inputs.scale, lse=inputs.lse, layer=inputs.layer
            )
        on_layer(inputs.layer)

    token_ids = torch.from_numpy(sample.token_ids.astype("int64"))[None]
    attention = dense_attention_for(loaded.device, with_lse=scorer.row_sample < 1.0)
    with clock.phase("forward"), chunked_mlps(loaded.model):
        run_with_capture(loaded, token_ids, on_attention, dense_attention=attention)
    if loaded.tensor_parallel > 1:
        with clock.phase("gather"):
            return _gathered(scores, loaded)
    return scores


def _gathered(scores: dict[int, LayerScores], loaded: LoadedModel) -> dict[int, LayerScores]:
    """Put the heads of all tensor-parallel ranks together, in the order of their global numbers.

    A head's sums were made whole on its rank, so nothing is averaged here.
    """
    layers = sorted(scores)
    some = scores[layers[0]]
    names = [field.name for field in fields(LayerScores) if field.name != "specs"]
    names = [name for name in names if getattr(some, name) is not None]

    def whole(name: str) -> Any:
        local = np.stack([getattr(scores[layer], name) for layer in layers], axis=1)
        # Counts stay below 2^53, so float64 holds them.
        tensor = torch.from_numpy(local.astype(np.float64)).to(loaded.device)
        return gather_heads(tensor, loaded.tensor_parallel).cpu().numpy().astype(local.dtype)

    arrays = {name: whole(name) for name in names}
    return {
        layer: LayerScores(
            specs=scores[layer].specs, **{name: arrays[name][:, at] for name in names}
        )
        for at, layer in enumerate(layers)
    }
