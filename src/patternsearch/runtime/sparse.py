# SPDX-License-Identifier: Apache-2.0
"""One layer's sparse attention: the index of its patterns, then attention over what they chose."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from patternsearch.kernels.attend import attend, build_plan
from patternsearch.patterns.candidates import Candidate
from patternsearch.runtime.phases import NoPhases, Phases

__all__ = ["SparseBackend", "sparse_attention_of"]

SparseBackend = Literal["triton", "torch"]


def sparse_attention_of(
    patterns: Sequence[Candidate],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    backend: SparseBackend,
    phases: Phases | None = None,
) -> Tensor:
    """Attend over each head's physical set, chosen with the online index.

    Args:
        patterns: of the Hq heads.
        q: [1, Hq, n, d] after rotary embedding.
        k: [1, Hkv, n, d], not repeated.
        v: like k.
        scale: factor of the logits.
        backend: who builds the index and attends.
        phases: told of ``index`` and ``sparse attention``.

    Returns:
        [1, Hq, n, d] in q's dtype.
    """
    phases = phases or NoPhases()
    with phases.phase("index"):
        plan = build_plan(q, k, scale=scale, candidates=patterns, backend=backend)
    with phases.phase("sparse attention"):
        out, _ = attend(q, k, v, scale=scale, plan=plan, backend=backend)
    return out
