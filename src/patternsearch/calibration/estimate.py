# SPDX-License-Identifier: Apache-2.0
"""How much work a calibration is, before it starts.

Work is counted in multiply-adds from shapes alone; a rate measured on this machine turns it into
time. On a CPU that is the fingerprint probe, which every calibration runs first; on a GPU the
probe is all launches and compilation, so matrix products of the model's size are timed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from patternsearch.model.fingerprints import PROBE_TOKENS
from patternsearch.model.loading import LoadedModel

__all__ = [
    "WorkEstimate",
    "estimate_work",
    "format_bytes",
    "format_duration",
    "forward_work",
    "sample_work",
]

_SCORE_WEIGHT = 1.0
"""Work of the score pass in units of Hq·d·n² multiply-adds.

Its products are half of that (Q·Kᵀ over the causal half); the exponential and the sum per pair
weigh about as much again.
"""


@dataclass(frozen=True, slots=True)
class WorkEstimate:
    """What the run expects to spend.

    Attributes:
        num_samples: samples still to do.
        seconds: wall time of all of them.
        peak_bytes: weights, activations and scoring buffers at the longest length.
        judged_by: what was timed.
    """

    num_samples: int
    seconds: float
    peak_bytes: int
    judged_by: str

    def sentence(self) -> str:
        """Say it in one line."""
        if not self.num_samples:
            return "nothing is left to score"
        return (
            f"{self.num_samples} samples to score: about {format_duration(self.seconds)}, judged "
            f"by {self.judged_by}, and {format_bytes(self.peak_bytes)} memory"
        )


def _num_layer_parameters(loaded: LoadedModel) -> int:
    """Count the parameters that multiply every token: not the embedding, not the LM head."""
    embedding = loaded.model.get_input_embeddings().weight.numel()
    total = sum(parameter.numel() for parameter in loaded.backbone.parameters())
    return int(total - embedding)


def forward_work(loaded: LoadedModel, n: int) -> float:
    """Return the multiply-adds of one dense forward over ``n`` tokens, without the LM head."""
    identity = loaded.identity
    width = identity.num_query_heads * identity.head_dim
    return float(_num_layer_parameters(loaded)) * n + len(loaded.full_layers) * width * float(n) * n


def sample_work(loaded: LoadedModel, n: int, *, oracle: bool) -> float:
    """Return the multiply-adds of forward and scoring of one sample; the oracle passes twice."""
    identity = loaded.identity
    width = identity.num_query_heads * identity.head_dim
    passes = 2 if oracle else 1
    score = passes * _SCORE_WEIGHT * len(loaded.full_layers) * width * float(n) * n
    return forward_work(loaded, n) + score


def estimate_work(
    loaded: LoadedModel,
    lengths: Sequence[int],
    *,
    oracle: bool,
    probe_seconds: float,
    num_copies: int = 1,
    tp_size: int = 1,
) -> WorkEstimate:
    """Extrapolate from the time of the fingerprint probe.

    Args:
        loaded: the model.
        lengths: tokens of each remaining sample.
        oracle: whether the oracle pass runs.
        probe_seconds: what the probe took here; not used on a GPU.
        num_copies: copies of the model that share the samples.
        tp_size: tensor-parallel ranks of a copy; memory is that of one rank.
    """
    if loaded.device.type == "cuda":
        rate = _product_rate(loaded) * tp_size
        judged_by = "matrix products on this GPU (short prompts take longer)"
    else:
        rate = forward_work(loaded, PROBE_TOKENS) / probe_seconds
        judged_by = f"a probe of {PROBE_TOKENS} tokens"
    total = sum(sample_work(loaded, n, oracle=oracle) for n in lengths)
    weights = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    return WorkEstimate(
        num_samples=len(lengths),
        seconds=total / rate / num_copies,
        peak_bytes=int(weights) // tp_size + _buffer_bytes(loaded, max(lengths, default=0)),
        judged_by=judged_by,
    )


def _product_rate(loaded: LoadedModel) -> float:
    """Return the multiply-adds per second of a feed-forward product over 4096 tokens."""
    hidden, wide = _widths(loaded)
    x = torch.randn(4096, hidden, device=loaded.device, dtype=loaded.dtype)
    weight = torch.randn(hidden, wide, device=loaded.device, dtype=loaded.dtype)
    seconds = []
    for _ in range(6):
        torch.cuda.synchronize(loaded.device)
        start = time.perf_counter()
        torch.matmul(x, weight)
        torch.cuda.synchronize(loaded.device)
        seconds.append(time.perf_counter() - start)
    return 4096.0 * hidden * wide / min(seconds)


def _widths(loaded: LoadedModel) -> tuple[int, int]:
    """Return the hidden and the feed-forward width."""
    config = loaded.model.config.get_text_config()
    hidden = int(config.hidden_size)
    return hidden, int(getattr(config, "intermediate_size", None) or 4 * hidden)


def _buffer_bytes(loaded: LoadedModel, n: int) -> int:
    """Activations of one layer and the scorer's sums for ``n`` tokens."""
    identity = loaded.identity
    item = loaded.dtype.itemsize
    hidden, feed_forward = _widths(loaded)
    activations = n * item * (4 * hidden + 3 * feed_forward)
    columns = 2 * 8 * 4 * n * 4
    tiles = (n // 64 + 4) * (n // 64 + 1) * 8
    return int(activations + identity.num_query_heads * (columns + tiles))


def format_duration(seconds: float) -> str:
    """Return a duration for people: ``48 s``, ``3 min 20 s``, ``2 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_bytes(size: float) -> str:
    """Return a size for people: ``812 MiB``, ``3.4 GiB``."""
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"
