# SPDX-License-Identifier: Apache-2.0
"""Columns of a scores table read and checked: which candidate, which index, which numbers."""

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import ValidationError

from patternsearch.errors import ScoresError
from patternsearch.patterns.candidates import CANDIDATE_COLUMNS, Candidate, candidate_from_columns

__all__ = [
    "COUNT_COLUMNS",
    "REDO",
    "candidate_codes",
    "check_values",
    "float_column",
    "is_oracle_row",
    "some",
]

Floats = NDArray[np.float64]

COUNT_COLUMNS = ("density", "tiles", "columns")

REDO = "run `patternsearch calibrate` again"
"""The way out of most faults."""

_MASS_SLACK = 1e-3
"""How far a sum of float32 probabilities may stray outside [0, 1] before it is an error."""


def candidate_codes(frame: pd.DataFrame, where: str) -> tuple[NDArray[np.int64], list[Candidate]]:
    """Return each row's candidate as a code, and the candidates in order of first appearance."""
    key = np.zeros(len(frame), dtype=np.int64)
    for name in CANDIDATE_COLUMNS:
        column, values = pd.factorize(frame[name])
        key = key * (len(values) + 1) + column + 1
    codes, _ = pd.factorize(key)
    _, first = np.unique(codes, return_index=True)
    named = frame[list(CANDIDATE_COLUMNS)].iloc[first]
    candidates = []
    for row in named.astype(object).to_dict("records"):
        parameters = {str(name): None if pd.isna(value) else value for name, value in row.items()}
        try:
            candidates.append(candidate_from_columns(parameters))
        except (ValidationError, ValueError) as error:
            shown = {name: value for name, value in parameters.items() if value is not None}
            raise ScoresError(
                f"{where} has rows of {shown}, which is no candidate of this version "
                f"({error}): {REDO}"
            ) from error
    if len(set(candidates)) != len(candidates):
        raise ScoresError(f"{where} names the same candidate in two ways: {REDO} with --fresh")
    return codes.astype(np.int64), candidates


def is_oracle_row(frame: pd.DataFrame, where: str) -> NDArray[np.bool_]:
    """Return which rows have the oracle index; static patterns must have none."""
    codes, values = pd.factorize(frame["index"])
    names = [str(value) for value in values]
    strange = [name for name in names if name not in ("none", "online", "oracle")]
    if strange or (codes < 0).any():
        raise ScoresError(
            f"{where} has index {some(strange or ['null'])}: it must be none, online or oracle"
        )
    static = frame["kind"].isin(["dense", "a_shape"]).to_numpy()
    is_none = np.array([name == "none" for name in names])[codes]
    if (static != is_none).any():
        raise ScoresError(
            f"{where} has index none for a pattern that needs one, or an index for a static "
            f"pattern: {REDO}"
        )
    return np.array([name == "oracle" for name in names])[codes]


def float_column(frame: pd.DataFrame, name: str, where: str) -> Floats:
    """Return a column as float64, missing values as NaN."""
    try:
        return frame[name].to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise ScoresError(f"{where}: column {name} is not numeric ({error}): {REDO}") from error


def check_values(sample: str, mass: Floats, counts: Floats) -> None:
    """Refuse masses, densities and counts that cannot be; a region's mass may be missing.

    Args:
        sample: its name.
        mass: [5, L, H, C].
        counts: [3, L, H, C], in the order of :data:`COUNT_COLUMNS`.
    """
    for name, values, low, high in (
        ("mass_physical", mass[0], 0.0, 1.0),
        ("density", counts[0], 0.0, 1.0),
        ("tiles", counts[1], 0.0, np.inf),
        ("columns", counts[2], 0.0, np.inf),
    ):
        good = np.isfinite(values) & (values >= low - _MASS_SLACK) & (values <= high + _MASS_SLACK)
        if not good.all():
            layer, head, _ = np.unravel_index(int(np.argmin(good)), values.shape)
            raise ScoresError(
                f"sample {sample}: {name} is {values[~good].flat[0]} in layer row {layer} head "
                f"{head}, it must be finite and in [{low:g}, {high:g}]; {REDO}"
            )
    regions = mass[1:]
    if ((regions < -_MASS_SLACK) | (regions > 1 + _MASS_SLACK)).any():
        raise ScoresError(f"sample {sample}: a region's mass lies outside [0, 1]; {REDO}")


def some(names: list[str], limit: int = 3) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
