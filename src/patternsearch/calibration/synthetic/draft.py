# SPDX-License-Identifier: Apache-2.0
"""What a synthetic task is before it has a length: evidence, filler and a question."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from patternsearch.calibration.tokens import Message

__all__ = ["Draft", "place", "single_turn"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A task whose prompt can be made as long as needed.

    Attributes:
        question: what the prompt ends with asking.
        answer: the text that answers it.
        evidence: the strings, each unique in the prompt, that the answer follows from, in order.
        filler: number k to the k-th piece of filler; pure and endless.
        opening_sentence: number k to a sentence for the opening, the run of text that is cut to
            make the length exact.
        lead: the beginning of the answer, with which the prompt ends.
        messages: opening text, number of filler pieces and size of the opening to come (in
            characters) to the conversation (one user turn, or many), with the evidence in its
            place and the question last.
    """

    question: str
    answer: str
    evidence: tuple[str, ...]
    filler: Callable[[int], str]
    opening_sentence: Callable[[int], str]
    lead: str
    messages: Callable[[str, int, int], list[Message]]


def place(sizes: Sequence[int], depths: Sequence[float], reserve: int) -> list[int]:
    """Return before which filler piece each piece of evidence goes.

    Args:
        sizes: size of every filler piece, in any unit.
        depths: ascending fractions of the whole.
        reserve: size of what stands before the filler and belongs to the whole.

    Returns:
        For each depth, the boundary between pieces (0 to len(sizes)) nearest to it.
    """
    bounds = [reserve]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    result: list[int] = []
    start = 0
    for depth in depths:
        target = depth * bounds[-1]
        while start < len(sizes) and abs(bounds[start + 1] - target) <= abs(bounds[start] - target):
            start += 1
        result.append(start)
    return result


def single_turn(
    before: str, after: str, body: Callable[[int, int], str]
) -> Callable[[str, int, int], list[Message]]:
    """Return a ``messages`` function for a prompt that is one user turn.

    Args:
        before: text in front of the opening.
        after: text behind the body: the question.
        body: number of filler pieces and size of the opening to the text with the evidence.
    """

    def messages(opening: str, num_pieces: int, reserve: int) -> list[Message]:
        content = f"{before}{opening}{body(num_pieces, reserve)}{after}"
        return [{"role": "user", "content": content}]

    return messages
