"""Column sums of sampled segments in Triton against the PyTorch path."""

import pytest
import torch

from patternsearch.kernels.score.sampled import segment_column_sums
from patternsearch.patterns.geometry import query_segments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sums_of(q, k, segments, lse, backend):
    n = q.shape[2]
    whole = torch.zeros(q.shape[1], len(segments), -(-n // 64) * 64, device=q.device)
    for piece in segment_column_sums(q, k, scale=0.3, lse=lse, segments=segments, backend=backend):
        flat = piece.sums.transpose(1, 2).flatten(2)
        whole[piece.heads, piece.segments, : flat.shape[2]] = flat
    return whole


@pytest.mark.parametrize(
    ("n", "num_heads", "num_kv", "d", "dtype"),
    [
        (1, 2, 1, 64, torch.float32),
        (63, 2, 2, 80, torch.float32),
        (200, 4, 2, 64, torch.float16),
        (515, 3, 1, 96, torch.float16),
        (330, 2, 1, 256, torch.float32),
        pytest.param(9000, 8, 2, 128, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_triton_equals_torch(n, num_heads, num_kv, d, dtype, monkeypatch):
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
    bounds, _ = query_segments(n, 64)
    segments = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))[::2]
    ours = sums_of(q, k, segments, lse, "triton")
    theirs = sums_of(q, k, segments, lse, "torch")
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
