"""The table of one sample: the contract's columns, order and types."""

import io

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
    candidate_from_columns,
)
from patternsearch.schema.scores import SCORES_COLUMNS
from patternsearch.scoring.engine import LayerScorer
from patternsearch.scoring.table import sample_table
from support.planted import random_qk

CANDIDATES = (
    Dense(),
    AShape(sink=64, window=64, tile=64),
    VerticalSlashSpread(vertical=40, diagonals=3, tile=128),
    VerticalSlashLastQ(vertical=40, slash=100, tile=64),
    BlockSparse(blocks=2, tile=64, estimator="pooled"),
)
SAMPLE = {
    "sample_id": "s1",
    "source": "prose",
    "split": "heldout",
    "length": 256,
    "num_tokens": 200,
}


def layer_scores(n=200, layers=(1, 3)):
    scorer = LayerScorer(CANDIDATES, oracle=True)
    return {
        layer: scorer.score(*random_qk(n, 4, 2, 64, seed=layer)[:2], scale=0.125)
        for layer in layers
    }


def parquet_bytes(table):
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def test_table_has_the_contract_columns_in_order():
    table = sample_table(layer_scores(), **SAMPLE)
    assert tuple(table.column_names) == SCORES_COLUMNS


def test_table_rows_run_over_layer_head_and_spec():
    scores = layer_scores(layers=(3, 1))
    frame = sample_table(scores, **SAMPLE).to_pandas()
    specs = scores[1].specs
    assert len(frame) == 2 * 4 * len(specs)
    place = 0
    for layer in (1, 3):
        for head in range(4):
            for row, (candidate, index) in enumerate(specs):
                got = frame.iloc[place]
                place += 1
                assert (got["layer"], got["head"], got["index"]) == (layer, head, index)
                assert candidate_from_columns(got.to_dict()) == candidate
                expected = scores[layer]
                masses = got[["mass_physical", "mass_q1", "mass_q2", "mass_q3", "mass_q4"]]
                np.testing.assert_array_equal(
                    masses.to_numpy(dtype=np.float32),
                    expected.mass[head, row].astype(np.float32),
                )
                assert got["mass_logical"] == np.float32(expected.logical[head, row])
                assert got["density"] == expected.density[head, row]
                assert got["tiles"] == expected.tiles[head, row]
                assert got["columns"] == expected.columns[head, row]
    for name, value in SAMPLE.items():
        assert (frame[name] == value).all()


def test_table_has_nulls_exactly_where_a_kind_has_no_such_parameter():
    frame = sample_table(layer_scores(), **SAMPLE).to_pandas()
    by_kind = frame.groupby("kind", observed=True)
    dense = by_kind.get_group("dense")
    assert dense[["sink", "window", "tile", "estimator", "blocks", "last_q"]].isna().all(axis=None)
    a_shape = by_kind.get_group("a_shape")
    assert a_shape[["sink", "window", "tile"]].notna().all(axis=None)
    assert a_shape[["vertical", "slash", "diagonals", "blocks"]].isna().all(axis=None)
    assert by_kind.get_group("block_sparse")["estimator"].eq("pooled").all()


def test_table_mass_of_a_region_without_rows_is_null():
    frame = sample_table(layer_scores(n=2), **SAMPLE).to_pandas()
    # Rows 0 and 1 of n = 2 are in the first and third quarter.
    assert frame["mass_q2"].isna().all()
    assert frame["mass_q4"].isna().all()
    assert frame[["mass_physical", "mass_q1", "mass_q3"]].notna().all(axis=None)


def test_table_bytes_are_the_same_for_the_same_scores():
    first, second = (parquet_bytes(sample_table(layer_scores(), **SAMPLE)) for _ in range(2))
    assert first == second


def test_parts_of_samples_read_as_one_frame(tmp_path):
    for name in ("a", "b"):
        table = sample_table(layer_scores(), **{**SAMPLE, "sample_id": name})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    frame = pd.read_parquet(tmp_path)
    assert tuple(frame.columns) == SCORES_COLUMNS
    assert frame["sample_id"].value_counts().to_dict() == {"a": 64, "b": 64}
