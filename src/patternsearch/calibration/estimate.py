# SPDX-License-Identifier: Apache-2.0
"""How much work a calibration is, before it starts.

Work is counted in multiply-adds from shapes alone; a rate measured on this machine (the
fingerprint probe, which every calibration runs first) turns it into time.
"""

from dataclasses import dataclass

from patternsearch.schema.config import ModelIdentity

__all__ = ["WorkEstimate", "format_bytes", "format_duration", "forward_work", "sample_work"]


@dataclass(frozen=True, slots=True)
class WorkEstimate:
    """What the run expects to spend.

    Attributes:
        seconds: wall time of all remaining samples.
        peak_bytes: weights, hidden states and scoring buffers at the longest length.
        basis: what the seconds were derived from.
    """

    seconds: float
    peak_bytes: int
    basis: str


def forward_work(identity: ModelIdentity, num_parameters: int, n: int) -> float:
    """Return the multiply-adds of one dense forward over ``n`` tokens.

    The embedding is a look-up and the LM head is not run; both are left out by the caller's
    ``num_parameters``.
    """
    full = sum(kind == "full" for kind in identity.layer_types)
    width = identity.num_query_heads * identity.head_dim
    return float(num_parameters) * n + full * width * float(n) * n


def sample_work(identity: ModelIdentity, num_parameters: int, n: int, *, oracle: bool) -> float:
    """Return the multiply-adds of forward and scoring of one sample.

    The score pass recomputes Q·Kᵀ, half of attention's products; on top of its products it has
    an exponential and a sum per pair, which weigh about as much again. The oracle pass repeats it.
    """
    full = sum(kind == "full" for kind in identity.layer_types)
    width = identity.num_query_heads * identity.head_dim
    passes = 2 if oracle else 1
    return forward_work(identity, num_parameters, n) + passes * full * width * float(n) * n


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
