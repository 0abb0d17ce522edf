"""Activations at the edge of what a model can give: scores stay whole, ties go to the lower."""

import numpy as np
import pytest
import torch

from patternsearch.errors import ModelError, PatternsearchError
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.scoring.engine import LayerScorer
from support.calibrated import run_tiny
from support.tiny_models import tiny_model_dir

CANDIDATES = [
    Dense(),
    AShape(sink=64, window=64, tile=64),
    VerticalSlashSpread(vertical=30, diagonals=2, tile=64),
    VerticalSlashLastQ(vertical=30, slash=100, tile=64),
    BlockSparse(blocks=2, tile=64),
    BlockSparse(blocks=2, tile=64, estimator="pooled"),
]
N = 400


def scored(q, k, **options):
    scores = LayerScorer(CANDIDATES, **options).score(q, k, scale=0.25)
    assert np.isfinite(scores.mass).all()
    assert (scores.mass >= 0).all()
    assert (scores.mass <= 1).all()
    assert (scores.mass[:, 0] == 1).all()
    return scores


@pytest.mark.parametrize("options", [{}, {"oracle": True}, {"row_sample": 0.5}])
def test_all_mass_on_the_sink(options):
    q = torch.zeros(1, 2, N, 16)
    k = torch.zeros(1, 1, N, 16)
    q[..., 0] = 100.0
    k[:, :, 0, 0] = 100.0  # a logit of 2500 against 0
    scores = scored(q, k, **options)
    np.testing.assert_allclose(scores.mass[..., 0], 1.0)


@pytest.mark.parametrize("options", [{}, {"oracle": True}, {"row_sample": 0.5}])
def test_identical_keys_tie_and_the_lower_index_wins(options):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, N, 16, generator=generator)
    k = torch.ones(1, 1, N, 16)
    scores = scored(q, k, **options)
    # Attention is uniform: row i has 1/(i+1) at each key, so the mass is that of any set.
    i = np.arange(N)
    a_shape = np.minimum(i + 1, 64 + (i % 64 + 1) + 64 * (i >= 128)) / (i + 1)
    np.testing.assert_allclose(scores.mass[:, 1, 0], a_shape.mean(), rtol=1e-5)
    again = scored(q, k, **options)
    assert np.array_equal(scores.mass, again.mass)
    # Block-Sparse ranks equal tiles by index: tile 0 beside the diagonal one.
    at = [index for index, (c, index_kind) in enumerate(scores.specs)
          if c == BlockSparse(blocks=2, tile=64) and index_kind == "online"]  # fmt: skip
    blocks = np.minimum(i + 1, np.where(i < 64, i + 1, 64 + i % 64 + 1)) / (i + 1)
    pooled = scores.mass[:, at[0], 0]
    np.testing.assert_allclose(pooled, blocks.mean(), rtol=1e-5)


def test_heads_without_variance():
    scores = scored(torch.zeros(1, 2, N, 16), torch.zeros(1, 1, N, 16))
    assert np.array_equal(scores.mass[0], scores.mass[1])


def test_logits_beyond_float16_do_not_overflow():
    q = torch.full((1, 1, N, 16), 3e4)
    k = torch.full((1, 1, N, 16), 3e4)
    scored(q, k)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"row_sample": 0.5}])
def test_values_that_are_not_finite_name_layer_and_head(value, options):
    q, k = torch.randn(1, 4, N, 16), torch.randn(1, 2, N, 16)
    q[0, 2, :, 0] = value
    with pytest.raises(ModelError, match="layer 7, head 2"):
        LayerScorer(CANDIDATES, **options).score(q, k, scale=0.25, layer=7)


def test_text_without_tokens_is_refused(tmp_path):
    model = tiny_model_dir(tmp_path / "m")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "format: patternsearch/recipe\nschema_version: 1\nname: empty\nseed: 0\n"
        "heldout_fraction: 0.0\nlengths: [{tokens: 256, samples: 1}]\n"
        "sources:\n  - {kind: files, name: nothing, format: text, paths: [nothing.txt]}\n"
    )
    (tmp_path / "nothing.txt").write_text("")
    with pytest.raises(PatternsearchError, match="nothing"):
        run_tiny(model, tmp_path / "c.yaml", recipe=str(recipe))
