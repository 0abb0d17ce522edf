"""Attention and its plans on a CUDA device: low precision, long sequences, no waiting."""

import pytest
import torch

from patternsearch.kernels.attend import attend, build_plan, sparse_attention
from patternsearch.kernels.attend.chunked import plan_to_host, query_tile_keys
from patternsearch.kernels.attend.reference import attend_reference, attend_row_reference
from patternsearch.kernels.index import reference
from patternsearch.kernels.index import triton as index_triton
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from support.attend import (
    MIXED,
    Head,
    masks_of,
    plan_of,
    poison,
    random_layer,
    with_distant_rows,
)
from support.closeness import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

LAYER = [
    Dense(),
    AShape(sink=128, window=1024, tile=128),
    VerticalSlashSpread(vertical=500, diagonals=12, tile=128),
    BlockSparse(blocks=16, tile=128),
    AShape(sink=4, window=300, tile=64),
    VerticalSlashLastQ(vertical=300, slash=200, tile=64),
    BlockSparse(blocks=16, tile=64, estimator="pooled"),
    VerticalSlashSpread(vertical=1000, diagonals=4, tile=64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attend_matches_masked_attention(head_dim, dtype):
    q, k, v = random_layer(4, 2, 777, head_dim, dtype=dtype, device="cuda")
    poison("cuda")
    plan = plan_of(MIXED, 777, "cuda")
    scale = head_dim**-0.5
    out, lse = attend(q, k, v, scale=scale, plan=plan)
    expected, expected_lse = attend_reference(
        q.cpu(), k.cpu(), v.cpu(), scale=scale, mask=masks_of(MIXED, 777)
    )
    assert_close(out, expected, dtype=dtype, what="out")
    assert_close(lse, expected_lse, what="lse", dtype=dtype)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 129, 1000])
def test_attend_takes_any_length_in_bfloat16(n):
    q, k, v = random_layer(4, 1, n, 128, dtype=torch.bfloat16, device="cuda", seed=n)
    poison("cuda")
    out, lse = attend(q, k, v, scale=0.1, plan=plan_of(MIXED, n, "cuda"))
    expected, expected_lse = attend_reference(
        q.cpu(), k.cpu(), v.cpu(), scale=0.1, mask=masks_of(MIXED, n)
    )
    assert_close(out, expected, dtype=torch.bfloat16, what="out")
    assert_close(lse, expected_lse, dtype=torch.bfloat16, what="lse")


def check_rows(q, k, v, scale, plan, out, lse, rows):
    for part in plan.tile_plans:
        host = plan_to_host(part)
        for index, head in enumerate(part.heads):
            for row in rows:
                keys = query_tile_keys(host, index, row // part.tile, plan.n)
                expected, expected_lse = attend_row_reference(
                    q, k, v, scale=scale, keys=keys, head=head, row=row
                )
                what = f"head {head}, row {row}"
                assert_close(out[0, head, row], expected, dtype=q.dtype, what=what)
                assert_close(lse[head, row], expected_lse, dtype=q.dtype, what=what)
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all())


@pytest.mark.parametrize("n", [8192, 131072 - 37])
def test_sparse_attention_of_a_mixed_layer_is_exact_in_long_prompts(n):
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, n, heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2) for heads in (8, 2, 2)
    )  # fmt: skip
    scale = 0.2
    plan = build_plan(q, k, scale=scale, candidates=LAYER)
    poison("cuda")
    out, lse = attend(q, k, v, scale=scale, plan=plan)
    rows = sorted({0, 1, 63, 64, 127, 128, n // 3, n // 2 + 1, n - 130, n - 2, n - 1})
    check_rows(q, k, v, scale, plan, out, lse, rows)


def test_attend_addresses_more_than_two_to_the_31_elements():
    n, heads, head_dim = 131072, 130, 128  # 2.18e9 elements
    q = torch.randn(1, heads, n, head_dim, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    candidates = [AShape(sink=1, window=64, tile=64)] * (heads - 1)
    candidates.append(VerticalSlashSpread(vertical=200, diagonals=2, tile=64))
    plan = build_plan(q, q, scale=0.1, candidates=candidates)
    out, lse = attend(q, q, q, scale=0.1, plan=plan)
    part = plan_to_host(plan.tile_plans[0])
    for head in (0, heads - 2, heads - 1):
        for row in (5, n - 1):
            keys = query_tile_keys(part, part.heads.index(head), row // 64, n)
            expected, expected_lse = attend_row_reference(
                q, q, q, scale=0.1, keys=keys, head=head, row=row
            )
            assert_close(out[0, head, row], expected, dtype=torch.bfloat16)
            assert_close(lse[head, row], expected_lse, dtype=torch.bfloat16)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_attend_addresses_rows_two_to_the_31_elements_away(which):
    """Tiles and gathered columns of one tensor that 32-bit offsets do not reach."""
    shape = {"dtype": torch.bfloat16, "device": "cuda"}
    layer = dict(zip("qkv", random_layer(1, 1, 5000, 128, **shape), strict=True))
    plan = plan_of([Head("vertical_slash", 128, columns=tuple(range(7, 4000, 9)))], 5000, "cuda")
    out, lse = attend(**layer, scale=0.1, plan=plan)
    again, lse_again = attend(
        **layer | {which: with_distant_rows(layer[which])}, scale=0.1, plan=plan
    )
    assert_close(again, out, dtype=torch.bfloat16, what="out")
    assert_close(lse_again, lse, dtype=torch.bfloat16, what="lse")


def test_sparse_attention_never_waits_for_the_device():
    q, k, v = random_layer(8, 2, 4000, 128, dtype=torch.bfloat16, device="cuda")
    sparse_attention(q, k, v, scale=0.1, candidates=LAYER)  # compile
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, _ = sparse_attention(q, k, v, scale=0.1, candidates=LAYER)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(out.isfinite().all())


def test_large_logits_stay_finite_in_float16():
    q, k, v = random_layer(4, 2, 300, 64, dtype=torch.float16, device="cuda", magnitude=200.0)
    out, lse = attend(q, k, v, scale=1.0, plan=plan_of(MIXED, 300, "cuda"))
    expected, expected_lse = attend_reference(
        q.cpu(), k.cpu(), v.cpu(), scale=1.0, mask=masks_of(MIXED, 300)
    )
    assert float(expected_lse.max()) > 65504
    assert_close(out / 200, expected / 200, dtype=torch.float16, what="out")
    assert_close(lse, expected_lse, dtype=torch.float16, what="lse")


@pytest.mark.parametrize("n", [5000, 20001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_index_scores_match_reference(dtype, n):
    q, k, _ = random_layer(8, 2, n, 128, dtype=dtype, device="cuda")
    for name, options in (
        ("spread_scores", {"last_q": 64, "spread_rows": 64, "tile": 128}),
        ("last_q_scores", {"last_q": 64}),
    ):
        got = getattr(index_triton, name)(q, k, scale=0.1, **options)
        expected = getattr(reference, name)(q, k, scale=0.1, **options)
        for values, truth in zip(got, expected, strict=True):
            assert_close(values, truth, dtype=torch.float32, what=name)
    for estimator in ("pooled_query", "pooled"):
        for tile in (64, 128):
            options = {"scale": 0.1, "tile": tile, "estimator": estimator}
            got = index_triton.block_scores(q, k, **options)
            expected = reference.block_scores(q, k, **options)
            # pooled queries are rounded to the keys' dtype before the product
            assert_close(
                got, expected, dtype=dtype if estimator == "pooled_query" else torch.float32
            )


def test_index_is_the_same_from_run_to_run():
    q, k, _ = random_layer(8, 2, 20000, 128, dtype=torch.bfloat16, device="cuda")
    first, second = (build_plan(q, k, scale=0.1, candidates=LAYER) for _ in range(2))
    for a, b in zip(first.tile_plans, second.tile_plans, strict=True):
        assert torch.equal(a.tile_count, b.tile_count)
        assert torch.equal(a.column_count, b.column_count)
        assert torch.equal(a.order, b.order)
        a, b = plan_to_host(a), plan_to_host(b)
        for row in range(len(a.heads)):
            for u in range(a.tile_count.shape[1]):
                keys = query_tile_keys(a, row, u, 20000)
                assert torch.equal(keys, query_tile_keys(b, row, u, 20000))
