# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, so that the same flag reads the same everywhere."""

from fractions import Fraction
from typing import Annotated

import typer

from patternsearch.errors import InputError

__all__ = [
    "DeviceOpt",
    "DtypeOpt",
    "JsonOpt",
    "LengthsOpt",
    "ModelArg",
    "OfflineOpt",
    "RecipeOpt",
    "SamplesOpt",
    "TpSizeOpt",
    "TrustOpt",
    "parse_fraction",
    "parse_lengths",
]

JsonOpt = Annotated[
    bool, typer.Option("--json", help="Write the result to stdout as one JSON document.")
]
ModelArg = Annotated[
    str, typer.Argument(metavar="MODEL", help="Checkpoint folder, hub id, or .gguf file.")
]
DeviceOpt = Annotated[
    str | None,
    typer.Option(help="Torch device; by default cuda if there is one, else cpu.", metavar="NAME"),
]
DtypeOpt = Annotated[
    str | None,
    typer.Option(
        help="Torch dtype of the forward; by default the checkpoint's on CUDA, float32 on the CPU.",
        metavar="NAME",
    ),
]
_SAMPLES = "Samples to judge on"

RecipeOpt = Annotated[
    str | None,
    typer.Option(
        help="Another recipe; by default the config's held-out samples.", rich_help_panel=_SAMPLES
    ),
]
LengthsOpt = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Lengths in tokens, such as 4k,32k; by default the calibrated ones.",
        rich_help_panel=_SAMPLES,
    ),
]
SamplesOpt = Annotated[
    int | None,
    typer.Option(
        help="At most so many samples a length; by default all held-out ones.",
        min=1,
        rich_help_panel=_SAMPLES,
    ),
]
TpSizeOpt = Annotated[int, typer.Option(help="Tensor-parallel size the config is for.", min=1)]
TrustOpt = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
]
OfflineOpt = Annotated[bool, typer.Option("--offline", help="Never open a network connection.")]


def parse_lengths(text: str | None) -> tuple[int, ...] | None:
    """Parse ``4096,32768`` or ``4k,32k`` into ascending lengths; None stays None.

    Raises:
        InputError: an item is not a positive integer.
    """
    if text is None:
        return None
    lengths = set()
    for item in text.split(","):
        word = item.strip().lower()
        scale = 1024 if word.endswith("k") else 1
        digits = word.removesuffix("k")
        if not digits.isdecimal() or int(digits) == 0:
            raise InputError(
                f"length {item.strip()!r} is not a positive whole number of tokens: "
                "write lengths as 4096,32768 or 4k,32k"
            )
        lengths.add(int(digits) * scale)
    return tuple(sorted(lengths))


def parse_fraction(text: str) -> float:
    """Parse ``1/8`` or ``0.125`` into a fraction in (0, 1].

    Raises:
        InputError: it is neither, or outside the range.
    """
    try:
        value = float(Fraction(text.replace(" ", "")))
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise InputError(f"{text!r} is not a fraction above 0 and up to 1: write 1/8 or 0.125")
    return value
