"""One tensor-parallel rank that attaches a config; started by torchrun, see start_attach_ranks.

python -m torch.distributed.run … -m support.tp_attach MODEL CONFIG TOKENS OUT
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

from support.torchrun import environment

__all__ = ["start_attach_ranks"]


def start_attach_ranks(model, config, num_tokens, out, *, processes=2):
    """Start the ranks in a process group of their own; each writes OUT/rank<r>.pt."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    worker = ["-m", "support.tp_attach", str(model), str(config), str(num_tokens), str(out)]
    tests = str(Path(__file__).parents[1])
    paths = [tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, *launcher, *worker],
        env={**environment(), "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def main(model, config, num_tokens, out):
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import patternsearch
    from support.runtime import random_ids

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plan = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    sharded = AutoModelForCausalLM.from_pretrained(
        model, distributed_config=plan, dtype=torch.float32
    ).eval()
    ids = random_ids(int(num_tokens))
    seen = []
    with torch.inference_mode():
        dense = sharded(input_ids=ids).logits
        with patternsearch.attach(sharded, config) as attachment:
            inner = attachment._sparse

            def watch(layer, q, k, v, scale):
                seen.append((layer, q.shape[1], k.shape[1]))
                return inner(layer, q, k, v, scale)

            attachment._sparse = watch
            sparse = sharded(input_ids=ids).logits
            stats = attachment.stats.as_document()
    found = {"dense": dense, "sparse": sparse, "heads": attachment.heads, "seen": seen}
    torch.save(found | {"stats": stats}, Path(out) / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
