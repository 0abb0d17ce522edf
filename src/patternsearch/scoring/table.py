# SPDX-License-Identifier: Apache-2.0
"""One sample's scores as the columns of the scores contract, in its order and compact types."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from patternsearch.patterns.candidates import CANDIDATE_COLUMNS, candidate_columns
from patternsearch.schema.scores import ERROR_COLUMNS, LOW_COLUMNS, MASS_COLUMNS, SCORES_COLUMNS
from patternsearch.scoring.accounts import LayerScores

__all__ = ["SCORES_SCHEMA", "sample_table"]

_NAME = pa.dictionary(pa.int32(), pa.string())
_TYPES: dict[str, pa.DataType] = {
    **dict.fromkeys(SCORES_COLUMNS, pa.int32()),
    **dict.fromkeys(("sample_id", "source", "split", "kind", "estimator", "index"), _NAME),
    **dict.fromkeys((*MASS_COLUMNS, "mass_logical"), pa.float32()),
    "layer": pa.int16(),
    "head": pa.int16(),
    "tile": pa.int16(),
    "density": pa.float64(),
    "tiles": pa.int64(),
    "columns": pa.int64(),
}
_VOCABULARY: dict[str, tuple[str, ...]] = {
    "kind": ("dense", "a_shape", "vertical_slash", "block_sparse"),
    "estimator": ("spread", "last_q", "pooled_query", "pooled"),
    "index": ("none", "online", "oracle"),
    "split": ("calibration", "heldout"),
}

SCORES_SCHEMA: pa.Schema = pa.schema([(name, _TYPES[name]) for name in SCORES_COLUMNS])
"""Arrow types of the scores table."""


def sample_table(
    layers: Mapping[int, LayerScores],
    *,
    sample_id: str,
    source: str,
    split: str,
    length: int,
    num_tokens: int,
) -> pa.Table:
    """Lay out the scores of one sample.

    Args:
        layers: scores by layer number, at least one; all of the same candidates and heads.
        sample_id: of the sample, as all that follows; repeated in every row.
        source: what the text came from.
        split: ``calibration`` or ``heldout``.
        length: bucket, in tokens.
        num_tokens: real tokens.

    Returns:
        A table of :data:`SCORES_SCHEMA`, with the columns of row sampling behind it if the scores
        have errors; rows by layer, head, candidate and index (none, online,
        oracle). Parameters that a kind does not have are null, and so is the mass of a region
        without rows. The same scores give the same table.
    """
    numbers = sorted(layers)
    scores = [layers[number] for number in numbers]
    specs = scores[0].specs
    assert all(layer.specs == specs for layer in scores)
    num_heads = scores[0].mass.shape[0]
    num_rows = len(numbers) * num_heads * len(specs)
    parameters = [candidate_columns(candidate) for candidate, _ in specs]

    def repeated(values: list[Any]) -> NDArray[Any]:
        """Repeat one value a spec for every layer and head."""
        return np.tile(np.asarray(values), len(numbers) * num_heads)

    def joined(name: str, region: int | None = None) -> NDArray[Any]:
        """Flatten an array of the scores over layer, head and spec."""
        arrays = [getattr(layer, name) for layer in scores]
        picked = arrays if region is None else [array[..., region] for array in arrays]
        return np.stack(picked).reshape(-1)

    def names(column: str, values: list[str | None]) -> pa.Array:
        vocabulary = _VOCABULARY[column]
        codes = repeated([-1 if value is None else vocabulary.index(value) for value in values])
        return _dictionary(codes, vocabulary)

    columns: dict[str, pa.Array] = {
        "sample_id": _constant(sample_id, num_rows),
        "source": _constant(source, num_rows),
        "split": _dictionary(
            np.full(num_rows, _VOCABULARY["split"].index(split)), _VOCABULARY["split"]
        ),
        "length": pa.array(np.full(num_rows, length)),
        "num_tokens": pa.array(np.full(num_rows, num_tokens)),
        "layer": pa.array(np.repeat(numbers, num_heads * len(specs))),
        "head": pa.array(np.tile(np.repeat(np.arange(num_heads), len(specs)), len(numbers))),
        "index": names("index", [index for _, index in specs]),
        "density": pa.array(joined("density")),
        "tiles": pa.array(joined("tiles")),
        "columns": pa.array(joined("columns")),
        "mass_logical": _masses(joined("logical")),
    }
    for name in CANDIDATE_COLUMNS:
        values = [parameter[name] for parameter in parameters]
        if name in _VOCABULARY:
            columns[name] = names(name, values)
        else:
            known = repeated([0 if value is None else value for value in values])
            columns[name] = pa.array(known, mask=repeated([value is None for value in values]))
    for region, name in enumerate(MASS_COLUMNS):
        columns[name] = _masses(joined("mass", region))
    arrays = [columns[name].cast(_TYPES[name]) for name in SCORES_COLUMNS]
    table = pa.Table.from_arrays(arrays, schema=SCORES_SCHEMA)
    if scores[0].error is not None:
        for field, names_of_field in (("error", ERROR_COLUMNS), ("low", LOW_COLUMNS)):
            for region, name in enumerate(names_of_field):
                table = table.append_column(name, _masses(joined(field, region)))
    return table


def _constant(value: str, num_rows: int) -> pa.Array:
    return _dictionary(np.zeros(num_rows, dtype=np.int32), (value,))


def _dictionary(codes: NDArray[Any], vocabulary: tuple[str, ...]) -> pa.Array:
    """Build a dictionary column; code −1 is null."""
    indices = pa.array(codes.astype(np.int32), mask=codes < 0)
    return pa.DictionaryArray.from_arrays(indices, pa.array(vocabulary, pa.string()))


def _masses(values: NDArray[np.float64]) -> pa.Array:
    """Build a float32 column; NaN is null."""
    return pa.array(values.astype(np.float32), mask=np.isnan(values))
