# SPDX-License-Identifier: Apache-2.0
"""The scores folder: names and columns of the contract that calibrate writes and others read.

``x.yaml`` is accompanied by ``x.scores/`` with ``scores.parquet`` (a folder of part files, one a
finished sample), ``samples.parquet`` and ``run.json``. A stranger with NumPy, the checkpoint and
``token_ids`` can recompute any row.
"""

from dataclasses import dataclass
from pathlib import Path

from patternsearch.patterns.candidates import CANDIDATE_COLUMNS

__all__ = [
    "ERROR_COLUMNS",
    "LOW_COLUMNS",
    "MASS_COLUMNS",
    "SAMPLED_COLUMNS",
    "SAMPLES_COLUMNS",
    "SCORES_COLUMNS",
    "ScoresFolder",
    "scores_folder_of",
]

MASS_COLUMNS: tuple[str, ...] = ("mass_physical", "mass_q1", "mass_q2", "mass_q3", "mass_q4")
"""Physical captured mass over all rows and over each quarter of the rows."""

SCORES_COLUMNS: tuple[str, ...] = (
    "sample_id",
    "source",
    "split",
    "length",
    "num_tokens",
    "layer",
    "head",
    *CANDIDATE_COLUMNS,
    "index",
    *MASS_COLUMNS,
    "mass_logical",
    "density",
    "tiles",
    "columns",
)
"""One row a sample × layer × head × candidate × index."""

ERROR_COLUMNS: tuple[str, ...] = tuple(f"{name}_se" for name in MASS_COLUMNS)
LOW_COLUMNS: tuple[str, ...] = tuple(f"{name}_low" for name in MASS_COLUMNS)
SAMPLED_COLUMNS: tuple[str, ...] = (*ERROR_COLUMNS, *LOW_COLUMNS)
"""Appended to the scores of a sample of rows: standard errors and lower 95% confidence bounds."""

SAMPLES_COLUMNS: tuple[str, ...] = (
    "sample_id",
    "source",
    "split",
    "length",
    "num_tokens",
    "sha256",
    "token_ids",
)


@dataclass(frozen=True, slots=True)
class ScoresFolder:
    """Paths inside one scores folder."""

    root: Path

    @property
    def scores(self) -> Path:
        """Folder of part files; ``pandas.read_parquet`` reads it whole."""
        return self.root / "scores.parquet"

    @property
    def samples(self) -> Path:
        """The samples with their token ids."""
        return self.root / "samples.parquet"

    @property
    def run(self) -> Path:
        """Versions, device, model identity, recipe, grid, timings of each phase."""
        return self.root / "run.json"

    def part_prefix(self, index: int) -> str:
        """Begin of the name of the part of the sample at this place in ``samples.parquet``."""
        return f"part-{index:05d}-"


def scores_folder_of(config_path: Path) -> ScoresFolder:
    """Return the scores folder that belongs to a config path: ``x.yaml`` → ``x.scores``."""
    return ScoresFolder(config_path.with_suffix(".scores"))
