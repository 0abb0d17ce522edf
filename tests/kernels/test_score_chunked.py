"""The streaming PyTorch pass against the n×n reference."""

import pytest
import torch

from patternsearch.kernels.score import BucketTable, chunked, score_masses_chunked
from patternsearch.kernels.score.reference import attention_probabilities, score_masses_reference
from patternsearch.patterns.geometry import num_tiles
from support.closeness import assert_close
from support.planted import planted_qk, random_qk

SINKS = (0, 3, 64, 70, 5000)
WINDOWS = (1, 5, 64, 100, 128, 777, 9000)


def every_table(n, num_heads, seed=0):
    g = torch.Generator().manual_seed(seed)

    def bucket(entries, dtype):
        return torch.randint(0, 4, (num_heads, entries), generator=g).to(dtype)

    return [
        BucketTable("tile", 64, bucket(num_tiles(n, 64), torch.int32), 3),
        BucketTable("tile", 128, bucket(num_tiles(n, 128), torch.uint8), 3),
        BucketTable("offset", 64, bucket(num_tiles(n, 64) * 64, torch.uint8), 3),
        BucketTable("offset", 128, bucket(num_tiles(n, 128) * 128, torch.int64), 3),
        BucketTable("slash", 64, bucket(n, torch.uint8), 3),
    ]


def assert_same(actual, expected, n):
    """Compare as captured masses: sums over rows divided by n."""
    assert len(actual.column_mass) == len(expected.column_mass)
    for name in ("segment_mass", "column_sum", "offset_sum", "a_shape_logical"):
        a, e = getattr(actual, name), getattr(expected, name)
        assert (a is None) == (e is None), name
        if e is not None:
            assert a.dtype == torch.float32
            assert_close(a / n, e / n, what=name)
    for place, (a, e) in enumerate(zip(actual.column_mass, expected.column_mass, strict=True)):
        assert_close(a / n, e / n, what=f"column_mass {place}")


def everything(n, num_heads):
    return {
        "tables": every_table(n, num_heads),
        "column_sums": True,
        "offset_sums": True,
        "a_shape_sinks": SINKS,
        "a_shape_windows": WINDOWS,
    }


@pytest.mark.parametrize("make", [random_qk, planted_qk])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (3, 1)], ids=["gqa", "mha", "mqa"])
@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 127, 129, 300])
def test_score_masses_matches_reference(n, heads, kv_heads, make):
    q, k, _ = make(n, heads, kv_heads, 64, seed=n)
    arguments = {"scale": 0.125, **everything(n, heads)}
    expected = score_masses_reference(q, k, dtype=torch.float64, **arguments)
    assert_same(score_masses_chunked(q, k, **arguments), expected, n)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_score_masses_matches_reference_at_a_thousand_tokens(head_dim):
    q, k, _ = planted_qk(1000, 2, 1, head_dim, seed=1)
    arguments = {"scale": head_dim**-0.5, **everything(1000, 2)}
    expected = score_masses_reference(q, k, dtype=torch.float64, **arguments)
    assert_same(score_masses_chunked(q, k, **arguments), expected, 1000)


@pytest.mark.parametrize("limit", [1, 10**5])
def test_score_masses_does_not_depend_on_how_work_is_cut(limit, monkeypatch):
    n = 400
    q, k, _ = random_qk(n, 6, 3, 64)
    arguments = {"scale": 0.125, **everything(n, 6)}
    expected = score_masses_reference(q, k, dtype=torch.float64, **arguments)
    monkeypatch.setattr(chunked, "_CHUNK_ELEMENTS", {"cpu": limit, "cuda": limit})
    monkeypatch.setattr(chunked, "_SUMS_ELEMENTS", {"cpu": limit, "cuda": limit})
    assert_same(score_masses_chunked(q, k, **arguments), expected, n)


def test_score_masses_uses_a_given_lse():
    n = 200
    q, k, _ = random_qk(n, 4, 2, 64)
    logits = torch.matmul(q[0], k[0].repeat_interleave(2, 0).transpose(1, 2)) * 0.125
    lse = logits.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).logsumexp(-1)
    arguments = {"scale": 0.125, **everything(n, 4)}
    expected = score_masses_reference(q, k, dtype=torch.float64, **arguments)
    assert_same(score_masses_chunked(q, k, lse=lse, **arguments), expected, n)
    halved = score_masses_chunked(q, k, scale=0.125, lse=lse + torch.log(torch.tensor(2.0)))
    assert_close(halved.segment_mass * 2, expected.segment_mass, what="halved probabilities")


def test_score_masses_takes_any_strides():
    q, k, _ = random_qk(150, 4, 2, 64)
    strided_q = q.transpose(1, 2).contiguous().transpose(1, 2)
    padded_k = torch.zeros(1, 2, 150, 96)[..., :64].copy_(k)
    arguments = {"scale": 0.125, **everything(150, 4)}
    expected = score_masses_reference(q, k, dtype=torch.float64, **arguments)
    assert_same(score_masses_chunked(strided_q, padded_k, **arguments), expected, 150)


def test_score_masses_leaves_out_what_is_not_asked_for():
    q, k, _ = random_qk(70, 2, 1, 64)
    masses = score_masses_chunked(q, k, scale=0.125)
    assert masses.column_mass == ()
    assert masses.column_sum is None
    assert masses.offset_sum is None
    assert masses.a_shape_logical is None


def test_score_masses_buckets_partition_the_rows():
    n = 300
    q, k, _ = random_qk(n, 2, 1, 64)
    outside = [
        BucketTable(table.kind, table.tile, torch.ones_like(table.bucket), 3)
        for table in every_table(n, 2)
    ]
    masses = score_masses_chunked(q, k, scale=0.125, tables=outside, column_sums=True)
    for mass in masses.column_mass:
        assert_close(mass[:, 0].sum(1), masses.column_sum, what="bucket 1 holds every pair")
        assert mass[:, 1:].abs().max() == 0


def test_score_masses_is_deterministic():
    q, k, _ = planted_qk(500, 4, 2, 64)
    arguments = {"scale": 0.125, **everything(500, 4)}
    first, second = (score_masses_chunked(q, k, **arguments) for _ in range(2))
    assert torch.equal(first.segment_mass, second.segment_mass)
    for a, b in zip(first.column_mass, second.column_mass, strict=True):
        assert torch.equal(a, b)


def test_attention_probabilities_rows_sum_to_one():
    q, k, _ = random_qk(65, 4, 2, 64)
    p = attention_probabilities(q, k, scale=0.125, dtype=torch.float64)
    assert_close(p.sum(-1), torch.ones(4, 65), what="row sums")
    assert p.triu(1).abs().max() == 0
