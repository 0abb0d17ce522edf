# SPDX-License-Identifier: Apache-2.0
"""The columns of a scores table, whether it is a data frame or came from Parquet.

The files are read without pandas: importing it takes longer than reading them.
"""

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Columns", "FrameColumns", "TableColumns"]


class Columns(Protocol):
    """What reading a scores table asks of it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def codes(self, name: str) -> tuple[NDArray[np.int64], list[Any]]:
        """Return each row's place among the column's values (−1 if missing), and the values."""

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Return a column as float64, missing values as NaN.

        Raises:
            TypeError, ValueError: the column is not numeric.
        """

    def integers(self, name: str) -> NDArray[np.int64]:
        """Return a column as int64.

        Raises:
            TypeError, ValueError: the column is not numeric, or values are missing.
        """

    def value(self, name: str, row: int) -> Any:
        """Return one cell; None if missing."""

    def same(self, other: "Columns", names: tuple[str, ...]) -> bool:
        """Return whether the named columns surely hold the same rows in both."""


class FrameColumns:
    """Columns of a data frame of any dtypes."""

    def __init__(self, frame: "pd.DataFrame") -> None:
        self._frame = frame
        self.names = tuple(map(str, frame.columns))

    def __len__(self) -> int:
        return len(self._frame)

    def codes(self, name: str) -> tuple[NDArray[np.int64], list[Any]]:
        """See :class:`Columns`."""
        import pandas as pd

        codes, values = pd.factorize(self._frame[name])
        return codes.astype(np.int64), list(values)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """See :class:`Columns`."""
        return self._frame[name].to_numpy(dtype=np.float64, na_value=np.nan)

    def integers(self, name: str) -> NDArray[np.int64]:
        """See :class:`Columns`."""
        return self._frame[name].to_numpy(dtype=np.int64)

    def value(self, name: str, row: int) -> Any:
        """See :class:`Columns`."""
        import pandas as pd

        value = self._frame[name].iloc[row]
        return None if pd.isna(value) else value

    def same(self, other: Columns, names: tuple[str, ...]) -> bool:
        """See :class:`Columns`."""
        return False


class TableColumns:
    """Columns of an Arrow table.

    Args:
        table: its text columns may be dictionaries.

    Raises:
        pyarrow.ArrowException: the table is damaged.
    """

    def __init__(self, table: pa.Table) -> None:
        # Damaged text would show only when it is converted.
        table.validate(full=True)
        self._table = table.unify_dictionaries().combine_chunks()
        self.names = tuple(table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def _array(self, name: str) -> pa.Array:
        chunks = self._table.column(name).chunks
        return chunks[0] if chunks else pa.array([], self._table.schema.field(name).type)

    def codes(self, name: str) -> tuple[NDArray[np.int64], list[Any]]:
        """See :class:`Columns`."""
        array = self._array(name)
        if pa.types.is_dictionary(array.type):
            codes = np.where(_is_valid(array.indices), _raw(array.indices), -1)
            return codes.astype(np.int64), array.dictionary.to_pylist()
        if _is_numeric(array.type):
            numbers, places = np.unique(_with_gaps(array), return_inverse=True)
            known = int((~np.isnan(numbers)).sum())  # NaN comes last
            return np.where(places < known, places, -1).astype(np.int64), numbers[:known].tolist()
        seen: dict[Any, int] = {}
        cells = array.to_pylist()
        coded = [-1 if cell is None else seen.setdefault(cell, len(seen)) for cell in cells]
        return np.array(coded, dtype=np.int64), list(seen)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """See :class:`Columns`."""
        array = self._array(name)
        if not _is_numeric(array.type):
            raise TypeError(f"it holds {array.type}")
        return _with_gaps(array)

    def integers(self, name: str) -> NDArray[np.int64]:
        """See :class:`Columns`."""
        array = self._array(name)
        if not pa.types.is_integer(array.type) or array.null_count:
            raise TypeError(f"it holds {array.type} with {array.null_count} missing values")
        return _raw(array).astype(np.int64)

    def value(self, name: str, row: int) -> Any:
        """See :class:`Columns`."""
        return self._array(name)[row].as_py()

    def same(self, other: Columns, names: tuple[str, ...]) -> bool:
        """See :class:`Columns`."""
        if not isinstance(other, TableColumns):
            return False
        return bool(self._table.select(names).equals(other._table.select(names)))


def _is_numeric(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind))


# By buffer, since Arrow's own conversions import pandas.


def _raw(array: pa.Array) -> NDArray[Any]:
    """Return the numbers of an array as they are stored; where one is missing, anything."""
    kind = array.type
    letter = (
        "f" if pa.types.is_floating(kind) else "u" if pa.types.is_unsigned_integer(kind) else "i"
    )
    dtype = np.dtype(f"{letter}{kind.bit_width // 8}")
    content = array.buffers()[-1]
    if content is None:
        return np.zeros(len(array), dtype=dtype)
    return np.frombuffer(content, dtype, len(array), array.offset * dtype.itemsize)


def _is_valid(array: pa.Array) -> NDArray[np.bool_]:
    """Return which cells are not missing."""
    bitmap = array.buffers()[0] if array.null_count else None
    if bitmap is None:
        return np.ones(len(array), dtype=np.bool_)
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    return bits[array.offset : array.offset + len(array)].astype(np.bool_)


def _with_gaps(array: pa.Array) -> NDArray[np.float64]:
    """Return numbers as float64, missing ones as NaN."""
    if pa.types.is_null(array.type):
        return np.full(len(array), np.nan)
    numbers = _raw(array).astype(np.float64)
    numbers[~_is_valid(array)] = np.nan
    return numbers
