"""Column sums of sampled rows in Triton against the PyTorch path."""

import pytest
import torch

from patternsearch.kernels.score.sampled import unit_column_sums
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.patterns.row_sampling import sample_rows
from patternsearch.scoring.engine import LayerScorer
from patternsearch.scoring.vertical_slash import prepare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sums_of(q, k, units, lse, backend):
    n = q.shape[2]
    whole = torch.zeros(q.shape[1], len(units), -(-n // 64) * 64, device=q.device)
    for piece in unit_column_sums(q, k, scale=0.3, lse=lse, units=units, backend=backend):
        flat = piece.sums.transpose(1, 2).flatten(2)
        whole[piece.heads, piece.units, : flat.shape[2]] = flat
    return whole


def units_of(n, unit_rows, monkeypatch):
    """A sample of units of so many rows, partial ones among them."""
    import patternsearch.patterns.row_sampling as module

    monkeypatch.setattr(module, "MIN_ROWS", 1)
    monkeypatch.setattr(module, "_unit_rows", lambda n, fraction: unit_rows)
    return sample_rows(n, 1 / 4, 0).units


@pytest.mark.parametrize(
    ("n", "num_heads", "num_kv", "d", "dtype", "unit_rows"),
    [
        (1, 2, 1, 64, torch.float32, 8),
        (63, 2, 2, 80, torch.float32, 4),
        (200, 4, 2, 64, torch.float16, 16),
        (515, 3, 1, 96, torch.float16, 8),
        (330, 2, 1, 256, torch.float32, 32),
        (500, 2, 1, 64, torch.float32, 64),
        *(
            pytest.param(9000, 8, 2, 128, torch.bfloat16, rows, marks=pytest.mark.gpu)
            for rows in (4, 8, 16, 32, 64)
        ),
    ],
)
def test_triton_equals_torch(n, num_heads, num_kv, d, dtype, unit_rows, monkeypatch):
    import patternsearch.kernels.score.triton_sampled as module

    monkeypatch.setattr(module, "_SUMS_ELEMENTS", 2**14 if n < 1000 else 2**24)
    generator = torch.Generator().manual_seed(n)
    q = torch.randn(1, n, num_heads, d, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    k = torch.randn(1, n, num_kv, d, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    logits = torch.einsum(
        "hid,hjd->hij", q[0].float(), k[0].float().repeat_interleave(num_heads // num_kv, 0)
    )
    hidden = torch.ones(n, n, dtype=torch.bool, device=DEVICE).triu(1)
    lse = (logits * 0.3).masked_fill(hidden, -torch.inf).logsumexp(-1)
    units = units_of(n, unit_rows, monkeypatch)
    ours = sums_of(q, k, units, lse, "triton")
    theirs = sums_of(q, k, units, lse, "torch")
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["spread 64", "spread 128", "last_q"])
@pytest.mark.parametrize(
    ("n", "budgets"),
    [
        (1, ((1, 1),)),
        (200, ((8, 1), (32, 2), (200, 4))),
        (515, tuple((v, s) for v in (4, 40, 300) for s in (1, 2, 3, 5, 8))),
        pytest.param(
            9000, tuple((v, s) for v in (64, 1000) for s in (2, 16)), marks=pytest.mark.gpu
        ),
    ],
)
def test_missed_on_cuda_equals_torch(n, budgets, kind, monkeypatch):
    generator = torch.Generator().manual_seed(n)
    heads, name = 3, kind.split()[0]
    units = units_of(n, 16, monkeypatch)
    tiles = -(-n // 64)
    first_row = torch.tensor([unit.start for unit in units], device=DEVICE)
    sums = torch.rand(heads, tiles, len(units), 64, generator=generator).to(DEVICE)
    key = torch.arange(tiles * 64, device=DEVICE).view(tiles, 1, 64)
    row = torch.tensor([unit[-1] for unit in units], device=DEVICE)[:, None]
    sums = torch.where(key <= row, sums, 0.0)
    if name == "spread":
        tile = int(kind.split()[1])
        candidates = [VerticalSlashSpread(vertical=v, diagonals=s, tile=tile) for v, s in budgets]
        entries = -(-n // tile)
    else:
        candidates = [VerticalSlashLastQ(vertical=v, slash=10 * s, tile=64) for v, s in budgets]
        entries = n
    columns = torch.rand(heads, n, generator=generator).to(DEVICE)
    extents = torch.rand(heads, entries, generator=generator).to(DEVICE)
    index = prepare(candidates, range(len(budgets)), columns, extents, None)
    some = slice(1, 3)
    left_out = index.left_out(some, tiles)
    by_columns = torch.matmul(sums[some], left_out)
    theirs = index.missed_by_unit(sums[some], left_out, by_columns, some, first_row)
    ours = index.missed_on_cuda(sums[some].contiguous(), some, first_row)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_sampled_scores_are_those_of_torch(monkeypatch):
    monkeypatch.setattr("patternsearch.patterns.row_sampling.MIN_ROWS", 256)
    n, generator = 700, torch.Generator().manual_seed(5)
    q = torch.randn(1, 2, n, 64, generator=generator).to(DEVICE)
    k = torch.randn(1, 1, n, 64, generator=generator).to(DEVICE)
    logits = torch.einsum("hid,hjd->hij", q[0], k[0].repeat_interleave(2, 0)) * 0.2
    hidden = torch.ones(n, n, dtype=torch.bool, device=DEVICE).triu(1)
    lse = logits.masked_fill(hidden, -torch.inf).logsumexp(-1)
    candidates = [
        AShape(sink=64, window=64, tile=64),
        BlockSparse(blocks=2, tile=64),
        *(VerticalSlashSpread(vertical=v, diagonals=2, tile=t) for v in (8, 64) for t in (64, 128)),
        *(VerticalSlashLastQ(vertical=v, slash=s, tile=64) for v in (8, 64) for s in (32, 100)),
    ]
    ours, theirs = (
        LayerScorer(candidates, backend=backend, row_sample=1 / 4).score(
            q, k, scale=0.2, lse=lse, layer=3
        )
        for backend in ("triton", "torch")
    )
    torch.testing.assert_close(
        torch.as_tensor(ours.mass), torch.as_tensor(theirs.mass), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        torch.as_tensor(ours.low), torch.as_tensor(theirs.low), atol=1e-4, rtol=0
    )
