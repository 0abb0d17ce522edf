# SPDX-License-Identifier: Apache-2.0
"""Vocabularies written as blocks of text."""

__all__ = ["phrases", "words"]


def words(block: str) -> tuple[str, ...]:
    """Return the words of a block."""
    return tuple(block.split())


def phrases(block: str) -> tuple[str, ...]:
    """Return the lines of a block without their indentation; a line ``-`` is the empty phrase."""
    lines = (line.strip() for line in block.strip().splitlines())
    return tuple("" if line == "-" else line for line in lines)
