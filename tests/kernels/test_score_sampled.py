"""Masses of sampled rows in Triton against the PyTorch path."""

import pytest
import torch

from patternsearch.kernels.score.sampled import near_masses
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.patterns.row_sampling import sample_rows
from patternsearch.scoring.engine import LayerScorer
from patternsearch.scoring.sampled_rows import sampled_in_torch, sampled_on_cuda
from patternsearch.scoring.vertical_slash import ColumnRanks, prepare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sample_of(n, unit_rows, monkeypatch):
    """A sample of units of so many rows, partial ones among them."""
    import patternsearch.patterns.row_sampling as module

    monkeypatch.setattr(module, "MIN_ROWS", 1)
    monkeypatch.setattr(module, "_unit_rows", lambda n, fraction: unit_rows)
    return sample_rows(n, 1 / 4, 0)


def lse_of(q, k, scale):
    n, group = q.shape[2], q.shape[1] // k.shape[1]
    keys = k[0].float().repeat_interleave(group, 0)
    lse = torch.empty(q.shape[1], n, device=q.device)
    key = torch.arange(n, device=q.device)
    for first in range(0, n, 1024):
        rows = key[first : first + 1024]
        logits = torch.einsum("hid,hjd->hij", q[0, :, rows].float(), keys) * scale
        lse[:, rows] = logits.masked_fill(key > rows[:, None], -torch.inf).logsumexp(-1)
    return lse


SPREAD = [(t, v, s) for t in (64, 128) for v in (4, 40, 300) for s in (1, 2, 3, 5, 8)]
LAST_Q = [(64, v, 10 * s) for v in (8, 32, 200) for s in (1, 2, 4)]
FEW = [(128, 1, 1), (64, 1, 1)]
MANY = [(64, v, 2) for v in range(1, 50)] + [(128, v, 3) for v in range(20, 40)]


@pytest.mark.parametrize(
    ("n", "num_heads", "num_kv", "d", "dtype", "unit_rows", "spread", "last_q"),
    [
        (1, 2, 1, 64, torch.float32, 8, FEW, []),
        (1, 2, 1, 64, torch.float16, 4, [], FEW[1:]),
        (63, 2, 2, 80, torch.float32, 4, FEW, LAST_Q),
        (200, 4, 2, 64, torch.float16, 16, SPREAD, LAST_Q[:1]),
        (515, 3, 1, 96, torch.float16, 8, SPREAD, []),
        (515, 2, 1, 64, torch.float32, 4, MANY, LAST_Q),
        (330, 2, 1, 256, torch.float16, 32, SPREAD, []),
        (500, 2, 1, 64, torch.float32, 64, [], []),
        *(
            pytest.param(
                9000, 8, 2, 128, dtype, rows, SPREAD, LAST_Q, marks=pytest.mark.gpu
            )
            for dtype, rows in [
                (torch.bfloat16, 4), (torch.bfloat16, 16), (torch.float16, 8),
                (torch.bfloat16, 32), (torch.bfloat16, 64), (torch.float32, 4),
            ]
        ),
        pytest.param(
            9000, 6, 2, 80, torch.bfloat16, 4, MANY, LAST_Q, marks=pytest.mark.gpu
        ),
        pytest.param(
            9000, 2, 2, 256, torch.bfloat16, 4, SPREAD, LAST_Q, marks=pytest.mark.gpu
        ),
    ],
)  # fmt: skip
def test_kernel_equals_torch(
    n, num_heads, num_kv, d, dtype, unit_rows, spread, last_q, monkeypatch
):
    generator = torch.Generator().manual_seed(n)
    q = torch.randn(1, n, num_heads, d, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    k = torch.randn(1, n, num_kv, d, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    lse = lse_of(q, k, 0.3)
    sample = sample_of(n, unit_rows, monkeypatch)
    columns = torch.rand(num_heads, n, generator=generator).to(DEVICE)
    extents = torch.rand(num_heads, n, generator=generator).to(DEVICE)
    indices = []
    for tile in dict.fromkeys(tile for tile, *_ in spread):
        chosen = [
            VerticalSlashSpread(vertical=v, diagonals=s, tile=tile) for t, v, s in spread
            if t == tile
        ]  # fmt: skip
        scores = extents[:, : -(-n // tile)]
        indices.append(
            prepare(chosen, range(len(chosen)), columns, scores, "patternsearch", ColumnRanks())
        )
    for consumer in ("minference", "patternsearch") if last_q else ():
        chosen = [VerticalSlashLastQ(vertical=v, slash=s, tile=64) for _, v, s in last_q]
        indices.append(
            prepare(chosen, range(len(chosen)), columns, extents, consumer, ColumnRanks())
        )
    arguments = {"scale": 0.3, "lse": lse, "sample": sample}
    ours, ours_missed = sampled_on_cuda(indices, q, k, **arguments)
    again, again_missed = sampled_on_cuda(indices, q, k, **arguments)
    theirs, theirs_missed = sampled_in_torch(indices, q, k, **arguments)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    assert torch.equal(ours, again)
    assert len(ours_missed) == len(theirs_missed) == len(indices)
    for mine, other, repeated in zip(ours_missed, theirs_missed, again_missed, strict=True):
        torch.testing.assert_close(mine, other, atol=tolerance, rtol=tolerance)
        assert torch.equal(mine, repeated)


@pytest.mark.parametrize(
    ("n", "num_heads", "num_kv", "d", "dtype"),
    [
        (1, 2, 1, 64, torch.float32),
        (64, 1, 1, 80, torch.float16),
        (129, 3, 1, 96, torch.float32),
        (300, 4, 2, 256, torch.float16),
        *(
            pytest.param(9001, 8, 2, d, dtype, marks=pytest.mark.gpu)
            for d, dtype in [
                (128, torch.bfloat16), (80, torch.float16), (256, torch.bfloat16),
                (128, torch.float32),
            ]
        ),
    ],
)  # fmt: skip
def test_near_masses_equal_torch(n, num_heads, num_kv, d, dtype):
    generator = torch.Generator().manual_seed(n)
    q = torch.randn(1, n, num_heads, d, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    k = torch.randn(1, n, num_kv, d, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    lse = lse_of(q, k, 0.3)
    ours, theirs = (
        near_masses(q, k, scale=0.3, lse=lse, backend=backend) for backend in ("triton", "torch")
    )
    assert ours.shape == (num_heads, n, 3)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("row_sample", [1.0, 0.25])
def test_scores_are_those_of_torch(row_sample, monkeypatch):
    monkeypatch.setattr("patternsearch.patterns.row_sampling.MIN_ROWS", 256)
    n, generator = 700, torch.Generator().manual_seed(5)
    q = torch.randn(1, 2, n, 64, generator=generator).to(DEVICE)
    k = torch.randn(1, 1, n, 64, generator=generator).to(DEVICE)
    logits = torch.einsum("hid,hjd->hij", q[0], k[0].repeat_interleave(2, 0)) * 0.2
    hidden = torch.ones(n, n, dtype=torch.bool, device=DEVICE).triu(1)
    lse = logits.masked_fill(hidden, -torch.inf).logsumexp(-1)
    candidates = [
        *(AShape(sink=s, window=w, tile=t) for s, w, t in ((64, 64, 64), (0, 300, 128))),
        *(BlockSparse(blocks=b, tile=t) for b in (1, 3, 50) for t in (64, 128)),
        *(VerticalSlashSpread(vertical=v, diagonals=2, tile=t) for v in (8, 64) for t in (64, 128)),
        *(VerticalSlashLastQ(vertical=v, slash=s, tile=64) for v in (8, 64) for s in (32, 100)),
    ]
    ours, theirs = (
        LayerScorer(candidates, backend=backend, row_sample=row_sample).score(
            q, k, scale=0.2, lse=lse, layer=3
        )
        for backend in ("triton", "torch")
    )
    torch.testing.assert_close(
        torch.as_tensor(ours.mass), torch.as_tensor(theirs.mass), atol=1e-5, rtol=0
    )
    if row_sample < 1:
        torch.testing.assert_close(
            torch.as_tensor(ours.low), torch.as_tensor(theirs.low), atol=1e-4, rtol=0
        )
