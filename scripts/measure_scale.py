"""Calibration of an 8B shape on one GPU against its plain dense prefill, in one process.

    PYTHONPATH=src python scripts/measure_scale.py --out scale.csv
    PYTHONPATH=src python scripts/measure_scale.py --lengths 131072 --sampled-lengths 131072 \
        --layers 8 --repeats 3
    PYTHONPATH=src python scripts/measure_scale.py --lengths "" --long 1048576
    PYTHONPATH=src python scripts/measure_scale.py --tiny --device cpu --lengths 128,256

The model is Llama-3.1-8B's shape, all 32 layers, with random weights drawn on the GPU; the tokens
are random. For each length, after a warm-up:

library    the forward with transformers' own sdpa attention, up to 32k tokens.
dense      the same forward with the attention operation that calibration uses, and no scoring;
           beyond 128k tokens it comes last, so that a time limit takes it first.
calibrate  forward, scores of the default grid, their table, and the part file.

The first sample of a length compiles what its budgets need and lays out its sampled rows; the
median of three (--repeats) leaves that out.

One row a measurement, printed as JSON and appended to --out (CSV) as soon as it is known: median
seconds of the repeats, seconds by phase of the last repeat (`lse` is the dense attention with its
log-sum-exp, `forward` all else of the model), peak GPU memory. The row of a length that completes
the pair holds what calibration takes over dense: `ratio` of seconds and `extra_gib` of peaks.
"""

import argparse
import csv
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from patternsearch.calibration import sample_scores
from patternsearch.calibration.clock import PhaseClock
from patternsearch.calibration.samples import Sample
from patternsearch.calibration.store import ScoresStore
from patternsearch.model.capture import run_with_capture
from patternsearch.model.chunked_mlp import chunked_mlps
from patternsearch.model.dense import causal_attention
from patternsearch.model.loading import adopt_model
from patternsearch.schema.io import load_grid
from patternsearch.schema.scores import scores_folder_of
from patternsearch.scoring.engine import LayerScorer
from patternsearch.scoring.table import sample_table

SHAPE = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "max_position_embeddings": 2**21,
    "tie_word_embeddings": True,
}
TINY = {
    **SHAPE,
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
NUM_LAYERS = 32
LIBRARY_LIMIT = 32_768
REPEAT_LIMIT = 32_768
DENSE_FIRST_LIMIT = 131_072
WARM_UP = 4096
GIB = 2**30
PHASES = ("forward", "lse", "score", "aggregate", "write")
COLUMNS = (
    "device", "torch", "measurement", "tokens", "layers", "row_sample", "repeats", "seconds",
    *(f"{phase}_s" for phase in PHASES), "peak_gib", "ratio", "extra_gib", "commit",
)  # fmt: skip


def build_model(shape, num_layers, device, dtype, seed=0):
    """A model whose weights are drawn on the device, in the model's own initial spread."""
    torch.manual_seed(seed)
    config = LlamaConfig(num_hidden_layers=num_layers, **shape)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.set_attn_implementation("sdpa")
    return adopt_model(model)


def random_sample(n, vocab_size):
    ids = np.random.default_rng(n).integers(0, vocab_size, n, dtype=np.int32)
    ids.flags.writeable = False
    return Sample(f"l{n}-000-random", "random", "calibration", n, n, "", ids, (), None)


def metered(device, work):
    """Return seconds and peak bytes of a call."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start, 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start, torch.cuda.max_memory_allocated(device)


class Bench:
    """One model and what is measured on it."""

    dense_limit = 2**60
    repeats = None

    def __init__(self, loaded, folder, put):
        self.loaded = loaded
        self.put = put
        self.store = ScoresStore(scores_folder_of(folder / "scale.yaml"), {})
        self.store.open(fresh=True)
        self.clock = PhaseClock(loaded.device)

    def library(self, sample, scorer):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None].to(self.loaded.device)
        with torch.inference_mode():
            self.loaded.backbone(input_ids=ids, use_cache=False)

    def dense(self, sample, scorer):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        attention = sample_scores.dense_attention_for(self.loaded.device)
        with chunked_mlps(self.loaded.model):
            run_with_capture(self.loaded, ids, lambda inputs: None, dense_attention=attention)

    def calibrate(self, sample, scorer):
        """What a run does with one sample, the dense attention as a phase of its own."""
        self.clock = PhaseClock(self.loaded.device)
        plain = sample_scores.dense_attention_for

        def clocked_for(device, **options):
            attention = plain(device, **options) or causal_attention

            def attend(*arguments, **keywords):
                with self.clock.phase("lse"):
                    return attention(*arguments, **keywords)

            return attend

        sample_scores.dense_attention_for = clocked_for
        try:
            scores = sample_scores.score_sample(
                self.loaded, sample, scorer, self.clock, lambda layer: None
            )
        finally:
            sample_scores.dense_attention_for = plain
        with self.clock.phase("aggregate"):
            names = ("sample_id", "source", "split", "length", "num_tokens")
            table = sample_table(scores, **{name: getattr(sample, name) for name in names})
        with self.clock.phase("write"):
            self.store.write_part(0, sample, table)

    def measure(self, n, scorer):
        """Measure one length."""
        sample = random_sample(n, self.loaded.identity.vocab_size)
        names = ["dense", "calibrate"] if n <= DENSE_FIRST_LIMIT else ["calibrate", "dense"]
        if n <= LIBRARY_LIMIT:
            names.insert(0, "library")
        if n > self.dense_limit:
            names.remove("dense")
        repeats = self.repeats or (3 if n <= REPEAT_LIMIT else 1)
        known = {}
        for name in names:
            work = getattr(self, name)
            runs = [metered(self.loaded.device, lambda w=work: w(sample, scorer))
                    for _ in range(repeats)]  # fmt: skip
            seconds = float(np.median([run[0] for run in runs]))
            peak = max(run[1] for run in runs) / GIB
            known[name] = seconds, peak
            row = {
                "measurement": name,
                "tokens": n,
                "layers": len(self.loaded.full_layers),
                "row_sample": scorer.row_sample,
                "repeats": repeats,
                "seconds": seconds,
                "peak_gib": peak,
            }
            if name == "calibrate":
                row |= {f"{phase}_s": self.clock.seconds[phase] for phase in PHASES}
            if name != "library" and {"dense", "calibrate"} <= known.keys():
                (ours, our_peak), (dense, dense_peak) = known["calibrate"], known["dense"]
                row |= {"ratio": ours / dense, "extra_gib": our_peak - dense_peak}
            self.put(row)


def row_writer(path, device, commit):
    """Return what prints a row and appends it to the file."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if path is not None and not (path.exists() and path.stat().st_size):
        with path.open("w", newline="") as file:
            csv.writer(file).writerow(COLUMNS)

    def put(row):
        row = {"device": name, "torch": torch.__version__, **row, "commit": commit}
        row = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(row), flush=True)
        if path is not None:
            with path.open("a", newline="") as file:
                csv.DictWriter(file, COLUMNS).writerow(row)

    return put


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="8192,32768,131072,262144", help="all rows scored")
    parser.add_argument("--sampled-lengths", default="", help="with --row-sample")
    parser.add_argument("--long", type=int, default=0, help="tokens of one layer, no dense")
    parser.add_argument("--row-sample", type=float, default=1 / 8)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument(
        "--dense-limit", type=int, default=2**60, help="longest that dense is measured at"
    )
    parser.add_argument(
        "--repeats", type=int, help=f"samples a length; by default 3 up to {REPEAT_LIMIT} tokens"
    )
    parser.add_argument("--grid", default="default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="CSV to append to")
    parser.add_argument("--commit", default="unknown", help="of this code, for the rows")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does the script run?")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    is_cuda = device.type == "cuda"
    candidates = load_grid(arguments.grid)[0].expand()
    backend = "triton" if is_cuda else "torch"
    whole = LayerScorer(candidates, backend=backend)
    sampled = LayerScorer(candidates, backend=backend, row_sample=arguments.row_sample)
    put = row_writer(arguments.out, device, arguments.commit)
    plan = [
        (arguments.layers, int(n), scorer)
        for text, scorer in ((arguments.lengths, whole), (arguments.sampled_lengths, sampled))
        for n in text.split(",")
        if n
    ]
    if arguments.long:
        plan.append((1, arguments.long, sampled))
    shape = TINY if arguments.tiny else SHAPE
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = None
        warm = set()
        for num_layers, n, scorer in plan:
            if bench is None or len(bench.loaded.full_layers) != num_layers:
                bench = None  # its memory first
                dtype = torch.bfloat16 if is_cuda else torch.float32
                loaded = build_model(shape, num_layers, device, dtype)
                bench = Bench(loaded, Path(folder), put)
                del loaded
            bench.repeats = arguments.repeats
            bench.dense_limit = 0 if num_layers == 1 else arguments.dense_limit
            if scorer.row_sample not in warm:  # compiles every kernel
                warm_up = random_sample(min(n, WARM_UP), bench.loaded.identity.vocab_size)
                bench.calibrate(warm_up, scorer)
                warm.add(scorer.row_sample)
            bench.measure(n, scorer)
    print(json.dumps({"total_s": round(time.perf_counter() - start, 1)}))


if __name__ == "__main__":
    main()
