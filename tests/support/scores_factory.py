"""Scores tables made up for tests: exact geometry, masses as the test wants them."""

import json

import numpy as np
import pandas as pd

from patternsearch.patterns import geometry
from patternsearch.patterns.candidates import (
    CANDIDATE_COLUMNS,
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
    candidate_columns,
)
from patternsearch.schema.scores import MASS_COLUMNS, SCORES_COLUMNS, ScoresFolder

SMALL_GRID = (
    Dense(),
    AShape(sink=64, window=256, tile=64),
    AShape(sink=64, window=512, tile=64),
    VerticalSlashSpread(vertical=64, diagonals=2, tile=64),
    VerticalSlashSpread(vertical=64, diagonals=4, tile=64),
    VerticalSlashSpread(vertical=64, diagonals=4, tile=128),
    BlockSparse(blocks=4, tile=64),
    BlockSparse(blocks=8, tile=64),
)


def counts(candidate, n):
    """(tiles, columns, density) of a candidate, as if its columns lay spread over the prompt."""
    pairs = geometry.causal_pairs(n)
    match candidate:
        case Dense():
            tiles = geometry.num_tiles(n, 64)
            return tiles * (tiles + 1) // 2, 0, 1.0
        case AShape():
            tiles, read = geometry.a_shape_counts(n, candidate.tile, candidate.sink,
                                                  candidate.window)  # fmt: skip
            return tiles, 0, read / pairs
        case BlockSparse():
            tiles, read = geometry.block_sparse_counts(n, candidate.tile, candidate.blocks)
            return tiles, 0, read / pairs
        case VerticalSlashSpread():
            chosen = geometry.effective_diagonals(n, candidate.tile, candidate.diagonals)
        case VerticalSlashLastQ():
            slash = geometry.effective_slash(n, candidate.slash)
            chosen = min(geometry.num_tiles(n, candidate.tile), slash // candidate.tile + 2)
    tiles = int(geometry.diagonal_tiles(n, candidate.tile)[:chosen].sum())
    vertical = geometry.effective_vertical(n, candidate.vertical)
    columns = vertical * geometry.num_tiles(n, candidate.tile) // 2
    density = min(1.0, (tiles * candidate.tile**2 + columns * candidate.tile) / pairs)
    return tiles, columns, density


def scores_frame(
    candidates=SMALL_GRID,
    *,
    lengths=(4096,),
    calibration=2,
    heldout=1,
    num_layers=2,
    num_heads=3,
    seed=0,
    mass=None,
    oracle_gap=None,
):
    """A scores table.

    `mass(rng, length, sample, layer, head, candidate)` gives the five masses (all, q1..q4); by
    default random ones around a level that rises with density. Dense has 1 everywhere.
    With `oracle_gap` every dynamic candidate also has oracle rows, that much higher.
    """
    rng = np.random.default_rng(seed)
    mass = mass or random_mass
    rows = []
    for length in lengths:
        for sample in range(calibration + heldout):
            split = "calibration" if sample < calibration else "heldout"
            for layer in range(num_layers):
                for head in range(num_heads):
                    for candidate in candidates:
                        tiles, columns, density = counts(candidate, length)
                        values = (
                            [1.0] * 5
                            if candidate == Dense()
                            else list(mass(rng, length, sample, layer, head, candidate))
                        )
                        static = candidate.kind in ("dense", "a_shape")
                        row = {
                            "sample_id": f"s{length}-{sample}",
                            "source": "prose" if sample % 2 else "code",
                            "split": split,
                            "length": length,
                            "num_tokens": length,
                            "layer": layer,
                            "head": head,
                            **candidate_columns(candidate),
                            "index": "none" if static else "online",
                            **dict(zip(MASS_COLUMNS, values, strict=True)),
                            "mass_logical": np.nan,
                            "density": density,
                            "tiles": tiles,
                            "columns": columns,
                        }
                        rows.append(row)
                        if oracle_gap is not None and not static:
                            raised = {c: min(1.0, row[c] + oracle_gap) for c in MASS_COLUMNS}
                            rows.append({**row, "index": "oracle", **raised})
    frame = pd.DataFrame(rows, columns=list(SCORES_COLUMNS))
    for name in CANDIDATE_COLUMNS:
        frame[name] = frame[name].astype("string" if name in ("kind", "estimator") else "Int64")
    return frame


def random_mass(rng, length, sample, layer, head, candidate):
    level = min(1.0, 0.75 + 0.5 * counts(candidate, length)[2] ** 0.5)
    regions = np.clip(level + rng.uniform(-0.15, 0.15, 4), 0.0, 1.0)
    return [regions.mean(), *regions]


def write_scores(root, frame, run=None):
    """A scores folder with one part file a sample; returns it."""
    folder = ScoresFolder(root)
    folder.scores.mkdir(parents=True)
    samples = frame.drop_duplicates("sample_id")
    for index, sample in enumerate(samples["sample_id"]):
        frame[frame["sample_id"] == sample].to_parquet(
            folder.scores / f"part-{index:05d}.parquet", index=False
        )
    table = samples[["sample_id", "source", "split", "length", "num_tokens"]].copy()
    table["sha256"] = "0" * 64
    table["token_ids"] = [[1, 2, 3]] * len(table)
    table.to_parquet(folder.samples, index=False)
    folder.run.write_text(json.dumps(run or {}))
    return folder
