"""SIGKILL to both ranks of a run at random moments: what it resumes to is what nobody disturbed."""

import os
import time

import numpy as np
import pytest

from patternsearch.schema.scores import scores_folder_of
from support.calibrated import run_tiny, snapshot
from support.forked_ranks import Nursery


def kills(model, undisturbed, folder, wanted):
    """Kill `wanted` runs while both ranks live; resume each, over two ranks and over one."""
    random = np.random.default_rng(0)
    done, moments = 0, []
    with Nursery() as nursery:
        for attempt in range(4 * wanted):
            if done == wanted:
                break
            output = folder / str(attempt) / "c.yaml"
            scores = scores_folder_of(output)
            parts = int(random.integers(0, 4))
            group = nursery.start(model, output)
            while nursery.is_running(group):
                if len(list(scores.scores.glob("part-*"))) >= parts:
                    break
                time.sleep(0.001)
            time.sleep(float(random.uniform(0, 1.5 if parts == 0 else 0.1)))
            if nursery.kill(group) < 2:
                continue  # it was over
            done += 1
            moments.append(len(list(scores.scores.glob("part-*"))))
            if attempt % 2:
                nursery.complete(nursery.start(model, output))
            else:
                run_tiny(model, output)
            assert snapshot(output) == snapshot(undisturbed), attempt
    return done, moments


def test_two_forked_ranks_write_the_files_of_one(model, undisturbed, tmp_path):
    with Nursery() as nursery:
        nursery.complete(nursery.start(model, tmp_path / "c.yaml"))
    assert snapshot(tmp_path / "c.yaml") == snapshot(undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_of_both_ranks_lose_nothing(model, undisturbed, tmp_path):
    wanted = int(os.environ.get("PATTERNSEARCH_KILLS", "50"))
    done, moments = kills(model, undisturbed, tmp_path, wanted)
    print(f"{done} kills, finished parts at each: {np.bincount(moments).tolist()}")
    assert done == wanted
    assert len(set(moments)) > 2 or wanted < 10  # early and late
