"""What the task level's logits say of a config, and of one that is plainly too sparse.

    python scripts/measure_agreement.py MODEL configs/models/smollm2-135m-instruct.yaml
    python scripts/measure_agreement.py MODEL CONFIG --recipe RECIPE --dtype bfloat16

Every held-out sample runs dense, with the config, and with all heads A-shape of 64 sink keys and a
window of 256. Prints one line of JSON a sample and config: KL, top-1 agreement, the share of
positions where dense finds a token at least twice as likely as any other, and the agreement there.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from patternsearch.model.loading import load_model
from patternsearch.schema.config import PatternConfig
from patternsearch.schema.io import load_config
from patternsearch.validation.samples import judging_samples
from patternsearch.validation.task import TaskOptions, measure_task

TOO_SPARSE = {"kind": "a_shape", "sink": 64, "window": 256, "tile": 64}


def all_heads(config, pattern):
    """Return the config with every head of that pattern."""
    document = config.model_dump()
    for entries in document["heads"]:
        for entry in entries or ():
            entry["pattern"] = pattern
    return PatternConfig.model_validate(document)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("config", type=Path)
    parser.add_argument("--recipe", help="by default the config's own held-out samples")
    parser.add_argument("--lengths", help="such as 2048,4096; by default the calibrated ones")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    loaded = load_model(arguments.model, device=arguments.device, dtype=arguments.dtype)
    lengths = [int(n) for n in arguments.lengths.split(",")] if arguments.lengths else None
    judging = judging_samples(
        config, loaded, config_path=arguments.config, recipe=arguments.recipe, lengths=lengths
    )
    options = TaskOptions(depths=(), new_tokens=1)
    configs = {"config": config, "all a_shape": all_heads(config, TOO_SPARSE)}
    for sample in judging.samples:
        for name, one in configs.items():
            alone = dataclasses.replace(judging, samples=(sample,))
            row = measure_task(loaded, one, alone, options=options).logits[0]
            values = {
                "kl": row.kl,
                "top1": row.top1_agreement,
                "decided": row.decided,
                "decided_agreement": row.decided_agreement,
            }
            rounded = {key: value and round(value, 4) for key, value in values.items()}
            about = {"sample": sample.sample_id, "dtype": arguments.dtype, "run": name}
            print(json.dumps(about | rounded), flush=True)


if __name__ == "__main__":
    main()
