"""The search finds the kind that was planted in a head, and keeps a head that shifts safe."""

import numpy as np
import pytest
import torch

from patternsearch.patterns.candidates import AShape, BlockSparse, Dense, VerticalSlashSpread
from patternsearch.scoring.engine import LayerScorer
from patternsearch.scoring.table import sample_table
from patternsearch.selection.options import SelectionOptions
from patternsearch.selection.select import select_heads
from support.planted import planted_qk

HEAD_DIM = 64
GRID = (
    Dense(),
    *(AShape(sink=64, window=w, tile=64) for w in (128, 256, 512, 1024)),
    *(
        VerticalSlashSpread(vertical=v, diagonals=d, tile=64)
        for v in (30, 128, 512)
        for d in (2, 4, 8, 16)
    ),
    *(BlockSparse(blocks=b, tile=64) for b in (2, 3, 4, 8, 16)),
)
EXPECTED = {
    "local": "a_shape",
    "columns": "vertical_slash",
    "diagonals": "vertical_slash",
    "blocks": "block_sparse",
    "dense": "dense",
}
SHARPNESS = {"columns": 10.0, "blocks": 12.0, "dense": 8.0}
NUM_WAVES = HEAD_DIM // 2 - 1


def waves(position, frequency):
    """Codes whose products depend on the distance of positions only, [n, HEAD_DIM − 2]."""
    angle = position[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], -1).float() / len(frequency) ** 0.5


def local_qk(n, seed, width=112.0, sharpness=14.0):
    """One head that looks at the first 64 keys and at a soft band of about `width` keys."""
    generator = torch.Generator().manual_seed(seed)
    width *= 1 + 0.04 * torch.rand(1, generator=generator).item()
    quantile = (torch.arange(NUM_WAVES, dtype=torch.float64) + 0.5) / NUM_WAVES
    frequency = torch.special.ndtri(0.5 + quantile / 2) / (width * sharpness**0.5)
    code = waves(torch.arange(n, dtype=torch.float64), frequency)
    amplitude = sharpness * HEAD_DIM**0.5
    q, k = torch.zeros(n, HEAD_DIM), torch.zeros(n, HEAD_DIM)
    q[:, 2:], k[:, 2:] = amplitude * code, code
    q[:, 0], k[:64, 0] = amplitude, 0.95
    return q, k


def diagonal_qk(n, seed, sharpness=24.0):
    """One head that looks 5 keys back and at one far offset.

    The codes turn within a tile, so that a mean over a tile's queries finds nothing: only an
    index of diagonals does.
    """
    generator = torch.Generator().manual_seed(seed)
    frequency = 0.5 + 2.5 * torch.rand(NUM_WAVES, generator=generator, dtype=torch.float64)
    far = int(torch.randint(300, n // 2, (1,), generator=generator))
    position = torch.arange(n, dtype=torch.float64)
    q, k = torch.zeros(n, HEAD_DIM), torch.zeros(n, HEAD_DIM)
    k[:, 2:] = waves(position, frequency)
    for offset in (5, far):
        q[:, 2:] += sharpness * HEAD_DIM**0.5 * waves(position - offset, frequency)
    return q, k


def planted(kinds, n, seed):
    """q and k [1, heads, n, d] of heads of the given kinds, each with keys of its own."""
    heads = []
    for place, kind in enumerate(kinds):
        number = 1000 * seed + place
        if kind in ("local", "diagonals"):
            heads.append((local_qk if kind == "local" else diagonal_qk)(n, number))
        else:
            q, k, _ = planted_qk(n, 1, 1, HEAD_DIM, [kind], number, sharpness=SHARPNESS[kind])
            heads.append((q[0, 0], k[0, 0]))
    return tuple(torch.stack(tensors)[None] for tensors in zip(*heads, strict=True))


def scores_of(samples, n):
    """Scores table of samples, each a list of kinds by head."""
    import pandas as pd

    scorer = LayerScorer(GRID)
    frames = []
    for number, kinds in enumerate(samples):
        q, k = planted(kinds, n, number)
        layer = scorer.score(q, k, scale=HEAD_DIM**-0.5, lse=None, layer=0)
        table = sample_table(
            {0: layer},
            sample_id=f"s{number}",
            source=("prose", "code")[number % 2],
            split="calibration",
            length=n,
            num_tokens=n,
        )
        frames.append(table.to_pandas().astype({"sample_id": str, "source": str}))
    return pd.concat(frames, ignore_index=True)


@pytest.mark.parametrize(
    ("num_tokens", "heads_each", "num_samples"),
    [(4096, 4, 2), pytest.param(32768, 1, 1, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
def test_search_recovers_the_planted_kind(num_tokens, heads_each, num_samples):
    kinds = list(EXPECTED) * heads_each
    selected = select_heads(scores_of([kinds] * num_samples, num_tokens))
    found = [entry.pattern.kind for entry in selected.heads[0]]
    hits = [EXPECTED[kind] == chosen for kind, chosen in zip(kinds, found, strict=True)]
    assert np.mean(hits) >= 0.95, list(zip(kinds, found, strict=True))


def test_head_that_shifts_between_domains_stays_safe():
    """Columns on prose, blocks on code: whatever is chosen reaches the target on both."""
    frame = scores_of([["columns", "local"], ["blocks", "local"]], 4096)
    alone = [
        select_heads(frame[frame["source"] == source]).heads[0][0].pattern.kind
        for source in ("prose", "code")
    ]
    assert alone == ["vertical_slash", "block_sparse"]
    for target in (0.8, 0.95):
        entry = select_heads(frame, SelectionOptions(target_mass=target)).heads[0][0]
        assert entry.lengths[0].mass_worst_region >= target
        assert entry.lengths[0].mass_worst_region <= entry.lengths[0].mass_worst
