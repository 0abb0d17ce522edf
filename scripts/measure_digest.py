"""How fast the weights of a checkpoint are digested, against reading the same bytes.

    python scripts/measure_digest.py ./Llama-3.1-8B

Prints one JSON document: bytes, seconds and gigabytes per second of the digest (best of
--repeats), and of one pass that only reads the files. Files that lie in the page cache give the
speed of the processor; drop the cache first to see that of the disk.
"""

import argparse
import json
import os
import time

from patternsearch.model.sources import resolve_model
from patternsearch.model.weights import digest_weights, list_tensors


def best(repeats, work):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def read_all(files):
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            while stream.read(8 << 20):
                pass


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="checkpoint folder or .gguf file")
    parser.add_argument("--threads", type=int, help="by default twice the CPUs, at most 16")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    source = resolve_model(arguments.model, offline=True)
    tensors = list_tensors(source)
    size = sum(tensor.size_bytes for tensor in tensors)
    reading = best(arguments.repeats, lambda: read_all(source.weight_files))
    digest = best(arguments.repeats, lambda: digest_weights(tensors, 1, threads=arguments.threads))
    print(
        json.dumps(
            {
                "bytes": size,
                "tensors": len(tensors),
                "cpus": os.cpu_count(),
                "read_s": round(reading, 3),
                "read_gb_per_s": round(size / reading / 1e9, 2),
                "digest_s": round(digest, 3),
                "digest_gb_per_s": round(size / digest / 1e9, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
