import sys
from dataclasses import dataclass

import pytest
import torch

from patternsearch.errors import EnvironmentLacks, InputError
from patternsearch.kernels.attend import attend, flash4
from patternsearch.kernels.attend.reference import attend_reference
from support.attend import Head, masks_of, plan_of, random_layer
from support.closeness import assert_close

HEADS = (
    Head("block_sparse", 128, blocks=3),
    Head("a_shape", 128, sink=130, window=129),
    Head("dense", 128),
    Head("block_sparse", 128, blocks=2, seed=1),
)


@pytest.mark.parametrize("n", [1, 128, 700])
def test_full_tiles_are_those_of_the_masks(n):
    count, index = flash4.full_tiles(plan_of(HEADS, n).tile_plans[0])
    for head, mask in enumerate(masks_of(HEADS, n)):
        for u in range(count.shape[1]):
            got = index[head, u, : int(count[head, u])].tolist()
            keys = mask[min((u + 1) * 128, n) - 1].nonzero().squeeze(-1)
            assert sorted(got) == sorted(set((keys // 128).tolist()) - {u})


@pytest.mark.parametrize(
    ("heads", "dtype", "head_dim", "message"),
    [
        ((Head("vertical_slash", 128, columns=(1,)),), torch.float16, 64, "gathers columns"),
        ((Head("a_shape", 64, window=64),), torch.float16, 64, "tiles of \\(64,\\)"),
        ((Head("dense", 128),), torch.float32, 64, "float32"),
        ((Head("dense", 128),), torch.float16, 256, "256"),
    ],
)
def test_flash4_refuses_what_it_cannot_run(heads, dtype, head_dim, message):
    q, k, v = random_layer(1, 1, 300, head_dim, dtype=dtype)
    with pytest.raises(InputError, match=message):
        attend(q, k, v, scale=1.0, plan=plan_of(heads, 300), backend="flash4")


def test_flash4_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    flash4._library.cache_clear()
    q, k, v = random_layer(4, 2, 300, 64, dtype=torch.float16)
    with pytest.raises(EnvironmentLacks, match="flash-attn-4"):
        attend(q, k, v, scale=1.0, plan=plan_of(HEADS, 300), backend="flash4")


@dataclass
class Lists:
    """The package's block-sparse arguments."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    block_size: tuple[int, int]


def package(q, k, v, *, softmax_scale, mask_mod, block_sparse_tensors, return_lse, pack_gqa=None):
    """What the package computes, by its own reading of its arguments.

    Packed, which is its default under GQA, all query heads of a kv head read the first one's lists
    unless the lists of partial tiles differ by head.
    """
    assert return_lse
    lists = block_sparse_tensors
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
    out, lse = attend_reference(
        *(x.transpose(1, 2) for x in (q, k, v)), scale=softmax_scale, mask=torch.stack(masks)
    )
    return out.transpose(1, 2), lse[None]


@pytest.mark.parametrize("n", [1, 127, 128, 129, 700])
def test_arguments_mean_the_masks_to_the_package(n, monkeypatch):
    def causal(batch, head, q_index, kv_index, seqlen_info, aux_tensors):
        return kv_index <= q_index

    monkeypatch.setattr(flash4, "_library", lambda: (package, Lists, causal))
    monkeypatch.setattr(flash4, "_runs_on", lambda device: True)
    q, k, v = random_layer(4, 2, n, 64, dtype=torch.float16)
    out, lse = attend(q, k, v, scale=0.125, plan=plan_of(HEADS, n), backend="flash4")
    expected, expected_lse = attend_reference(q, k, v, scale=0.125, mask=masks_of(HEADS, n))
    assert_close(out, expected, dtype=torch.float16, what="out")
    assert_close(lse, expected_lse, dtype=torch.float16, what="lse")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("n", [1, 127, 128, 129, 777, 2048])
def test_flash4_matches_masked_attention(n, head_dim, dtype):
    pytest.importorskip("flash_attn.cute")
    q, k, v = random_layer(4, 2, n, head_dim, dtype=dtype, device="cuda")
    out, lse = attend(
        q, k, v, scale=head_dim**-0.5, plan=plan_of(HEADS, n, "cuda"), backend="flash4"
    )
    expected, expected_lse = attend_reference(
        q.cpu(), k.cpu(), v.cpu(), scale=head_dim**-0.5, mask=masks_of(HEADS, n)
    )
    assert_close(out, expected, dtype=dtype, what="out")
    assert_close(lse, expected_lse, dtype=dtype, what="lse")
