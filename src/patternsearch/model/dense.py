# SPDX-License-Identifier: Apache-2.0
"""Dense attention whose memory is flat: no n × n array, no repeated keys or values.

Shapes throughout: q [1, Hq, n, d], k [1, Hkv, n, d], v [1, Hkv, n, dv], any strides; outputs
[1, Hq, n, dv] in q's dtype. Query head h reads kv head h // (Hq / Hkv). This is what carries a
model's hidden states from layer to layer; scoring does not use it.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["DenseAttention", "causal_attention", "causal_attention_chunked", "sliding_attention"]

_FLAT_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]
_CHUNK_SCORES = 1 << 24
"""Scores held at a time by the chunked paths: 64 MiB in float32."""


class DenseAttention(Protocol):
    """Causal attention that may also return its row log-sum-exp.

    Returns the output [1, Hq, n, dv], the log-sum-exp (fp32 [Hq, n], natural logarithm of the
    sum of exp(scale · q · k)) or None, and the name of the backend that ran.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor | None, str]:
        """Attend causally."""


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float
) -> tuple[Tensor, Tensor | None, str]:
    """Attend causally with a fused kernel of torch, or in chunks where none takes the inputs."""
    num_kv_heads = k.shape[1]
    if q.shape[-1] == v.shape[-1]:
        try:
            with sdpa_kernel(_FLAT_BACKENDS):
                out = scaled_dot_product_attention(*_grouped(q, k, v), is_causal=True, scale=scale)
            return out.reshape(1, -1, *out.shape[2:]), None, "sdpa"
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
    assert q.shape[1] % num_kv_heads == 0
    return causal_attention_chunked(q, k, v, scale=scale), None, "chunked"


def causal_attention_chunked(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Attend causally, a chunk of query rows at a time with a plain fp32 softmax."""
    return _banded(q, k, v, scale=scale, window=None)


def sliding_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int) -> Tensor:
    """Attend to the keys j ≤ i with i − j < ``window``."""
    n = q.shape[2]
    if window >= n:
        return causal_attention(q, k, v, scale=scale)[0]
    return _banded(q, k, v, scale=scale, window=window)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View the inputs as Hkv batches of Hq / Hkv heads that share one key and value, uncopied."""
    num_kv_heads = k.shape[1]
    group = q.shape[1] // num_kv_heads
    return (
        q[0].view(num_kv_heads, group, *q.shape[2:]),
        k.transpose(0, 1).expand(-1, group, -1, -1),
        v.transpose(0, 1).expand(-1, group, -1, -1),
    )


def _banded(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
    n, num_heads = q.shape[2], q.shape[1]
    q_grouped, k_grouped, v_grouped = _grouped(q, k, v)
    out = q.new_empty(*q_grouped.shape[:3], v.shape[-1])
    reach = n if window is None else min(n, 2 * window)
    rows = max(16, min(n, window or n, _CHUNK_SCORES // (num_heads * reach)))
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        first = 0 if window is None else max(0, start - window + 1)
        keys = k_grouped[:, :1, first:stop].float()
        scores = torch.matmul(q_grouped[:, :, start:stop].float(), keys.mT).mul_(scale)
        i = torch.arange(start, stop, device=q.device)[:, None]
        j = torch.arange(first, stop, device=q.device)[None, :]
        hidden = j > i if window is None else (j > i) | (i - j >= window)
        probabilities = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        out[:, :, start:stop] = torch.matmul(probabilities, v_grouped[:, :1, first:stop].float())
    return out.reshape(1, num_heads, n, v.shape[-1])
