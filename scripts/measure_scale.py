"""Calibrating an 8B shape on one GPU beside the plain dense prefill of the same model.

    python scripts/measure_scale.py --lengths 8192,32768,131072 --output rows.json

The model is a Llama of 8B shape with random bfloat16 weights; a sample is random tokens. The plain
prefill is the backbone with torch's `sdpa` attention; calibrating is the same forward with every
layer scored on the default grid. Both run once for warm-up at the shortest length. Times are wall
time around a synchronised device, phases as `calibrate` books them.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from patternsearch.calibration.clock import PhaseClock
from patternsearch.calibration.sample_scores import score_sample
from patternsearch.calibration.samples import Sample
from patternsearch.model.loading import adopt_model
from patternsearch.schema.io import load_grid
from patternsearch.scoring.engine import LayerScorer
from patternsearch.scoring.table import sample_table

GIB = 2**30


def llama_8b(num_layers, positions):
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=positions,
        rope_theta=500000.0,
    )
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def sample_of(n):
    ids = np.random.default_rng(n).integers(3, 32000, n).astype(np.int32)
    return Sample(f"random-{n}", "random", "calibration", n, n, "0" * 64, ids, (), None)


def measured(function):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() / GIB


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="8192,32768,131072")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--oracle", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lengths = [int(item) for item in arguments.lengths.split(",")]
    loaded = adopt_model(llama_8b(arguments.layers, max(lengths)), reference="random 8B shape")
    grid, _ = load_grid("default")
    scorer = LayerScorer(grid.expand(), oracle=arguments.oracle, backend="triton")
    rows = []

    def prefill(sample):
        loaded.model.set_attn_implementation("sdpa")
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None].cuda()
        with torch.inference_mode():
            loaded.backbone(input_ids=ids, use_cache=False)

    def calibrate(sample, clock):
        scores = score_sample(loaded, sample, scorer, clock, lambda layer: None)
        with clock.phase("aggregate"):
            return sample_table(
                scores, sample_id=sample.sample_id, source="random", split="calibration",
                length=sample.length, num_tokens=sample.num_tokens,
            )  # fmt: skip

    for n in (lengths[0], *lengths):
        sample = sample_of(n)
        clock = PhaseClock(loaded.device)
        row = {"length": n, "layers": arguments.layers, "candidates": len(scorer.specs)}
        try:
            seconds, peak = measured(lambda sample=sample: prefill(sample))
            row |= {"prefill_s": round(seconds, 3), "prefill_peak_gib": round(peak, 2)}
            seconds, peak = measured(lambda s=sample, c=clock: calibrate(s, c))
            row |= {
                "calibrate_s": round(seconds, 3),
                "ratio": round(seconds / row["prefill_s"], 3),
                "calibrate_peak_gib": round(peak, 2),
                "phases_s": {name: round(value, 3) for name, value in clock.seconds.items()},
            }
        except torch.OutOfMemoryError as error:
            row["out_of_memory"] = str(error).splitlines()[0]
        rows.append(row)
        print(json.dumps(row), flush=True)
    document = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": rows[1:],
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
