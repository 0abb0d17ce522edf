# SPDX-License-Identifier: Apache-2.0
"""Runs feed-forward blocks a slice of the tokens at a time, so that their memory is flat in n.

A gated block of an 8B model holds three activations of 14336 numbers a token: 11 GiB at 128k
tokens in bfloat16. Each token is on its own there, so slices give the same numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["chunked_mlps", "token_wise_mlps"]

ROWS = 16_384
"""Tokens at a time: large enough to fill a GPU, 1.3 GiB of activations in an 8B model."""

_PROJECTIONS = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})


def token_wise_mlps(model: Any) -> list[Any]:
    """Return the modules that are a plain feed-forward block: projections and an activation.

    Blocks that look at several tokens (routing with capacities, normalisation over tokens) have
    other modules and are left alone.
    """
    found = []
    for module in model.modules():
        children = dict(module.named_children())
        linear = {name for name, child in children.items() if isinstance(child, torch.nn.Linear)}
        others = [child for name, child in children.items() if name not in linear]
        # Activations have no parameters of their own.
        plain = all(next(child.parameters(), None) is None for child in others)
        if linear in _PROJECTIONS and plain:
            found.append(module)
    return found


@contextmanager
def chunked_mlps(model: Any, rows: int = ROWS) -> Iterator[None]:
    """Let the feed-forward blocks of a model take at most ``rows`` tokens at a time.

    Args:
        model: a transformers model, in evaluation mode.
        rows: tokens a slice; shorter inputs run as they are.
    """
    modules = token_wise_mlps(model)
    replaced = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.forward = _in_slices(module.forward, rows)
    try:
        yield
    finally:
        for module, forward in zip(modules, replaced, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _in_slices(forward: Callable[[Tensor], Tensor], rows: int) -> Callable[[Tensor], Tensor]:
    def sliced(hidden: Tensor) -> Tensor:
        n = hidden.shape[-2]
        if n <= rows:
            return forward(hidden)
        out = torch.empty_like(hidden)
        for first in range(0, n, rows):
            out[..., first : first + rows, :] = forward(hidden[..., first : first + rows, :])
        return out

    return sliced
