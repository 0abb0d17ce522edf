# SPDX-License-Identifier: Apache-2.0
"""Read scores: a folder that ``calibrate`` wrote, or a data frame of the same columns."""

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from patternsearch.errors import ScoresError
from patternsearch.schema.scores import LOW_COLUMNS, SCORES_COLUMNS, ScoresFolder
from patternsearch.selection.arrays import ScoreArrays
from patternsearch.selection.collect import Collector
from patternsearch.selection.rows import REDO, some

__all__ = ["load_scores", "scores_from_frame"]

_TEXT_COLUMNS = ("sample_id", "source", "split", "kind", "estimator", "index")
_NEEDED = tuple(name for name in SCORES_COLUMNS if name != "mass_logical")


def load_scores(folder: ScoresFolder | Path) -> ScoreArrays:
    """Read and check a scores folder.

    Args:
        folder: the folder that ``calibrate`` wrote beside its config.

    Raises:
        ScoresError: the folder is missing, foreign or incomplete, or its rows are inconsistent.
    """
    folder = folder if isinstance(folder, ScoresFolder) else ScoresFolder(Path(folder))
    if not folder.root.is_dir():
        raise ScoresError(
            f"{folder.root} is not a folder: give the scores folder that `patternsearch calibrate` "
            f"wrote beside its config (x.yaml → x.scores)"
        )
    missing = [p.name for p in (folder.scores, folder.samples, folder.run) if not p.exists()]
    if missing:
        raise ScoresError(
            f"{folder.root} has no {', '.join(missing)}: a scores folder holds scores.parquet, "
            f"samples.parquet and run.json; {REDO} or name another folder"
        )
    expected = _read_parquet(folder.samples, ("sample_id",))["sample_id"].astype(str).tolist()
    collector = Collector()
    for path in _part_files(folder.scores):
        collector.add(_read_parquet(path, _NEEDED), path.name)
    found = collector.sample_ids()
    unscored = [sample for sample in expected if sample not in found]
    if unscored:
        raise ScoresError(
            f"{folder.root} holds scores of {len(expected) - len(unscored)} of its "
            f"{len(expected)} samples (missing: {some(unscored)}): selection needs them all; "
            f"{REDO} with the same arguments to resume"
        )
    strangers = sorted(found - set(expected))
    if strangers:
        raise ScoresError(
            f"{folder.root}/scores.parquet holds samples that samples.parquet does not list "
            f"({some(strangers)}): the folder mixes two runs; {REDO} with --fresh"
        )
    return collector.finish()


def scores_from_frame(frame: pd.DataFrame) -> ScoreArrays:
    """Turn a scores data frame (columns :data:`~patternsearch.schema.scores.SCORES_COLUMNS`,
    any row order) into arrays.

    Raises:
        ScoresError: columns are missing or rows are inconsistent.
    """  # noqa: D205
    _check_columns(tuple(frame.columns), _NEEDED, "the data frame")
    collector = Collector()
    collector.add(frame, "the data frame")
    return collector.finish()


def _part_files(scores: Path) -> list[Path]:
    if scores.is_file():
        return [scores]
    parts = sorted(scores.glob("*.parquet"))
    if not parts:
        raise ScoresError(f"{scores} holds no part files: no sample was scored yet; {REDO}")
    return parts


def _check_columns(have: tuple[str, ...], need: tuple[str, ...], where: str) -> None:
    missing = [name for name in need if name not in have]
    if missing:
        raise ScoresError(
            f"{where} lacks the columns {', '.join(missing)}: it is not a scores table of this "
            f"version; {REDO}"
        )


def _read_parquet(path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    try:
        _check_columns(tuple(pq.read_schema(path).names), columns, str(path))
        text = [name for name in _TEXT_COLUMNS if name in columns]
        names = set(pq.read_schema(path).names)
        bounds = [name for name in LOW_COLUMNS if columns is _NEEDED and name in names]
        table = pq.read_table(
            path, columns=[*columns, *bounds], read_dictionary=text, memory_map=True
        )
        # Damaged text shows only when it is converted.
        frame: pd.DataFrame = table.to_pandas()
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise ScoresError(f"{path} cannot be read as Parquet ({error}): {REDO}") from error
    return frame
