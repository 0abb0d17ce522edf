"""Dense attention with its row log-sum-exp: every backend against explicit softmax in float64."""

import pytest
import torch

from patternsearch.errors import EnvironmentLacks, InputError
from patternsearch.kernels.score.lse import attention_with_lse, lse_backends
from support.closeness import assert_close

CUDA = torch.cuda.is_available()
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(CUDA, reason="compiled here"), id="cpu"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="cuda"),
]


def make_inputs(n, heads, kv_heads, dim, dtype, device, *, is_transposed=False, gain=1.0):
    g = torch.Generator().manual_seed(n + dim)
    q, k, v = (
        torch.randn(1, count, n, dim, generator=g).to(device, dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    q = q * gain
    if is_transposed:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return q, k, v


def explicit(q, k, v, scale):
    group, n = q.shape[1] // k.shape[1], q.shape[2]
    q, k, v = q.double(), k.double(), v.double()
    logits = q @ k.repeat_interleave(group, 1).mT * scale
    above = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    logits = logits.masked_fill(above, float("-inf"))
    return logits.softmax(-1) @ v.repeat_interleave(group, 1), logits.logsumexp(-1)[0]


def check(q, k, v, backend):
    scale = q.shape[3] ** -0.5
    got = attention_with_lse(q, k, v, scale=scale, backend=backend)
    out, lse = explicit(q, k, v, scale)
    assert got.backend == backend
    assert got.out.dtype == q.dtype
    assert got.lse.dtype == torch.float32
    assert_close(got.out, out, dtype=q.dtype, what="out")
    assert_close(got.lse, lse, what="lse")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "dim"),
    [(1, 1, 1, 64), (63, 3, 1, 80), (65, 2, 2, 96), (130, 4, 2, 128), (257, 1, 1, 256)],
)
def test_own_kernel_matches_explicit_softmax(n, heads, kv_heads, dim, dtype, device):
    inputs = make_inputs(n, heads, kv_heads, dim, dtype, device, is_transposed=n % 2 == 1)
    check(*inputs, "triton")


@pytest.mark.parametrize("device", DEVICES)
def test_own_kernel_survives_large_logits(device):
    q, k, v = make_inputs(100, 2, 1, 64, torch.float16, device, gain=300.0)
    check(q, k, v, "triton")


def test_cpu_operator_matches_explicit_softmax_and_is_the_choice_there():
    q, k, v = make_inputs(150, 8, 2, 64, torch.float32, "cpu")
    assert lse_backends(q, k, v) == ("torch_cpu",)
    assert attention_with_lse(q, k, v, scale=0.125).backend == "torch_cpu"
    check(q, k, v, "torch_cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_backend_offered_on_cuda_matches_explicit_softmax(dim, dtype):
    for heads, kv_heads in ((8, 1), (8, 2), (3, 1), (4, 4)):
        q, k, v = make_inputs(333, heads, kv_heads, dim, dtype, "cuda", is_transposed=True)
        for backend in lse_backends(q, k, v):
            check(q, k, v, backend)


@pytest.mark.gpu
def test_operators_do_not_repeat_keys_in_memory():
    q, k, v = make_inputs(8192, 32, 1, 128, torch.bfloat16, "cuda")
    for backend in lse_backends(q, k, v):
        attention_with_lse(q, k, v, scale=0.1, backend=backend)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        got = attention_with_lse(q, k, v, scale=0.1, backend=backend)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
        kept = got.out.nbytes + got.lse.nbytes
        assert extra < kept + 8 * k.nbytes, backend


def test_attention_with_lse_refuses_by_name():
    q, k, v = make_inputs(8, 2, 1, 64, torch.float32, "cpu")
    with pytest.raises(InputError, match="magic"):
        attention_with_lse(q, k, v, scale=1.0, backend="magic")
    with pytest.raises(EnvironmentLacks, match="cudnn cannot run"):
        attention_with_lse(q, k, v, scale=1.0, backend="cudnn")
    with pytest.raises(InputError, match="kv heads must divide"):
        attention_with_lse(
            q, k.expand(1, 3, 8, 64), v.expand(1, 3, 8, 64), scale=1.0, backend="triton"
        )
