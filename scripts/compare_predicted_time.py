# SPDX-License-Identifier: Apache-2.0
"""Run a config's attention layer by layer on this GPU and compare with what was predicted.

    python scripts/compare_predicted_time.py --timings h200.json --length 32768 \
        [--config llama.yaml] [--output result.json]

Queries and keys are random; the prediction is made for the tiles and columns that the layer's
indices really chose, so that it tests the time model and nothing else. Without --config, 32 layers
of 32 heads are drawn from the default grid. Dense heads run on the fastest dense backend, the
others on the sparse kernels, as a runtime would.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch

from patternsearch.patterns.candidates import AShape, BlockSparse, Dense
from patternsearch.patterns.geometry import a_shape_counts, block_sparse_counts
from patternsearch.schema.io import load_config, load_grid
from patternsearch.timing.clocks import CudaClock
from patternsearch.timing.devices import require_cuda
from patternsearch.timing.gate import check_kernels
from patternsearch.timing.model import load_time_model
from patternsearch.timing.workload import ProjectKernels, dense_backends, make_inputs

PLACEHOLDER = AShape(sink=0, window=1, tile=64)
"""What the sparse kernel runs for a head whose output the dense backend gives: one tile a row."""


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


class Layer:
    """One layer's heads, split into those that run dense and those that run sparse."""

    def __init__(self, candidates, model, length, num_kv_heads, backends):
        self.candidates = candidates
        self.is_dense = [isinstance(candidate, Dense) for candidate in candidates]
        self.heads = torch.tensor([h for h, dense in enumerate(self.is_dense) if dense])
        self.sparse = [PLACEHOLDER if isinstance(c, Dense) else c for c in candidates]
        self.kv = self.heads // (len(candidates) // num_kv_heads)
        name = model.backend(Dense(), length, 0.0, 0.0)
        self.dense = next((b for b in backends if b.name == name), None)

    def run(self, kernels, q, k, v, scale):
        if all(self.is_dense) and self.dense is not None:
            return self.dense.run(q, k, v, scale)
        candidates = self.candidates if self.dense is None else self.sparse
        plan = kernels.plan(candidates, q, k, scale)
        out = kernels.attend(q, k, v, scale, plan)
        if len(self.heads) and self.dense is not None:
            heads, kv = self.heads.to(q.device), self.kv.to(q.device)
            out[:, heads] = self.dense.run(q[:, heads], k[:, kv], v[:, kv], scale)
        return out

    def predict(self, kernels, model, q, k, scale):
        counts = kernels.plan(self.candidates, q, k, scale).counts()
        tiles = counts.tiles.double().cpu().numpy()
        columns = counts.columns.double().cpu().numpy()
        return sum(
            float(model.head_cost((c,), q.shape[2], tiles[h : h + 1], columns[h : h + 1])[0])
            for h, c in enumerate(self.candidates)
        )


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
    model = load_time_model(options.timings, dtype=options.dtype, head_dim=head_dim)
    kernels, backends, clock = ProjectKernels(), dense_backends(device), CudaClock()
    check_kernels(kernels, [], head_dim=head_dim, dtype=dtype, device=device)
    num_heads = len(layers[0])
    inputs = make_inputs(options.length, head_dim, num_heads, num_kv_heads, dtype, device)
    scale = head_dim**-0.5
    q, k, _ = inputs[0]
    dense_ms = min(
        clock.measure(lambda i, b=backend: b.run(*inputs[i], scale)).p50_ms for backend in backends
    )
    rows = []
    for number in chosen.tolist():
        layer = Layer(layers[number], model, options.length, num_kv_heads, backends)
        predicted = layer.predict(kernels, model, q, k, scale)
        timing = clock.measure(lambda i, y=layer: y.run(kernels, *inputs[i], scale))
        kinds = [candidate.kind for candidate in layers[number]]
        rows.append(
            {
                "layer": number,
                "heads": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
                "predicted_ms": round(predicted, 4),
                "measured_ms": round(timing.p50_ms, 4),
                "p20_ms": timing.p20_ms,
                "p80_ms": timing.p80_ms,
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr)
    predicted, measured = (
        sum(row[name] for row in rows) for name in ("predicted_ms", "measured_ms")
    )
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
        "predicted_ms": predicted,
        "measured_ms": measured,
        "error": predicted / measured - 1.0,
        "layers": rows,
    }
    text = json.dumps(result, indent=2)
    if options.output is not None:
        options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
