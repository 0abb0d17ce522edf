"""SIGKILL to both ranks of a run at random moments: what it resumes to is what nobody disturbed."""

import os
import time

import numpy as np
import pytest

from patternsearch.schema.scores import scores_folder_of
from support.calibrated import run_tiny, snapshot
from support.forked_ranks import Nursery
from support.tiny_models import tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone") / "c.yaml"
    run_tiny(model, output)
    return output


def kills(model, alone, folder, wanted):
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
            assert snapshot(output) == snapshot(alone), attempt
    return done, moments


def test_two_forked_ranks_write_the_files_of_one(model, alone, tmp_path):
    with Nursery() as nursery:
        nursery.complete(nursery.start(model, tmp_path / "c.yaml"))
    assert snapshot(tmp_path / "c.yaml") == snapshot(alone)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_of_both_ranks_lose_nothing(model, alone, tmp_path):
    wanted = int(os.environ.get("PATTERNSEARCH_KILLS", "50"))
    done, moments = kills(model, alone, tmp_path, wanted)
    print(f"{done} kills, finished parts at each: {np.bincount(moments).tolist()}")
    assert done == wanted
    assert len(set(moments)) > 2 or wanted < 10  # early and late
