# SPDX-License-Identifier: Apache-2.0
"""The engines that run MInference's pattern files, and what each makes of an entry.

An entry is ``[name, vertical, slash, score]``. Three readers share the form and differ in what
they accept and run; what is written here was read from their sources:

- MInference (its Hugging Face patch and its vLLM patch) knows ``vertical_and_slash``,
  ``stream_llm`` (A-shape: sink and window in place of the budgets) and ``block_sparse`` (always
  the best 100 blocks; the numbers are ignored).
- vLLM's dual-chunk attention (up to 0.10.x, V0 engine) and SGLang's assert
  ``vertical_and_slash``, at the first long prompt and not at load, and run a vertical budget of
  exactly 30 as 130.

All force the first 30 columns and the last 100 slashes, clamp budgets to the sequence, look heads
up by global index, and read tiles of 64 with an estimate from the last 64 rows.
"""

import math
from dataclasses import dataclass
from typing import Literal

from patternsearch.errors import ConfigError
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Candidate,
    Dense,
    VerticalSlashLastQ,
)
from patternsearch.patterns.consumers import (
    MINFERENCE_BLOCKS,
    MINFERENCE_LAST_Q,
    MINFERENCE_TILE,
    is_expressible,
)
from patternsearch.patterns.forced import FORCED_COLUMNS, FORCED_SLASHES

__all__ = [
    "CONSUMERS",
    "SPARSE_FILE_NAME",
    "Consumer",
    "ConsumerName",
    "Entry",
    "dense_budget",
    "entry_of",
    "is_finite_score",
    "is_writable",
    "pattern_of",
]

ConsumerName = Literal["minference", "vllm", "sglang"]

SPARSE_FILE_NAME = "sparse_attention_config.json"
"""Where vLLM and SGLang look, inside the model's folder."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """One engine.

    Attributes:
        name: as in ``--to`` and ``--from``.
        title: for people, with the versions that read the file.
        entry_names: pattern names that it runs.
        bumped_vertical: a vertical budget that it runs as 100 more, or None.
        in_model_folder: the file lies in the model's folder under a fixed name.
    """

    name: ConsumerName
    title: str
    entry_names: tuple[str, ...]
    bumped_vertical: int | None
    in_model_folder: bool


CONSUMERS: dict[ConsumerName, Consumer] = {
    "minference": Consumer(
        name="minference",
        title="MInference (Hugging Face and its vLLM patch)",
        entry_names=("vertical_and_slash", "stream_llm", "block_sparse"),
        bumped_vertical=None,
        in_model_folder=False,
    ),
    "vllm": Consumer(
        name="vllm",
        title="vLLM dual-chunk attention (up to 0.10.x, V0 engine)",
        entry_names=("vertical_and_slash",),
        bumped_vertical=30,
        in_model_folder=True,
    ),
    "sglang": Consumer(
        name="sglang",
        title="SGLang dual-chunk attention",
        entry_names=("vertical_and_slash",),
        bumped_vertical=30,
        in_model_folder=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One head's entry as it stands in a file."""

    name: str
    vertical: int
    slash: int
    score: int | float | None


def dense_budget(max_positions: int | None) -> int:
    """Return the budget that stands for a dense head: beyond any sequence, so always clamped."""
    return max(2**20, max_positions or 0)


def is_writable(pattern: Candidate, consumer: Consumer) -> bool:
    """Return whether the consumer runs exactly this pattern for some entry.

    Budgets below the forced entries are raised to them, as they are when the pattern runs.
    """
    if isinstance(pattern, VerticalSlashLastQ):
        pattern = _raised(pattern, consumer)
    return is_expressible(pattern, consumer.name)


def entry_of(
    pattern: Candidate, consumer: Consumer, score: int | float | None, max_positions: int | None
) -> Entry:
    """Return the entry that makes the consumer run a pattern (see :func:`is_writable`)."""
    assert is_writable(pattern, consumer), pattern
    match pattern:
        case Dense():
            budget = dense_budget(max_positions)
            return Entry("vertical_and_slash", budget, budget, score)
        case AShape():
            return Entry("stream_llm", pattern.sink, pattern.window, score)
        case BlockSparse():
            return Entry("block_sparse", MINFERENCE_BLOCKS, MINFERENCE_BLOCKS, score)
        case VerticalSlashLastQ():
            raised = _raised(pattern, consumer)
            return Entry("vertical_and_slash", raised.vertical, raised.slash, score)
    raise AssertionError(pattern)


def _raised(pattern: VerticalSlashLastQ, consumer: Consumer) -> VerticalSlashLastQ:
    vertical = max(pattern.vertical, FORCED_COLUMNS)
    slash = max(pattern.slash, FORCED_SLASHES)
    if vertical == consumer.bumped_vertical:
        # One column more than asked for; 30 itself would run as 130.
        vertical += 1
    if (vertical, slash) == (pattern.vertical, pattern.slash):
        return pattern
    return pattern.model_copy(update={"vertical": vertical, "slash": slash})


def pattern_of(entry: Entry, consumer: Consumer, max_positions: int | None) -> Candidate:
    """Return the pattern that the consumer runs for an entry.

    Raises:
        ConfigError: the consumer does not run entries of this name, or a budget is no budget.
    """
    if entry.name not in consumer.entry_names:
        known = ", ".join(consumer.entry_names)
        raise ConfigError(f"unknown pattern {entry.name!r}: {consumer.name} runs {known}")
    if entry.name == "block_sparse":
        return BlockSparse(estimator="pooled", blocks=MINFERENCE_BLOCKS, tile=MINFERENCE_TILE)
    if entry.name == "stream_llm":
        if entry.slash < 1:
            raise ConfigError(f"stream_llm has a window of {entry.slash}: it must be at least 1")
        return AShape(sink=entry.vertical, window=entry.slash, tile=MINFERENCE_TILE)
    if entry.vertical == entry.slash == dense_budget(max_positions):
        return Dense()
    vertical = entry.vertical
    if vertical == consumer.bumped_vertical:
        vertical += 100
    return VerticalSlashLastQ(
        vertical=vertical, slash=entry.slash, tile=MINFERENCE_TILE, last_q=MINFERENCE_LAST_Q
    )


def is_finite_score(score: object) -> bool:
    """Return whether a value can be an entry's score: null or a finite number."""
    return score is None or (
        isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
    )
