"""Where a layer's scoring spends its time on a GPU: all rows, and a sample of them.

    PYTHONPATH=src python scripts/profile_scoring.py --tokens 131072 [--layout tokens]

One layer of an 8B model's shape with random q and k, the default grid; contiguous by head, or by
token as a model's projections leave them. Prints the wall time of the scorer (median of five, after
every sample of rows was laid out once) and, from one profiled call, the time of the kernels: of the
pass over the pairs, which a sample shrinks, of the online index, of what sums up, and by name.
"""

import argparse
import statistics
import time

import torch
from torch.profiler import ProfilerActivity, profile

from patternsearch.kernels.score.lse import attention_with_lse
from patternsearch.schema.io import load_grid
from patternsearch.scoring.engine import LayerScorer

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
WARM_UP = 10
REPETITIONS = 5
PARTS = {
    "pass": ("score_", "a_shape_logical_", "sampled_masses_", "near_masses_"),
    "index": ("block_scores_", "tile_mean_", "row_", "skewed_sum_", "select_top_"),
}
"""Beginnings of the kernels' names; all others sum up."""


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--layout", choices=("heads", "tokens"), default="heads")
    parser.add_argument("--row-sample", default="1,0.125", help="fractions")
    parser.add_argument("--most", type=int, default=15, help="kernels that are named")
    return parser.parse_args()


def kernels(run):
    """Return {name: milliseconds} of one call, the longest first."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run(0)
        torch.cuda.synchronize()
    times = {
        event.key: event.self_device_time_total / 1e3
        for event in found.key_averages()
        if event.self_device_time_total and not event.key.startswith("aten::")
    }
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def by_part(times):
    """Return {part: milliseconds} of the kernels of :func:`kernels`."""
    sums = dict.fromkeys([*PARTS, "sums"], 0.0)
    for name, milliseconds in times.items():
        mine = (part for part, beginnings in PARTS.items() if name.startswith(beginnings))
        sums[next(mine, "sums")] += milliseconds
    return sums


def main():
    options = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device: this profiles GPU kernels")
    generator = torch.Generator("cuda").manual_seed(0)

    def random(heads):
        shape = (1, heads, options.tokens, HEAD_DIM)
        if options.layout == "tokens":
            shape = (1, options.tokens, heads, HEAD_DIM)
        numbers = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        return numbers.transpose(1, 2) if options.layout == "tokens" else numbers

    q, k, v = (random(heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    scale = HEAD_DIM**-0.5
    lse = attention_with_lse(q, k, v, scale=scale).lse
    candidates = load_grid("default")[0].expand()
    for fraction in map(float, options.row_sample.split(",")):
        scorer = LayerScorer(candidates, backend="triton", row_sample=fraction)

        def run(layer, scorer=scorer):
            scorer.score(q, k, scale=scale, lse=lse, layer=layer)

        for layer in range(WARM_UP):
            run(layer)
        torch.cuda.synchronize()
        seconds = []
        for layer in range(REPETITIONS):
            start = time.perf_counter()
            run(layer)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        times = kernels(run)
        print(
            f"rows {fraction:g}, contiguous by {options.layout}: "
            f"{statistics.median(seconds) * 1e3:.1f} ms, kernels {sum(times.values()):.1f} ms"
        )
        print(", ".join(f"{part} {ms:.1f} ms" for part, ms in by_part(times).items()))
        for name, milliseconds in list(times.items())[: options.most]:
            print(f"  {milliseconds:8.3f} ms  {name[:100]}")


if __name__ == "__main__":
    main()
