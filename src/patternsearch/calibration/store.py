# SPDX-License-Identifier: Apache-2.0
"""The scores folder on disk: written piece by piece, each piece whole or absent.

A finished sample is one part file. Its footer carries the digests of the request and of the
sample, its name the digest of its bytes, so that a run continues exactly where an earlier one
stopped and never takes over a part that belongs to something else or was damaged.
"""

import hashlib
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from patternsearch.calibration.request import changed_arguments, digest
from patternsearch.calibration.samples import Sample
from patternsearch.errors import InputError, ScoresError
from patternsearch.schema.files import write_atomic
from patternsearch.schema.scores import SAMPLES_COLUMNS, ScoresFolder

__all__ = ["ScoresStore", "disk_errors"]

RUN_FORMAT = "patternsearch/run"
_MARK = b"patternsearch"
_LAYOUT = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("length", pa.int32()),
        ("num_tokens", pa.int32()),
        ("sha256", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
    ]
)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into a sentence.

    Raises:
        InputError: an :class:`OSError` arose in the body.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or folder} cannot be used ({error.strerror or error}): choose an "
            "output you may write to, or mend the folder and run again; finished samples are kept"
        ) from None


class ScoresStore:
    """Reads and writes one scores folder on behalf of one request.

    Args:
        folder: where the scores are or will be.
        request: the mapping of :func:`patternsearch.calibration.request.score_request`.
    """

    def __init__(self, folder: ScoresFolder, request: dict[str, Any]) -> None:
        self.folder = folder
        self.request = request
        self.request_sha256 = digest(request)

    @staticmethod
    def refuse_foreign(folder: ScoresFolder) -> None:
        """Refuse a folder that something else made.

        Raises:
            InputError: the path exists and is not a scores folder.
        """
        root = folder.root
        known = {folder.scores.name, folder.samples.name, folder.run.name, ".lock"}
        with disk_errors(root):
            if not root.exists():
                return
            if not root.is_dir():
                raise InputError(
                    f"{root} is a file, a folder is needed there: choose another output"
                )
            strange = sorted(
                path.name
                for path in root.iterdir()
                if path.name not in known and not path.name.endswith(".tmp")
            )
        if strange:
            raise InputError(
                f"{root} holds {strange[0]!r}, which patternsearch did not write: "
                "choose another output or move that folder away"
            )

    def open(self, *, fresh: bool) -> bool:
        """Prepare the folder and return True if it continues an earlier run.

        Raises:
            InputError: an earlier run had other arguments, each named, and ``fresh`` is False.
        """
        root = self.folder.root
        with disk_errors(root):
            if fresh and root.exists():
                for path in (self.folder.run, self.folder.samples):
                    path.unlink(missing_ok=True)
                shutil.rmtree(self.folder.scores, ignore_errors=True)
            self.folder.scores.mkdir(parents=True, exist_ok=True)
            self._sweep()
            is_new = not self.folder.run.exists()
            holds_parts = any(self.folder.scores.iterdir())
        if is_new:
            if holds_parts:
                raise InputError(
                    f"{root} holds scores but no run.json to say what they are of: "
                    "pass --fresh to discard them, or choose another output"
                )
            return False
        differences = changed_arguments(self.read_run().get("request", {}), self.request)
        if differences:
            raise InputError(
                f"{root} was made with other arguments ({'; '.join(differences)}): "
                "repeat them to continue, pass --fresh to start over, or choose another output"
            )
        return True

    def _sweep(self) -> None:
        """Remove what a killed writer left half-written."""
        for folder in (self.folder.root, self.folder.scores):
            for path in folder.glob("*.tmp"):
                path.unlink(missing_ok=True)

    # --- run.json --------------------------------------------------------------------------

    def read_run(self) -> dict[str, Any]:
        """Return run.json.

        Raises:
            ScoresError: it cannot be read as one of ours.
        """
        path = self.folder.run
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ScoresError(
                f"{path} cannot be read ({error}): pass --fresh to start over"
            ) from None
        if not isinstance(document, dict) or document.get("format") != RUN_FORMAT:
            raise ScoresError(f"{path} is not a patternsearch run file: choose another output")
        return document

    def write_run(self, document: dict[str, Any]) -> None:
        """Write run.json; the format and the request are added."""
        full = {"format": RUN_FORMAT, "request": self.request, **document}
        text = json.dumps(full, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_atomic(self.folder.run, text.encode())

    # --- samples ---------------------------------------------------------------------------

    def write_samples(self, samples: Sequence[Sample]) -> None:
        """Write samples.parquet."""
        columns = {name: [getattr(sample, name) for sample in samples] for name in SAMPLES_COLUMNS}
        columns["token_ids"] = [np.asarray(ids, dtype=np.int32) for ids in columns["token_ids"]]
        write_atomic(self.folder.samples, _parquet(pa.table(columns, schema=_LAYOUT), {}))

    def has_samples(self) -> bool:
        """Return whether samples.parquet is there."""
        with disk_errors(self.folder.root):
            return self.folder.samples.exists()

    def check_samples(self, samples: Sequence[Sample]) -> None:
        """Hold freshly drawn samples against the ones on disk.

        Raises:
            ScoresError: the text behind the recipe has changed since the run began.
        """
        try:
            stored = pq.read_table(self.folder.samples, columns=["sample_id", "sha256"])
        except (OSError, pa.ArrowException) as error:
            raise ScoresError(
                f"{self.folder.samples} cannot be read ({error}): pass --fresh to start over"
            ) from None
        before = dict(zip(*(column.to_pylist() for column in stored.columns), strict=True))
        now = {sample.sample_id: sample.sha256 for sample in samples}
        changed = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
        if changed:
            raise ScoresError(
                f"the recipe now gives other tokens for {len(changed)} of {len(before)} samples "
                f"(first: {min(changed)}): its text or its packages changed since the run began; "
                "restore them to continue, or pass --fresh to start over"
            )

    def read_samples(self) -> list[Sample]:
        """Return the samples on disk, without where their documents began.

        Raises:
            ScoresError: samples.parquet cannot be read.
        """
        try:
            rows = pq.read_table(self.folder.samples, schema=_LAYOUT)
        except (OSError, pa.ArrowException) as error:
            raise ScoresError(
                f"{self.folder.samples} cannot be read ({error}): all processes of a run need the "
                "same scores folder, on a file system that they share"
            ) from None
        tokens = rows.column("token_ids")
        return [
            Sample(
                **row,
                token_ids=np.asarray(tokens[place].values, dtype=np.int32),
                documents=(),
                task=None,
            )
            for place, row in enumerate(rows.drop_columns("token_ids").to_pylist())
        ]

    # --- parts -----------------------------------------------------------------------------

    def has_part(self, index: int, sample: Sample) -> bool:
        """Return whether a whole part of this sample and this request is on disk."""
        with disk_errors(self.folder.scores):
            paths = self._parts_of(index)
        for path in paths:
            try:
                content = path.read_bytes()
                metadata = pq.read_schema(io.BytesIO(content)).metadata or {}
            except (OSError, pa.ArrowException):
                continue
            if path == self._part_path(index, content) and (
                metadata.get(_MARK) == self._part_mark(sample)
            ):
                return True
        return False

    def write_part(self, index: int, sample: Sample, table: pa.Table) -> None:
        """Write the scores of one finished sample."""
        content = _parquet(table, {_MARK: self._part_mark(sample)})
        path = self._part_path(index, content)
        with disk_errors(self.folder.scores):
            for other in self._parts_of(index):
                if other != path:
                    other.unlink(missing_ok=True)
        write_atomic(path, content)

    def remove_other_parts(self, num_samples: int) -> None:
        """Remove files in the scores folder that are no part of this run."""
        with disk_errors(self.folder.scores):
            wanted = {path for index in range(num_samples) for path in self._parts_of(index)}
            for path in self.folder.scores.iterdir():
                if path not in wanted:
                    path.unlink()

    def _parts_of(self, index: int) -> list[Path]:
        return sorted(self.folder.scores.glob(f"{self.folder.part_prefix(index)}*.parquet"))

    def _part_path(self, index: int, content: bytes) -> Path:
        digest = hashlib.sha256(content).hexdigest()[:16]
        return self.folder.scores / f"{self.folder.part_prefix(index)}{digest}.parquet"

    def _part_mark(self, sample: Sample) -> bytes:
        return f"{self.request_sha256} {sample.sample_id} {sample.sha256}".encode()


def _parquet(table: pa.Table, metadata: dict[bytes, bytes]) -> bytes:
    """Return a table as the bytes of a parquet file; the same table gives the same bytes."""
    merged = {**(table.schema.metadata or {}), **metadata}
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(merged), buffer, compression="zstd")
    return buffer.getvalue()
