"""Runs over several processes: the files of one process, and an end that loses nothing."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from patternsearch.calibration import distributed
from patternsearch.calibration.distributed import Team, joined, world_size
from patternsearch.errors import EnvironmentLacks, InputError
from patternsearch.schema.io import load_config
from patternsearch.schema.scores import MASS_COLUMNS, scores_folder_of
from support.calibrated import run_tiny, snapshot
from support.torchrun import start_calibrate


def complete(process, *, code=0):
    out, err = process.communicate(timeout=280)
    assert process.returncode == code, err
    return out, err


def test_two_processes_write_the_files_of_one(model, undisturbed, tmp_path):
    output = tmp_path / "c.yaml"
    _, err = complete(start_calibrate(model, output, "--log-json", processes=2))
    assert snapshot(output) == snapshot(undisturbed)
    # Only the leader talks, and it counts the work of both.
    advances = [line for line in err.splitlines() if '"advance"' in line]
    assert '"event": "end", "task": "calibrate"' in err
    assert advances
    assert err.count('"event": "start", "task": "calibrate"') == 1
    assert "tokens/s" in err
    assert ", layer " in err
    ranks = json.loads(scores_folder_of(output).run.read_text())["ranks"]
    assert [rank["samples"] for rank in ranks] == [2, 2]
    assert all(rank["seconds"]["score"] > 0 for rank in ranks)


@pytest.mark.slow
def test_four_processes_write_the_files_of_one(model, undisturbed, tmp_path):
    output = tmp_path / "c.yaml"
    complete(start_calibrate(model, output, processes=4))
    assert snapshot(output) == snapshot(undisturbed)


def scores_of(output):
    return pd.read_parquet(scores_folder_of(output).scores)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_tensor_parallel_ranks_fill_global_heads(model, undisturbed, tmp_path, processes):
    output = tmp_path / "c.yaml"
    complete(start_calibrate(model, output, "--tp-ranks", 2, processes=processes))
    ours, theirs = scores_of(output), scores_of(undisturbed)
    exact = [name for name in theirs if name not in (*MASS_COLUMNS, "mass_logical")]
    pd.testing.assert_frame_equal(ours[exact], theirs[exact])
    for name in (*MASS_COLUMNS, "mass_logical"):
        np.testing.assert_allclose(ours[name].to_numpy(float), theirs[name].to_numpy(float),
                                   atol=1e-4)  # fmt: skip
    prints, expected = load_config(output).fingerprints, load_config(undisturbed).fingerprints
    assert prints is not None
    assert expected is not None
    np.testing.assert_allclose(prints.values, expected.values, atol=2e-5)


@pytest.mark.slow
def test_dead_rank_ends_the_run_which_then_resumes(model, undisturbed, tmp_path):
    output = tmp_path / "c.yaml"
    process = start_calibrate(model, output, processes=2)
    scores = scores_folder_of(output).scores
    while not (scores.exists() and any(scores.glob("part-*"))):
        assert process.poll() is None
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    killed = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - killed < 60
    complete(start_calibrate(model, output, processes=2))
    assert snapshot(output) == snapshot(undisturbed)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_ranks_of_a_dead_launcher_end_with_it(model, tmp_path):
    output = tmp_path / "c.yaml"
    process = start_calibrate(model, output, "--tp-ranks", 2, processes=2)
    folder = scores_folder_of(output)
    while not folder.samples.exists():
        assert process.poll() is None
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while any(map(is_running, children)):
        assert time.monotonic() < deadline, "a rank outlives its launcher"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_at_random_moments_of_two_ranks_lose_nothing(model, undisturbed, tmp_path):
    random = np.random.default_rng(0)
    for attempt in range(int(os.environ.get("PATTERNSEARCH_KILLS", "10"))):
        output = tmp_path / str(attempt) / "c.yaml"
        process = start_calibrate(model, output, processes=2)
        folder = scores_folder_of(output)
        wanted = int(random.integers(0, 4))
        while process.poll() is None:
            if folder.run.exists() and len(list(folder.scores.glob("part-*"))) >= wanted:
                break
            time.sleep(0.002)
        time.sleep(float(random.uniform(0, 0.2)))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        run_tiny(model, output)
        assert snapshot(output) == snapshot(undisturbed), attempt


def test_bad_input_is_said_once_and_ends_all(model, tmp_path):
    process = start_calibrate(model, tmp_path / "c.yaml", "--recipe", "no-such-recipe")
    _, err = process.communicate(timeout=280)
    assert process.returncode != 0
    assert err.count("no-such-recipe") == 1


def test_tp_ranks_need_their_processes():
    with pytest.raises(InputError, match="torchrun --nproc-per-node 2"), joined(2, "cpu"):
        pass


def test_one_process_needs_no_launcher():
    assert world_size() == 1
    with joined(1, "cpu") as team:
        assert team == Team()
        assert team.is_leader
        assert team.share("anything", {"a": 1}) == {"a": 1}
        assert team.num_unfinished() == 0


def test_team_numbers_its_copies():
    team = Team(rank=5, size=8, tp_size=2, local_rank=5)
    assert (team.copy, team.num_copies, team.writes) == (2, 4, False)
    assert team.device("cuda") == "cuda:5"
    with pytest.raises(InputError, match="shared by 8 processes"):
        team.device("cuda:1")


def test_each_process_takes_the_gpu_of_its_local_rank(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    distributed._take_gpu(Team(rank=3, size=4, local_rank=1))
    assert taken == [1]
    with pytest.raises(EnvironmentLacks, match="local rank 2 has no GPU of its own"):
        distributed._take_gpu(Team(rank=2, size=4, local_rank=2))


class Library:
    """Stands for torch.distributed and writes down how its communicators end."""

    def __init__(self, backend):
        self.backend, self.ends, self.group = backend, [], self
        self.WORLD = self

    def get_backend(self):
        return self.backend

    def abort(self):
        self.ends.append("abort")

    def destroy_process_group(self):
        self.ends.append("destroy")


@pytest.mark.parametrize(("backend", "end"), [("nccl", "abort"), ("gloo", "destroy")])
def test_a_failing_rank_never_waits_for_its_peers(backend, end):
    library = Library(backend)
    distributed._abandon(library)
    assert library.ends == [end]
