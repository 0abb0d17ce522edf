# SPDX-License-Identifier: Apache-2.0
"""Twelve numbers a head that tell the heads of a model apart.

They come from one short dense pass over a fixed pseudo-random probe, so they depend on the
weights, the rotary embedding and the head mapping, and on nothing else. Per head, averaged over
the probe's rows: mass on key 0; mass at δ = 0, 1, 2–3, 4–7, …, 256–511; entropy of the row over
the logarithm of its number of keys.
"""

import torch
from torch import Tensor

from patternsearch.model.capture import AttentionInputs, run_with_capture
from patternsearch.model.loading import LoadedModel
from patternsearch.model.probe import probe_token_ids
from patternsearch.model.tensor_parallel import gather_heads
from patternsearch.schema.config import Fingerprints

__all__ = [
    "NUM_FEATURES",
    "PROBE_TOKENS",
    "attention_features",
    "fingerprint_heads",
]

PROBE_TOKENS = 512
NUM_FEATURES = 12
_NUM_OFFSET_BANDS = 10


def fingerprint_heads(
    loaded: LoadedModel, seed: int = 0, *, num_tokens: int = PROBE_TOKENS
) -> Fingerprints:
    """Run the probe through the model and describe every head.

    Args:
        loaded: The model.
        seed: Of the probe; recorded.
        num_tokens: Length of the probe, at most 512. A model of fewer positions needs less.

    Returns:
        ``values[layer][head]`` holds 12 numbers; a layer that is not full attention is empty.

    Raises:
        ModelError: If activations are not finite.
    """
    num_tokens = min(num_tokens, PROBE_TOKENS, loaded.identity.max_positions or PROBE_TOKENS)
    ids = probe_token_ids(seed, loaded.identity.vocab_size, num_tokens)
    values: list[tuple[tuple[float, ...], ...]] = [()] * loaded.identity.num_layers

    def describe(inputs: AttentionInputs) -> None:
        features = attention_features(inputs.q, inputs.k, scale=inputs.scale)
        features = gather_heads(features, loaded.tensor_parallel).cpu()
        values[inputs.layer] = tuple(tuple(row) for row in features.tolist())

    run_with_capture(loaded, torch.tensor([ids]), describe)
    return Fingerprints(seed=seed, num_tokens=num_tokens, values=tuple(values))


def attention_features(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """Return the twelve numbers of each head.

    Args:
        q: [1, Hq, n, d] with n ≤ 512; an n × n array is built for one kv group at a time.
        k: [1, Hkv, n, d].
        scale: Attention logits are scale · q · k.

    Returns:
        fp32 [Hq, 12], rounded to six decimals so that a stored value is short.
    """
    num_heads, n, head_dim = q.shape[1:]
    num_kv_heads = k.shape[1]
    assert n <= PROBE_TOKENS
    positions = torch.arange(n, device=q.device)
    offset = positions[:, None] - positions[None, :]
    hidden = offset < 0
    band = _offset_band(offset.clamp(min=0))
    in_band = [(band == b).float() for b in range(_NUM_OFFSET_BANDS)]
    log_keys = (positions[1:] + 1).float().log()
    queries = q[0].reshape(num_kv_heads, -1, n, head_dim)
    rows = []
    for group, key in zip(queries, k[0], strict=True):
        logits = torch.matmul(group.float(), key.float().mT) * scale
        log_p = logits.masked_fill(hidden, -torch.inf).log_softmax(-1)
        p = log_p.exp()
        sink = p[:, :, 0].mean(-1, keepdim=True)
        # Not index_add_: on CUDA its order, and so the last digit, changes from run to run.
        by_band = torch.stack([(p * mask).sum((1, 2)) for mask in in_band], dim=1)
        entropy = -torch.where(hidden, 0.0, p * log_p).nan_to_num(0.0).sum(-1)
        normalised = (entropy[:, 1:] / log_keys).sum(-1, keepdim=True) / max(n - 1, 1)
        rows.append(torch.cat([sink, by_band / n, normalised], dim=1))
    return torch.cat(rows).reshape(num_heads, NUM_FEATURES).double().round(decimals=6).float()


def _offset_band(offset: Tensor) -> Tensor:
    """Return 0 for δ = 0, 1 for 1, 2 for 2–3, 3 for 4–7, …, 9 for 256–511."""
    band = torch.zeros_like(offset)
    for power in range(_NUM_OFFSET_BANDS - 1):
        band += offset >= (1 << power)
    return band
