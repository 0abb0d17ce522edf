"""Time sparse attention on a CUDA device, side by side with dense and block-sparse kernels.

    PYTHONPATH=src python scripts/bench_attend.py --commit "$(git rev-parse --short HEAD)" \
        --csv docs/measurements/attend_h200.csv

Correctness first: a red check prints no time. One row per measurement, appended to the CSV.
Kernels and index building are timed on the device (graph replay); `index+triton` is a plain call,
launches included.
`rate` is the pairs executed per ms (whole tiles; a gathered column counts T pairs) over the causal
pairs per ms of cuDNN's dense kernel in the same run.
"""

import argparse
import csv
import functools
import sys
from pathlib import Path

import torch
import triton

from patternsearch.kernels.attend import attend, build_plan, sparse_attention
from patternsearch.kernels.attend.chunked import plan_to_host, query_tile_keys
from patternsearch.kernels.attend.reference import attend_row_reference
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
    describe,
)
from patternsearch.patterns.geometry import num_tiles
from patternsearch.timing.workload import dense_backends

FIELDS = (
    "provider", "what", "n", "head_dim", "heads", "kv_heads", "dtype", "data", "p20_ms", "p50_ms",
    "p80_ms", "tiles", "columns", "density", "rate", "device", "torch", "triton", "commit",
)  # fmt: skip


def planted_layer(n, heads, kv_heads, head_dim, seed=0):
    """Return bf16 q, k, v whose heads look at sinks, columns and a few diagonals, plus noise."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    randn = functools.partial(torch.randn, generator=generator, device="cuda")
    num_waves = head_dim // 4
    frequency = torch.logspace(0.3, -3.0, num_waves, device="cuda", dtype=torch.float64)
    position = torch.arange(n, device="cuda", dtype=torch.float64)

    def waves(x):
        angle = x[:, None] * frequency
        return torch.cat([angle.cos(), angle.sin()], -1).float() / num_waves**0.5

    k = 0.5 * randn(kv_heads, n, head_dim)
    q = 0.5 * randn(heads, n, head_dim)
    strength = (8.0 * head_dim**0.5) ** 0.5
    k[:, :, : 2 * num_waves] = strength * waves(position)
    q[:, :, : 2 * num_waves] = 0
    group = heads // kv_heads
    for head in range(heads):
        offsets = torch.randint(0, n // 2, (4,), generator=generator, device="cuda")
        for offset in [0, *offsets.tolist()]:
            q[head, :, : 2 * num_waves] += strength / 3 * waves(position - offset)
    for kv in range(kv_heads):
        columns = torch.randperm(n, generator=generator, device="cuda")[: n // 200]
        k[kv, columns, -1] += strength
        k[kv, :4, -1] += strength
    q[:, :, -1] += strength
    assert group * kv_heads == heads
    v = randn(kv_heads, n, head_dim)
    return tuple(x[None].bfloat16() for x in (q, k, v))


def random_layer(n, heads, kv_heads, head_dim, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return tuple(
        torch.randn(1, h, n, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for h in (heads, kv_heads, kv_heads)
    )


def check(q, k, v, scale, plan, out, lse):
    """Compare rows of every head with a float64 reference; exit if one is off."""
    n = q.shape[2]
    rows = sorted({0, 127, n // 3, n // 2 + 65, n - 1})
    for part in plan.tile_plans:
        host = plan_to_host(part)
        for index, head in enumerate(part.heads):
            for row in rows:
                keys = query_tile_keys(host, index, row // part.tile, n)
                expected, expected_lse = attend_row_reference(
                    q, k, v, scale=scale, keys=keys, head=head, row=row
                )
                error = (out[0, head, row].double() - expected).norm() / expected.norm()
                off = abs(float(lse[head, row]) - float(expected_lse))
                if not (error < 1e-2 and off < 2e-3 * max(1.0, abs(float(expected_lse)))):
                    sys.exit(f"wrong: head {head} row {row}: out {error:.2e}, lse {off:.2e}")


def time_ms(function, rep):
    """Return p20, p50, p80 of the time on the device, launches replayed from a graph."""
    function()
    return triton.testing.do_bench_cudagraph(function, rep=rep, quantiles=[0.2, 0.5, 0.8])


def time_with_launches_ms(function, rep):
    """Return p20, p50, p80 of calls as a program makes them, one at a time."""
    return triton.testing.do_bench(
        function, warmup=max(5, rep // 5), rep=rep, quantiles=[0.2, 0.5, 0.8]
    )


def flex(q, k, v, scale, plan):
    """Return a call of FlexAttention over the same tiles of 128, all heads alike or listed."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    (part,) = plan.tile_plans
    host, count = plan_to_host(part), num_tiles(plan.n, part.tile)
    num_full = host.tile_count - 1
    full = torch.zeros(1, len(part.heads), count, count, dtype=torch.int32)
    for index, head in enumerate(part.heads):
        for u in range(count):
            keys = query_tile_keys(host, index, u, plan.n)
            tiles = torch.unique(keys // part.tile)
            full[0, head, u, : len(tiles) - 1] = tiles[:-1].int()
    own = torch.arange(count, dtype=torch.int32).view(1, 1, count, 1)
    partial = torch.zeros_like(full)
    partial[..., :1] = own
    mask = BlockMask.from_kv_blocks(
        torch.ones(1, len(part.heads), count, dtype=torch.int32, device="cuda"), partial.cuda(),
        num_full[None].cuda(), full.cuda(), BLOCK_SIZE=part.tile,
        mask_mod=lambda b, h, i, j: i >= j, seq_lengths=(plan.n, plan.n),
    )  # fmt: skip
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)


class Bench:
    def __init__(self, arguments):
        self.rep, self.csv, self.baseline = arguments.rep, arguments.csv, {}
        self.flash4 = arguments.flash4
        self.common = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "triton": triton.__version__, "commit": arguments.commit,
        }  # fmt: skip

    def add(self, provider, what, q, k, data, times, plan=None):
        _, heads, n, head_dim = q.shape
        row = {
            "provider": provider, "what": what, "n": n, "head_dim": head_dim, "heads": heads,
            "kv_heads": k.shape[1], "dtype": "bfloat16", "data": data, **self.common,
        }  # fmt: skip
        row.update(zip(("p20_ms", "p50_ms", "p80_ms"), (f"{t:.4f}" for t in times), strict=True))
        if plan is not None:
            counts = plan.counts()
            tile = {h: part.tile for part in plan.tile_plans for h in part.heads}
            pairs = sum(
                t * tile[h] ** 2 + c * tile[h]
                for h, (t, c) in enumerate(
                    zip(counts.tiles.tolist(), counts.columns.tolist(), strict=True)
                )
            )
            row |= {
                "tiles": int(counts.tiles.sum()), "columns": int(counts.columns.sum()),
                "density": f"{float(counts.density.mean()):.4f}",
            }  # fmt: skip
            if (n, heads, head_dim) in self.baseline:
                rate = heads * n * n / 2 / self.baseline[n, heads, head_dim]
                row["rate"] = f"{pairs / times[1] / rate:.3f}"
        self.append(row)
        print(
            f"{n:7d} d{head_dim:<3d} {heads:2d}/{k.shape[1]} {provider:12s} {what:62s} "
            f"{times[1]:9.3f} ms  density {row.get('density', '-'):6s} rate {row.get('rate', '-')}",
            flush=True,
        )

    def append(self, row):
        """Write the row at once: what was measured before a fault is kept."""
        if self.csv is None:
            return
        new = not self.csv.exists()
        self.csv.parent.mkdir(parents=True, exist_ok=True)
        with self.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, restval="")
            if new:
                writer.writeheader()
            writer.writerow(row)

    def dense(self, q, k, v, scale, data):
        """Time torch's fused kernels, and FlashAttention-4 where asked for; they must agree."""
        first = None
        for backend in dense_backends(q.device):
            if backend.name == "flash4" and not self.flash4:
                continue
            if backend.name == "sdpa_flash" and q.shape[2] ** 2 * q.shape[1] > 2**34:
                continue
            out = backend.run(q, k, v, scale).float()
            first = out if first is None else first
            if not (out - first).norm() < 1e-2 * first.norm():
                sys.exit(f"{backend.name} differs from the first dense kernel")
            del out
            clock = time_with_launches_ms if backend.name == "flash4" else time_ms
            times = clock(functools.partial(backend.run, q, k, v, scale), self.rep)
            if backend.name == "sdpa_cudnn":
                self.baseline[q.shape[2], q.shape[1], q.shape[3]] = times[1]
            self.add(backend.name, "dense", q, k, data, times)

    def sparse(self, q, k, v, scale, candidates, data, what, with_flex=False):
        plan = build_plan(q, k, scale=scale, candidates=candidates)
        out, lse = attend(q, k, v, scale=scale, plan=plan)
        check(q, k, v, scale, plan, out, lse)
        if any(not isinstance(c, Dense | AShape) for c in candidates):
            times = time_ms(lambda: build_plan(q, k, scale=scale, candidates=candidates), self.rep)
            self.add("index", what, q, k, data, times)
        times = time_ms(lambda: attend(q, k, v, scale=scale, plan=plan), self.rep)
        self.add("triton", what, q, k, data, times, plan)
        times = time_with_launches_ms(
            lambda: sparse_attention(q, k, v, scale=scale, candidates=candidates), self.rep
        )
        self.add("index+triton", what, q, k, data, times)
        if self.flash4 and [p.tile for p in plan.tile_plans] == [128]:
            self.flash4_over(q, k, v, scale, plan, data, what)
        if with_flex:
            call = flex(q, k, v, scale, plan)
            error = (call() - out).float().norm() / out.float().norm()
            if not error < 1e-2:
                sys.exit(f"FlexAttention differs by {error:.2e}: the block mask is wrong")
            self.add("flex", what, q, k, data, time_ms(call, self.rep), plan)

    def flash4_over(self, q, k, v, scale, plan, data, what):
        if plan.tile_plans[0].has_columns:
            return
        other, other_lse = attend(q, k, v, scale=scale, plan=plan, backend="flash4")
        check(q, k, v, scale, plan, other, other_lse)
        times = time_with_launches_ms(
            lambda: attend(q, k, v, scale=scale, plan=plan, backend="flash4"), self.rep
        )
        self.add("flash4", what, q, k, data, times, plan)


def mixed_layer(n, heads, share):
    """Return one candidate per head; dynamic patterns read about 1/share of the key tiles."""
    count = num_tiles(n, 128)
    kinds = [
        AShape(sink=128, window=1024, tile=128),
        VerticalSlashSpread(vertical=1000, diagonals=count // share, tile=128),
        BlockSparse(blocks=count // share, tile=128),
        VerticalSlashSpread(vertical=2000, diagonals=count // share // 2, tile=128),
        AShape(sink=64, window=2048, tile=64),
        VerticalSlashLastQ(vertical=500, slash=200, tile=64),
        BlockSparse(blocks=2 * count // share, tile=64, estimator="pooled"),
        VerticalSlashSpread(vertical=1000, diagonals=2 * count // share, tile=128),
    ]
    return [kinds[head % len(kinds)] for head in range(heads)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="8192,32768,131072")
    parser.add_argument("--head-dims", default="128")
    parser.add_argument("--heads", type=int, default=8, help="a layer of mixed heads has 4 times")
    parser.add_argument("--group", type=int, default=4, help="query heads of a kv head")
    parser.add_argument("--rep", type=int, default=100, help="milliseconds per measurement")
    parser.add_argument("--only", default="ashape,block,vs,layer")
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--flash4", action="store_true", help="launches included in its times")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    heads, kv_heads = arguments.heads, arguments.heads // arguments.group
    bench = Bench(arguments)
    for head_dim in map(int, arguments.head_dims.split(",")):
        scale = head_dim**-0.5
        for n in map(int, arguments.lengths.split(",")):
            q, k, v = random_layer(n, heads, kv_heads, head_dim)
            bench.dense(q, k, v, scale, "random")
            for tile in (128, 64):
                candidates = {
                    "ashape": AShape(sink=128, window=1024, tile=tile),
                    "block": BlockSparse(blocks=8192 // tile // 2, tile=tile),
                }
                for name, candidate in candidates.items():
                    if name in only:
                        with_flex = arguments.flex and tile == 128 and n <= 32768
                        bench.sparse(
                            q, k, v, scale, [candidate] * heads, "random",
                            describe(candidate), with_flex,
                        )  # fmt: skip
            if "vs" in only:
                q, k, v = planted_layer(n, heads, kv_heads, head_dim)
                for tile in (128, 64):
                    for vertical, share in ((1000, 16), (1000, 64), (4000, 32)):
                        candidate = VerticalSlashSpread(
                            vertical=vertical, diagonals=num_tiles(n, tile) // share, tile=tile
                        )
                        name = describe(candidate)
                        bench.sparse(q, k, v, scale, [candidate] * heads, "planted", name)
            if "layer" in only:
                q, k, v = planted_layer(n, 4 * heads, 4 * kv_heads, head_dim)
                bench.dense(q, k, v, scale, "planted")
                for share in (32, 16):
                    candidates = mixed_layer(n, 4 * heads, share)
                    bench.sparse(q, k, v, scale, candidates, "planted", f"mixed layer, 1/{share}")
            del q, k, v


if __name__ == "__main__":
    main()
