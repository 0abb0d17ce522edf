"""FlashAttention-4's package as our adapter calls it, in PyTorch, for machines that lack it."""

from dataclasses import dataclass, field

import torch

from patternsearch.kernels.attend import flash4
from patternsearch.kernels.attend.reference import attend_reference


@dataclass
class Lists:
    """The package's block-sparse arguments."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    block_size: tuple[int, int]


def masks_read(q, k, mask_mod, lists, pack_gqa):
    """The pairs that each head reads, bool [Hq, n, n], by the package's reading of its arguments.

    Packed, which is its default under GQA, all query heads of a kv head read the first one's lists
    unless the lists of partial tiles differ by head.
    """
    rows, tile = lists.block_size
    _, n, heads, _ = q.shape
    group = heads // k.shape[2]
    if pack_gqa is None:
        pack_gqa = group > 1
    if pack_gqa and lists.mask_block_cnt.shape[1] != 1:
        pack_gqa = False
    i = torch.arange(n)
    masks = []
    for head in range(heads):
        mask = torch.zeros(n, n, dtype=torch.bool)
        own = head // group * group if pack_gqa else head
        for u in range(-(-n // rows)):
            here = slice(u * rows, (u + 1) * rows)
            for counts, indices, partial in (
                (lists.mask_block_cnt, lists.mask_block_idx, True),
                (lists.full_block_cnt, lists.full_block_idx, False),
            ):
                at = min(own, counts.shape[1] - 1)
                for tile_index in indices[0, at, u, : int(counts[0, at, u])].tolist():
                    keys = slice(tile_index * tile, (tile_index + 1) * tile)
                    whole = torch.ones_like(mask[here, keys])
                    allowed = mask_mod(0, head, i[here, None], i[None, keys], None, None)
                    assert not mask[here, keys].any(), "a tile is read twice"
                    mask[here, keys] = whole & allowed if partial else whole
        masks.append(mask)
    return torch.stack(masks)


@dataclass
class Package:
    """Computes what the package would; keeps the pairs of each call, [Hq, n, n]."""

    calls: list = field(default_factory=list)

    def attend(self, q, k, v, *, softmax_scale, mask_mod, block_sparse_tensors, return_lse,
               pack_gqa=None):  # fmt: skip
        assert return_lse
        self.calls.append(masks_read(q, k, mask_mod, block_sparse_tensors, pack_gqa))
        out, lse = attend_reference(
            *(x.transpose(1, 2) for x in (q, k, v)), scale=softmax_scale, mask=self.calls[-1]
        )
        return out.transpose(1, 2).to(q.dtype), lse[None]


def causal(batch, head, q_index, kv_index, seqlen_info, aux_tensors):
    return kv_index <= q_index


def install(monkeypatch):
    """Let backend flash4 run on the CPU; returns the package that stands in for the real one."""
    package = Package()
    monkeypatch.setattr(flash4, "_library", lambda: (package.attend, Lists, causal))
    monkeypatch.setattr(flash4, "_runs_on", lambda device: True)
    monkeypatch.setattr(flash4, "_is_installed", lambda: True)
    return package
