"""Calibration of an 8B shape on one GPU against its plain dense prefill, in one process.

    python scripts/measure_scale.py                      # 8k, 32k, 128k: all layers; 256k: 8 layers
    python scripts/measure_scale.py --lengths 131072:32  # one length, 32 layers
    python scripts/measure_scale.py --long 1048576       # only one layer of a million tokens

The model is Llama-3.1-8B's shape with random weights, built on the GPU; the tokens are random. For
each length, after a warm-up: `library` is the forward with transformers' own sdpa attention
(lengths up to 32k), `dense` the same forward with the attention operation that calibration uses and
no scoring, `calibrate` forward and scores of the default grid as a table. Prints one JSON object a
measurement: seconds, seconds by phase, peak GPU memory, and both relative to `dense`.
"""

import argparse
import json
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from patternsearch.calibration.clock import PhaseClock
from patternsearch.calibration.sample_scores import dense_attention_for, score_sample
from patternsearch.calibration.samples import Sample
from patternsearch.model.capture import run_with_capture
from patternsearch.model.chunked_mlp import chunked_mlps
from patternsearch.model.loading import adopt_model
from patternsearch.schema.io import load_grid
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
LIBRARY_LIMIT = 32_768
GIB = 2**30


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
    return adopt_model(model)


def random_sample(n, vocab_size):
    ids = np.random.default_rng(n).integers(0, vocab_size, n, dtype=np.int32)
    ids.flags.writeable = False
    return Sample(f"l{n}-000-random", "random", "calibration", n, n, "", ids, (), None)


class Meter:
    def __init__(self, device):
        self.device = device

    def __call__(self, work):
        """Return seconds and peak bytes of a call."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start, 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        work()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - start, torch.cuda.max_memory_allocated(self.device)


def library_forward(loaded, sample):
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None].to(loaded.device)
    with torch.inference_mode():
        loaded.backbone(input_ids=ids, use_cache=False)


def dense_forward(loaded, sample):
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    attention = dense_attention_for(loaded.device)
    with chunked_mlps(loaded.model):
        run_with_capture(loaded, ids, lambda inputs: None, dense_attention=attention)


def calibrate(loaded, sample, scorer, clock):
    scores = score_sample(loaded, sample, scorer, clock, lambda layer: None)
    with clock.phase("aggregate"):
        names = ("sample_id", "source", "split", "length", "num_tokens")
        sample_table(scores, **{name: getattr(sample, name) for name in names})


def measure(loaded, n, scorer, *, library, plain=True):
    meter = Meter(loaded.device)
    sample = random_sample(n, loaded.identity.vocab_size)
    row = {"tokens": n, "layers": len(loaded.full_layers), "row_sample": scorer.row_sample}
    if library:
        row["library_s"], peak = meter(lambda: library_forward(loaded, sample))
        row["library_peak_gib"] = peak / GIB
    if plain:
        row["dense_s"], peak = meter(lambda: dense_forward(loaded, sample))
        row["dense_peak_gib"] = peak / GIB
    clock = PhaseClock(loaded.device)
    row["calibrate_s"], peak = meter(lambda: calibrate(loaded, sample, scorer, clock))
    row["calibrate_peak_gib"] = peak / GIB
    if plain:
        row["ratio"] = row["calibrate_s"] / row["dense_s"]
        row["extra_gib"] = row["calibrate_peak_gib"] - row["dense_peak_gib"]
    row["phases_s"] = {name: round(seconds, 3) for name, seconds in clock.seconds.items()}
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
    print(json.dumps(rounded), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="8192:32,32768:32,131072:32,262144:8")
    parser.add_argument(
        "--long", type=int, default=1_048_576, help="tokens of the one layer; 0: no"
    )
    parser.add_argument("--row-sample", type=float, default=1 / 8, help="of the one layer")
    parser.add_argument("--sampled-lengths", default="131072:8", help="with --row-sample too")
    parser.add_argument("--grid", default="default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does the script run?")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backend = "triton" if device.type == "cuda" else "torch"
    shape = TINY if arguments.tiny else SHAPE
    candidates = load_grid(arguments.grid)[0].expand()
    whole = LayerScorer(candidates, backend=backend)
    sampled = LayerScorer(candidates, backend=backend, row_sample=arguments.row_sample)
    properties = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(json.dumps({"device": properties, "torch": torch.__version__, "candidates":
                      len(candidates), "grid": arguments.grid, "dtype": str(dtype)}))  # fmt: skip

    wanted = [
        (int(part.split(":")[1]), int(part.split(":")[0]), scorer)
        for text, scorer in ((arguments.lengths, whole), (arguments.sampled_lengths, sampled))
        for part in text.split(",")
        if part
    ]
    if arguments.long:
        wanted.append((1, arguments.long, sampled))
    loaded = None
    for num_layers, n, scorer in wanted:
        if loaded is None or len(loaded.full_layers) != num_layers:
            loaded = None
            loaded = build_model(shape, num_layers, device, dtype)
            loaded.model.set_attn_implementation("sdpa")
        # Compiles and sizes every kernel: a few thousand tokens are enough, but for autotuning.
        warm_up = random_sample(min(n, 8192), loaded.identity.vocab_size)
        calibrate(loaded, warm_up, scorer, PhaseClock(device))
        measure(loaded, n, scorer, library=n <= LIBRARY_LIMIT, plain=n <= 262_144)


if __name__ == "__main__":
    main()
