import sys

import pytest
import torch

from patternsearch.errors import EnvironmentLacks, InputError
from patternsearch.kernels.attend import attend, flash4
from patternsearch.kernels.attend.reference import attend_reference
from support.attend import Head, masks_of, plan_of, random_layer
from support.closeness import assert_close
from support.fake_flash4 import install

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


def test_package_is_looked_for_and_not_imported(monkeypatch, tmp_path):
    cuda = torch.device("cuda")
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "cutlass")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(flash4, "_runs_on", lambda device: device == cuda)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert not flash4.is_available(cuda)
    monkeypatch.delitem(sys.modules, "flash_attn")
    for package in ("flash_attn/cute", "cutlass"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert flash4.is_available(cuda)
    assert not flash4.is_available(torch.device("cpu"))
    sys.modules.pop("flash_attn", None)


def test_flash4_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    flash4._library.cache_clear()
    q, k, v = random_layer(4, 2, 300, 64, dtype=torch.float16)
    with pytest.raises(EnvironmentLacks, match="flash-attn-4"):
        attend(q, k, v, scale=1.0, plan=plan_of(HEADS, 300), backend="flash4")


@pytest.mark.parametrize("n", [1, 127, 128, 129, 700])
def test_arguments_mean_the_masks_to_the_package(n, monkeypatch):
    install(monkeypatch)
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
