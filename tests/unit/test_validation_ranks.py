"""Validation on running tensor-parallel ranks: whose heads a rank holds, whose entries it reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from patternsearch.calibration.distributed import Team
from patternsearch.errors import InputError
from patternsearch.schema.config import Fingerprints
from patternsearch.validation import api
from patternsearch.validation.api import ValidationRequest, validate_on_ranks
from patternsearch.validation.ranks import copied_ranks, entries_read
from support.rank_faults import FAULTS
from support.torchrun import environment

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests")))


def prints(table):
    """Fingerprints of a table [layers, heads, 12]."""
    return Fingerprints(seed=1, num_tokens=512, values=tuple(
        tuple(tuple(row) for row in layer) for layer in np.asarray(table).tolist()))  # fmt: skip


@pytest.fixture
def recorded():
    return np.random.default_rng(0).dirichlet(np.ones(12), size=(3, 8))


class Reporting(Team):
    """A team of which every rank has reported the entries that it reads."""

    def wait(self, meanwhile):
        meanwhile(0)

    def reports(self):
        return [{"entries": [0, 4]}, {"entries": [0, 4]}]


def test_entries_of_one_process_are_the_recorded_ones(recorded):
    assert entries_read(prints(recorded), Team()) == prints(recorded)


def test_entries_stand_in_the_order_in_which_ranks_read_them(recorded):
    team = Reporting(rank=0, size=2, tp_size=2)
    read = np.asarray(entries_read(prints(recorded), team).values)
    np.testing.assert_array_equal(read, recorded[:, [0, 1, 2, 3, 0, 1, 2, 3]])


def test_a_copied_rank_is_named_although_later_layers_resemble_nothing(recorded):
    found = np.random.default_rng(1).dirichlet(np.ones(12), size=(3, 8))
    found[0] = recorded[0]
    found[:, 4:6] = found[:, 2:4]  # rank 2 of 4 holds the heads of rank 1
    (finding,) = copied_ranks(prints(recorded), prints(found), 4)
    assert finding.kind == "tensor-parallel offset"
    assert finding.text == "rank 2 of 4 holds heads 2–3 instead of 4–5"


def test_ranks_that_hold_their_own_heads_are_not_named(recorded):
    assert copied_ranks(prints(recorded), prints(recorded), 2) == ()
    # Nor where the record itself has two alike: a model whose heads are copies.
    recorded[:, 4:] = recorded[:, :4]
    assert copied_ranks(prints(recorded), prints(recorded), 2) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp_size": 4}, "torchrun --nproc-per-node 4"),
        ({"tp_size": 1}, "2 ranks were started for --tp-size 1"),
        ({"tp_size": 2, "level": "quality"}, "up to --level mapping"),
    ],
)
def test_other_processes_and_levels_are_refused(changes, message):
    request = ValidationRequest(config=Path("c.yaml"), model="m", **changes)
    with pytest.raises(InputError, match=message):
        api._check_ranks(request, 2)


def test_alone_is_a_deployment_of_one_rank():
    with pytest.raises(InputError, match="1 ranks were started for --tp-size 2"):
        validate_on_ranks(ValidationRequest(config=Path("c.yaml"), model="m", tp_size=2))


FINDINGS = {
    "none": [],
    "entries": ["rank 1 of 2 reads heads 0–1 instead of 2–3"],
    "weights": ["rank 1 of 2 holds heads 0–1 instead of 2–3"],
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_running_ranks_name_a_wrong_offset(model, undisturbed, fault):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["--nproc-per-node", "2", str(ROOT / "tests" / "support" / "rank_faults.py"), fault]
    command = ["validate", str(undisturbed), str(model), "--level", "mapping", "--tp-size", "2"]
    run = subprocess.run(
        [*launcher, *program, *command, "--device", "cpu", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
        env={**environment(), "PYTHONPATH": PATH},
    )
    report = json.loads(run.stdout)  # one document: the other rank says nothing
    assert [finding["text"] for finding in report["mapping"]["findings"]] == FINDINGS[fault]
    assert report["status"] == ("differs" if FINDINGS[fault] else "ok"), run.stderr
    assert (run.returncode != 0) == bool(FINDINGS[fault])
    assert report["notes"] == ["mapping was read from 2 running ranks"]
