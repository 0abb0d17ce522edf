# SPDX-License-Identifier: Apache-2.0
"""Time a prefill and split it: projection and RoPE, index, attention, everything else.

The dense run goes through the same code with no layer attached, so both runs carry the same
overhead. A prefill is the backbone over one prompt with a fresh cache, and the logits of its last
position: what a first token waits for.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from patternsearch.errors import InputError
from patternsearch.model.support import attention_modules
from patternsearch.runtime.attach import attach
from patternsearch.runtime.phases import PhaseTimer
from patternsearch.schema.config import PatternConfig
from patternsearch.timing.table import TimingTable

__all__ = ["DENSE_KERNELS", "PrefillTime", "time_dense_prefill", "time_prefill"]

DENSE_KERNELS = {
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
}
"""torch's fast attention kernels on CUDA; left alone, torch does not always take the fastest."""

_TOTAL, _ATTENTION_MODULE = "total", "attention module"


class PrefillTime(BaseModel):
    """Medians over the repetitions, milliseconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Literal["dense", "sparse"]
    kernel: str = Field(
        description="attention of the run: of DENSE_KERNELS, `library` for what the model calls by "
        "itself, or the backends of the sparse run's heads, the most first"
    )
    num_tokens: int
    total_ms: float
    projection_ms: float = Field(
        description="attention modules without index and attention: q, k, v and output "
        "projections, RoPE, cache"
    )
    index_ms: float
    attention_ms: float
    other_ms: float = Field(description="embedding, norms, MLPs, head")
    repetitions: int


def time_prefill(
    model: Any,
    config: PatternConfig,
    token_ids: Tensor,
    *,
    run: Literal["dense", "sparse"],
    repetitions: int = 3,
    warm_up: int = 1,
    timings: TimingTable | None = None,
    dense_kernel: str | None = None,
) -> PrefillTime:
    """Time prefills of one prompt.

    Args:
        model: a transformers causal language model in evaluation mode.
        config: the config; it must have the model's shape.
        token_ids: int64 [1, n].
        run: dense ignores the patterns.
        repetitions: timed runs.
        warm_up: runs before them, not counted; the first compiles.
        timings: this GPU's timing table, as for :func:`patternsearch.runtime.attach.attach`.
        dense_kernel: of ``DENSE_KERNELS``, for a dense run; None leaves the choice to torch.
    """
    if repetitions < 1 or warm_up < 0:
        raise InputError(f"{repetitions} repetitions after {warm_up} warm-ups: at least 1 and 0")
    device = next(model.parameters()).device
    ids = token_ids.to(device)
    layers: list[int] | None = [] if run == "dense" else None
    rows: list[dict[str, float]] = []
    forced = sdpa_kernel([DENSE_KERNELS[dense_kernel]]) if dense_kernel else nullcontext()
    with (
        forced,
        attach(
            model, config, strict=False, min_length=1, layers=layers, timings=timings
        ) as attachment,
    ):
        if run == "dense":
            kernel = dense_kernel or "library"
        else:
            kernel = _named(attachment.backends(ids.shape[1]))
        for repetition in range(warm_up + repetitions):
            timer = PhaseTimer(device)
            attachment.phases = timer
            with _timed_modules(model, timer), torch.inference_mode(), timer.phase(_TOTAL):
                model(input_ids=ids, use_cache=True, logits_to_keep=1)
            measured = timer.milliseconds()
            if repetition >= warm_up:
                rows.append(measured)
    return _split(rows, run, kernel, ids.shape[1])


def time_dense_prefill(
    model: Any,
    config: PatternConfig,
    token_ids: Tensor,
    *,
    repetitions: int = 3,
    warm_up: int = 1,
) -> PrefillTime:
    """Time dense prefills of one prompt under each fast kernel; return the fastest.

    A speed-up means little against a kernel that nobody has to use. Where none of them takes the
    model (a mask, a head size), and off CUDA, the library's own choice is timed.
    """
    kernels: list[str | None] = []
    if next(model.parameters()).device.type == "cuda":
        kernels += DENSE_KERNELS
    found: list[PrefillTime] = []
    for kernel in (*kernels, None):
        if kernel is None and found:
            break
        try:
            found.append(
                time_prefill(
                    model, config, token_ids, run="dense", repetitions=repetitions,
                    warm_up=warm_up, dense_kernel=kernel,
                )
            )  # fmt: skip
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            if kernel is None:
                raise
    return min(found, key=lambda row: row.total_ms)


def _named(backends: Iterable[str]) -> str:
    """Join the names; dense heads that no table places have none, unless they are all."""
    return " + ".join(name for name in backends if name != "auto") or "auto"


def _split(
    rows: list[dict[str, float]], run: Literal["dense", "sparse"], kernel: str, num_tokens: int
) -> PrefillTime:
    def median(*names: str) -> float:
        return float(np.median([sum(row.get(name, 0.0) for name in names) for row in rows]))

    attention = median("dense attention", "sparse attention")
    index, modules, total = median("index"), median(_ATTENTION_MODULE), median(_TOTAL)
    return PrefillTime(
        run=run,
        kernel=kernel,
        num_tokens=num_tokens,
        total_ms=total,
        projection_ms=max(0.0, modules - index - attention),
        index_ms=index,
        attention_ms=attention,
        other_ms=max(0.0, total - modules),
        repetitions=len(rows),
    )


@contextmanager
def _timed_modules(model: Any, timer: PhaseTimer) -> Iterator[None]:
    """Time every attention module as a whole."""
    hooks, running = [], {}

    def begin(module: Any, _args: Any, _kwargs: Any) -> None:
        running[module] = timer.phase(_ATTENTION_MODULE)
        running[module].__enter__()

    def end(module: Any, _args: Any, _output: Any) -> None:
        running.pop(module).__exit__(None, None, None)

    for module in attention_modules(model).values():
        hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        hooks.append(module.register_forward_hook(end))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
