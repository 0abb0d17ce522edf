"""The Triton score pass against the n×n reference, in the interpreter and, marked gpu, on CUDA."""

import pytest
import torch

from patternsearch.kernels.score.reference import score_masses_reference
from patternsearch.kernels.score.tables import BucketTable
from patternsearch.kernels.score.triton import score_masses
from patternsearch.kernels.score.triton_launch import ScoreLaunch
from patternsearch.patterns.geometry import num_tiles
from support.closeness import assert_close

CUDA = torch.cuda.is_available()
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(CUDA, reason="compiled on this machine"), id="cpu"
    ),
    pytest.param("cuda", marks=pytest.mark.gpu, id="cuda"),
]
SMALL = (ScoreLaunch("triton", 128, 4, 2),)
"""One launch shape for the interpreter; on CUDA the defaults run."""


def make_inputs(
    n, *, heads=2, kv_heads=1, dim=64, dtype=torch.float32, device="cpu", seed=0, gain=2.0
):
    """q, k and the exact LSE of the rounded inputs; a strong key, and growing rows."""
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
    return logits.masked_fill(above, float("-inf")).logsumexp(-1).float()


def make_tables(n, heads, *, device="cpu", seed=0, fill=None, kinds=None):
    """Random (or constant) bucket tables of all kinds."""
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for kind, tile, num_buckets in kinds or [
        ("tile", 64, 3), ("tile", 128, 2), ("offset", 64, 3), ("offset", 128, 1), ("slash", 64, 3),
    ]:  # fmt: skip
        length = {
            "tile": num_tiles(n, tile), "offset": tile * num_tiles(n, tile), "slash": n,
        }[kind]  # fmt: skip
        bucket = torch.randint(0, num_buckets + 1, (heads, length), generator=generator)
        if fill is not None:
            bucket[:] = num_buckets if fill == "none" else fill
        bucket = bucket.to(device, torch.uint8 if seed % 2 else torch.int32)
        tables.append(BucketTable(kind, tile, bucket, num_buckets))
    return tables


def check(q, k, lse, tables, launches=None, **options):
    """Compare everything with the reference computed in float64 on the same (rounded) inputs."""
    scale = q.shape[3] ** -0.5
    launches = launches or (None if q.is_cuda else SMALL)
    got = score_masses(q, k, scale=scale, lse=lse, tables=tables, launches=launches, **options)
    want = score_masses_reference(q, k, scale=scale, tables=tables, dtype=torch.float64, **options)
    # Products of half inputs are exact in float32, so all that is left is the order of sums.
    assert_close(got.segment_mass, want.segment_mass, what="segment_mass")
    for index, (a, b) in enumerate(zip(got.column_mass, want.column_mass, strict=True)):
        assert_close(a, b, what=f"column_mass of table {index} ({tables[index].kind})")
    for name in ("column_sum", "offset_sum", "a_shape_logical"):
        a, b = getattr(got, name), getattr(want, name)
        if name == "a_shape_logical" and b is not None:  # sums over n rows: compare their means
            a, b = a / q.shape[2], b / q.shape[2]
        if name == "a_shape_logical" or options.get(name + "s"):
            assert (a is None) == (b is None), name
        if a is not None:
            assert_close(a, b, what=name)
    return got


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 127, 128, 129, 257, 600])
def test_score_masses_matches_reference_at_every_length(n, device):
    q, k, lse = make_inputs(n, heads=1, device=device, seed=n)
    check(
        q, k, lse, make_tables(n, 1, device=device, seed=n),
        column_sums=True, offset_sums=True, a_shape_sinks=(0, 64, 100),
        a_shape_windows=(30, 64, 200),
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(3, 3, 80), (3, 1, 96), (8, 2, 128), (8, 1, 64), (1, 1, 256)]
)
def test_score_masses_maps_heads_and_pads_dimensions(heads, kv_heads, dim, device):
    q, k, lse = make_inputs(150, heads=heads, kv_heads=kv_heads, dim=dim, device=device)
    check(q, k, lse, make_tables(150, heads, device=device), column_sums=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "launch",
    [ScoreLaunch("triton", keys, 4, 2) for keys in (64, 128, 256)],
    ids=lambda launch: f"{launch.block_keys}keys",
)
def test_score_masses_is_the_same_in_every_launch_shape(launch, device):
    n = 700
    q, k, lse = make_inputs(n, heads=1, device=device, dtype=torch.float16)
    tables = make_tables(n, 1, device=device, kinds=[("tile", 64, 2), ("tile", 128, 3)])
    for table in tables:  # mostly the last bucket, as in a real grid
        table.bucket[:, 1::3] = table.num_buckets
        table.bucket[:, 2::3] = table.num_buckets
    check(q, k, lse, tables, launches=[launch])
