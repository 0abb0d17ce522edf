"""Capture on a CUDA device: the same hidden states, no math fall-back, flat memory."""

import pytest
import torch

from patternsearch.model.capture import run_with_capture
from patternsearch.model.dense import causal_attention, sliding_attention
from patternsearch.model.loading import adopt_model
from support.closeness import assert_close
from support.tiny_models import FAMILIES, HYBRIDS, tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", sorted({*FAMILIES, *HYBRIDS}))
def test_capture_on_cuda_equals_the_library(family):
    loaded = adopt_model(tiny_model(family).cuda())
    ids = torch.randint(0, 320, (1, 300), generator=torch.Generator().manual_seed(0)).cuda()
    layers = []
    hidden = run_with_capture(loaded, ids, lambda inputs: layers.append(inputs.layer))
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = loaded.backbone(input_ids=ids, use_cache=False).last_hidden_state
    assert layers == list(loaded.full_layers)
    difference = (hidden - expected).norm() / expected.norm()
    assert difference < 1e-3, difference  # float32 products may use reduced precision here


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 1000])
def test_dense_attention_on_cuda_is_right_and_flat(head_dim, window):
    n, num_heads, num_kv_heads = 4099, 8, 2
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(
            1, n, heads, head_dim, device="cuda", dtype=torch.bfloat16, generator=generator
        ).transpose(1, 2)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if window is None:
        out, _, backend = causal_attention(q, k, v, scale=head_dim**-0.5)
        assert backend == "sdpa"
    else:
        out = sliding_attention(q, k, v, scale=head_dim**-0.5, window=window)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < (3 * q.numel() * 2 if window is None else 600 << 20)
    offset = torch.arange(n, device="cuda")[:, None] - torch.arange(n, device="cuda")
    hidden = (offset < 0) if window is None else (offset < 0) | (offset >= window)
    for head in (0, 5):
        logits = q[0, head].float() @ k[0, head // 4].float().T * head_dim**-0.5
        expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v[0, head // 4].float()
        assert_close(out[0, head], expected, dtype=torch.bfloat16)
