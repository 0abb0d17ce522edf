# SPDX-License-Identifier: Apache-2.0
"""The timing table: measured kernel times of one GPU, as a strict document with its own digest.

Every row is one measurement of one launch over all heads of a layer. How a row was run (backend,
launch shape) is part of the table; which pairs it read is counted, not assumed.
"""

import hashlib
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from patternsearch.errors import TimingError
from patternsearch.patterns.candidates import Tile
from patternsearch.schema.canonical import canonical_json, canonical_sha256
from patternsearch.schema.files import write_atomic
from patternsearch.schema.io import load_model_file

__all__ = [
    "KERNEL_DTYPES",
    "TIMINGS_FORMAT",
    "TIMINGS_SCHEMA_VERSION",
    "Clocks",
    "LaunchSetting",
    "ModelError",
    "Operation",
    "Skipped",
    "TimingRow",
    "TimingTable",
    "check_output",
    "dump_timings",
    "kernel_digest",
    "load_timings",
    "sealed",
]

TIMINGS_FORMAT = "patternsearch/timings"
TIMINGS_SCHEMA_VERSION = 1

KERNEL_DTYPES = ("bfloat16", "float16", "float32")
"""What the kernels take, by the names that a table has; torch's aliases (``half``) are none."""

Operation = Literal[
    "dense",
    "index_spread",
    "index_last_q",
    "index_pooled_query",
    "index_pooled",
    "attend_a_shape",
    "attend_vertical_slash",
    "attend_block_sparse",
]
"""``dense``: a whole causal attention. ``index_*``: from q and k to the lists that the kernel
reads. ``attend_*``: the sparse kernel on such lists."""

PositiveMs = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_MEASURED = {"p20_ms", "p50_ms", "p80_ms", "repetitions", "host_ms"}


class TimingRow(_Part):
    """One measurement. Times are milliseconds of one launch over all query heads."""

    op: Operation
    backend: str = Field(min_length=1, description="who ran it, by name")
    dtype: str = Field(min_length=1, description="torch name, such as bfloat16")
    head_dim: Count
    num_tokens: Count
    num_query_heads: Count
    num_kv_heads: Count
    tile: Tile | None = Field(description="null for dense and for ops that know no tile")
    rows: Count | None = Field(description="sampled query rows; null where none are sampled")
    budget: Count | None = Field(description="columns (vertical) or blocks of an index op")
    tiles: Amount | None = Field(description="causal tiles read, mean a head; attend only")
    columns: Amount | None = Field(description="gathered columns, mean a head; attend only")
    held_out: bool = Field(description="not used by the time model; measures its error")
    repetitions: Count
    p20_ms: PositiveMs
    p50_ms: PositiveMs
    p80_ms: PositiveMs
    host_ms: PositiveMs | None = Field(
        default=None,
        description="the host's time to launch it, which runs beside the GPU's; not in the others",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "TimingRow":
        if not self.p20_ms <= self.p50_ms <= self.p80_ms:
            raise ValueError(
                f"p20 {self.p20_ms}, p50 {self.p50_ms} and p80 {self.p80_ms} are not ascending"
            )
        is_attend = self.op.startswith("attend")
        if is_attend and (not self.tiles or self.columns is None or self.tile is None):
            raise ValueError("an attend row needs its tile, a positive tiles and its columns")
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError("num_query_heads is not a multiple of num_kv_heads")
        return self

    def identity(self) -> str:
        """Return what was measured and how, without the times; unique in a table."""
        return self.model_dump_json(exclude=_MEASURED)

    @property
    def head_ms(self) -> float:
        """Median milliseconds of one head."""
        return self.p50_ms / self.num_query_heads


class LaunchSetting(_Part):
    """One way to launch a kernel for a class of shapes: an execution choice, measured."""

    op: str
    backend: str
    dtype: str
    head_dim: Count
    tile: Tile | None
    has_columns: bool = Field(description="of launches that gather columns, or of the others")
    values: dict[str, int | bool]
    p50_ms: PositiveMs = Field(description="of the tuning workload")
    is_used: bool = Field(description="the rows were measured with it; others only compared")


class Skipped(_Part):
    """A measurement that this machine could not make, and why; nothing is predicted from it."""

    op: str = Field(description="an operation, or ``inputs`` for everything at a length")
    backend: str | None
    head_dim: Count
    num_tokens: Count
    case: str = Field(description="what was to run")
    reason: str = Field(min_length=1)


class Clocks(_Part):
    """Clock rates seen while measuring, MHz; null where the driver does not tell."""

    sm_mhz_min: Count | None
    sm_mhz_max: Count | None
    memory_mhz: Count | None


class ModelError(_Part):
    """Relative error of the time model on held-out rows."""

    op: str
    num_rows: Count
    median: Amount
    worst: Amount


class TimingTable(_Part):
    """The whole document."""

    format: Literal["patternsearch/timings"]
    schema_version: Literal[1]
    device: str = Field(min_length=1)
    compute_capability: str
    driver: str | None
    clocks: Clocks
    versions: dict[str, str | None]
    kernel_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    is_quick: bool
    settings: tuple[LaunchSetting, ...]
    rows: Annotated[tuple[TimingRow, ...], Field(min_length=1)]
    skipped: tuple[Skipped, ...]
    errors: tuple[ModelError, ...]
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of everything else")

    def content_sha256(self) -> str:
        """Return the digest that :attr:`sha256` must have."""
        return canonical_sha256(self.model_dump(exclude={"sha256"}))

    @property
    def is_of_these_kernels(self) -> bool:
        """Whether the table was measured with the kernels of this installation."""
        return self.kernel_sha256 == kernel_digest()

    def require_these_kernels(self) -> None:
        """Refuse a table that other kernels than this installation's were measured for.

        Raises:
            TimingError: naming both digests.
        """
        if not self.is_of_these_kernels:
            raise TimingError(
                f"the timing table of {self.device} was measured with kernels "
                f"{self.kernel_sha256[:12]}…, this installation has {kernel_digest()[:12]}…: other "
                "kernels take other times; measure again with `patternsearch bench` on the GPU "
                "that will serve, or leave the table out"
            )


def sealed(**parts: object) -> TimingTable:
    """Build a table from all its parts but the digest."""
    draft = TimingTable.model_validate(
        {
            "format": TIMINGS_FORMAT,
            "schema_version": TIMINGS_SCHEMA_VERSION,
            **parts,
            "sha256": "0" * 64,
        }
    )
    return draft.model_copy(update={"sha256": draft.content_sha256()})


def load_timings(path: str | os.PathLike[str]) -> TimingTable:
    """Load a timing table and check its digest.

    Raises:
        TimingError: unreadable, another document, a fault in it (a time that is not positive, a
            repeated row), or content that does not match the digest.
    """
    table = load_model_file(path, TimingTable, error=TimingError)
    if table.content_sha256() != table.sha256:
        raise TimingError(
            f"{path}: its content has digest {table.content_sha256()[:12]}… but it says "
            f"{table.sha256[:12]}…: the table was edited or damaged; measure again with "
            f"`patternsearch bench -o {path}`"
        )
    seen: set[str] = set()
    for row in table.rows:
        if row.identity() in seen:
            raise TimingError(
                f"{path}: two rows measure the same {row.op} at {row.num_tokens} tokens with "
                f"{row.backend}: a table holds each measurement once; measure again"
            )
        seen.add(row.identity())
    return table


def dump_timings(table: TimingTable, path: str | os.PathLike[str]) -> None:
    """Write a table atomically as canonical JSON.

    Raises:
        InputError: a suffix other than ``.json``, a foreign file, or an unwritable folder.
        EnvironmentLacks: the disk is full or fails.
    """
    check_output(Path(path))
    write_atomic(path, canonical_json(table.model_dump()).encode())


def check_output(path: Path) -> None:
    """Refuse an output path before hours are spent on what could not be written.

    Raises:
        TimingError: a suffix other than ``.json``, or a file that is no timing table.
    """
    if path.suffix.lower() != ".json":
        raise TimingError(f"{path}: a timing table's name ends in .json")
    if path.exists():
        try:
            load_model_file(path, TimingTable, error=TimingError)
        except TimingError as error:
            raise TimingError(
                f"{path} exists and is not a timing table: choose another name or remove it"
            ) from error
    elif not path.parent.is_dir():
        raise TimingError(f"cannot write {path}: folder {path.parent} does not exist")


def kernel_digest() -> str:
    """Return the SHA-256 (hex) of the kernels' source, which a table's times belong to.

    Without ``flash4.py``: that backend's kernels are a package's, whose version the table has.
    """
    root = Path(__file__).resolve().parent.parent / "kernels"
    digest = hashlib.sha256()
    for name in ("_common", "attend", "index"):
        for path in sorted((root / name).glob("*.py")):
            if path.name == "flash4.py":
                continue
            digest.update(f"{name}/{path.name}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
