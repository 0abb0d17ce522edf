# SPDX-License-Identifier: Apache-2.0
"""What a library's exception says, in one line of ours."""

__all__ = ["one_line"]

_MAX_CHARACTERS = 300


def one_line(error: BaseException) -> str:
    """Return the exception's text without line breaks, cut at 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 1] + "…"
