# SPDX-License-Identifier: Apache-2.0
"""One-pass masses of all candidates (DESIGN: one pass scores the whole grid).

Triton launchers are loaded on first use, so that the CPU path needs no Triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from patternsearch.kernels.score.chunked import score_masses_chunked
from patternsearch.kernels.score.tables import BucketTable, ScoreMasses

if TYPE_CHECKING:
    from patternsearch.kernels.score.lse import attention_with_lse
    from patternsearch.kernels.score.triton import score_masses

__all__ = [
    "BucketTable",
    "ScoreMasses",
    "attention_with_lse",
    "score_masses",
    "score_masses_chunked",
]

_LAZY = {"score_masses": "triton", "attention_with_lse": "lse"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
