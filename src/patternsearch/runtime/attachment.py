# SPDX-License-Identifier: Apache-2.0
"""A config attached to a transformers model: the attention function that runs it.

The function is in the library's registry under one name; which config runs is looked up by the
model's configuration object, so several models may be attached at once, and a copy of an attached
model is refused instead of sharing state with the original.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from patternsearch.errors import InputError, ModelError
from patternsearch.model.dense import sliding_attention
from patternsearch.patterns.candidates import Candidate
from patternsearch.runtime.phases import NoPhases, Phases
from patternsearch.runtime.routing import Prefill, Router
from patternsearch.runtime.sparse import SparseBackend, sparse_attention_of, split_heads
from patternsearch.runtime.stats import DenseReason, RuntimeStats
from patternsearch.timing.execution import Execution

__all__ = ["ATTENTION_NAME", "Attachment", "Observer", "attached_to"]

ATTENTION_NAME = "patternsearch"
"""The attention implementation's name in transformers."""

_ATTACHED: dict[int, "Attachment"] = {}
"""By id of the model's configuration object, which the attachment keeps alive."""


class Observer(Protocol):
    """Watches an attachment at work."""

    def start_forward(self) -> None:
        """Told that a forward begins."""

    def wants(self, layer: int) -> bool:
        """Return whether to compare this layer of the sequence that runs now."""

    def compare(self, layer: int, sparse: Tensor, dense: Tensor) -> None:
        """Receive both outputs [1, n, heads, d]."""


class Attachment:
    """The connection of one model and one config; leave it with :meth:`detach` or as a context.

    Made by :func:`patternsearch.runtime.attach.attach`, which checks the arguments.

    Args:
        model: the transformers causal language model.
        patterns: of every global query head of every layer; None for a layer without patterns.
        layer_types: full, sliding or linear, of every layer.
        sliding_window: window of sliding layers in tokens.
        min_length: prompts of fewer real tokens run dense.
        layers: full layers that run sparse.
        head_dim: d.
        heads: [first, past the last) global query head of this process; None is all of them.
        backend: ``triton``, ``torch``, or ``auto``: triton on CUDA, torch elsewhere.
        execution: execution choices measured on this GPU.

    Attributes:
        stats: what ran how so far.
        phases: told about every index build and attention; measures nothing by default.
        observer: sees both outputs of the layers and requests that it asks for.
        serve_dense: patterns run for the observer only; requests get dense attention.
    """

    def __init__(
        self,
        model: Any,
        patterns: tuple[tuple[Candidate, ...] | None, ...],
        *,
        layer_types: tuple[str, ...],
        sliding_window: int | None,
        min_length: int,
        layers: Iterable[int],
        head_dim: int,
        heads: tuple[int, int] | None = None,
        backend: Literal["auto"] | SparseBackend = "auto",
        execution: Execution | None = None,
    ) -> None:
        self.patterns = patterns
        self.layer_types = layer_types
        self.sliding_window = sliding_window
        self.min_length = min_length
        self.layers = frozenset(layers)
        self.head_dim = head_dim
        self.heads = heads
        self.backend = backend
        self.execution = execution
        self.stats = RuntimeStats()
        self.phases: Phases = NoPhases()
        self.observer: Observer | None = None
        self.serve_dense = False
        self._router = Router()
        self._model = weakref.ref(model)
        self._config = model.config
        self._before = model.config._attn_implementation
        self._hooks: list[Any] = []

    # --- life ------------------------------------------------------------------------------

    def connect(self) -> None:
        """Route the model's attention through this object."""
        from transformers import AttentionInterface, AttentionMaskInterface

        model = self._model()
        assert model is not None
        if id(self._config) in _ATTACHED:
            raise InputError(
                "a config is already attached to this model: detach it first "
                "(patternsearch.detach(model))"
            )
        AttentionInterface.register(ATTENTION_NAME, _attention)
        AttentionMaskInterface.register(ATTENTION_NAME, _mask)
        model.set_attn_implementation(ATTENTION_NAME)
        if self._config._attn_implementation != ATTENTION_NAME:
            raise ModelError(
                f"{type(model).__name__} does not let its attention be set through transformers' "
                "registry: this model's code is not supported"
            )
        _ATTACHED[id(self._config)] = self
        backbone = model.base_model
        self._hooks = [
            backbone.register_forward_pre_hook(self._begin, with_kwargs=True),
            backbone.register_forward_hook(self._end, always_call=True),
        ]
        weakref.finalize(model, _ATTACHED.pop, id(self._config), None)

    def detach(self) -> None:
        """Give the model its former attention back; detaching twice does nothing."""
        if _ATTACHED.pop(id(self._config), None) is None:
            return
        for hook in self._hooks:
            hook.remove()
        model = self._model()
        if model is not None:
            model.set_attn_implementation(self._before)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def backends(self, num_tokens: int) -> dict[str, int]:
        """Return how many heads of this process run on which backend, the most first.

        Names are a timing table's. ``auto`` are dense heads that no table places: the first of
        torch's kernels that takes them. ``library`` is what the model calls by itself: below
        ``min_length``, and in full layers that are not attached.

        Args:
            num_tokens: real tokens of a prompt.
        """
        model = self._model()
        assert model is not None
        counts: Counter[str] = Counter()
        for layer, patterns in enumerate(self.patterns):
            if patterns is None:
                continue
            first, last = self.heads or (0, len(patterns))
            if num_tokens < self.min_length or layer not in self.layers:
                counts["library"] += last - first
                continue
            split = split_heads(
                patterns[first:last], num_tokens, self.head_dim, model.dtype, model.device,
                backend=self._backend(model.device), execution=self.execution,
            )  # fmt: skip
            counts[split.dense_backend or "auto"] += len(split.dense)
            counts[split.sparse_backend] += len(split.sparse)
        return {n: c for n, c in sorted(counts.items(), key=lambda at: (-at[1], at[0])) if c}

    # --- one forward -----------------------------------------------------------------------

    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._router.begin(args, kwargs)
        if self.observer is not None:
            self.observer.start_forward()

    def _end(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self._router.clear()

    def mask(self, **request: Any) -> Tensor | None:
        """Answer the library's request for a mask."""
        return self._router.mask(self.min_length, **request)

    def attention(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, keywords: dict[str, Any]
    ) -> Tensor:
        """Return the attention output [batch, tokens, Hq, d] of one layer.

        Args:
            module: the layer's attention module.
            q: [batch, Hq, tokens, d].
            k: [batch, Hkv, keys, d], not repeated.
            v: like k.
            mask: what the mask function answered, or the caller's own.
            keywords: the rest of what the library passes on.
        """
        layer = int(module.layer_idx)
        kind: Any = self.layer_types[layer]
        prefill = self._router.prefills.get(kind) if mask is None else None
        if prefill is not None and prefill.num_tokens != q.shape[2]:
            prefill = None
        reason = self._dense_reason(layer, kind, q, k, prefill)
        if prefill is None or (reason is not None and kind == "full"):
            if prefill is not None:  # an empty static cache holds room beyond the prompt
                k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
            self.stats.count_dense(reason or "custom mask", q.shape[0])
            with self.phases.phase("dense attention"):
                return _dense(module, q, k, v, mask, keywords)
        scale = keywords.get("scaling")
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        out = torch.zeros(
            q.shape[0], q.shape[2], q.shape[1], v.shape[-1], dtype=q.dtype, device=q.device
        )
        for row, length in enumerate(prefill.lengths):
            parts = (t[row : row + 1, :, :length] for t in (q, k, v))
            out[row, :length] = self._row(layer, kind, module, *parts, scale=scale)[0]
        return out

    def _dense_reason(
        self, layer: int, kind: str, q: Tensor, k: Tensor, prefill: Prefill | None
    ) -> DenseReason | None:
        if q.shape[2] == 1:
            return "decode"
        if kind != "full":
            return "sliding layer"
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            return "training"
        if prefill is None:
            return self._router.reason
        return None if layer in self.layers else "layer not attached"

    def _row(
        self,
        layer: int,
        kind: str,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
    ) -> Tensor:
        """Attend within one sequence of real tokens; returns [1, n, Hq, d]."""
        n = q.shape[2]
        if kind == "sliding":
            assert self.sliding_window is not None
            self.stats.count_dense("sliding layer")
            with self.phases.phase("dense attention"):
                window = self.sliding_window
                return sliding_attention(q, k, v, scale=scale, window=window).transpose(1, 2)
        if n < self.min_length:
            self.stats.count_dense("short")
            with self.phases.phase("dense attention"):
                return _dense(module, q, k, v, None, {"scaling": scale})
        is_watched = self.observer is not None and self.observer.wants(layer)
        dense = sparse = None
        if self.serve_dense or is_watched:
            with self.phases.phase("dense attention"):
                dense = _dense(module, q, k, v, None, {"scaling": scale})
        if not self.serve_dense or is_watched:
            sparse = self._sparse(layer, q, k, v, scale)
        if is_watched:
            assert self.observer is not None
            assert sparse is not None
            assert dense is not None
            self.observer.compare(layer, sparse, dense)
        if self.serve_dense:
            self.stats.count_dense("shadow")
            assert dense is not None
            return dense
        self.stats.count_sparse(n)
        assert sparse is not None
        return sparse

    def _sparse(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        guard = torch.cuda.device(q.device) if q.device.type == "cuda" else nullcontext()
        with guard:
            out = sparse_attention_of(
                self._local_patterns(layer, q.shape[1]),
                q,
                k,
                v,
                scale=scale,
                backend=self._backend(q.device),
                phases=self.phases,
                execution=self.execution,
            )
        return out.transpose(1, 2)

    def _backend(self, device: torch.device) -> SparseBackend:
        if self.backend != "auto":
            return self.backend
        return "triton" if device.type == "cuda" else "torch"

    def _local_patterns(self, layer: int, num_heads: int) -> tuple[Candidate, ...]:
        patterns = self.patterns[layer]
        assert patterns is not None
        first, last = self.heads or (0, len(patterns))
        if num_heads != last - first:
            raise ModelError(
                f"layer {layer} runs {num_heads} query heads here, the config gives this process "
                f"{last - first} (heads {first}–{last - 1} of {len(patterns)}): attach after the "
                "model is sharded, or pass tp_rank and tp_size"
            )
        return patterns[first:last]


def attached_to(model: Any) -> Attachment | None:
    """Return what is attached to a model, or None."""
    return _ATTACHED.get(id(model.config))


def _of(config: Any) -> Attachment:
    attachment = _ATTACHED.get(id(config))
    if attachment is None:
        raise ModelError(
            "this model's attention is set to patternsearch but no config is attached to it: it "
            "was copied or re-loaded while attached; call patternsearch.attach on it"
        )
    return attachment


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' registry asks: [batch, tokens, Hq, d] and no weights."""
    attachment = _of(module.config)
    return attachment.attention(module, query, key, value, attention_mask, keywords), None


def _mask(*, config: Any, **request: Any) -> Tensor | None:
    """Build the mask as transformers' registry asks."""
    return _of(config).mask(**request)


def _dense(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, keywords: dict[str, Any]
) -> Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out: Tensor = sdpa_attention_forward(module, q, k, v, mask, **keywords)[0]
    return out
