# SPDX-License-Identifier: Apache-2.0
"""One layer's attention: the index of its patterns, attention over what they chose, dense heads.

Dense heads run on a dense backend, which is what selection prices, and the sparse ones together on
the sparse backend that was measured fastest for all of them.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from patternsearch.errors import BackendMissing
from patternsearch.kernels._common.upload import upload
from patternsearch.kernels.attend import attend, build_plan
from patternsearch.kernels.score.lse import LseBackend, attention_with_lse, lse_backends
from patternsearch.patterns.candidates import AShape, Candidate, Dense
from patternsearch.runtime.phases import NoPhases, Phases
from patternsearch.timing.execution import FLASH4, OWN, Execution
from patternsearch.timing.workload import dense_backends

__all__ = ["SparseBackend", "Split", "sparse_attention_of", "split_heads"]

SparseBackend = Literal["triton", "torch"]

_OPERATORS: dict[str, LseBackend] = {
    "sdpa_cudnn": "cudnn",
    "sdpa_cudnn_repeated_kv": "cudnn",
    "sdpa_flash": "flash",
    "sdpa_flash_repeated_kv": "flash",
}
"""What runs a dense backend of the timing table; none of them repeats k and v."""


@dataclass(frozen=True, slots=True)
class Split:
    """Which heads of a layer run where.

    Attributes:
        dense: heads of the dense backend.
        dense_backend: its name in the timing table; None is the first that takes the inputs.
        sparse: all other heads.
        sparse_backend: what attends for them.
    """

    dense: tuple[int, ...]
    dense_backend: str | None
    sparse: tuple[int, ...]
    sparse_backend: Literal["triton", "torch", "flash4"]


def split_heads(
    patterns: Sequence[Candidate],
    num_tokens: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    backend: SparseBackend,
    execution: Execution | None,
) -> Split:
    """Say where each head runs; the arguments are as for :func:`sparse_attention_of`."""
    everything = tuple(range(len(patterns)))
    if backend == "torch" and device.type != "cpu":
        return Split((), None, everything, backend)
    name = str(dtype).removeprefix("torch.")
    fastest = None if execution is None else execution.dense(name, head_dim, num_tokens)
    dense = [h for h in everything if isinstance(patterns[h], Dense)] if fastest != OWN else []
    sparse = tuple(head for head in everything if head not in dense)
    run: Literal["triton", "torch", "flash4"] = backend
    if execution is not None:
        some = [patterns[head] for head in sparse]
        run = FLASH4 if execution.sparse(some, name, head_dim, num_tokens) == FLASH4 else backend
    return Split(tuple(dense), fastest, sparse, run)


def sparse_attention_of(
    patterns: Sequence[Candidate],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    backend: SparseBackend,
    phases: Phases | None = None,
    execution: Execution | None = None,
) -> Tensor:
    """Attend over each head's physical set, chosen with the online index.

    Args:
        patterns: of the Hq heads.
        q: [1, Hq, n, d] after rotary embedding.
        k: [1, Hkv, n, d], not repeated.
        v: like k.
        scale: factor of the logits.
        backend: who builds the index and attends, unless ``execution`` names another sparse
            backend for the layer. Dense heads run on a dense backend, unless the sparse kernel was
            measured faster; but ``torch`` on a GPU is a reference and runs everything itself.
        phases: told of ``index``, ``sparse attention`` and ``dense attention``.
        execution: launch shapes and backends measured on this GPU; None takes what is known to
            be good.

    Returns:
        [1, Hq, n, d] in q's dtype.
    """
    phases = phases or NoPhases()
    split = split_heads(
        patterns, q.shape[2], q.shape[3], q.dtype, q.device, backend=backend, execution=execution
    )
    if not split.sparse:
        with phases.phase("dense attention"):
            return _dense(q, k, v, scale, split.dense_backend)
    with phases.phase("index"):
        sparse = _without(split.dense, patterns)
        plan = build_plan(q, k, scale=scale, candidates=sparse, backend=backend)
    with phases.phase("sparse attention"):
        tuning = None if execution is None else execution.tuning
        name = split.sparse_backend
        out, _ = attend(q, k, v, scale=scale, plan=plan, backend=name, tuning=tuning)
    if split.dense:
        with phases.phase("dense attention"):
            places = np.asarray(split.dense, dtype=np.int64)
            heads = upload(places, q.device)
            kv = upload(places // (q.shape[1] // k.shape[1]), q.device)
            some = (q.index_select(1, heads), k.index_select(1, kv), v.index_select(1, kv))
            out.index_copy_(1, heads, _dense(*some, scale, split.dense_backend))
    return out


def _without(dense: Sequence[int], patterns: Sequence[Candidate]) -> Sequence[Candidate]:
    """Give dense heads one tile a row: the kernel runs every head and theirs is overwritten."""
    if not dense:
        return patterns
    tile = next(pattern.tile for pattern in patterns if not isinstance(pattern, Dense))
    placeholder = AShape(sink=0, window=1, tile=tile)
    return [placeholder if isinstance(pattern, Dense) else pattern for pattern in patterns]


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float, name: str | None) -> Tensor:
    """Attend causally on the backend of this name in the table; None is the first that can.

    A warning says where the named one cannot run what it is given, and what does instead.
    """
    if name is not None and name not in _OPERATORS:
        named = next((b for b in dense_backends(q.device) if b.name == name), None)
        if named is not None:
            return named.run(q, k, v, scale)
    wanted = None if name is None else _OPERATORS.get(name)
    usable = lse_backends(q, k, v)
    if name is not None and wanted not in usable:
        warnings.warn(
            f"the timing table names {name} for dense heads, which cannot run {q.dtype} heads of "
            f"head_dim {q.shape[3]}, {q.shape[1]} over {k.shape[1]}, on {q.device}: {usable[0]} "
            "runs them; measure what is here with `patternsearch bench`",
            BackendMissing,
            stacklevel=2,
        )
        wanted = None
    return attention_with_lse(q, k, v, scale=scale, backend=wanted).out
