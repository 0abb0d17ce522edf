# SPDX-License-Identifier: Apache-2.0
"""Decide, once a forward, whether its attention is a plain causal prefill that may run sparse.

transformers asks a mask function for each kind of layer before the layers run. A plain prefill
(nothing cached before it, causal, padded at the right end or not at all) needs no mask: real rows
never look at what lies to their right. Everything else gets the library's own mask.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from patternsearch.runtime.stats import DenseReason

__all__ = ["Prefill", "Router", "is_packed", "right_padded_lengths"]

LayerKind = Literal["full", "sliding"]


@dataclass(frozen=True, slots=True)
class Prefill:
    """A plain causal prefill.

    Attributes:
        num_tokens: columns of the batch, padding included.
        lengths: real tokens of each row; they stand at its beginning.
    """

    num_tokens: int
    lengths: tuple[int, ...]


@dataclass
class Router:
    """What is known of the forward that runs now.

    Attributes:
        packed: its position ids do not simply count up.
        prefills: by layer kind, where it is a plain prefill.
        reason: why it is none.
    """

    packed: bool = False
    prefills: dict[LayerKind, Prefill] = field(default_factory=dict)
    reason: DenseReason = "custom mask"

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the arguments of a forward that starts."""
        self.clear()
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        positions = kwargs.get("position_ids", args[2] if len(args) > 2 else None)
        self.packed = kwargs.get("cu_seq_lens_q") is not None or is_packed(positions, mask)

    def clear(self) -> None:
        """Forget the last forward."""
        self.packed = False
        self.prefills.clear()
        self.reason = "custom mask"

    def mask(self, min_length: int, **request: Any) -> Tensor | None:
        """Answer transformers' request for a mask; the arguments are those of its ``sdpa_mask``.

        Returns None for a plain prefill that has a row of at least ``min_length`` real tokens,
        and for whatever the library needs no mask for.
        """
        from transformers.masking_utils import sdpa_mask

        kind: LayerKind = "full" if request.get("local_size") is None else "sliding"
        prefill = self._plain_prefill(kind, min_length, request)
        if prefill is None:
            self.prefills.pop(kind, None)
            mask: Tensor | None = sdpa_mask(**request)
            return mask
        self.prefills[kind] = prefill
        return None

    def _plain_prefill(
        self, kind: LayerKind, min_length: int, request: dict[str, Any]
    ) -> Prefill | None:
        num_tokens, num_keys = int(request["q_length"]), int(request["kv_length"])
        if num_tokens == 1:
            return None
        if self.packed:
            self.reason = "packed"
            return None
        if not request.get("allow_is_causal_skip", True) or request.get("use_vmap", False):
            self.reason = "custom mask"
            return None
        if int(request.get("q_offset", 0)) or int(request.get("kv_offset", 0)):
            self.reason = "chunked prefill"
            return None
        if num_keys < num_tokens or (kind == "sliding" and num_keys != num_tokens):
            return None
        lengths = right_padded_lengths(
            request.get("attention_mask"), int(request["batch_size"]), num_tokens
        )
        if lengths is None:
            self.reason = "padding"
            return None
        if max(lengths) < min_length:
            self.reason = "short"
            return None
        return Prefill(num_tokens, lengths)


def right_padded_lengths(
    mask: Tensor | None, batch_size: int, num_tokens: int
) -> tuple[int, ...] | None:
    """Return each row's real tokens if all padding is at the right end, else None.

    Args:
        mask: [batch, ≥ tokens], nonzero where a token is real; None is no padding.
        batch_size: rows.
        num_tokens: columns that count.
    """
    if mask is None:
        return (num_tokens,) * batch_size
    real = mask[:, :num_tokens].bool()
    if real.shape[1] < num_tokens:
        return None
    counts = real.sum(-1)
    position = torch.arange(num_tokens, device=real.device)
    is_prefix = (real == (position < counts[:, None])).all()
    answer = torch.cat([counts, is_prefix[None].to(counts.dtype)]).tolist()  # one wait for all
    if not answer.pop() or min(answer) < 1:
        return None
    return tuple(int(count) for count in answer)


def is_packed(positions: Any, mask: Any) -> bool:
    """Return whether position ids restart, jump or have several axes among the real tokens."""
    if not isinstance(positions, Tensor) or positions.shape[-1] == 1:
        return False
    if positions.ndim != 2:
        return True
    steps = positions.diff(dim=-1) != 1
    if isinstance(mask, Tensor) and mask.ndim == 2:
        real = mask[:, -positions.shape[1] :].bool()
        steps = steps & real[:, 1:] & real[:, :-1]
    return bool(steps.any())
