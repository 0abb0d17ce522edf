# SPDX-License-Identifier: Apache-2.0
"""How often each layer's attention ran sparse or dense, and why dense."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["DENSE_REASONS", "DenseReason", "RuntimeStats"]

DenseReason = Literal[
    "decode", "short", "chunked prefill", "padding", "packed", "custom mask", "sliding layer",
    "layer not attached", "training",
    "shadow",
]  # fmt: skip
DENSE_REASONS: dict[DenseReason, str] = {
    "decode": "one new token",
    "short": "fewer real tokens than min_length",
    "chunked prefill": "keys from an earlier call come before this call's",
    "padding": "padding that is not at the right end",
    "packed": "several sequences in one row",
    "custom mask": "a mask of the caller's or the model's own",
    "sliding layer": "a sliding-window layer has no pattern",
    "layer not attached": "left out by `layers`",
    "shadow": "the config is only watched, see patternsearch.shadow",
    "training": "gradients are wanted and the sparse kernels have none",
}
"""Every reason to run dense, and what it means."""


@dataclass
class RuntimeStats:
    """Counts of attention calls; one call is one sequence in one layer.

    Attributes:
        sparse_calls: calls that ran the config.
        sparse_tokens: real tokens in them.
        dense_calls: calls that ran dense, by reason.
    """

    sparse_calls: int = 0
    sparse_tokens: int = 0
    dense_calls: Counter[str] = field(default_factory=Counter)

    def count_sparse(self, tokens: int) -> None:
        """Count a sparse call over ``tokens`` real tokens."""
        self.sparse_calls += 1
        self.sparse_tokens += tokens

    def count_dense(self, reason: DenseReason, calls: int = 1) -> None:
        """Count dense calls."""
        self.dense_calls[reason] += calls

    def reset(self) -> None:
        """Start counting anew."""
        self.sparse_calls = self.sparse_tokens = 0
        self.dense_calls.clear()

    def as_document(self) -> dict[str, object]:
        """Return the counts for programs."""
        return {
            "sparse_calls": self.sparse_calls,
            "sparse_tokens": self.sparse_tokens,
            "dense_calls": dict(sorted(self.dense_calls.items())),
        }
