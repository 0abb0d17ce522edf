"""What a GPU says about itself is what that GPU says, whatever else is in the machine."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from patternsearch.timing.devices import GpuState, gpu_state

SEEN, HIDDEN = "GPU-11111111-2222", "0"


@pytest.fixture
def driver(monkeypatch):
    """A driver whose GPU 0 is hidden from this process; torch's 0 is another."""
    answers = {SEEN: "555.42, 1980, 2619\n", HIDDEN: "555.42, 345, 405\n"}

    def run(command, **_):
        name = command[1].removeprefix("--id=")
        if name not in answers:
            raise subprocess.CalledProcessError(6, command)
        return SimpleNamespace(stdout=answers[name])

    monkeypatch.setattr(subprocess, "run", run)
    return answers


def uuid_of(monkeypatch, **properties):
    found = SimpleNamespace(**properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)


def test_gpu_is_asked_for_by_its_uuid(monkeypatch, driver):
    uuid_of(monkeypatch, uuid="11111111-2222")
    assert gpu_state(0) == GpuState("555.42", 1980, 2619)


@pytest.mark.parametrize("properties", [{}, {"uuid": "of a part of a GPU"}])
def test_without_a_known_uuid_the_index_must_do(monkeypatch, driver, properties):
    uuid_of(monkeypatch, **properties)
    assert gpu_state(0) == GpuState("555.42", 345, 405)


def test_no_driver_tells_nothing(monkeypatch, driver):
    uuid_of(monkeypatch, uuid="11111111-2222")
    driver.clear()
    assert gpu_state(0) == GpuState(None, None, None)


def test_clock_that_is_not_told_is_none(monkeypatch, driver):
    uuid_of(monkeypatch, uuid="11111111-2222")
    driver[SEEN] = "555.42, [N/A], 2619"
    assert gpu_state(0) == GpuState("555.42", None, 2619)
