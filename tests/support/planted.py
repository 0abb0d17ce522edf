"""Attention with planted structure: q and k whose heads are known to be of a kind."""

from collections.abc import Sequence
from itertools import cycle, islice

import torch

KINDS = ("dense", "sink", "columns", "diagonals", "blocks")


def planted_qk(
    n, heads, kv_heads, head_dim, kinds: Sequence[str] = KINDS, seed=0, *, sharpness=8.0,
    noise=0.5,
):  # fmt: skip
    """Return float32 q [1, heads, n, d], k and v [1, kv_heads, n, d]; head h has kind h % len.

    The keys of a kv head carry every structure, each in its own dimensions; the queries of a head
    look at one. Logits are meant for scale d**-0.5. A pair that matches has a logit of about
    `sharpness` above others; `noise` is the standard deviation of all other logits.

    dense: noise only. sink: keys 0..3. columns: about n/50 keys anywhere. diagonals: offsets 0 and
    a few up to n/2. blocks: for each tile of 64 queries one earlier tile of 64 keys.
    """
    assert head_dim >= 32
    assert heads % kv_heads == 0
    g = torch.Generator().manual_seed(seed)
    group = heads // kv_heads
    num_code = head_dim // 4
    num_angles = head_dim // 4  # two dimensions each
    used = 2 + num_code + 2 * num_angles
    position = torch.arange(n, dtype=torch.float64)
    tile = torch.arange(n) // 64
    num_tiles = int(tile[-1]) + 1
    frequency = torch.logspace(0.3, -2.5, num_angles, dtype=torch.float64)

    def waves(x):
        angle = x[..., None] * frequency
        return torch.cat([angle.cos(), angle.sin()], -1).float() / num_angles**0.5

    k = torch.zeros(kv_heads, n, head_dim)
    codes = torch.randn(kv_heads, num_tiles, num_code, generator=g)
    codes = codes / codes.norm(dim=-1, keepdim=True)
    for h in range(kv_heads):
        k[h, :4, 0] = 1.0
        chosen = torch.randperm(n, generator=g)[: max(1, n // 50)]
        k[h, chosen, 1] = 0.75 + 0.5 * torch.rand(len(chosen), generator=g)
        k[h, :, 2 : 2 + num_code] = codes[h, tile]
        k[h, :, 2 + num_code : used] = waves(position)
    free = head_dim - used
    q = torch.zeros(heads, n, head_dim)
    amplitude = sharpness * head_dim**0.5
    for h, kind in zip(range(heads), islice(cycle(kinds), heads), strict=True):
        kv = h // group
        if kind == "sink":
            q[h, :, 0] = amplitude
        elif kind == "columns":
            q[h, :, 1] = amplitude
        elif kind == "diagonals":
            offsets = torch.cat(
                [torch.zeros(1), torch.randint(1, max(2, n // 2), (2,), generator=g)]
            )
            for offset in offsets:
                q[h, :, 2 + num_code : used] += amplitude * waves(position - offset)
        elif kind == "blocks":
            target = (torch.rand(num_tiles, generator=g) * (torch.arange(num_tiles) + 1)).long()
            q[h, :, 2 : 2 + num_code] = amplitude * codes[kv, target[tile]]
        else:
            assert kind == "dense", kind
    q += noise * torch.randn(heads, n, head_dim, generator=g) * (head_dim / (free + 1)) ** 0.5 / 2
    k += noise * torch.randn(kv_heads, n, head_dim, generator=g) * 0.2
    k[..., used:] += torch.randn(kv_heads, n, free, generator=g)
    v = torch.randn(kv_heads, n, head_dim, generator=g)
    return q[None].contiguous(), k[None].contiguous(), v[None].contiguous()


def random_qk(n, heads, kv_heads, head_dim, seed=0, *, spread=1.0):
    """Return float32 q, k and v of normal noise; logits at scale d**-0.5 deviate by `spread`."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(1, heads, n, head_dim, generator=g) * spread
    k, v = (torch.randn(1, kv_heads, n, head_dim, generator=g) for _ in range(2))
    return q, k, v
