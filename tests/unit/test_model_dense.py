"""The dense attention that carries hidden states agrees with naive masked attention."""

import pytest
import torch

from patternsearch.model.dense import (
    causal_attention,
    causal_attention_chunked,
    sliding_attention,
)
from support.closeness import assert_close


def _inputs(n, num_heads=6, num_kv_heads=2, d=16, dv=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, n, num_heads, d, generator=generator).transpose(1, 2)
    k = torch.randn(1, n, num_kv_heads, d, generator=generator).transpose(1, 2)
    v = torch.randn(1, num_kv_heads, n, dv or d, generator=generator)
    return q, k, v


def _naive(q, k, v, scale, window=None):
    n, group = q.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    offset = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    hidden = (offset < 0) if window is None else (offset < 0) | (offset >= window)
    return (q.double() @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("n", [1, 63, 64, 65, 300])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("function", [causal_attention, causal_attention_chunked])
def test_causal_attention_equals_naive(function, n, num_heads, num_kv_heads):
    q, k, v = _inputs(n, num_heads, num_kv_heads)
    out = function(q, k, v, scale=0.3)
    out = out[0] if isinstance(out, tuple) else out
    assert_close(out, _naive(q, k, v, 0.3))


def test_causal_attention_names_its_backend():
    assert causal_attention(*_inputs(9), scale=1.0)[1:] == (None, "sdpa")
    out, lse, name = causal_attention(*_inputs(50, dv=8), scale=0.25)
    assert (lse, name) == (None, "chunked")
    assert_close(out, _naive(*_inputs(50, dv=8), 0.25))


@pytest.mark.parametrize("window", [1, 2, 24, 99, 100, 1000])
@pytest.mark.parametrize("n", [1, 24, 25, 100])
def test_sliding_attention_equals_naive(n, window):
    q, k, v = _inputs(n)
    assert_close(sliding_attention(q, k, v, scale=0.3, window=window), _naive(q, k, v, 0.3, window))


@pytest.mark.parametrize("function", [causal_attention_chunked, sliding_attention])
def test_chunks_of_any_size_give_the_same(function, monkeypatch):
    q, k, v = _inputs(100)
    options = {"window": 30} if function is sliding_attention else {}
    monkeypatch.setattr("patternsearch.model.dense._CHUNK_SCORES", 1)  # 16 rows at a time
    out = function(q, k, v, scale=0.3, **options)
    assert_close(out, _naive(q, k, v, 0.3, options.get("window")))


def test_causal_attention_in_bfloat16_loses_no_more_than_the_library():
    q, k, v = (x.bfloat16() for x in _inputs(200))
    exact = _naive(q, k, v, 0.3)
    for out in (
        causal_attention(q, k, v, scale=0.3)[0],
        causal_attention_chunked(q, k, v, scale=0.3),
    ):
        assert out.dtype == torch.bfloat16
        assert_close(out, exact, dtype=torch.bfloat16)
