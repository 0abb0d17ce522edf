# SPDX-License-Identifier: Apache-2.0
"""Watch a config in production: on some requests, compare sparse and dense in some layers.

A watched layer computes both outputs on the request's own inputs; the request is served as it
would be without watching. Sums stay on the device and nothing waits for it until they are read.
"""

import os
import random
from collections.abc import Iterable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from patternsearch.errors import InputError
from patternsearch.runtime.attach import attach
from patternsearch.runtime.attachment import attached_to
from patternsearch.schema.config import PatternConfig

__all__ = ["LayerStatistics", "Shadow", "ShadowStatistics", "shadow"]

_ERROR, _SQUARE, _WORST, _COSINE = range(4)


class LayerStatistics(BaseModel):
    """One layer over the requests compared so far; one value a head."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: int
    num_compared: int
    mean_error: tuple[float, ...] = Field(description="mean of ‖sparse − dense‖ / ‖dense‖")
    std_error: tuple[float, ...]
    worst_error: tuple[float, ...]
    mean_cosine: tuple[float, ...]


class ShadowStatistics(BaseModel):
    """Running statistics."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_requests: int = Field(description="prefills long enough to run sparse")
    num_sampled: int
    layers: tuple[LayerStatistics, ...]

    def worst_head(self) -> tuple[int, int, float] | None:
        """Return (layer, head, mean error) of the head that errs most; None before any."""
        found = [
            (part.layer, head, error)
            for part in self.layers
            for head, error in enumerate(part.mean_error)
        ]
        return max(found, key=lambda item: item[2], default=None)


class Shadow:
    """Watches an attached model; leave it with :meth:`close` or as a context.

    Made by :func:`shadow`.
    """

    def __init__(self, model: Any, rate: float, layers: Iterable[int], seed: int) -> None:
        self._attachment = attached_to(model)
        self._owns = False
        self._rate = rate
        self._layers = frozenset(layers)
        self._random = random.Random(seed)
        self._sampled: bool | None = None
        self._num_requests = self._num_sampled = 0
        self._sums: dict[int, Tensor] = {}
        self._counts: dict[int, int] = {}

    def start_forward(self) -> None:
        """Forget the decision on the last request."""
        self._sampled = None

    def wants(self, layer: int) -> bool:
        """Return whether this layer of the current request is compared; decides once a request."""
        if self._sampled is None:
            self._sampled = self._random.random() < self._rate
            self._num_requests += 1
            self._num_sampled += self._sampled
        return self._sampled and layer in self._layers

    def compare(self, layer: int, sparse: Tensor, dense: Tensor) -> None:
        """Add one comparison; both outputs are [1, n, heads, d]."""
        ours, theirs = sparse[0].float(), dense[0].float()
        norm = theirs.norm(dim=(0, 2)).clamp(min=1e-30)
        error = (ours - theirs).norm(dim=(0, 2)) / norm
        cosine = torch.cosine_similarity(ours, theirs, dim=-1).mean(0)
        sums = self._sums.get(layer)
        if sums is None:
            sums = self._sums[layer] = torch.zeros(4, len(error), device=error.device)
        sums[_ERROR] += error
        sums[_SQUARE] += error**2
        sums[_WORST] = torch.maximum(sums[_WORST], error)
        sums[_COSINE] += cosine
        self._counts[layer] = self._counts.get(layer, 0) + 1

    def statistics(self) -> ShadowStatistics:
        """Return what was seen so far."""
        rows = []
        for layer, sums in sorted(self._sums.items()):
            count = self._counts[layer]
            values = sums.double().cpu()
            mean = values[_ERROR] / count
            std = (values[_SQUARE] / count - mean**2).clamp(min=0).sqrt()
            rows.append(
                LayerStatistics(
                    layer=layer,
                    num_compared=count,
                    mean_error=tuple(mean.tolist()),
                    std_error=tuple(std.tolist()),
                    worst_error=tuple(values[_WORST].tolist()),
                    mean_cosine=tuple((values[_COSINE] / count).tolist()),
                )
            )
        return ShadowStatistics(
            num_requests=self._num_requests, num_sampled=self._num_sampled, layers=tuple(rows)
        )

    def connect(self, model: Any, config: PatternConfig | str | os.PathLike[str]) -> None:
        """Watch the model's attachment, or one of our own that serves dense."""
        if self._attachment is None:
            self._attachment = attach(model, config)
            self._attachment.serve_dense = True
            self._owns = True
        if self._attachment.observer is not None:
            raise InputError("this model is watched already: close the other shadow first")
        self._attachment.observer = self

    def close(self) -> None:
        """Stop watching; statistics stay readable."""
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        attachment.observer = None
        if self._owns:
            attachment.detach()

    def __enter__(self) -> "Shadow":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def shadow(
    model: Any,
    config: PatternConfig | str | os.PathLike[str],
    rate: float = 0.01,
    layers: Iterable[int] | None = None,
    *,
    seed: int = 0,
) -> Shadow:
    """Compare sparse and dense on a sampled fraction of requests.

    A model that has a config attached goes on serving sparse and is watched with that config;
    another serves dense and computes the sparse output on the side.

    Args:
        model: a transformers causal language model in evaluation mode.
        config: the config or its path; it must fit the model.
        rate: fraction of the prefills to compare, in [0, 1].
        layers: full layers to compare; None is the first, the middle and the last.
        seed: of the sampling.

    Raises:
        InputError: the rate or a layer is out of range, or the config does not fit.
    """
    if not 0.0 <= rate <= 1.0:
        raise InputError(f"rate {rate} is no fraction: give 0 to 1, such as 0.01")
    attachment = attached_to(model)
    if attachment is not None:
        full = sorted(attachment.layers)
    else:
        from patternsearch.model.support import layer_types

        full = [layer for layer, kind in enumerate(layer_types(model.config)) if kind == "full"]
    if not full:
        raise InputError(
            "no layer runs patterns, so there is nothing to compare: the model has no full "
            "attention, or a config is attached with layers=[]"
        )
    chosen = (
        sorted(set(layers)) if layers is not None else [full[0], full[len(full) // 2], full[-1]]
    )
    if strange := [layer for layer in chosen if layer not in full]:
        raise InputError(f"layer {strange[0]} runs no patterns: choose among {full}")
    watch = Shadow(model, rate, chosen, seed)
    watch.connect(model, config)
    return watch
