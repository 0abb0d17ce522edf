"""The whole scorer on the GPU against the PyTorch path: the same rows from the same q and k."""

import numpy as np
import pytest
import torch

from patternsearch.schema.io import load_grid
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
