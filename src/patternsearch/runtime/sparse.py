# SPDX-License-Identifier: Apache-2.0
"""One layer's attention: the index of its patterns, attention over what they chose, dense heads.

Dense heads run on a dense backend and each sparse head on the sparse backend that was measured
fastest for it, which is what selection prices and what ``bench`` measures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

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
    """Which heads of a layer run where; every head is in one place.

    Attributes:
        dense: heads of the dense backend.
        dense_backend: its name in the timing table; None is the first that takes the inputs.
        sparse: the others by attention backend, none of them without heads.
    """

    dense: tuple[int, ...]
    dense_backend: str | None
    sparse: Mapping[Literal["triton", "torch", "flash4"], tuple[int, ...]]


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
        return Split((), None, {backend: everything})
    name = str(dtype).removeprefix("torch.")
    fastest = None if execution is None else execution.dense(name, head_dim, num_tokens)
    dense = [h for h in everything if isinstance(patterns[h], Dense)] if fastest != OWN else []
    flash4 = [
        head
        for head, pattern in enumerate(patterns)
        if execution is not None and execution.sparse(pattern, name, head_dim, num_tokens) == FLASH4
    ]
    apart = {*dense, *flash4}
    own = tuple(head for head in everything if head not in apart)
    sparse = {backend: own, FLASH4: tuple(flash4)}
    return Split(tuple(dense), fastest, {key: heads for key, heads in sparse.items() if heads})


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
        backend: who builds the index and attends, but for heads that run elsewhere: dense ones
            on a dense backend, unless the sparse kernel was measured faster, and those that
            ``execution`` gives to another sparse backend. ``torch`` on a GPU is a reference and
            runs everything itself.
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
    parts: list[tuple[Sequence[int], Tensor]] = []
    for name, heads in split.sparse.items():
        with phases.phase("index"):
            only = _only(heads, patterns)
            plan = build_plan(q, k, scale=scale, candidates=only, backend=backend)
        with phases.phase("sparse attention"):
            tuning = None if execution is None else execution.tuning
            part, _ = attend(q, k, v, scale=scale, plan=plan, backend=name, tuning=tuning)
            parts.append((heads, part))
    with phases.phase("sparse attention"):
        out = _joined(parts)
    if split.dense:
        with phases.phase("dense attention"):
            places = _upload(split.dense, q.device)
            kv = _upload([head // (q.shape[1] // k.shape[1]) for head in split.dense], q.device)
            some = (q.index_select(1, places), k.index_select(1, kv), v.index_select(1, kv))
            out.index_copy_(1, places, _dense(*some, scale, split.dense_backend))
    return out


def _only(heads: Sequence[int], patterns: Sequence[Candidate]) -> Sequence[Candidate]:
    """Give other heads one tile a row: a kernel runs every head and theirs is overwritten.

    Leaving them out would take a copy of the keys and values of each of the heads.
    """
    if len(heads) == len(patterns):
        return patterns
    tiles = [p.tile for p in (patterns[head] for head in heads) if not isinstance(p, Dense)]
    placeholder = AShape(sink=0, window=1, tile=tiles[0] if tiles else 128)
    mine = set(heads)
    return [pattern if head in mine else placeholder for head, pattern in enumerate(patterns)]


def _joined(parts: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    """Return one output [1, Hq, n, d] with each part's own heads: the largest part's, filled up."""
    *others, (_, out) = sorted(parts, key=lambda part: len(part[0]))
    for heads, part in others:
        places = _upload(heads, out.device)
        out.index_copy_(1, places, part.index_select(1, places))
    return out


def _upload(heads: Sequence[int], device: torch.device) -> Tensor:
    return upload(np.asarray(heads, dtype=np.int64), device)


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float, name: str | None) -> Tensor:
    """Attend causally on the backend of this name in the table, else on the first that can."""
    if name is not None and name not in _OPERATORS:
        named = next((b for b in dense_backends(q.device) if b.name == name), None)
        if named is not None:
            return named.run(q, k, v, scale)
    wanted = _OPERATORS.get(name or "")
    usable = wanted if wanted in lse_backends(q, k, v) else None
    return attention_with_lse(q, k, v, scale=scale, backend=usable).out
