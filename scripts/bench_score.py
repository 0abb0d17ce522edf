"""Measure the score pass beside dense attention; correctness first, one CSV row a measurement.

PYTHONPATH=src:tests python scripts/bench_score.py -o rows.csv [--sweep]
"""

import argparse
import csv
import dataclasses
import math
import multiprocessing
import subprocess
import sys

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from patternsearch.kernels.index.reference import last_q_scores, rank, spread_scores
from patternsearch.kernels.score.reference import score_masses_reference
from patternsearch.kernels.score.tables import BucketTable
from patternsearch.kernels.score.triton import score_masses
from patternsearch.kernels.score.triton_launch import ScoreLaunch, score_launches
from patternsearch.patterns.geometry import (
    FORCED_DIAGONALS,
    FORCED_SLASHES,
    num_tiles,
    query_segments,
)
from support.planted import planted_qk

DIAGONALS = (2, 4, 8, 16, 32, 64)
SLASHES = (100, 750, 1500, 3000, 6096)
WARM_UP_MS, REPEAT_MS = 50, 300


@dataclasses.dataclass(frozen=True)
class Row:
    provider: str
    detail: str
    n: int
    head_dim: int
    heads: int
    kv_heads: int
    dtype: str
    p20_ms: float
    p50_ms: float
    p80_ms: float
    ratio_to_cudnn: float
    extra_mib_per_head: float
    device: str
    driver: str
    torch: str
    triton: str
    commit: str


def environment():
    def out(*command):
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        return run.stdout.strip()

    return {
        "device": torch.cuda.get_device_name(),
        "driver": out("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": out("git", "rev-parse", "--short", "HEAD") or "working tree",
    }


def bucket_table(kind, tile, scores, budgets, num_forced):
    """Rank the entries and give each the bucket of the smallest budget that selects it."""
    order = rank(scores, num_forced)
    place = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    bounds = torch.tensor(budgets, device=order.device)
    bucket = torch.bucketize(place, bounds, right=True)
    return BucketTable(kind, tile, bucket.to(torch.uint8), len(budgets))


def default_tables(q, k, scale):
    """The tables of the default grid, and MInference's reading of the offsets of its own."""
    tables = []
    for tile in (64, 128):
        _, diagonal = spread_scores(q, k, scale=scale, last_q=64, spread_rows=64, tile=tile)
        tables.append(bucket_table("tile", tile, diagonal, DIAGONALS, FORCED_DIAGONALS))
    _, offset = last_q_scores(q, k, scale=scale, last_q=64)
    n = q.shape[2]
    by_offset = bucket_table("slash", 64, offset, SLASHES, FORCED_SLASHES).bucket
    # Query tile u reads keys 64u − δ … 64u + 63 − δ: e = 64u − j + 63 is in δ … δ + 63.
    padded = torch.full((q.shape[1], 63 + 64 * num_tiles(n, 64)), len(SLASHES), device=q.device)
    padded[:, 63 : 63 + n] = by_offset
    lowest = padded.unfold(1, 64, 1).amin(2)
    tables.append(BucketTable("offset", 64, lowest.to(torch.uint8), len(SLASHES)))
    return tables


def time_ms(run):
    p20, p50, p80 = triton.testing.do_bench(
        run, warmup=WARM_UP_MS, rep=REPEAT_MS, quantiles=[0.2, 0.5, 0.8]
    )
    return p20, p50, p80


def sampled_rows(q, k, lse, scale, tables, masses, rng, rows=48):
    """Recompute sampled query segments in float32 and compare them; return the worst error."""
    n, group = q.shape[2], q.shape[1] // k.shape[1]
    worst = 0.0
    for _ in range(rows):
        h = int(torch.randint(q.shape[1], (), generator=rng))
        u = int(torch.randint(num_tiles(n, 64), (), generator=rng))
        a, b = 64 * u, min(64 * u + 64, n)
        logits = (q[0, h, a:b].float() @ k[0, h // group].float().T) * scale
        i = torch.arange(a, b, device=q.device)[:, None]
        j = torch.arange(n, device=q.device)[None, :]
        p = torch.exp(logits - lse[h, a:b, None]).masked_fill(j > i, 0)
        mass = torch.nn.functional.pad(p.sum(0), (0, -n % 64)).view(-1, 64).sum(1)
        own = torch.as_tensor(query_segments(n, 64)[0][:-1] // 64 == u, device=q.device)
        worst = max(worst, float((masses.segment_mass[h, own].sum(0) - mass).abs().max()))
    return worst


def check_sums(n, masses, tables):
    """Rows sum to one, and the bucket sums stay within the whole."""
    total = masses.segment_mass.sum((1, 2))
    assert torch.allclose(total, torch.full_like(total, n), rtol=2e-3), total
    for mass in masses.column_mass:
        assert torch.isfinite(mass).all()
        assert (mass.sum((1, 2, 3)) <= total * 1.001).all()


def check_small(launches, head_dim, device="cuda"):
    """The n×n reference on odd lengths; any failure ends the run before a time is taken."""
    dim = head_dim
    for n in (1000, 513):
        q, k, _ = (x.to(device, torch.bfloat16) for x in planted_qk(n, 4, 2, dim))
        scale = dim**-0.5
        logits = q[0].float() @ k[0].float().repeat_interleave(2, 0).mT * scale
        above = torch.ones(n, n, dtype=torch.bool, device=device).triu(1)
        lse = logits.masked_fill(above, -math.inf).logsumexp(-1)
        tables = default_tables(q, k, scale)
        want = score_masses_reference(q, k, scale=scale, tables=tables, dtype=torch.float64)
        for launch in launches:
            got = score_masses(q, k, scale=scale, lse=lse, tables=tables, launches=[launch])
            pairs = zip(
                (got.segment_mass, *got.column_mass), (want.segment_mass, *want.column_mass),
                strict=True,
            )  # fmt: skip
            for a, b in pairs:
                torch.testing.assert_close(a.double(), b, rtol=5e-4, atol=1e-4)


LAUNCHES = [
    ScoreLaunch("hopper", 256, 4, 2),
    ScoreLaunch("hopper", 256, 8, 2, 128),
    ScoreLaunch("triton", 256, 8, 3, 128),
    ScoreLaunch("triton", 128, 4, 2, 168),
]


def default_launches(head_dim):
    x = torch.empty(1, 1, 64, head_dim, dtype=torch.bfloat16, device="cuda")
    return score_launches(x, x)[:1]


def bench(n, head_dim, heads, kv_heads, rows, env, sweep):
    q, k, v = (x.to("cuda", torch.bfloat16) for x in planted_qk(n, heads, kv_heads, head_dim))
    scale = head_dim**-0.5
    group = heads // kv_heads
    wide = [x.repeat_interleave(group, 1) for x in (k, v)]

    def dense(backend):
        def run():
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, *wide, is_causal=True, scale=scale
                )

        return run

    lse = torch.ops.aten._scaled_dot_product_flash_attention(
        q, *wide, 0.0, True, False, scale=scale
    )[1][0].float()
    tables = default_tables(q, k, scale)
    shares = [
        [f"{(t.bucket == b).float().mean():.3f}" for b in range(t.num_buckets + 1)] for t in tables
    ]
    print(n, "share of entries by bucket", shares, flush=True)
    cudnn = math.nan
    shape = {
        "n": n, "head_dim": head_dim, "heads": heads, "kv_heads": kv_heads, "dtype": "bfloat16",
    }  # fmt: skip

    def add(provider, detail, times, extra=0.0):
        row = Row(
            provider, detail, **shape, p20_ms=times[0], p50_ms=times[1], p80_ms=times[2],
            ratio_to_cudnn=times[1] / cudnn, extra_mib_per_head=extra, **env,
        )  # fmt: skip
        rows.append(row)
        print(
            f"{provider:8} {detail:44} n={n} d={head_dim} {times[1]:8.3f} ms "
            f"ratio {row.ratio_to_cudnn:.3f} extra {extra:.1f} MiB/head", flush=True,
        )  # fmt: skip

    times = time_ms(dense(SDPBackend.CUDNN_ATTENTION))
    cudnn = times[1]
    add("cudnn", "dense", times)
    add("flash", "dense", time_ms(dense(SDPBackend.FLASH_ATTENTION)))
    del wide[:]
    cases = [("default grid + offsets", tables, launch) for launch in (
        LAUNCHES if sweep else score_launches(q, k)[:1])]  # fmt: skip
    cases.append(("segments only", [], cases[0][2]))
    cases.append(("default grid", tables[:2], cases[0][2]))
    for name, some, launch in cases:

        def run(some=some, launch=launch):
            return score_masses(q, k, scale=scale, lse=lse, tables=some, launches=[launch])

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        masses = run()
        torch.cuda.synchronize()
        extra = (torch.cuda.max_memory_allocated() - before) / heads / 2**20
        check_sums(n, masses, some)
        error = sampled_rows(q, k, lse, scale, some, masses, torch.Generator().manual_seed(n))
        assert error < 2e-3, error
        del masses
        shape_text = ",".join(str(x) for x in dataclasses.astuple(launch))
        add("score", f"{name} ({shape_text})", time_ms(run), extra)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--out", required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    rows = []
    try:
        for head_dim in args.head_dims:
            launches = LAUNCHES if args.sweep else default_launches(head_dim)
            if len(launches) > 1:  # compile side by side
                context = multiprocessing.get_context("spawn")
                with context.Pool(len(launches)) as pool:
                    pool.starmap(check_small, [([launch], head_dim) for launch in launches])
            check_small(launches, head_dim)
            print(f"correctness at head_dim {head_dim}: passed", flush=True)
            for n in args.lengths:
                bench(n, head_dim, args.heads, args.kv_heads, rows, environment(), args.sweep)
    finally:
        with open(args.out, "w", newline="") as file:
            writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Row)])
            writer.writeheader()
            writer.writerows(dataclasses.asdict(row) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
