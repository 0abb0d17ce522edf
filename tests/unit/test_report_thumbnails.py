"""Drawings of heads: the physical set and its mass are the ones that are scored."""

import numpy as np
import pytest
import torch

from patternsearch.errors import InputError
from patternsearch.model.loading import adopt_model
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.report.thumbnails import draw_head, draw_heads, pick_heads
from patternsearch.schema.scores import ScoresFolder
from patternsearch.scoring.engine import LayerScorer
from support.configs import make_config
from support.tiny_models import tiny_model

PATTERNS = (
    Dense(),
    AShape(sink=64, window=128, tile=64),
    AShape(sink=30, window=300, tile=128),
    VerticalSlashSpread(vertical=40, diagonals=3, tile=64),
    VerticalSlashSpread(vertical=64, diagonals=2, tile=128),
    VerticalSlashLastQ(vertical=40, slash=130, tile=64),
    BlockSparse(blocks=3, tile=64),
    BlockSparse(blocks=2, tile=128, estimator="pooled"),
)


def queries_and_keys(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 1, n, 16, generator=generator) * 2
    k = torch.randn(1, 1, n, 16, generator=generator)
    k[:, :, ::97] *= 3
    return q, k


@pytest.mark.parametrize("n", [1, 63, 400, 777])
@pytest.mark.parametrize(
    ("consumer", "pattern"),
    [*(("patternsearch", p) for p in PATTERNS), ("minference", PATTERNS[5])],
)
def test_drawn_mass_is_the_scored_mass(n, consumer, pattern):
    q, k = queries_and_keys(n)
    scorer = LayerScorer((pattern,), oracle=False, consumer=consumer, backend="torch")
    scored = scorer.score(q, k, scale=0.25)
    drawing = draw_head(q, k, scale=0.25, pattern=pattern, family=consumer)
    assert drawing.mass == pytest.approx(float(scored.mass[0, 0, 0]), abs=1e-5)
    assert drawing.mass - 1e-6 <= drawing.top_k <= 1.0 + 1e-6
    np.testing.assert_allclose(drawing.mass_map.sum(axis=1), 1.0, atol=1e-5)


def test_outline_is_the_geometry():
    q, k = queries_and_keys(400)
    pattern = AShape(sink=64, window=100, tile=64)
    read = draw_head(q, k, scale=0.25, pattern=pattern).read
    u, v = np.indices(read.shape)
    expected = (v <= u) & ((v == 0) | (u - v <= 2))
    np.testing.assert_array_equal(read, expected)


def test_long_samples_have_larger_cells():
    q, k = queries_and_keys(64 * 100)
    drawing = draw_head(q, k, scale=0.25, pattern=BlockSparse(blocks=2, tile=64))
    assert drawing.tile == 128
    assert drawing.read.shape == (50, 50)


def write_samples(folder, lengths):
    import pandas as pd

    rng = np.random.default_rng(0)
    folder.root.mkdir()
    pd.DataFrame(
        {
            "sample_id": [f"s{n}" for n in lengths],
            "source": "prose",
            "split": "calibration",
            "length": lengths,
            "num_tokens": lengths,
            "sha256": "0" * 64,
            "token_ids": [rng.integers(3, 300, n) for n in lengths],
        }
    ).to_parquet(folder.samples)


def test_model_is_run_on_the_shortest_sample(tmp_path):
    loaded = adopt_model(tiny_model("llama"))
    config = make_config(num_layers=3, num_query_heads=4, num_kv_heads=2)
    folder = ScoresFolder(tmp_path / "x.scores")
    write_samples(folder, [512, 200])
    drawn = draw_heads(config, folder, loaded, ((1, 3), (2, 0)))["heads"]
    assert [(d["layer"], d["head"], d["num_tokens"]) for d in drawn] == [(1, 3, 200), (2, 0, 200)]
    with pytest.raises(InputError, match="layer:head"):
        draw_heads(config, folder, loaded, ((1, 4),))


def test_picked_heads_are_the_worst_of_each_kind():
    config = make_config(num_layers=4, num_query_heads=8)
    picked = pick_heads(config, per_kind=1)
    kinds = [config.heads[layer][head].pattern.kind for layer, head in picked]
    assert len(set(kinds)) == len(kinds) == 4
