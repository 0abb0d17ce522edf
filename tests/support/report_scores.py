"""Finished scores folders of any size for reports: real geometry, made-up masses, fast."""

import json

import numpy as np
import pyarrow.parquet as pq

from patternsearch.patterns.grids import Grid
from patternsearch.schema.config import Calibration, Fingerprints, ModelIdentity, Provenance
from patternsearch.schema.io import dump_config, load_grid
from patternsearch.schema.scores import scores_folder_of
from patternsearch.scoring.accounts import LayerScores
from patternsearch.scoring.table import sample_table
from patternsearch.selection.document import select_config
from patternsearch.selection.options import SelectionOptions
from support.configs import make_model, sha
from support.scores_factory import counts

SMALL_GRID = Grid.model_validate(
    {
        "format": "patternsearch/grid",
        "schema_version": 1,
        "name": "small",
        "min_tokens": 256,
        "candidates": [
            {"kind": "a_shape", "sink": [64], "window": [256, 512, 1024], "tile": [64, 128]},
            {"kind": "vertical_slash", "estimator": "spread", "vertical": [64, 256],
             "diagonals": [2, 4, 8], "tile": [64]},
            {"kind": "block_sparse", "estimator": ["pooled_query"], "blocks": [4, 8], "tile": [64]},
        ],
    }
)  # fmt: skip


def default_grid():
    return load_grid("default")[0]


def layer_scores(candidates, n, num_heads, rng, favourites, oracle):
    """Scores of a layer: mass rises with density, most for the head's favourite kind."""
    specs = [(c, "none" if c.kind in ("dense", "a_shape") else "online") for c in candidates]
    if oracle:
        specs += [(c, "oracle") for c, index in specs if index == "online"]
    counted = np.array([counts(c, n) for c, _ in specs])
    density = np.minimum(1.0, counted[:, 2] * rng.uniform(0.9, 1.1, (num_heads, 1)))
    likes = np.array([[c.kind == kind for c, _ in specs] for kind in favourites])
    power = np.where(likes, rng.uniform(0.01, 0.05, (num_heads, 1)), 0.15)
    level = density**power
    level = np.minimum(1.0, level + 0.01 * np.array([index == "oracle" for _, index in specs]))
    regions = np.clip(level[..., None] + rng.normal(0, 0.006, (*level.shape, 4)), 0.0, 1.0)
    mass = np.concatenate([regions.mean(axis=-1, keepdims=True), regions], axis=-1)
    dense = [place for place, (c, _) in enumerate(specs) if c.kind == "dense"]
    mass[:, dense], density[:, dense] = 1.0, 1.0
    shape = density.shape
    return LayerScores(
        specs=tuple(specs),
        mass=mass,
        logical=np.full(shape, np.nan),
        density=density,
        tiles=np.broadcast_to(counted[:, 0], shape).astype(np.int64),
        columns=np.broadcast_to(counted[:, 1], shape).astype(np.int64),
    )


def write_calibration(
    config_path,
    *,
    grid=SMALL_GRID,
    lengths=(2048, 8192),
    calibration=3,
    heldout=2,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    layer_types=None,
    oracle=True,
    seed=0,
    options=None,
    cost=None,
    reference="tests/model",
    sources=("prose", "code"),
    head_dim=128,
):
    """Write ``config_path`` and the scores folder beside it; returns the config."""
    rng = np.random.default_rng(seed)
    folder = scores_folder_of(config_path)
    folder.scores.mkdir(parents=True)
    layer_types = layer_types or ["full"] * num_layers
    full = [layer for layer, kind in enumerate(layer_types) if kind == "full"]
    candidates = grid.expand()
    kinds = ["a_shape", "vertical_slash", "block_sparse"]
    favourites = {layer: rng.choice(kinds, num_heads).tolist() for layer in full}
    rows = []
    for length in lengths:
        for place in range(calibration + heldout):
            sample = {
                "sample_id": f"{length}-{place:02d}",
                "source": sources[place % len(sources)],
                "split": "calibration" if place < calibration else "heldout",
                "length": length,
                "num_tokens": length,
            }
            layers = {
                layer: layer_scores(candidates, length, num_heads, rng, favourites[layer], oracle)
                for layer in full
            }
            pq.write_table(
                sample_table(layers, **sample), folder.scores / f"part-{len(rows):05d}.parquet"
            )
            rows.append({**sample, "sha256": sha(sample["sample_id"])})
    import pandas as pd

    table = pd.DataFrame(rows)
    table["token_ids"] = [[1, 2, 3]] * len(table)
    table.to_parquet(folder.samples, index=False)
    folder.run.write_text(json.dumps(_run(rows, lengths, layer_types, num_layers, num_heads,
                                          num_kv_heads, oracle, reference, head_dim)))  # fmt: skip
    result = select_config(folder, options or SelectionOptions(), cost)
    dump_config(result.config, config_path)
    return result.config


def _run(
    rows, lengths, layer_types, num_layers, num_heads, num_kv_heads, oracle, reference, head_dim
):
    model = ModelIdentity.model_validate(
        make_model(
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            layer_types=layer_types,
            reference=reference,
            sliding_window=512 if "sliding" in layer_types else None,
        )
    )
    calibration = Calibration(
        recipe="test", recipe_sha256=sha("recipe"), grid="test", grid_sha256=sha("grid"), seed=0,
        lengths=tuple(lengths), consumer="patternsearch", oracle=oracle, row_sample=1.0,
        extrapolated=False, samples=rows,
    )  # fmt: skip
    values = [[[0.5] * 12] * num_heads if kind == "full" else [] for kind in layer_types]
    return {
        "format": "patternsearch/run",
        "status": "complete",
        "model": model.model_dump(mode="json"),
        "calibration": calibration.model_dump(mode="json"),
        "fingerprints": Fingerprints(seed=1, num_tokens=512, values=values).model_dump(mode="json"),
        "provenance": Provenance(patternsearch="0", device="cpu").model_dump(mode="json"),
    }
