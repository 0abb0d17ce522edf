"""Column sums of sampled rows in Triton against the PyTorch path."""

import pytest
import torch

from patternsearch.kernels.score.sampled import unit_column_sums
from patternsearch.patterns.row_sampling import sample_rows

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
