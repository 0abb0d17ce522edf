# SPDX-License-Identifier: Apache-2.0
"""One layer's attention: the index of its patterns, attention over what they chose, dense heads.

Dense heads run on a dense backend and the others on the sparse kernels, which is what selection
prices and what ``bench`` measures.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from patternsearch.kernels._common.upload import upload
from patternsearch.kernels.attend import attend, build_plan
from patternsearch.kernels.score.lse import LseBackend, attention_with_lse, lse_backends
from patternsearch.patterns.candidates import AShape, Candidate, Dense
from patternsearch.runtime.phases import NoPhases, Phases
from patternsearch.timing.execution import OWN_DENSE, Execution
from patternsearch.timing.workload import dense_backends

__all__ = ["SparseBackend", "sparse_attention_of"]

SparseBackend = Literal["triton", "torch"]

_OPERATORS: dict[str, LseBackend] = {
    "sdpa_cudnn": "cudnn",
    "sdpa_cudnn_repeated_kv": "cudnn",
    "sdpa_flash": "flash",
    "sdpa_flash_repeated_kv": "flash",
}
"""What runs a dense backend of the timing table; none of them repeats k and v."""


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
        backend: who builds the index and attends. Dense heads run on a dense backend, unless
            the sparse kernel was measured faster, and but for ``torch`` on a GPU, which is a
            reference and runs everything itself.
        phases: told of ``index``, ``sparse attention`` and ``dense attention``.
        execution: launch shapes and the dense backend measured on this GPU; None takes what is
            known to be good.

    Returns:
        [1, Hq, n, d] in q's dtype.
    """
    phases = phases or NoPhases()
    dense: list[int] = []
    fastest = _fastest_dense(q, execution)
    if fastest != OWN_DENSE and (backend == "triton" or q.device.type == "cpu"):
        dense = [head for head, pattern in enumerate(patterns) if isinstance(pattern, Dense)]
    if dense and len(dense) == len(patterns):
        with phases.phase("dense attention"):
            return _dense(q, k, v, scale, fastest)
    with phases.phase("index"):
        sparse = _without(dense, patterns)
        plan = build_plan(q, k, scale=scale, candidates=sparse, backend=backend)
    with phases.phase("sparse attention"):
        tuning = None if execution is None else execution.tuning
        out, _ = attend(q, k, v, scale=scale, plan=plan, backend=backend, tuning=tuning)
    if dense:
        with phases.phase("dense attention"):
            heads = upload(np.asarray(dense, dtype=np.int64), q.device)
            kv = upload(np.asarray(dense, dtype=np.int64) // (q.shape[1] // k.shape[1]), q.device)
            some = (q.index_select(1, heads), k.index_select(1, kv), v.index_select(1, kv))
            out.index_copy_(1, heads, _dense(*some, scale, fastest))
    return out


def _without(dense: Sequence[int], patterns: Sequence[Candidate]) -> Sequence[Candidate]:
    """Give dense heads one tile a row: the kernel runs every head and theirs is overwritten."""
    if not dense:
        return patterns
    tile = next(pattern.tile for pattern in patterns if not isinstance(pattern, Dense))
    placeholder = AShape(sink=0, window=1, tile=tile)
    return [placeholder if isinstance(pattern, Dense) else pattern for pattern in patterns]


def _fastest_dense(q: Tensor, execution: Execution | None) -> str | None:
    dtype = str(q.dtype).removeprefix("torch.")
    return None if execution is None else execution.dense(dtype, q.shape[3], q.shape[2])


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float, name: str | None) -> Tensor:
    """Attend causally on the backend of this name in the table, else on the first that can."""
    if name is not None and name not in _OPERATORS:
        named = next((b for b in dense_backends(q.device) if b.name == name), None)
        if named is not None:
            return named.run(q, k, v, scale)
    wanted = _OPERATORS.get(name or "")
    usable = wanted if wanted in lse_backends(q, k, v) else None
    return attention_with_lse(q, k, v, scale=scale, backend=usable).out
