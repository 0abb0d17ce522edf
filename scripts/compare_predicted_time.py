"""Run a config's attention layer by layer on this GPU and compare with what was predicted.

    python scripts/compare_predicted_time.py --timings h200.json --length 32768 \
        [--config llama.yaml] [--output result.json]

Queries and keys are random; the prediction is made for the tiles and columns that the layer's
indices really chose, so that it tests the time model and nothing else. Without --config, 32 layers
of 32 heads are drawn from the default grid. A layer runs through the function that an attached
model calls, with the table's launch settings. The kernels must be right on this shape before
anything is timed. ``measured_ms`` is the GPU's time, as in a model whose host runs ahead;
``as_called_ms`` is one layer on an idle GPU, launches included.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch

from patternsearch.kernels.attend import build_plan
from patternsearch.patterns.candidates import AShape, BlockSparse, Dense
from patternsearch.patterns.geometry import a_shape_counts, block_sparse_counts
from patternsearch.runtime.sparse import sparse_attention_of
from patternsearch.schema.io import load_config, load_grid
from patternsearch.timing.clocks import CudaClock
from patternsearch.timing.devices import require_cuda
from patternsearch.timing.execution import execution_on
from patternsearch.timing.gate import check_kernels
from patternsearch.timing.model import TimeModel
from patternsearch.timing.table import load_timings
from patternsearch.timing.workload import ProjectKernels, make_inputs, running_backends


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timings", type=Path, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=8, help="layers measured, spread evenly")
    parser.add_argument("--max-density", type=float, default=0.15, help="of drawn candidates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def drawn_layers(length, max_density, seed):
    """32 layers of 32 heads, each a random candidate of the default grid; one head in 16 dense."""
    grid, _ = load_grid("default")
    pairs = length * (length + 1) / 2
    light = []
    for candidate in grid.expand():
        match candidate:
            case Dense():
                continue
            case AShape():
                read = a_shape_counts(length, candidate.tile, candidate.sink, candidate.window)[1]
            case BlockSparse():
                read = block_sparse_counts(length, candidate.tile, candidate.blocks)[1]
            case _:
                read = (candidate.diagonals * candidate.tile + candidate.vertical) * length
        if read / pairs <= max_density:
            light.append(candidate)
    generator = random.Random(seed)
    return [
        [Dense() if generator.random() < 1 / 16 else generator.choice(light) for _ in range(32)]
        for _ in range(32)
    ]


def predict(candidates, model, q, k, scale):
    """Sum the predicted milliseconds of a layer's heads, for what their indices choose."""
    counts = build_plan(q, k, scale=scale, candidates=candidates).counts()
    tiles = counts.tiles.double().cpu().numpy()
    columns = counts.columns.double().cpu().numpy()
    return sum(
        float(model.head_cost((c,), q.shape[2], tiles[h : h + 1], columns[h : h + 1])[0])
        for h, c in enumerate(candidates)
    )


def as_called_ms(call, repetitions=5):
    """Time a call on an idle GPU, launches included: the median."""
    times = []
    for repetition in range(repetitions):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(repetition)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return float(np.median(times))


def main():
    options = arguments()
    require_cuda("comparing times")
    device, dtype = torch.device("cuda"), getattr(torch, options.dtype)
    if options.config is not None:
        config = load_config(options.config)
        head_dim, num_kv_heads = config.model.head_dim, config.model.num_kv_heads
        layers = [[entry.pattern for entry in heads] for heads in config.heads if heads is not None]
    else:
        head_dim, num_kv_heads = 128, 8
        layers = drawn_layers(options.length, options.max_density, options.seed)
    chosen = np.unique(np.linspace(0, len(layers) - 1, options.layers).round().astype(int))
    table = load_timings(options.timings)
    execution = execution_on(table, device)
    if lack := execution.lack(options.dtype, head_dim):
        print(lack, file=sys.stderr)
    model, clock = TimeModel(table, dtype=options.dtype, head_dim=head_dim), CudaClock()
    kernels = ProjectKernels(tuning=execution.tuning)
    check_kernels(kernels, [], head_dim=head_dim, dtype=dtype, device=device)
    num_heads = len(layers[0])
    inputs = make_inputs(options.length, head_dim, num_heads, num_kv_heads, dtype, device)
    scale = head_dim**-0.5
    q, k, _ = inputs[0]
    backends = list(running_backends(head_dim, dtype, device, lambda _: None))
    dense_ms = {
        backend.name: clock.measure(lambda i, b=backend: b.run(*inputs[i], scale)).p50_ms
        for backend in backends
    }
    rows = []
    for number in chosen.tolist():
        layer = layers[number]
        predicted = predict(layer, model, q, k, scale)

        def run(repetition, layer=layer):
            return sparse_attention_of(
                layer, *inputs[repetition], scale=scale, backend="triton", execution=execution
            )

        timing = clock.measure(run)
        kinds = [candidate.kind for candidate in layer]
        rows.append(
            {
                "layer": number,
                "heads": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
                "predicted_ms": round(predicted, 4),
                "measured_ms": round(timing.p50_ms, 4),
                "p20_ms": timing.p20_ms,
                "p80_ms": timing.p80_ms,
                "host_ms": timing.host_ms,
                "as_called_ms": round(as_called_ms(run), 4),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    total = {
        name: sum(row[name] for row in rows)
        for name in ("predicted_ms", "measured_ms", "as_called_ms")
    }
    result = {
        "device": torch.cuda.get_device_name(device),
        "timings_device": model.device,
        "timings_sha256": model.sha256,
        "torch": torch.__version__,
        "dtype": options.dtype,
        "head_dim": head_dim,
        "num_query_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "length": options.length,
        "dense_ms_per_layer": dense_ms,
        "layers": rows,
        **total,
        "error": total["predicted_ms"] / total["measured_ms"] - 1.0,
    }
    text = json.dumps(result, indent=2)
    if options.output is not None:
        options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
