# SPDX-License-Identifier: Apache-2.0
"""Builds a synthetic task at an exact token length and a wanted depth of its evidence.

The prompt ends with the question, so that its last rows must look far back. The length is made
exact by cutting into the first tokens of an opening text (an excerpt that begins in the middle of
a sentence): no padding, and nothing of evidence or question is touched.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from patternsearch.calibration.randomness import KeyedRandom
from patternsearch.calibration.recipes import TaskName
from patternsearch.calibration.synthetic.code import code
from patternsearch.calibration.synthetic.dialogue import dialogue
from patternsearch.calibration.synthetic.draft import Draft
from patternsearch.calibration.synthetic.retrieval import multikey, needle, variable_tracking
from patternsearch.calibration.tokens import Encoder
from patternsearch.errors import RecipeError

__all__ = ["TaskPrompt", "build_task", "spread_depth"]

_MARK = "PatternsearchOpeningGoesHere"
_GOLDEN = 0.6180339887498949
_DRAFTS: dict[TaskName, Callable[[tuple[str | int, ...], float], Draft]] = {
    "needle": needle,
    "multikey": multikey,
    "variable_tracking": variable_tracking,
    "dialogue": dialogue,
    "code": code,
}


@dataclass(frozen=True, slots=True, eq=False)
class TaskPrompt:
    """A prompt, what it asks and what is right.

    Attributes:
        task: name of the generator.
        token_ids: int32, shape [length]; ends where the answer begins.
        question: the question at the end of the prompt.
        lead: the beginning of the answer, which the prompt ends with.
        answer: the text that follows.
        depth: where the first evidence really stands, as a fraction of the prompt.
        evidence: token offset of each piece of evidence, ascending.
    """

    task: TaskName
    token_ids: NDArray[np.int32]
    question: str
    lead: str
    answer: str
    depth: float
    evidence: tuple[int, ...]


def spread_depth(index: int, *key: str | int) -> float:
    """Return the depth of the ``index``-th task of a series: in [0, 1), evenly spread early on."""
    return (KeyedRandom(*key, "depth").fraction() + index * _GOLDEN) % 1.0


def build_task(
    task: TaskName, encoder: Encoder, *, length: int, depth: float, key: tuple[str | int, ...]
) -> TaskPrompt:
    """Build one task.

    Args:
        task: which generator.
        encoder: the model's tokenizer and prompt form.
        length: tokens of the whole prompt, special tokens included.
        depth: wanted position of the (first) evidence, in [0, 1]; it lands on the nearest
            boundary of the filler.
        key: seeds everything; the same key gives the same task.

    Raises:
        RecipeError: the length cannot even hold evidence and question.
    """
    draft = _DRAFTS[task](key, depth)
    head, tail_text = _frame(draft, encoder, task, length)
    tail = encoder.encode(tail_text)
    opening: list[str] = []
    while (missing := length - head.size - tail.size) > 0:
        opening += _sentences(draft, encoder, len(opening), missing)
        tail = encoder.encode("".join(opening) + tail_text)
    # `missing` is now minus the number of tokens too many, all of them in the opening.
    token_ids = np.concatenate([head, tail[-missing:]])
    token_ids.setflags(write=False)
    evidence = tuple(
        max(0, length - encoder.encode(tail_text[tail_text.index(text) :]).size)
        for text in draft.evidence
    )
    return TaskPrompt(
        task=task,
        token_ids=token_ids,
        question=draft.question,
        lead=draft.lead.lstrip(),
        answer=draft.answer,
        depth=evidence[0] / length,
        evidence=evidence,
    )


def _frame(
    draft: Draft, encoder: Encoder, task: TaskName, length: int
) -> tuple[NDArray[np.int32], str]:
    """Return the tokens before the opening and the text after it, with as much filler as fits."""
    _, _, num_bare = _layout(draft, encoder, 0, reserve=0)
    if num_bare > length:
        raise RecipeError(
            f"task {task} needs at least {num_bare} tokens with this tokenizer, the length is "
            f"{length}: drop the length or the source"
        )
    sizes = _filler_sizes(draft, encoder, length - num_bare)
    while True:
        head, after, num_tokens = _layout(draft, encoder, len(sizes), reserve=0)
        excess = num_tokens - length
        if excess <= 0:
            break
        while sizes and excess > 0:
            excess -= max(1, sizes.pop())
    # Once more, with the evidence placed in view of the opening that will fill the rest.
    chars_per_token = len(after) / max(1, num_tokens - head.size)
    reserve = round((length - num_tokens) * chars_per_token)
    placed, text, num_placed = _layout(draft, encoder, len(sizes), reserve=reserve)
    return (placed, text) if num_placed <= length else (head, after)


def _layout(
    draft: Draft, encoder: Encoder, num_pieces: int, *, reserve: int
) -> tuple[NDArray[np.int32], str, int]:
    messages = draft.messages(_MARK, num_pieces, reserve)
    before, after = encoder.split_at_mark(messages, _MARK, lead=draft.lead)
    head = np.concatenate([encoder.prefix, encoder.encode(before)])
    return head, after, head.size + encoder.encode(after).size


def _filler_sizes(draft: Draft, encoder: Encoder, num_tokens: int) -> list[int]:
    """Return the sizes in tokens of as many pieces of filler as that many tokens hold.

    Pieces are counted one by one; joined, or in a chat template, they may take a few more.
    """
    sizes: list[int] = []
    total = 0
    while True:
        batch = range(len(sizes), len(sizes) + 64)
        for size in encoder.counts([draft.filler(number) for number in batch]):
            total += max(1, size)
            if total > num_tokens:
                return sizes
            sizes.append(size)


def _sentences(draft: Draft, encoder: Encoder, start: int, num_tokens: int) -> list[str]:
    """Return sentences for the opening, from number ``start``, of about that many tokens."""
    texts: list[str] = []
    while num_tokens > 0:
        texts.append(draft.opening_sentence(start + len(texts)))
        num_tokens -= max(1, *encoder.counts(texts[-1:]))
    return texts
