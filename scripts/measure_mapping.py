"""Measure the mapping level: false alarms over dtypes, devices and backends; planted faults.

    python scripts/measure_mapping.py MODEL [--device cuda] [--cache prints.json]
    python scripts/measure_mapping.py MODEL --device cuda --cache prints.json --collect-only

The second form is all that needs the device; the first, given its cache and no device, does the
rest anywhere.
Prints the tables of docs/validation.md. Fingerprints are computed once per variant of the model;
faults that only move heads are planted on fingerprints, the others (weight noise, a wrong GQA map)
in the model.
"""

import argparse
import dataclasses
import itertools
import json
import time
from pathlib import Path

import numpy as np
import torch

from patternsearch.model.capture import run_with_capture
from patternsearch.model.dense import causal_attention, causal_attention_chunked
from patternsearch.model.fingerprints import attention_features
from patternsearch.model.loading import load_model
from patternsearch.model.probe import probe_token_ids
from patternsearch.runtime.mapping import compare_mapping
from patternsearch.schema.config import Fingerprints

SEED, TOKENS = 20260101, 512
NOISE = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)
NOISE_SEEDS = 2


def chunked(q, k, v, *, scale):
    return causal_attention_chunked(q, k, v, scale=scale), None, "chunked"


def fingerprint(loaded, *, attention=causal_attention, kv_map=None):
    """Return fingerprints [layers, heads, 12]; kv_map gives the kv head of each query head."""
    ids = torch.tensor([probe_token_ids(SEED, loaded.identity.vocab_size, TOKENS)])
    values = {}

    def mapped(tensor):
        return tensor if kv_map is None else tensor[:, kv_map]

    def describe(inputs):
        features = attention_features(inputs.q, mapped(inputs.k), scale=inputs.scale)
        values[inputs.layer] = features.double().cpu().numpy()

    def attend(q, k, v, *, scale):
        return attention(q, mapped(k), mapped(v), scale=scale)

    run_with_capture(loaded, ids, describe, dense_attention=attend)
    return np.stack([values[layer] for layer in sorted(values)])


def collect(model, device, prints, device_only):
    """Add the missing fingerprints to {variant: fingerprints}; return the identity.

    `device_only`: the reference and the device's variants, which need the device.
    """
    loaded = load_model(
        model, device="cpu", dtype="float32", digests=False, require_tokenizer=False
    )
    identity = loaded.identity

    def add(name, where=loaded, **options):
        if name not in prints:
            prints[name] = fingerprint(where, **options).tolist()

    add("float32, CPU, sdpa")
    if not device_only:
        add("float32, CPU, chunked", attention=chunked)
        group = identity.num_query_heads // identity.num_kv_heads
        if group > 1:
            wrong = torch.arange(identity.num_query_heads) % identity.num_kv_heads
            add("kv map h % Hkv", kv_map=wrong)
        weights = {n: p.detach().clone() for n, p in loaded.model.named_parameters() if p.ndim == 2}
        for level, seed in itertools.product(NOISE[1:], range(NOISE_SEEDS)):
            generator = torch.Generator().manual_seed(seed)
            for name, parameter in loaded.model.named_parameters():
                if name in weights:
                    step = torch.randn(parameter.shape, generator=generator)
                    parameter.data.copy_(weights[name] + level * weights[name].std() * step)
            add(f"noise {level:g}, seed {seed}")
        for name, parameter in loaded.model.named_parameters():
            if name in weights:
                parameter.data.copy_(weights[name])
        del weights
    for where in (device,) if device_only else dict.fromkeys(("cpu", device)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if (where, dtype) == ("cpu", torch.float32):
                continue
            moved = dataclasses.replace(
                loaded, model=loaded.model.to(where, dtype), dtype=dtype, device=torch.device(where)
            )
            name = f"{str(dtype).removeprefix('torch.')}, {where.upper()}"
            add(f"{name}, sdpa", moved)
            add(f"{name}, chunked", moved, attention=chunked)
    return identity


def as_prints(values):
    # model_construct: validating thousands of nested tuples would be most of the time
    return Fingerprints.model_construct(seed=SEED, num_tokens=TOKENS, values=values)


class Measurement:
    def __init__(self, prints, identity):
        self.prints = {name: np.asarray(values) for name, values in prints.items()}
        self.identity = identity
        self.reference = self.prints["float32, CPU, sdpa"]
        self.num_layers, self.num_heads, _ = self.reference.shape

    def compare(self, found, expected=None):
        expected = self.reference if expected is None else expected
        return compare_mapping(as_prints(expected), as_prints(found), self.identity)

    def variants(self):
        print("| variant | verdict | similarity | lowest layer | median distance | findings |")
        print("|---|---|---|---|---|---|")
        for name, values in self.prints.items():
            report = self.compare(values)
            lowest = min(layer.similarity for layer in report.layers)
            print(
                f"| {name} | {report.verdict} | {report.similarity:.3f} | {lowest:.3f} | "
                f"{report.median_distance:.4f} | {len(report.findings)} "
                f"{report.findings[0].text if report.findings else ''} |"
            )

    def swaps(self, base):
        """Swap every two heads of every layer; count the swaps named exactly."""
        found = tried = 0
        for layer in range(self.num_layers):
            for a, b in itertools.combinations(range(self.num_heads), 2):
                values = base.copy()
                values[layer, [a, b]] = base[layer, [b, a]]
                texts = [finding.text for finding in self.compare(values).findings]
                found += texts == [f"layer {layer}: heads {a} and {b} are swapped"]
                tried += 1
        return found, tried

    def offsets(self, base):
        """Give every rank every other rank's heads, on either side."""
        found = tried = 0
        for size in range(2, self.num_heads + 1):
            if self.num_heads % size:
                continue
            width = self.num_heads // size
            for rank, other in itertools.permutations(range(size), 2):
                for side in ("model", "config"):
                    source = base if side == "model" else self.reference
                    faulty = source.copy()
                    faulty[:, rank * width : (rank + 1) * width] = source[
                        :, other * width : (other + 1) * width
                    ]
                    report = self.compare(faulty) if side == "model" else self.compare(base, faulty)
                    wanted = f"rank {rank} of {size} reads heads {other * width}–"
                    found += any(wanted in finding.text for finding in report.findings)
                    tried += 1
        return found, tried

    def layers(self, base):
        """Exchange every two layers."""
        found = tried = 0
        for a, b in itertools.combinations(range(self.num_layers), 2):
            values = base.copy()
            values[[a, b]] = base[[b, a]]
            report = self.compare(values)
            found += [(f.kind, f.layers) for f in report.findings] == [("layers permuted", (a, b))]
            tried += 1
        return found, tried

    def groups(self, base):
        """Exchange every two kv groups, in every layer."""
        group = self.num_heads // self.identity.num_kv_heads
        found = tried = 0
        for a, b in itertools.combinations(range(self.identity.num_kv_heads), 2):
            order = np.arange(self.num_heads).reshape(-1, group)
            order[[a, b]] = order[[b, a]]
            kinds = [f.kind for f in self.compare(base[:, order.ravel()]).findings]
            found += kinds in (["kv groups permuted"], ["shifted heads"])
            tried += 1
        return found, tried

    def faults(self):
        print("| fault | planted in | found | tried | share |")
        print("|---|---|---|---|---|")
        plain = ("float32, CPU, sdpa", "bfloat16, CPU, sdpa", "float16, CPU, sdpa")
        devices = [name for name in self.prints if "CUDA, sdpa" in name]
        noisy = [f"noise {level:g}, seed 0" for level in NOISE[1:]]
        for name in (*plain, *devices, *noisy):
            self.row("single swap in a layer", name, self.swaps)
        for name in (*plain, *devices):
            self.row("rank reads another rank's heads", name, self.offsets)
            self.row("two layers exchanged", name, self.layers)
            self.row("two kv groups exchanged", name, self.groups)

    def row(self, fault, name, plant):
        found, tried = plant(self.prints[name])
        print(f"| {fault} | {name} | {found} | {tried} | {found / tried:.2%} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cache", type=Path)
    parser.add_argument(
        "--collect-only", action="store_true", help="only the device's variants, no faults"
    )
    arguments = parser.parse_args()
    start = time.perf_counter()
    prints = {}
    if arguments.cache and arguments.cache.exists():
        prints = json.loads(arguments.cache.read_text())
    identity = collect(arguments.model, arguments.device, prints, arguments.collect_only)
    if arguments.cache:
        arguments.cache.write_text(json.dumps(prints))
    measurement = Measurement(prints, identity)
    measurement.variants()
    if not arguments.collect_only:
        print()
        measurement.faults()
    print(f"\n{time.perf_counter() - start:.0f} s, torch {torch.__version__}")


if __name__ == "__main__":
    main()
