"""The whole scorer on the GPU against the PyTorch path: the same rows from the same q and k."""

import numpy as np
import pytest
import torch

from patternsearch.schema.io import load_grid
from patternsearch.scoring.accounts import Accounts
from patternsearch.scoring.engine import LayerScorer
from support.planted import planted_qk

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("oracle", [False, True], ids=["online", "oracle"])
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 2e-4), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("n", [1000, 4096, 8191])
def test_scorer_on_cuda_agrees_with_torch(n, dtype, atol, oracle):
    from patternsearch.kernels.score.lse import attention_with_lse

    q, k, v = (x.to(dtype) for x in planted_qk(n, 8, 2, 128, seed=3))
    scale = 128**-0.5
    grid = load_grid("default")[0].expand()
    on_cpu = LayerScorer(grid, oracle=oracle).score(q.float(), k.float(), scale=scale)
    gpu = [x.cuda() for x in (q, k, v)]
    lse = attention_with_lse(*gpu, scale=scale).lse
    on_gpu = LayerScorer(grid, oracle=oracle, backend="triton").score(
        gpu[0], gpu[1], scale=scale, lse=lse
    )
    assert on_gpu.specs == on_cpu.specs
    for name in ("mass", "logical", "density"):
        ours = torch.as_tensor(getattr(on_gpu, name)).double().cpu().numpy()
        theirs = torch.as_tensor(getattr(on_cpu, name)).double().cpu().numpy()
        np.testing.assert_allclose(ours, theirs, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 2e-4), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("n", [3000, 8191])
def test_sampled_scores_on_cuda_agree_with_torch(n, dtype, atol):
    from patternsearch.kernels.score.lse import attention_with_lse

    q, k, v = (x.to(dtype) for x in planted_qk(n, 8, 2, 128, seed=3))
    scale = 128**-0.5
    grid = load_grid("default")[0].expand()
    cpu = [x.float() for x in (q, k, v)]
    on_cpu = LayerScorer(grid, row_sample=1 / 8).score(
        *cpu[:2], scale=scale, lse=attention_with_lse(*cpu, scale=scale).lse
    )
    gpu = [x.cuda() for x in (q, k, v)]
    scorer = LayerScorer(grid, row_sample=1 / 8, backend="triton")
    lse = attention_with_lse(*gpu, scale=scale).lse
    on_gpu, again = (scorer.score(*gpu[:2], scale=scale, lse=lse) for _ in range(2))
    for name in ("mass", "error", "low"):
        ours, theirs = getattr(on_gpu, name), getattr(on_cpu, name)
        np.testing.assert_allclose(ours, theirs, atol=atol, err_msg=name)
        np.testing.assert_array_equal(ours, getattr(again, name), err_msg=name)


@pytest.mark.parametrize("row_sample", [1.0, 1 / 8])
def test_scoring_waits_for_the_device_only_at_its_end(row_sample, monkeypatch):
    """What the host still has to launch would lie bare if it waited for the pass."""
    from patternsearch.kernels.score.lse import attention_with_lse

    q, k, v = (x.to("cuda", torch.bfloat16) for x in planted_qk(4096, 8, 2, 128, seed=3))
    lse = attention_with_lse(q, k, v, scale=0.1).lse
    scorer = LayerScorer(load_grid("default")[0].expand(), row_sample=row_sample, backend="triton")
    scorer.score(q, k, scale=0.1, lse=lse)  # compile, and lay the sample out
    finish = Accounts.finish

    def at_the_end(*arguments):
        torch.cuda.set_sync_debug_mode("default")
        return finish(*arguments)

    monkeypatch.setattr(Accounts, "finish", at_the_end)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scores = scorer.score(q, k, scale=0.1, lse=lse)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert np.isfinite(scores.mass).all()
