# SPDX-License-Identifier: Apache-2.0
"""Run a model once and hand over every full-attention layer's q, k and v.

The capture is an attention function in transformers' registry, so it sees q and k after rotary
embedding and QK-norm in every family, and a mask function that builds nothing. Each layer's
tensors are handed over when that layer runs and dropped right after.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from patternsearch.errors import InputError, ModelError, UnsupportedModel
from patternsearch.model.dense import DenseAttention, causal_attention, sliding_attention
from patternsearch.model.loading import LoadedModel

__all__ = ["AttentionInputs", "run_with_capture"]

_IMPLEMENTATION = "patternsearch_capture"


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What one full-attention layer computes with.

    Attributes:
        layer: Global layer index.
        q: [1, Hq, n, d] after rotary embedding and QK-norm, any strides, the model's dtype; of a
            tensor-parallel rank, its own heads, here and below.
        k: [1, Hkv, n, d], not repeated.
        v: [1, Hkv, n, dv].
        scale: Attention logits are scale · q · k.
        lse: fp32 [Hq, n], natural log-sum-exp of each row's logits, or None when the dense
            attention in use does not return it.
        output: [1, Hq, n, dv], the dense attention output.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    lse: Tensor | None
    output: Tensor


def run_with_capture(
    loaded: LoadedModel,
    token_ids: Tensor,
    on_attention: Callable[[AttentionInputs], None],
    *,
    dense_attention: DenseAttention | None = None,
    on_layer: Callable[[int], None] | None = None,
) -> Tensor:
    """Run the backbone on one sample and hand over each full-attention layer in order.

    Sliding-window and linear-attention layers run as they are and are not handed over. Nothing is
    cached, no n × n array is built, gradients and dropout are off.

    Args:
        loaded: From :func:`patternsearch.model.loading.load_model`.
        token_ids: int64 [1, n], n ≥ 1, without padding.
        on_attention: Called once a full layer. The tensors are the model's own: read, do not
            write, and keep none of them beyond the call.
        dense_attention: What computes full layers; by default torch's fused attention, which
            returns no log-sum-exp.
        on_layer: Called with the layer's index after any attention layer.

    Returns:
        The final hidden states [1, n, hidden].

    Raises:
        InputError: If ``token_ids`` has another shape, or ids outside the vocabulary.
        ModelError: If q, k or v is not finite (naming layer and head), or a layer is missing.
        UnsupportedModel: If a layer asks for attention that was not announced.
    """
    _check_token_ids(loaded, token_ids)
    run = _Run(loaded, on_attention, dense_attention or causal_attention, on_layer)
    with _capturing(loaded.model, run), torch.inference_mode():
        hidden: Tensor = loaded.backbone(
            input_ids=token_ids.to(loaded.device), use_cache=False
        ).last_hidden_state
    lacking = sorted(set(loaded.full_layers) - run.seen)
    if lacking:
        raise ModelError(
            f"the layers {lacking[:4]} ran without calling attention through the registry, so "
            "their heads cannot be scored; this model's code is not supported"
        )
    return hidden


@dataclass(frozen=True, slots=True)
class _Options:
    scale: float
    sliding_window: int | None
    unsupported: str


@dataclass
class _Run:
    """State of one forward pass."""

    loaded: LoadedModel
    on_attention: Callable[[AttentionInputs], None]
    dense_attention: DenseAttention
    on_layer: Callable[[int], None] | None
    seen: set[int] = field(default_factory=set)

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, options: _Options) -> Tensor:
        """Return the layer's attention output [1, Hq, n, dv], handing over a full layer."""
        identity = self.loaded.identity
        layer = int(module.layer_idx)
        self._check_call(layer, q, k, options)
        if identity.layer_types[layer] == "sliding":
            assert identity.sliding_window is not None
            out = sliding_attention(q, k, v, scale=options.scale, window=identity.sliding_window)
        else:
            if layer in self.seen:
                raise ModelError(f"layer {layer} calls attention twice in one pass")
            self.seen.add(layer)
            check_finite(layer, q=q, k=k, v=v)
            out, lse, _ = self.dense_attention(q, k, v, scale=options.scale)
            self.on_attention(AttentionInputs(layer, q, k, v, options.scale, lse, out))
        if self.on_layer is not None:
            self.on_layer(layer)
        return out

    def _check_call(self, layer: int, q: Tensor, k: Tensor, options: _Options) -> None:
        identity = self.loaded.identity
        kind = identity.model_type
        if options.unsupported:
            raise UnsupportedModel(
                f"layer {layer} of the model ({kind}) asks for {options.unsupported}, which is "
                "not supported"
            )
        window = options.sliding_window
        is_full = identity.layer_types[layer] == "full"
        if is_full and window is not None and window < q.shape[2]:
            raise UnsupportedModel(
                f"layer {layer} of the model ({kind}) uses a window of {window} tokens although "
                f"it counts as full attention; use lengths of at most {window}"
            )
        ranks = self.loaded.tensor_parallel
        expected = (
            identity.num_query_heads // ranks,
            identity.num_kv_heads // ranks,
            identity.head_dim,
        )
        found = (q.shape[1], k.shape[1], q.shape[3])
        if is_full and (found != expected or options.scale != identity.attention_scale):
            raise ModelError(
                f"layer {layer} runs {found[0]} query heads, {found[1]} kv heads, head_dim "
                f"{found[2]}, scale {options.scale}; the model announced {expected[0]}, "
                f"{expected[1]}, {expected[2]}, {identity.attention_scale}"
            )


_current: ContextVar[_Run] = ContextVar("current capture")


def _capture_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' registry asks: returns [1, n, Hq, dv] and no weights."""
    features = {
        "logit softcap": keywords.get("softcap"),
        "attention sinks": keywords.get("s_aux"),
        "an attention mask of its own": attention_mask,
        "attention that is not causal": keywords.get("is_causal") is False or None,
    }
    unsupported = ", ".join(name for name, value in features.items() if value is not None)
    options = _Options(
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window,
        unsupported,
    )
    out = _current.get().attend(module, query, key, value, options)
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*arguments: Any, **keywords: Any) -> None:
    """Build no mask: causality and windows are the attention function's business."""


@contextmanager
def _capturing(model: Any, run: _Run) -> Iterator[None]:
    """Route the model's attention through the capture for one pass."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_IMPLEMENTATION, _capture_attention)
    AttentionMaskInterface.register(_IMPLEMENTATION, _no_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_IMPLEMENTATION)
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)
        model.set_attn_implementation(before)


def _check_token_ids(loaded: LoadedModel, token_ids: Tensor) -> None:
    if token_ids.ndim != 2 or token_ids.shape[0] != 1 or token_ids.shape[1] < 1:
        raise InputError(
            f"token ids have the shape {list(token_ids.shape)}; one unpadded sample [1, n] is "
            "expected"
        )
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= loaded.identity.vocab_size:
        raise InputError(
            f"token ids span {low}..{high} but the model's vocabulary has "
            f"{loaded.identity.vocab_size} entries; use the model's own tokenizer"
        )


def check_finite(layer: int, **tensors: Tensor) -> None:
    """Refuse q, k, v [1, H, n, d] with NaN or Inf, naming the layer and the heads.

    Raises:
        ModelError: With the first tensor and heads that are not finite.
    """
    bad = {
        # extremes carry NaN and Inf along without a temporary of the tensor's size
        name: ~(tensor.amax((0, 2, 3)).isfinite() & tensor.amin((0, 2, 3)).isfinite())
        for name, tensor in tensors.items()
    }
    if not bool(torch.cat(list(bad.values())).any()):
        return
    for name, heads in bad.items():
        if bool(heads.any()):
            numbers = ", ".join(map(str, heads.nonzero()[:, 0].tolist()[:8]))
            kind = "query" if name == "q" else "kv"
            raise ModelError(
                f"layer {layer} has values that are not finite in {name}, {kind} heads {numbers}: "
                "the weights are damaged or the dtype overflows; try another dtype (bfloat16 or "
                "float32)"
            )
