"""Builds valid pattern configs of any size for tests, the same for the same arguments."""

import numpy as np

from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.schema.config import PatternConfig

PATTERNS = (
    VerticalSlashSpread(vertical=128, diagonals=8, tile=64),
    AShape(sink=128, window=1024, tile=64),
    BlockSparse(blocks=16, tile=128),
    Dense(),
)
MINFERENCE_PATTERNS = (
    VerticalSlashLastQ(vertical=1000, slash=6096, tile=64),
    VerticalSlashLastQ(vertical=30, slash=800, tile=64),
    AShape(sink=100, window=800, tile=64),
    BlockSparse(estimator="pooled", blocks=100, tile=64),
    Dense(),
)
VERTICAL_SLASH_PATTERNS = (
    VerticalSlashLastQ(vertical=1000, slash=6096, tile=64),
    VerticalSlashLastQ(vertical=500, slash=700, tile=64),
    VerticalSlashLastQ(vertical=3500, slash=100, tile=64),
)


def sha(text):
    """Return a 64-digit hexadecimal string that stands for a digest of ``text``."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def make_model(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=64, **changes):
    """Return a model identity as plain values."""
    model = {
        "reference": "tests/model",
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "num_layers": num_layers,
        "layer_types": ["full"] * num_layers,
        "num_query_heads": num_query_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "attention_scale": head_dim**-0.5,
        "logit_softcap": None,
        "sliding_window": None,
        "dtype": "float32",
        "rope": {
            "full": {
                "rope_type": "default",
                "parameters": {"rope_theta": 10000.0, "rope_type": "default"},
                "attention_factor": 1.0,
                "inverse_frequencies": [float(10000.0 ** (-i / 8)) for i in range(8)],
            }
        },
        "max_positions": 8192,
        "vocab_size": 1000,
        "tokenizer_sha256": sha("tokenizer"),
        "weights_format": "safetensors",
        "weights_sha256": sha("weights"),
        "attention_sha256": [sha(f"layer {i}") for i in range(num_layers)],
    }
    return model | changes


def make_tensor_parallel(num_query_heads, num_kv_heads, size=1, predicted_ms=None):
    """Return the layout of ``size`` ranks as plain values."""
    per_rank = num_query_heads // size
    group = num_query_heads // num_kv_heads
    return {
        "size": size,
        "ranks": [
            {
                "rank": r,
                "query_heads": [r * per_rank, (r + 1) * per_rank],
                "kv_heads": [r * per_rank // group, ((r + 1) * per_rank - 1) // group + 1],
                "predicted_ms": predicted_ms,
            }
            for r in range(size)
        ],
    }


def make_calibration(lengths=(2048, 4096), consumer="patternsearch", **changes):
    """Return calibration provenance as plain values."""
    calibration = {
        "recipe": "smoke",
        "recipe_sha256": sha("recipe"),
        "grid": "smoke",
        "grid_sha256": sha("grid"),
        "seed": 0,
        "lengths": list(lengths),
        "consumer": consumer,
        "oracle": False,
        "row_sample": 1.0,
        "extrapolated": False,
        "samples": [
            {
                "sample_id": f"{length}-{split}",
                "source": "prose",
                "split": split,
                "length": length,
                "num_tokens": length,
                "sha256": sha(f"{length}-{split}"),
            }
            for length in lengths
            for split in ("calibration", "heldout")
        ],
    }
    return calibration | changes


def make_selection(measured=False, **changes):
    """Return a selection record as plain values."""
    selection = {
        "objective": "time" if measured else "work",
        "target_mass": 0.95,
        "budget_ms": None,
        "statistic": "worst",
        "regions": "each",
        "kinds": ["dense", "a_shape", "vertical_slash", "block_sparse"],
        "max_density": None,
        "dense_layers": [],
        "tp_size": 1,
        "measured": measured,
        "timings_sha256": sha("timings") if measured else None,
        "timings_device": "GPU" if measured else None,
        "min_length": 1024 if measured else None,
        "break_even": [],
    }
    return selection | changes


def make_head(pattern, lengths=(2048, 4096), random=None, measured=False):
    """Return one head's entry as plain values; dense heads keep all mass."""
    random = random or np.random.default_rng(0)
    dense = pattern.kind == "dense"
    entries = []
    for length in lengths:
        mean = 1.0 if dense else float(random.uniform(0.97, 0.99))
        worst = 1.0 if dense else mean - 0.005
        region = 1.0 if dense else mean - float(random.uniform(0.006, 0.015))
        entries.append(
            {
                "length": length,
                "mass_mean": mean,
                "mass_worst": worst,
                "mass_worst_region": region,
                "mass_std": 0.0 if dense else 0.001,
                "heldout_mean": mean,
                "heldout_worst_region": region,
                "oracle_mean": None,
                "density": 1.0 if dense else float(random.uniform(0.1, 0.5)),
                "tiles": float(length // 4),
                "columns": 128.0,
                "predicted_ms": float(random.uniform(0.01, 0.1)) if measured else None,
            }
        )
    return {
        "pattern": pattern.model_dump(),
        "lengths": entries,
        "runner_up": None
        if dense
        else {
            "pattern": {"kind": "dense"},
            "mass_worst_region": 1.0,
            "density": 1.0,
            "predicted_ms": None,
        },
        "imported_score": None,
    }


def make_document(
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    *,
    lengths=(2048, 4096),
    patterns=PATTERNS,
    consumer="patternsearch",
    tp_size=1,
    measured=False,
    fingerprints=True,
    seed=0,
    layer_types=None,
):
    """Return a whole config as plain values (lists, dicts), patterns dealt out by the seed."""
    random = np.random.default_rng(seed)
    layer_types = list(layer_types or ["full"] * num_layers)
    heads = [
        [
            make_head(patterns[int(random.integers(len(patterns)))], lengths, random, measured)
            for _ in range(num_query_heads)
        ]
        if kind == "full"
        else None
        for kind in layer_types
    ]
    prints = [
        [[float(x) for x in random.random(12)] for _ in range(num_query_heads)]
        if kind == "full"
        else []
        for kind in layer_types
    ]
    return {
        "format": "patternsearch/config",
        "schema_version": 1,
        "provenance": {
            "patternsearch": "0.1.0",
            "torch": "2.13.0",
            "triton": None,
            "transformers": "5.24.0",
            "device": "cpu",
            "backend": "torch",
        },
        "model": make_model(num_layers, num_query_heads, num_kv_heads, layer_types=layer_types),
        "tensor_parallel": make_tensor_parallel(num_query_heads, num_kv_heads, tp_size),
        "calibration": make_calibration(lengths, consumer),
        "selection": make_selection(measured),
        "imported": None,
        "fingerprints": {"seed": 0, "num_tokens": 512, "values": prints} if fingerprints else None,
        "heads": heads,
    }


def make_config(*args, **kwargs):
    """Return a valid config; see :func:`make_document` for the arguments."""
    return PatternConfig.model_validate(make_document(*args, **kwargs))
