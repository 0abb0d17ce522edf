"""The program on tensor-parallel ranks of which one has a fault, planted in this process only.

    torchrun --nproc-per-node 2 tests/support/rank_faults.py FAULT validate CONFIG MODEL …

`none`: as it is. `entries`: rank 1 reads the config's entries of rank 0. `weights`: rank 1 holds
the query, key and value projections of rank 0. `raises`: rank 1 fails before its third sample,
while rank 0 waits for it in a collective, and writes the time to the file in RAISED_AT.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

FAULTS = ("none", "entries", "weights")
"""Those of validate."""


def plant(fault):
    """Plant a fault in this process; on ``weights`` every rank must do so."""
    assert fault in (*FAULTS, "raises")
    rank = int(os.environ["RANK"])
    if fault == "entries" and rank == 1:
        from patternsearch.validation import ranks

        true_range = ranks.query_head_range
        ranks.query_head_range = lambda heads, size, rank: true_range(heads, size, 0)
    if fault == "weights":
        from patternsearch.model import loading

        load = loading._load_weights

        def load_wrong(*arguments):
            model = load(*arguments)
            for name, parameter in model.named_parameters():
                if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                    with torch.no_grad():
                        dist.broadcast(parameter.to_local(), src=0)
            return model

        loading._load_weights = load_wrong
    if fault == "raises" and rank == 1:
        from patternsearch.calibration import loop

        score, calls = loop.score_sample, []

        def fail_third(*arguments):
            calls.append(time.monotonic())
            if len(calls) == 3:
                Path(os.environ["RAISED_AT"]).write_text(str(calls[-1]))
                raise RuntimeError("planted: out of memory")
            return score(*arguments)

        loop.score_sample = fail_third


if __name__ == "__main__":
    from patternsearch.cli.app import main

    plant(sys.argv[1])
    main(sys.argv[2:])
