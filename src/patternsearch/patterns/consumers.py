# SPDX-License-Identifier: Apache-2.0
"""Which patterns each engine's pattern file can say; the one rule for selection and export."""

from typing import Literal

from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Candidate,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.patterns.forced import FORCED_COLUMNS, FORCED_SLASHES

__all__ = [
    "MINFERENCE_BLOCKS",
    "MINFERENCE_LAST_Q",
    "MINFERENCE_TILE",
    "Consumer",
    "is_expressible",
]

Consumer = Literal["patternsearch", "minference", "vllm", "sglang"]

MINFERENCE_TILE: Literal[64] = 64
MINFERENCE_LAST_Q = 64
MINFERENCE_BLOCKS = 100


def is_expressible(candidate: Candidate, consumer: Consumer) -> bool:
    """Return whether a consumer's file can say exactly this candidate.

    Dense is written as budgets beyond the sequence. MInference runs tiles of 64, a last-row
    estimator of 64 rows, forced budgets of at least 30 columns and 100 slashes, and pooled blocks
    only as the best 100. vLLM and SGLang run Vertical-Slash only, and read 30 columns as 130.
    """
    if consumer == "patternsearch" or isinstance(candidate, Dense):
        return True
    if candidate.tile != MINFERENCE_TILE:
        return False
    match candidate:
        case VerticalSlashLastQ():
            least = FORCED_COLUMNS if consumer == "minference" else FORCED_COLUMNS + 1
            return (
                candidate.last_q == MINFERENCE_LAST_Q
                and candidate.vertical >= least
                and candidate.slash >= FORCED_SLASHES
            )
        case AShape():
            return consumer == "minference"
        case BlockSparse():
            return (
                consumer == "minference"
                and candidate.estimator == "pooled"
                and candidate.blocks == MINFERENCE_BLOCKS
            )
        case VerticalSlashSpread():
            return False
