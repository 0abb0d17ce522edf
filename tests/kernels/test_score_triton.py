"""The Triton score pass against the n×n reference: interpreted here, compiled where marked gpu."""

import math

import pytest
import torch
from triton.runtime.errors import OutOfResources

from patternsearch.errors import EnvironmentLacks, InputError
from patternsearch.kernels.score.reference import score_masses_reference
from patternsearch.kernels.score.tables import BucketTable
from patternsearch.kernels.score.triton import score_masses
from patternsearch.kernels.score.triton_launch import (
    ScoreLaunch,
    can_run_hopper,
    launch_first_that_fits,
)
from patternsearch.patterns.geometry import NUM_REGIONS, num_tiles, query_segments
from support.closeness import assert_close
from support.planted import planted_qk

CUDA = torch.cuda.is_available()
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(CUDA, reason="compiled here"), id="cpu"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="cuda"),
]
SMALL = (ScoreLaunch("triton", 128, 4, 2),)
"""One launch shape for the interpreter; on CUDA the defaults run."""
ALL_KINDS = [("tile", 64, 3), ("tile", 128, 2), ("offset", 64, 3), ("slash", 64, 2)]


def make_inputs(n, *, heads=1, kv_heads=1, dim=64, dtype=torch.float32, device="cpu", seed=0):
    """q, k with a few strong keys, and the exact LSE of the rounded inputs."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, heads, n, dim, generator=generator)
    k = torch.randn(1, kv_heads, n, dim, generator=generator)
    k[:, :, :: max(1, n // 5)] *= 2
    q, k = q.to(device, dtype), k.to(device, dtype)
    return q, k, exact_lse(q, k, dim**-0.5)


def exact_lse(q, k, scale):
    n, group = q.shape[2], q.shape[1] // k.shape[1]
    logits = q[0].double() @ k[0].double().repeat_interleave(group, 0).mT * scale
    above = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    return logits.masked_fill(above, -math.inf).logsumexp(-1).float()


def make_tables(n, heads, kinds=ALL_KINDS, *, device="cpu", seed=0, fill=None):
    """Random (or constant) bucket tables."""
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for kind, tile, num_buckets in kinds:
        length = {
            "tile": num_tiles(n, tile), "offset": tile * num_tiles(n, tile), "slash": n,
        }[kind]  # fmt: skip
        bucket = torch.randint(0, num_buckets + 1, (heads, length), generator=generator)
        if fill is not None:
            bucket[:] = num_buckets if fill == "last" else fill
        bucket = bucket.to(device, torch.uint8 if seed % 2 else torch.int32)
        tables.append(BucketTable(kind, tile, bucket, num_buckets))
    return tables


def check(q, k, lse, tables, *, launches=None, rtol_of=torch.float32, **options):
    """Compare everything with the reference computed in float64 on the same (rounded) inputs.

    Products of half inputs are exact in float32, so what is left is the order of sums.
    """
    scale = q.shape[3] ** -0.5
    launches = launches or (None if q.is_cuda else SMALL)
    got = score_masses(q, k, scale=scale, lse=lse, tables=tables, launches=launches, **options)
    want = score_masses_reference(
        q, k, scale=scale, tables=tables, dtype=torch.float64, **options
    )  # fmt: skip
    assert_close(got.segment_mass, want.segment_mass, dtype=rtol_of, what="segment_mass")
    for index, (a, b) in enumerate(zip(got.column_mass, want.column_mass, strict=True)):
        what = f"column_mass of table {index} ({tables[index].kind})"
        assert_close(a, b, dtype=rtol_of, what=what)
    assert (got.column_sum is not None) == options.get("column_sums", False)
    if got.column_sum is not None:
        assert_close(got.column_sum, want.column_sum, dtype=rtol_of, what="column_sum")
    assert (got.offset_sum is not None) == options.get("offset_sums", False)
    if got.offset_sum is not None:
        assert_close(got.offset_sum, want.offset_sum, dtype=rtol_of, what="offset_sum")
    assert (got.a_shape_logical is None) == (want.a_shape_logical is None)
    if got.a_shape_logical is not None:  # sums over n rows: compare their means
        n = q.shape[2]
        a, b = got.a_shape_logical / n, want.a_shape_logical / n
        assert_close(a, b, dtype=rtol_of, what="a_shape_logical")
    return got


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 127, 128, 129, 130, 257])
def test_score_masses_matches_reference_at_every_length(n, device):
    q, k, lse = make_inputs(n, device=device, seed=n)
    check(
        q, k, lse, make_tables(n, 1, device=device, seed=n), offset_sums=True,
        a_shape_sinks=(0, 70), a_shape_windows=(30, 64, 200),
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_score_masses_matches_reference_over_many_tiles(device):
    n = 600  # region bounds inside tiles, whole tiles in every region, a partial last tile
    q, k, lse = make_inputs(n, device=device, dtype=torch.float16)
    tables = make_tables(n, 1, [*ALL_KINDS[:3], ("offset", 128, 300)], device=device)
    check(q, k, lse, tables, column_sums=True)  # five reductions: two passes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(3, 3, 80), (3, 1, 96), (4, 1, 128), (8, 1, 64), (1, 1, 256)]
)
def test_score_masses_maps_heads_and_pads_dimensions(heads, kv_heads, dim, device):
    n = 200 if heads < 8 else 66
    q, k, lse = make_inputs(n, heads=heads, kv_heads=kv_heads, dim=dim, device=device)
    check(q, k, lse, make_tables(n, heads, [("tile", 64, 2), ("offset", 64, 2)], device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keys", [64, 128, 256])
def test_score_masses_is_the_same_in_every_launch_shape(keys, device):
    n = 700
    q, k, lse = make_inputs(n, device=device, dtype=torch.float16)
    tables = make_tables(n, 1, [("tile", 64, 2), ("tile", 128, 3)], device=device)
    for table in tables:  # mostly the last bucket, as in a real grid: the short cut runs, too
        table.bucket[:, 1::3] = table.num_buckets
        table.bucket[:, 2::3] = table.num_buckets
    check(q, k, lse, tables, launches=[ScoreLaunch("triton", keys, 4, 2)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fill", [0, 1, "last"])
def test_score_masses_takes_everything_in_one_bucket(fill, device):
    n = 330
    q, k, lse = make_inputs(n, device=device)
    tables = make_tables(n, 1, device=device, fill=fill)
    got = check(q, k, lse, tables)
    for table, mass in zip(tables, got.column_mass, strict=True):
        whole = {0: 0.0, 1: n}.get(fill, n)
        assert_close(mass.sum() / n, torch.tensor(whole / n), what=f"{table.kind} total")


@pytest.mark.parametrize("device", DEVICES)
def test_score_masses_takes_any_strides(device):
    n, dim = 150, 64
    base = torch.randn(1, n, 3, 2 * dim, generator=torch.Generator().manual_seed(1))
    q = base.to(device).transpose(1, 2)[:, :2, :, ::2]  # [1, 2, n, d]: a step of 2 along d
    k = base.to(device).flip(1).transpose(1, 2)[:, 2:, :, :dim]
    assert not q.is_contiguous()
    check(q, k, exact_lse(q, k, dim**-0.5), make_tables(n, 2, ALL_KINDS[:2], device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_score_masses_survives_large_logits(device):
    q, k, _ = make_inputs(200, device=device, dtype=torch.float16)
    q = q * 200
    got = check(
        q, k, exact_lse(q, k, 0.125), make_tables(200, 1, device=device), rtol_of=torch.float16
    )
    assert got.segment_mass.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_score_masses_writes_all_it_returns(device, monkeypatch):
    n = 200
    q, k, lse = make_inputs(n, device=device)
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        out = new_empty(self, *args, **kwargs)
        return out.fill_(math.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    check(
        q, k, lse, make_tables(n, 1, device=device), column_sums=True, offset_sums=True,
        a_shape_sinks=(70,), a_shape_windows=(30, 64),
    )  # fmt: skip


def test_score_masses_refuses_what_it_cannot_take():
    q, k, lse = make_inputs(64)
    with pytest.raises(InputError, match="lse is None"):
        score_masses(q, k, scale=1.0)
    with pytest.raises(InputError, match="must be float32 \\[1, 64\\]"):
        score_masses(q, k, scale=1.0, lse=lse[:, :-1])
    with pytest.raises(InputError, match="tile 32; tiles are 64 or 128"):
        score_masses(q, k, scale=1.0, lse=lse, tables=[BucketTable("tile", 32, lse.int(), 1)])
    with pytest.raises(InputError, match=r"it must be \[1, 1\]"):
        score_masses(q, k, scale=1.0, lse=lse, tables=[BucketTable("tile", 64, lse.int(), 1)])
    wide = torch.randn(1, 1, 64, 300)
    with pytest.raises(InputError, match="head_dim is 300"):
        score_masses(wide, wide, scale=1.0, lse=lse)
    with pytest.raises(InputError, match="kv heads must divide"):
        score_masses(q, k.expand(1, 3, 64, 64), scale=1.0, lse=lse)
    if not CUDA:
        with pytest.raises(EnvironmentLacks, match="bfloat16"):
            score_masses(q.bfloat16(), k.bfloat16(), scale=1.0, lse=lse)
    with pytest.raises(InputError, match="use a triton launch"):
        score_masses(q, k, scale=1.0, lse=lse, launches=[ScoreLaunch("hopper", 256, 4, 2)])


def test_launch_first_that_fits_skips_and_reports():
    big, small = ScoreLaunch("triton", 256, 8, 3), ScoreLaunch("triton", 64, 4, 1)

    def start(launch):
        if launch.block_keys > 64:
            raise OutOfResources(300_000, 232_448, "shared memory")

    assert launch_first_that_fits([big, small], start) == small
    with pytest.raises(EnvironmentLacks, match=r"300000.*232448"):
        launch_first_that_fits([big], start)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_default_launches_match_reference_in_half_precision(dim, dtype):
    for n in (257, 1000, 2304):
        q, k, lse = make_inputs(n, heads=4, kv_heads=2, dim=dim, dtype=dtype, device="cuda")
        check(q, k, lse, make_tables(n, 4, device="cuda", seed=n), column_sums=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("warps", "registers"), [(4, None), (8, 128)])
def test_hopper_kernel_matches_reference(dim, warps, registers, dtype):
    for n in (257, 1000, 2304, 4097):
        q, k, lse = make_inputs(n, heads=4, kv_heads=2, dim=dim, dtype=dtype, device="cuda")
        if not can_run_hopper(q, k):
            pytest.skip("no Hopper GPU")
        tables = make_tables(n, 4, device="cuda", seed=n)
        launches = [ScoreLaunch("hopper", 256, warps, 2, registers)]
        check(q, k, lse, tables, launches=launches, column_sums=True)


@pytest.mark.gpu
def test_score_masses_is_deterministic():
    q, k, lse = make_inputs(3000, heads=4, kv_heads=1, dtype=torch.bfloat16, device="cuda")
    tables = make_tables(3000, 4, device="cuda")
    first, second = (
        score_masses(q, k, scale=0.125, lse=lse, tables=tables, column_sums=True) for _ in range(2)
    )
    assert torch.equal(first.segment_mass, second.segment_mass)
    for a, b in zip(first.column_mass, second.column_mass, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_score_masses_addresses_beyond_2_31_elements():
    n, dim, step = 4200, 64, 2**19  # rows 2¹⁹ elements apart: the last begin beyond 2³¹
    store = torch.empty(n * step, dtype=torch.bfloat16, device="cuda")
    far = store.as_strided((1, 2, n, dim), (0, 256, step, 1))
    q, k, lse = make_inputs(n, heads=2, dim=dim, dtype=torch.bfloat16, device="cuda")
    far[:, :, :] = q
    far_k = store.as_strided((1, 1, n, dim), (0, 256, step, 1), 1024)
    far_k[:, :, :] = k
    tables = make_tables(n, 2, device="cuda")
    options = {"scale": 0.125, "lse": lse, "tables": tables, "offset_sums": True}
    near_masses, far_masses = score_masses(q, k, **options), score_masses(far, far_k, **options)
    assert torch.equal(near_masses.segment_mass, far_masses.segment_mass)
    assert torch.equal(near_masses.offset_sum, far_masses.offset_sum)
    for a, b in zip(near_masses.column_mass, far_masses.column_mass, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_score_masses_at_131072_tokens_matches_sampled_rows_and_columns():
    n, dim, heads = 131072, 128, 2
    scale = dim**-0.5
    q, k, v = (x.to("cuda", torch.bfloat16) for x in planted_qk(n, heads, 1, dim))
    lse = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, True, False, scale=scale
    )[1][0].float()
    tables = make_tables(n, heads, ALL_KINDS[:3], device="cuda")
    got = score_masses(q, k, scale=scale, lse=lse, tables=tables)
    bounds = torch.as_tensor(query_segments(n, 64)[0])
    generator = torch.Generator().manual_seed(0)
    position = torch.arange(n, device="cuda")
    keys = k[0, 0].float()
    for s in torch.randint(len(bounds) - 1, (12,), generator=generator).tolist():
        a, b = int(bounds[s]), int(bounds[s + 1])
        for h in range(heads):
            p = torch.exp(q[0, h, a:b].float() @ keys.T * scale - lse[h, a:b, None])
            p = p.masked_fill(position[None, :] > position[a:b, None], 0)
            mass = p.sum(0).view(-1, 64).sum(1)
            assert_close(got.segment_mass[h, s] / 64, mass / 64, dtype=torch.float16)
    for j in torch.randint(n, (12,), generator=generator).tolist():
        for h in range(heads):
            p = torch.exp(q[0, h, j:].float() @ keys[j] * scale - lse[h, j:])
            i = position[j:]
            for table, mass in zip(tables, got.column_mass, strict=True):
                entry = i // table.tile - j // table.tile
                if table.kind == "offset":
                    entry = table.tile * (i // table.tile) - j + table.tile - 1
                bucket = table.bucket[h, entry].long()
                place = bucket * NUM_REGIONS + NUM_REGIONS * i // n
                size = (table.num_buckets + 1) * NUM_REGIONS
                sums = torch.zeros(size, device="cuda").index_add_(0, place, p)
                want = sums.view(-1, NUM_REGIONS)[1:]
                assert_close(mass[h, :, :, j], want, dtype=torch.float16, what=f"column {j}")
