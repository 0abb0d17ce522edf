import pytest
import torch

from patternsearch.kernels.attend import attend
from patternsearch.kernels.attend.configs import AttendConfig
from patternsearch.kernels.attend.reference import attend_reference
from patternsearch.kernels.attend.triton import attend_triton
from support.attend import MIXED, masks_of, plan_of, random_layer
from support.closeness import assert_close

BACKENDS = ["triton", "torch"]


def check(heads, q, k, v, scale, backend, dtype=torch.float32):
    n = q.shape[2]
    plan = plan_of(heads, n, q.device)
    out, lse = attend(q, k, v, scale=scale, plan=plan, backend=backend)
    expected, expected_lse = attend_reference(
        q.cpu(), k.cpu(), v.cpu(), scale=scale, mask=masks_of(heads, n)
    )
    assert out.dtype == q.dtype
    assert out.stride() == q.stride()
    assert_close(out, expected, dtype=dtype, what="out")
    assert_close(lse, expected_lse, dtype=dtype, what="lse")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 150, 257])
def test_attend_matches_masked_attention_for_any_length(n, backend):
    q, k, v = random_layer(4, 2, n, 16, seed=n)
    check(MIXED, q, k, v, 0.25, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attend_takes_any_head_dim(head_dim, backend):
    q, k, v = random_layer(4, 4, 140, head_dim)
    check(MIXED, q, k, v, head_dim**-0.5, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_attend_maps_query_heads_to_kv_heads(group, backend):
    heads = tuple(MIXED[index % 4] for index in range(2 * group))
    q, k, v = random_layer(2 * group, 2, 130, 16)
    check(heads, q, k, v, 0.25, backend)


def test_attend_reads_tiles_through_descriptors():
    """The addressing that Hopper uses; the interpreter runs it too."""
    q, k, v = random_layer(4, 2, 150, 16)
    plan = plan_of(MIXED, 150)
    config = AttendConfig(32, 32, 4, 1, use_tma=True)
    out, lse = attend_triton(q, k, v, scale=0.25, plan=plan, config=config)
    expected, expected_lse = attend_reference(q, k, v, scale=0.25, mask=masks_of(MIXED, 150))
    assert_close(out, expected, what="out")
    assert_close(lse, expected_lse, what="lse")
