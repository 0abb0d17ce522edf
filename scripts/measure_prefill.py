"""Time a whole prefill, dense against sparse, on a random model of an 8B model's shape.

    PYTHONPATH=src python scripts/measure_prefill.py --lengths 32768,131072
        [--kinds a_shape,block_sparse --timings configs/timings/nvidia-h200-fa4.json]

Weights are random, so outputs mean nothing; times depend on shapes and on how much the patterns
read, and that is set by budgets and reported as measured density. Correctness first: the kernels
must agree with the PyTorch path on this model's own q, k and v before anything is timed. Dense
runs under both of torch's fused attention kernels and the faster one counts. With --timings a
second sparse run follows, on the backends that the table names. One JSON row per
measurement on stdout.
"""

import argparse
import itertools
import json

import torch
from measure_scale import SHAPE, build_model

from patternsearch.kernels.attend import build_plan
from patternsearch.model.capture import run_with_capture
from patternsearch.model.tensor_parallel import rank_slices
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashSpread,
    describe,
)
from patternsearch.runtime.prefill_timing import time_dense_prefill, time_prefill
from patternsearch.runtime.sparse import sparse_attention_of
from patternsearch.schema.config import PatternConfig
from patternsearch.timing.environment import describe_environment
from patternsearch.timing.table import load_timings

PATTERNS = (
    VerticalSlashSpread(vertical=512, diagonals=8, tile=128),
    AShape(sink=128, window=1024, tile=128),
    BlockSparse(blocks=10, tile=128),
    VerticalSlashSpread(vertical=1000, diagonals=4, tile=128),
)


def shape_of(small):
    """An 8B model's shape with a language-model head of its own, or a toy's."""
    shape = {**SHAPE, "max_position_embeddings": 131_072, "tie_word_embeddings": False}
    if small:
        shape |= {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "vocab_size": 512, "head_dim": 64}  # fmt: skip
    return shape


def config_for(loaded, patterns):
    identity = loaded.identity
    in_turn = itertools.cycle(patterns)
    return PatternConfig.model_validate(
        {
            "format": "patternsearch/config",
            "schema_version": 1,
            "provenance": {"patternsearch": "measurement"},
            "model": identity.model_dump(),
            "tensor_parallel": {
                "size": 1,
                "ranks": [
                    part.model_dump()
                    for part in rank_slices(identity.num_query_heads, identity.num_kv_heads, 1)
                ],
            },
            "calibration": None,
            "selection": None,
            "imported": {"format": "minference", "file_sha256": "0" * 64, "score_kind": "none"},
            "fingerprints": None,
            "heads": [
                [{"pattern": next(in_turn).model_dump()} for _ in range(identity.num_query_heads)]
                for _ in range(identity.num_layers)
            ],
        }
    )


def check(loaded, num_tokens):
    """Compare the kernels with the PyTorch path on the first layer; return the largest error.

    On sets that need no index: in half precision a random model's near-ties break either way.
    """
    errors = []
    kinds = itertools.cycle(
        (AShape(sink=128, window=1024, tile=128), AShape(sink=64, window=512, tile=64), Dense())
    )
    patterns = [next(kinds) for _ in range(loaded.identity.num_query_heads)]

    def look(inputs):
        if inputs.layer:
            return
        keywords = {"scale": inputs.scale}
        q, k, v = (t.contiguous() for t in (inputs.q, inputs.k, inputs.v))
        ours = sparse_attention_of(patterns, q, k, v, backend="triton", **keywords).float()
        truth = sparse_attention_of(patterns, q, k, v, backend="torch", **keywords).float()
        error = (ours - truth).norm(dim=(2, 3)) / truth.norm(dim=(2, 3))
        errors.append(float(error.max()))

    ids = torch.randint(0, loaded.identity.vocab_size, (1, num_tokens))
    run_with_capture(loaded, ids, look)
    return errors[0]


def density_of(loaded, config, num_tokens):
    """Return the mean density of the first layer's heads on random q and k, and the largest."""
    identity = loaded.identity
    q, k = (
        torch.randn(1, heads, num_tokens, identity.head_dim, device=loaded.device,
                    dtype=loaded.dtype)
        for heads in (identity.num_query_heads, identity.num_kv_heads)
    )  # fmt: skip
    patterns = [entry.pattern for entry in config.heads[0]]
    backend = "triton" if loaded.device.type == "cuda" else "torch"
    plan = build_plan(q, k, scale=identity.attention_scale, candidates=patterns, backend=backend)
    density = plan.counts().density
    return float(density.mean()), float(density.max())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="32768,131072")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a toy width, to try the script")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--timings", type=load_timings, help="a timing table of this GPU")
    parser.add_argument("--kinds", help="of the patterns; all by default")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",") if arguments.kinds else {p.kind for p in PATTERNS}
    patterns = [pattern for pattern in PATTERNS if pattern.kind in kinds]
    dtype = torch.bfloat16 if arguments.device != "cpu" else torch.float32
    loaded = build_model(shape_of(arguments.small), arguments.layers, arguments.device, dtype)
    config = config_for(loaded, patterns)
    facts = describe_environment()
    head = {
        "gpu": facts.get("gpu_0"), "torch": facts.get("torch"), "triton": facts.get("triton"),
        "transformers": facts.get("transformers"), "dtype": str(dtype).removeprefix("torch."),
        "layers": arguments.layers, "patterns": [describe(p) for p in patterns],
    }  # fmt: skip
    if loaded.device.type == "cuda":
        error = check(loaded, 3000)
        print(json.dumps({**head, "check": "triton against torch", "largest_error": error}))
        if error > 2e-2:
            raise SystemExit("the kernels disagree with the PyTorch path: nothing is timed")
    for n in map(int, arguments.lengths.split(",")):
        ids = torch.randint(0, loaded.identity.vocab_size, (1, n))
        mean, largest = density_of(loaded, config, n)
        dense = time_dense_prefill(loaded.model, config, ids, repetitions=arguments.repetitions)
        print(json.dumps({**head, **dense.model_dump()}), flush=True)
        for timings in [None] if arguments.timings is None else [None, arguments.timings]:
            sparse = time_prefill(
                loaded.model, config, ids, run="sparse", repetitions=arguments.repetitions,
                timings=timings,
            )  # fmt: skip
            print(json.dumps({**head, "density": mean, **sparse.model_dump()}))
            summary = {
                "num_tokens": n,
                "dense_kernel": dense.kernel,
                "sparse_kernel": sparse.kernel,
                "density": mean,
                "largest_density": largest,
                "attention_speedup": dense.attention_ms / sparse.attention_ms,
                "attention_and_index_speedup": dense.attention_ms
                / (sparse.attention_ms + sparse.index_ms),
                "prefill_speedup": dense.total_ms / sparse.total_ms,
            }
            print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
