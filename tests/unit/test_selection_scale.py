"""A model of 80 layers × 64 heads is selected in seconds; run with ``-m slow``."""

import resource
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patternsearch.patterns.candidates import (
    CANDIDATE_COLUMNS,
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashSpread,
    candidate_columns,
)
from patternsearch.schema.scores import MASS_COLUMNS, SCORES_COLUMNS, ScoresFolder
from support.scores_factory import counts

LAYERS, HEADS, SAMPLES, LENGTH = 80, 64, 8, 32768


def grid():
    shapes = [
        AShape(sink=128, window=w, tile=t) for t in (64, 128) for w in (512, 1024, 2048, 4096)
    ]
    stripes = [
        VerticalSlashSpread(vertical=v, diagonals=d, tile=t)
        for t in (64, 128)
        for v in (30, 128, 512)
        for d in (2, 4, 8, 16, 32, 64)
    ]
    blocks = [BlockSparse(blocks=b, tile=t) for t in (64, 128) for b in (2, 4, 8, 16, 32, 64, 96)]
    candidates = (Dense(), *shapes, *stripes, *blocks, AShape(sink=64, window=256, tile=64))
    assert len(candidates) == 60
    return candidates


def write_large_scores(root):
    """One part a sample, 307,200 rows each."""
    candidates = grid()
    folder = ScoresFolder(root)
    folder.scores.mkdir(parents=True)
    named = pd.DataFrame([candidate_columns(c) for c in candidates])
    measured = np.array([counts(c, LENGTH) for c in candidates], dtype=np.float64)
    static = named["kind"].isin(["dense", "a_shape"]).to_numpy()
    shape = (LAYERS, HEADS, len(candidates))
    layer, head, place = (axis.reshape(-1) for axis in np.indices(shape))
    for sample in range(SAMPLES):
        rng = np.random.default_rng(sample)
        # The first sample's generator also draws what the heads have in common.
        level = 0.9 + 0.1 * np.random.default_rng(99).random((LAYERS, HEADS, 1))
        mass = level + (1 - level) * measured[:, 2] ** 0.3
        regions = np.clip(mass[..., None] + rng.normal(0, 0.01, (*shape, 4)), 0, 1)
        regions[..., 0, :] = 1.0
        values = {
            "sample_id": f"s{sample}",
            "source": "prose",
            "split": "heldout" if sample >= 6 else "calibration",
            "length": LENGTH,
            "num_tokens": LENGTH,
            "layer": layer.astype(np.int32),
            "head": head.astype(np.int32),
            **{name: named[name].convert_dtypes().array.take(place) for name in CANDIDATE_COLUMNS},
            "index": np.where(static, "none", "online")[place],
            "mass_physical": regions.mean(-1).reshape(-1),
            **{name: regions[..., r].reshape(-1) for r, name in enumerate(MASS_COLUMNS[1:])},
            "mass_logical": np.nan,
            "density": measured[place, 2],
            "tiles": measured[place, 0].astype(np.int64),
            "columns": measured[place, 1].astype(np.int64),
        }
        frame = pd.DataFrame(values, columns=list(SCORES_COLUMNS))
        pq.write_table(
            pa.Table.from_pandas(frame, preserve_index=False),
            folder.scores / f"part-{sample:05d}.parquet",
        )
    pd.DataFrame({"sample_id": [f"s{i}" for i in range(SAMPLES)]}).to_parquet(folder.samples)
    folder.run.write_text("{}")
    return folder


SELECT = """
import sys, time
from patternsearch.selection.options import SelectionOptions
from patternsearch.selection.select import select_heads
options = SelectionOptions(**eval(sys.argv[2]))
selected = select_heads(__import__("pathlib").Path(sys.argv[1]), options)
print(len({entry.pattern for heads in selected.heads for entry in heads}), selected.optimality_gap)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"target_mass": 0.95},
        {"target_mass": 0.95, "tp_size": 8},
        {"objective": "mass", "target_mass": None, "budget_fraction": 0.2},
        {"objective": "mass", "target_mass": None, "budget_fraction": 0.2, "tp_size": 8},
    ],
    ids=["time", "time tp8", "mass", "mass tp8"],
)
def test_large_selection_takes_seconds_and_little_memory(options, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "large.scores"
    if not folder.exists():
        write_large_scores(folder)
    start = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-c", SELECT, str(folder), repr(options)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    num_patterns, gap = run.stdout.split()
    print(f"{options}: {seconds:.1f} s, {peak_gib:.2f} GiB, {num_patterns} patterns, gap {gap}")
    assert seconds < 20.0
    assert peak_gib < 4.0
    assert int(num_patterns) > 3
