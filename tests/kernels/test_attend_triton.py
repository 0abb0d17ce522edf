import pytest
import torch

from patternsearch.errors import InputError
from patternsearch.kernels.attend import attend, make_plan, sparse_attention
from patternsearch.kernels.attend import triton as attend_triton_module
from patternsearch.kernels.attend.configs import AttendConfig, LaunchClass
from patternsearch.kernels.attend.reference import attend_reference
from patternsearch.kernels.attend.triton import attend_triton
from patternsearch.patterns.candidates import AShape, BlockSparse, Dense, VerticalSlashSpread
from support.attend import (
    MIXED,
    Head,
    masks_of,
    plan_of,
    random_layer,
    with_distant_rows,
)
from support.closeness import assert_close

BACKENDS = ["triton", "torch"]


def check(heads, q, k, v, scale, backend, dtype=torch.float32):
    n = q.shape[2]
    plan = plan_of(heads, n, q.device)
    out, lse = attend(q, k, v, scale=scale, plan=plan, backend=backend)
    expected, expected_lse = attend_reference(
        q.cpu(), k.cpu(), v.cpu(), scale=scale, mask=masks_of(heads, n)
    )
    assert out.dtype == q.dtype
    assert out.stride() == q.stride()
    assert_close(out, expected, dtype=dtype, what="out")
    assert_close(lse, expected_lse, dtype=dtype, what="lse")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 150, 257])
def test_attend_matches_masked_attention_for_any_length(n, backend):
    q, k, v = random_layer(4, 2, n, 16, seed=n)
    check(MIXED, q, k, v, 0.25, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attend_takes_any_head_dim(head_dim, backend):
    q, k, v = random_layer(4, 4, 140, head_dim)
    check(MIXED, q, k, v, head_dim**-0.5, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_attend_maps_query_heads_to_kv_heads(group, backend):
    heads = tuple(MIXED[index % 4] for index in range(2 * group))
    q, k, v = random_layer(2 * group, 2, 130, 16)
    check(heads, q, k, v, 0.25, backend)


def test_attend_reads_tiles_through_descriptors():
    """The addressing that Hopper uses; the interpreter runs it too."""
    q, k, v = random_layer(4, 2, 150, 16)
    plan = plan_of(MIXED, 150)
    config = AttendConfig(32, 32, 4, 1, use_tma=True)
    out, lse = attend_triton(q, k, v, scale=0.25, plan=plan, config=config)
    expected, expected_lse = attend_reference(q, k, v, scale=0.25, mask=masks_of(MIXED, 150))
    assert_close(out, expected, what="out")
    assert_close(lse, expected_lse, what="lse")


def test_tuned_launch_runs_and_changes_nothing(monkeypatch):
    launched = []
    inner = attend_triton_module._launch_with

    def watch(*arguments):
        launched.append(arguments[-1])
        return inner(*arguments)

    monkeypatch.setattr(attend_triton_module, "_launch_with", watch)
    q, k, v = random_layer(4, 2, 150, 16)
    plan = plan_of(MIXED, 150)
    tuned = AttendConfig(16, 16, 4, 1)
    classes = [LaunchClass("float32", 16, part.tile, part.has_columns) for part in plan.tile_plans]
    tuning = {classes[0]: tuned}
    out, _ = attend(q, k, v, scale=0.25, plan=plan, tuning=tuning)
    assert [config == tuned for config in launched] == [c == classes[0] for c in classes]
    expected, _ = attend_reference(q, k, v, scale=0.25, mask=masks_of(MIXED, 150))
    assert_close(out, expected, what="out")


def test_worked_example_of_the_pattern():
    """n = 8, columns {1}, offsets {0, 2}: row 6 reads keys 1, 4 and 6.

    The kernels read tiles, so each position becomes the first of a tile of 64 whose other keys
    are out of reach: column 64, tile diagonals 0 and 2, row 6 · 64.
    """
    q, k, v = (torch.zeros(1, 1, 8 * 64, 16) for _ in range(3))
    k[..., :2] = -100.0
    for position, key, value in ((1, (2, 0), (1, 0)), (4, (0, 1), (0, 2)), (6, (1, 1), (2, 1))):
        k[0, 0, 64 * position, :2] = torch.tensor(key, dtype=torch.float32)
        v[0, 0, 64 * position, :2] = torch.tensor(value, dtype=torch.float32)
    q[0, 0, 64 * 6, :2] = 1.0
    plan = plan_of([Head("vertical_slash", 64, columns=(64,), diagonals=(0, 2))], 8 * 64)
    for backend in BACKENDS:
        out, lse = attend(q, k, v, scale=1.0, plan=plan, backend=backend)
        got = out[0, 0, 64 * 6, :2]
        torch.testing.assert_close(got, torch.tensor([1.266, 0.732]), atol=2e-3, rtol=0)
        weights = (torch.tensor([2.0, 1.0, 2.0]) - lse[0, 64 * 6]).exp()
        torch.testing.assert_close(weights, torch.tensor([0.422, 0.155, 0.422]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_columns", [0, 1, 64, 127, 128, 129, 200])
def test_attend_gathers_any_number_of_columns_once(num_columns, backend):
    """Columns inside chosen tiles, outside them, and none; one softmax over both."""
    generator = torch.Generator().manual_seed(num_columns)
    columns = tuple(torch.randperm(400, generator=generator)[:num_columns].tolist())
    heads = [Head("vertical_slash", tile, columns=columns, diagonals=(0, 1)) for tile in (64, 128)]
    q, k, v = random_layer(2, 1, 400, 16, seed=num_columns)
    check(heads, q, k, v, 0.25, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attend_reads_any_strides(backend):
    q, k, v = random_layer(4, 2, 130, 16)
    spread = torch.zeros(1, 4, 130, 16, 2)
    strided = spread[..., 0]  # rows that are not contiguous
    strided.copy_(q)
    plan = plan_of(MIXED, 130)
    out, _ = attend(q, k, v, scale=0.25, plan=plan, backend=backend)
    again, _ = attend(strided, k.contiguous(), v[:, :, :], scale=0.25, plan=plan, backend=backend)
    assert_close(again, out)


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_attend_addresses_rows_two_to_the_31_elements_away(which, use_tma):
    """Tiles and gathered columns of one tensor that 32-bit offsets do not reach."""
    heads = [Head("vertical_slash", 64, columns=(3, 70, 140), diagonals=(0,))]
    layer = dict(zip("qkv", random_layer(1, 1, 300, 16, dtype=torch.float16), strict=True))
    plan = plan_of(heads, 300)
    config = AttendConfig(32, 32, 4, 1, use_tma=use_tma)
    out, lse = attend_triton(**layer, scale=0.25, plan=plan, config=config)
    far = layer | {which: with_distant_rows(layer[which])}
    again, lse_again = attend_triton(**far, scale=0.25, plan=plan, config=config)
    assert torch.equal(again, out)
    assert torch.equal(lse_again, lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attend_keeps_large_logits_finite_in_float16(backend):
    q, k, v = random_layer(4, 2, 130, 16, dtype=torch.float16, magnitude=200.0)
    out, lse = attend(q, k, v, scale=1.0, plan=plan_of(MIXED, 130), backend=backend)
    expected, expected_lse = attend_reference(q, k, v, scale=1.0, mask=masks_of(MIXED, 130))
    assert float(expected_lse.max()) > 65504
    assert_close(out / 200, expected / 200, dtype=torch.float16, what="out")
    assert_close(lse, expected_lse, dtype=torch.float16, what="lse")


@pytest.mark.parametrize("backend", BACKENDS)
def test_attend_over_everything_is_dense_attention(backend):
    heads = [
        Head("vertical_slash", 64, diagonals=tuple(range(5))),
        Head("vertical_slash", 64, columns=tuple(range(300)), diagonals=(0,)),
        Head("block_sparse", 64, blocks=5),
        Head("a_shape", 128, sink=300),
    ]
    q, k, v = random_layer(4, 2, 300, 16)
    out, lse = attend(q, k, v, scale=0.25, plan=plan_of(heads, 300), backend=backend)
    dense, dense_lse = attend(
        q, k, v, scale=0.25, plan=plan_of([Head("dense", 64)] * 4, 300), backend=backend
    )
    assert_close(out, dense)
    assert_close(lse, dense_lse)


def test_sparse_attention_is_the_same_on_all_backends():
    q, k, v = random_layer(4, 2, 300, 32, magnitude=2.0)
    candidates = [
        Dense(),
        AShape(sink=4, window=64, tile=64),
        VerticalSlashSpread(vertical=40, diagonals=2, tile=64),
        BlockSparse(blocks=2, tile=64),
    ]
    out, lse = sparse_attention(q, k, v, scale=0.2, candidates=candidates, backend="triton")
    again, again_lse = sparse_attention(q, k, v, scale=0.2, candidates=candidates, backend="torch")
    assert_close(out, again)
    assert_close(lse, again_lse)


def _refused(change):
    n, arguments = 70, {"scale": 0.25, "backend": "triton"}
    q, k, v = random_layer(4, 2, n, 16)
    plan = plan_of(MIXED, n)
    if change == "shape":
        k = k[:, :, :-1]
    elif change == "heads":
        q = q[:, :3]
    elif change == "dtype":
        v = v.half()
    elif change == "head_dim":
        q, k, v = random_layer(4, 2, n, 257)
    elif change == "plan":
        plan = plan_of(MIXED, n + 64)
    elif change == "scale":
        arguments["scale"] = -1.0
    elif change == "backend":
        arguments["backend"] = "fastest"
    return q, k, v, {"plan": plan, **arguments}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("shape", "k and v"),
        ("heads", "multiple of Hkv"),
        ("dtype", "float16"),
        ("head_dim", "257"),
        ("plan", "134 tokens"),
        ("scale", "-1.0"),
        ("backend", "fastest"),
    ],
)
def test_attend_refuses_what_it_cannot_run(change, message):
    q, k, v, arguments = _refused(change)
    with pytest.raises(InputError, match=message):
        attend(q, k, v, **arguments)


def test_make_plan_refuses_missing_and_repeated_heads():
    one = MIXED[0].sets(0, 64, "cpu")
    for sets in ([], [one, one], [MIXED[0].sets(1, 64, "cpu")]):
        with pytest.raises(InputError, match="must be named once"):
            make_plan(64, 1, sets, device="cpu")
